"""Remote UM-Bridge servers as models: the server of the umbridge package, and Dragoman."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import dragoman
from dragoman import ApplyHessian, ApplyJacobian, Gradient, Infer, ModelSpec, Tensor, errors
from dragoman.core.calls import Describe
from dragoman.core.tensor import NONE
from dragoman.engine.engine import Engine
from dragoman.engine.repository import Repository
from dragoman_simulators.umbridge_runtime.model import make_function
from e2e.server_process import ServerProcess, free_ports, wait_until
from features.simulators.conftest import SIMULATORS
from loaded_models import recorded_models
from vector_calls import call_model, vector

REFERENCE = f"""
import sys, umbridge
sys.path.insert(0, {str(SIMULATORS.parent)!r})
from simulators import Forward
class Odd(Forward):
    def __call__(self, parameters, config={{}}):
        if parameters[0][0] == 13: raise RuntimeError("bad luck")
        if parameters[0][0] == 14: return [[float("nan"), float("-inf")], [float("inf")]]
        if parameters[0][0] == 15: return [[1.0], [1.0]]
        return super().__call__(parameters, config)
umbridge.serve_models([Odd()], int(sys.argv[1]))
"""


@contextmanager
def running(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the umbridge package's server in a process, without waiting for it."""
    command = [sys.executable, "-c", REFERENCE, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def reference() -> Iterator[str]:
    """Start the umbridge package's server and wait until it listens."""
    (port,) = free_ports(1)

    def listens() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            return False
        return True

    with running(port):
        wait_until(listens, "the reference server listens")
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def reference_url() -> Iterator[str]:
    with reference() as url:
        yield url


def engine(*urls: str, **parameters: Any) -> Engine:
    parameters_ = {"urls": list(urls), "model": "forward", **parameters}
    return Engine(Repository([ModelSpec(name="remote", runtime="umbridge", parameters=parameters_)]))


POINT = (vector(1, 2), vector(3, 4, 5))


async def evaluate(engine: Engine, *vectors: Tensor, **config: Any) -> list[list[float]]:
    result = await call_model(engine, "remote", Infer({}, positional=vectors or POINT, config=config or NONE))
    return [t.data.tolist() for t in result.outputs.values()]


@pytest.mark.parametrize("server", ["reference", "dragoman"])
async def test_every_operation(server: str, reference_url: str, simulators: ServerProcess) -> None:
    url = reference_url if server == "reference" else f"http://{simulators.url}"
    async with engine(url, config={"scale": 2.0}) as remote:
        assert await evaluate(remote) == [[2.0, 8.0], [53.0]]
        assert await evaluate(remote, vector(1, 2, 3), vector(0, 0, 0), n=3, scale=1.0) == [
            [1.0, 4.0, 9.0],
            [6.0],
        ]
        gradient = Gradient(positional=POINT, sens=vector(1, 10))
        assert (await call_model(remote, "remote", gradient)).data.tolist() == [4.0, 80.0]
        jacobian = ApplyJacobian(positional=POINT, output=1, input=1, vec=vector(1, 1, 1))
        assert (await call_model(remote, "remote", jacobian)).data.tolist() == [24.0]
        hessian = ApplyHessian(positional=POINT, sens=vector(1, 1), vec=vector(1, 2))
        assert (await call_model(remote, "remote", hessian)).data.tolist() == [4.0, 8.0]
        description = await call_model(remote, "remote", Describe())
        assert (description.platform, description.details["derivatives"]["gradient"]) == ("umbridge_model", "remote")


async def test_errors_of_the_server_are_passed_on(reference_url: str) -> None:
    async with engine(reference_url) as remote:
        assert str(await evaluate(remote, vector(14, 0), POINT[1])) == "[[nan, -inf], [inf]]"
        with pytest.raises(errors.ModelFailed, match="answers 500: 500 Internal Server Error"):
            await evaluate(remote, vector(13, 0), POINT[1])
        with pytest.raises(errors.InvalidOutput, match="answers 500 InvalidOutput"):
            await evaluate(remote, vector(15, 0), POINT[1])
        with pytest.raises(errors.InvalidInput, match="expected 2 numbers, got 3"):
            await evaluate(remote, vector(1, 2, 3), POINT[1])
        assert await evaluate(remote) == [[1.0, 4.0], [53.0]]


async def test_calls_run_concurrently(simulators: ServerProcess) -> None:
    spec = ModelSpec(
        name="remote",
        runtime="umbridge",
        uri=f"http://{simulators.url}",
        parameters={"model": "Slow", "concurrency": 4},
    )
    async with Engine(Repository([spec])) as remote:
        found = await asyncio.gather(*(evaluate(remote, vector(i)) for i in range(2, 6)))  # each waits for the others
        assert found == [[[float(i)]] for i in range(2, 6)]


async def test_calls_fail_over_to_other_servers(reference_url: str) -> None:
    (closed_port,) = free_ports(1)
    with reference() as second:
        async with engine(f"http://127.0.0.1:{closed_port}", reference_url, second) as remote:
            result = await asyncio.gather(*(evaluate(remote) for _ in range(20)))
            assert result == [[[1.0, 4.0], [53.0]]] * 20
    async with engine(reference_url, f"http://127.0.0.1:{closed_port}") as remote:
        assert await evaluate(remote) == [[1.0, 4.0], [53.0]]


async def test_a_restarted_server_is_used_again() -> None:
    with reference() as url:
        remote = engine(url)
        await remote.start()
    try:
        with pytest.raises(errors.NotReady, match=r"no server of .* answers: cannot reach"):
            await evaluate(remote)
        with running(int(url.rpartition(":")[2])) as process:
            for _ in range(1000):
                try:
                    assert await evaluate(remote) == [[1.0, 4.0], [53.0]]
                    break
                except errors.NotReady:
                    assert process.poll() is None
                    await asyncio.sleep(0.02)
            else:
                raise AssertionError("it never came back")
    finally:
        await remote.close()


async def test_loading_waits_for_the_server() -> None:
    (port,) = free_ports(1)
    with running(port):
        async with engine(f"http://127.0.0.1:{port}", wait_s=60) as remote:
            assert await evaluate(remote) == [[1.0, 4.0], [53.0]]
    async with engine(f"http://127.0.0.1:{port}") as remote:
        assert "no server of" in remote.deployments()[0].reason


async def test_a_restarted_server_of_several_is_used_again(reference_url: str) -> None:
    with reference() as url, recorded_models() as models:
        remote = engine(reference_url, url)
        await remote.start()
    try:
        servers = models["remote"].function.servers.servers
        while not any(server.has_failed for server in servers):  # both are asked by turns
            assert await evaluate(remote) == [[1.0, 4.0], [53.0]]
        with running(int(url.rpartition(":")[2])):
            for _ in range(1000):
                assert await evaluate(remote) == [[1.0, 4.0], [53.0]]
                if not any(server.has_failed for server in servers):
                    break
                await asyncio.sleep(0.02)
            else:
                raise AssertionError("it was never asked again")
    finally:
        await remote.close()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "expected the parameter 'urls'"),
        ({"urls": "ftp://x"}, "parameter 'urls': url: expected http://host:port"),
        ({"urls": 5}, "parameter 'urls': expected str or list, got 5"),
        ({"url": "http://x:1"}, "unknown parameter 'url': expected one of urls, model"),
        ({"urls": "http://x:1", "concurrency": 0}, "parameter 'concurrency': expected at least 1"),
    ],
)
def test_invalid_parameters_are_rejected(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ModelFailed, match=message):
        make_function(ModelSpec(name="remote", parameters=parameters))


INFO = {"protocolVersion": 1.0, "models": ["m"]}
SUPPORT = {"support": {"Evaluate": True}}


@contextmanager
def scripted_server(**responses: Any) -> Iterator[str]:
    """Start a server that sends a fixed JSON value, or the bytes of one, per endpoint."""

    class Endpoint(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = responses[self.path[1:]]
            text = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_GET  # noqa: N815 - as http.server names it

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("responses", "reason"),
    [
        ({"Info": {**INFO, "protocolVersion": "1.0"}}, "expected the number 1.0 as protocolVersion, got '1.0'"),
        ({"Info": {**INFO, "protocolVersion": True}}, "expected the number 1.0 as protocolVersion, got True"),
        ({"Info": {**INFO, "protocolVersion": 2.0}}, "expected the number 1.0 as protocolVersion, got 2.0"),
        ({"Info": {**INFO, "models": [1]}}, r"expected a list of names as models, got \[1\]"),
        ({"Info": {**INFO, "models": []}}, "has no models"),
        ({"ModelInfo": {"support": ["Evaluate"]}}, "expected an object as support, got"),
        ({"InputSizes": {"inputSizes": [1.5]}}, r"expected a list of integers from 0 as inputSizes, got \[1.5\]"),
        ({"InputSizes": {"inputSizes": [True]}}, "expected a list of integers from 0 as inputSizes"),
        ({"InputSizes": {"inputSizes": ["1"]}}, "expected a list of integers from 0 as inputSizes"),
        (
            {"InputSizes": b'{"inputSizes":' + b"[" * 9999 + b"]" * 9999 + b"}"},
            '/InputSizes: expected JSON, got b\'{"inputSizes":\\[\\[',
        ),
        ({"OutputSizes": {"outputSizes": [-1]}}, "expected a list of integers from 0 as outputSizes"),
    ],
)
async def test_invalid_descriptions_of_servers_are_rejected(responses: dict[str, Any], reason: str) -> None:
    right = {"Info": INFO, "ModelInfo": SUPPORT, "InputSizes": {"inputSizes": [1]}, "OutputSizes": {"outputSizes": [1]}}
    with scripted_server(**{**right, **responses}) as url:
        async with engine(url, model="") as remote:
            assert re.search(reason, remote.deployments()[0].reason)


async def test_text_is_not_converted_to_a_number() -> None:
    sizes = {"InputSizes": {"inputSizes": [1.0]}, "OutputSizes": {"outputSizes": [1]}}
    with scripted_server(Info=INFO, ModelInfo=SUPPORT, **sizes, Evaluate={"output": [["1"]]}) as url:
        async with engine(url, model="m") as remote:
            with pytest.raises(errors.InvalidOutput, match="expected numbers in 'output', got '1'"):
                await evaluate(remote, vector(0))


async def test_unknown_models_of_a_server_are_not_loaded(simulators: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    table = f'[model]\nruntime = "umbridge"\n[model.parameters]\nurls = "http://{simulators.url}"\n'
    for line, reason in (("", "models; expected `model` to name one of"), ('model = "x"\n', "has no model 'x'")):
        (tmp_path / "remote" / "dragoman.toml").write_text(table + line)
        async with dragoman.open_engine(str(tmp_path)) as engine_:
            assert reason in engine_.deployments()[0].reason
