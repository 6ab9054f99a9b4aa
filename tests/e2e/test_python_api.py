"""The Python API: in a running event loop, without a server, and in a script."""

import asyncio
import http.client
import inspect
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import typing
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from numpy.typing import NDArray

import dragoman
from e2e.models.batched import Rows
from e2e.models.script import IsolatedSquares, Squares, isolated
from e2e.server_process import MODELS, ServerProcess, running_server, wait_until


def double(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 2 * x


@dragoman.model(name="half")
def halved(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / 2


async def slow(x: NDArray[np.float64]) -> NDArray[np.float64]:
    await asyncio.sleep(0.1)
    return -x


async def countdown(n: int) -> AsyncIterator[int]:
    for i in range(n, 0, -1):
        yield i


# --- in an event loop ------------------------------------------------------------------------------------


def post(url: str, path: str, body: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("POST", path, json.dumps(body))
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


async def test_a_function_in_a_server() -> None:
    async with dragoman.Server(double, http_port=0, grpc_port=0) as server:
        tensor = {"name": "x", "datatype": "FP64", "shape": [2], "data": [1.5, 2.0]}
        path = "/v2/models/double/infer"
        status, body = await asyncio.to_thread(post, server.http_url, path, {"inputs": [tensor]})
        assert (status, body["outputs"][0]["data"]) == (200, [3.0, 4.0])
        async with triton.InferenceServerClient(server.grpc_url) as client:
            x = triton.InferInput("x", [2], "FP64")
            x.set_data_from_numpy(np.array([1.5, 2.0]))
            result = await client.infer("double", [x])
            output = result.get_response().outputs[0].name
            assert result.as_numpy(output).tolist() == [3.0, 4.0]
        direct = await server.engine.infer("double", {"x": np.array([5.0])})
        assert [a.tolist() for a in direct.values()] == [[10.0]]


async def test_the_metadata_of_a_function() -> None:
    def mixed(x: NDArray[np.float64], y, z: list[int]):  # type: ignore[no-untyped-def]
        return x

    async with dragoman.Server(double, mixed, http_port=0, grpc_port=-1) as server:
        connection = http.client.HTTPConnection(server.http_url.removeprefix("http://"), timeout=60)

        def get(name: str) -> Any:
            connection.request("GET", f"/v2/models/{name}")
            return json.loads(connection.getresponse().read())

        found, other = [await asyncio.to_thread(get, name) for name in ("double", "mixed")]
        connection.close()
    any_rank = {"datatype": "FP64", "shape": [-1], "parameters": {"any_rank": True}}
    assert (found["inputs"], found["outputs"]) == ([{"name": "x", **any_rank}], [{"name": "output-0", **any_rank}])
    # `y` has no known datatype, which the protocol cannot express.
    assert other["inputs"] == [{"name": "x", **any_rank}, {"name": "z", "datatype": "INT64", "shape": [-1]}]
    assert other["outputs"] == []


async def test_a_server_stops_and_its_ports_are_free_again() -> None:
    async with dragoman.Server(double, http_port=0, grpc_port=0) as server:
        port, grpc_port = server.http_ports[0], server.grpc_port
    async with dragoman.Server(double, http_port=port, grpc_port=grpc_port) as server:
        assert server.http_ports == [port]


async def test_two_servers_in_one_process() -> None:
    async with (
        dragoman.Server(double, http_port=0, grpc_port=0) as one,
        dragoman.Server(halved, http_port=0, grpc_port=0) as other,
    ):
        assert one.http_url != other.http_url
        tensor = {"name": "x", "datatype": "FP64", "shape": [1], "data": [8.0]}
        for server, model, expected in ((one, "double", 16.0), (other, "half", 4.0)):
            path = f"/v2/models/{model}/infer"
            _, body = await asyncio.to_thread(post, server.http_url, path, {"inputs": [tensor]})
            assert body["outputs"][0]["data"] == [expected]


async def test_a_port_in_use() -> None:
    async with dragoman.Server(double, http_port=0, grpc_port=0) as server:
        with pytest.raises(OSError, match="ddress already in use"):
            await dragoman.Server(double, http_port=server.http_ports[0], grpc_port=0).listen()


async def test_a_server_in_a_thread_answers_a_blocking_client_in_a_running_loop() -> None:
    """As in a cell of a notebook, whose kernel runs an event loop."""
    with dragoman.Server(double, http_port=0, grpc_port=0) as server:
        for url in (server.http_url, f"grpc://{server.grpc_url}"):
            with dragoman.Client(url) as client:
                assert client.infer("double", {"x": [1.5, 2.0]})["output-0"].tolist() == [3.0, 4.0]
    with dragoman.Client(server.http_url) as client:
        assert not client.live()


def test_start_and_close() -> None:
    server = dragoman.Server(double, http_port=0, grpc_port=-1).start()
    try:
        with pytest.raises(RuntimeError, match="the server runs already"):
            server.start()
        taken = int(server.http_url.rpartition(":")[2])
        with (
            pytest.raises(OSError, match=f"in use: '127.0.0.1:{taken}'"),
            dragoman.Server(double, http_port=taken, grpc_port=-1),
        ):
            pass
        assert not [each for each in threading.enumerate() if each.name == "dragoman-server"][1:]
    finally:
        server.close()
    server.close()
    assert not [each for each in threading.enumerate() if each.name == "dragoman-server"]


def test_settings_are_typed_for_editors() -> None:
    hints = typing.get_type_hints(dragoman.serve)
    arguments = typing.get_args(hints["settings"])[0]
    assert typing.get_type_hints(arguments) == typing.get_type_hints(dragoman.Settings)
    assert typing.get_type_hints(dragoman.Server.__init__)["changes"] == hints["settings"]
    for function, last in ((dragoman.serve, "handle_signals"), (dragoman.Server, "settings")):
        names = list(inspect.signature(function).parameters)
        assert names == ["models", *typing.get_type_hints(arguments), last]


async def test_invalid_settings() -> None:
    with pytest.raises(dragoman.errors.InvalidInput, match="unknown setting 'prot'"):
        dragoman.Server(double, prot=1)  # type: ignore[call-arg]
    with pytest.raises(dragoman.errors.InvalidInput, match="nothing to serve"):
        dragoman.Server()
    with pytest.raises(dragoman.errors.InvalidInput, match="two models are called 'double'"):
        dragoman.Server(double, double)


@pytest.mark.parametrize("root", ["/models", "models", "/models/", "models/a/"])
async def test_root_path(root: str) -> None:
    async with dragoman.Server(double, http_port=0, grpc_port=-1, root_path=root) as server:
        body = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [1.5]}]}
        for before in ("", f"/{root.strip('/')}"):
            status, _ = await asyncio.to_thread(post, server.http_url, f"{before}/v2/models/double/infer", body)
            assert status == 200
        assert (await asyncio.to_thread(post, server.http_url, "/modelsv2/models/double/infer", body))[0] == 404


async def test_serve_needs_its_own_event_loop(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(RuntimeError, match=r"use `async with dragoman.Server\(...\)` instead"):
        dragoman.serve(double)
    assert not recwarn.list


async def test_a_server_without_models_warns(caplog: pytest.LogCaptureFixture) -> None:
    settings: list[tuple[Any, int]] = [({"control_token": "t"}, 0), ({}, 1)]
    for control, count in settings:
        async with dragoman.Server(double, http_port=0, grpc_port=-1, load_at_start=False, **control):
            assert caplog.text.count("nothing will be served: no model is loaded at the start") == count


async def test_an_invalid_output_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def nothing(x: float) -> float:
        return None  # type: ignore[return-value]

    def large(x: float) -> int:
        return 2**70

    async with dragoman.Server(nothing, large, http_port=0, grpc_port=-1) as server:
        for name, message in (
            ("nothing", "output 'output-0': expected FP64, got NoneType"),
            ("large", "output 'output-0': 1180591620717411303424 does not fit into INT64"),
        ):
            body = {"id": "r7", "inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [1.5]}]}
            status, found = await asyncio.to_thread(post, server.http_url, f"/v2/models/{name}/infer", body)
            assert (status, found["error"]) == (500, f"model '{name}' failed: {message}")
            assert f"model '{name}' failed on request 'r7': {message}" in caplog.messages


# --- without a server ------------------------------------------------------------------------------------


async def test_an_engine_without_a_server() -> None:
    path = f"{MODELS / 'trouble.py'}:Twice"
    async with dragoman.open_engine(double, halved, slow, Squares, path, placement="thread") as engine:
        x = np.array([3.0])
        for model, expected in (("double", 6.0), ("half", 1.5), ("slow", -3.0), ("Squares", 9.0), ("Twice", 6.0)):
            response = await engine.infer(model, {"x": x})
            assert [a.tolist() for a in response.values()] == [[expected]], model
        with pytest.raises(dragoman.errors.ModelNotFound, match="'missing' is not found"):
            await engine.infer("missing", {"x": x})
        with pytest.raises(dragoman.errors.InvalidInput, match="unexpected inference input 'z'"):
            await engine.infer("double", {"z": x})


@pytest.mark.parametrize(("target", "model"), [(IsolatedSquares, "IsolatedSquares"), (isolated, "isolated")])
async def test_an_object_runs_in_the_process_that_it_declares(target: Any, model: str) -> None:
    async with dragoman.open_engine(target) as engine:
        inputs = {"x": np.array([3.0])} if target is IsolatedSquares else {}
        response = await engine.infer(model, inputs)
        assert [*response.values()][-1] != os.getpid()


async def test_an_object_that_no_process_can_import_is_an_error_if_it_declares_one() -> None:
    class Local(Squares):
        placement = "process"

    for target in (Local, IsolatedSquares(dragoman.ModelSpec(name="IsolatedSquares"))):
        async with dragoman.open_engine(target) as engine:
            assert re.search(r"placement 'process' needs .* otherwise set placement", engine.deployments()[0].reason)


async def test_asynchronous_functions_run_concurrently() -> None:
    async with dragoman.open_engine(slow) as engine, asyncio.timeout(60):
        responses = await asyncio.gather(*(engine.infer("slow", {"x": np.array([float(i)])}) for i in range(100)))
        assert [next(iter(a.values())).tolist() for a in responses] == [[-float(i)] for i in range(100)]


async def test_merged_calls_of_one_process() -> None:
    async with dragoman.open_engine(Rows, max_batch_size=8, max_batch_wait_s=0.005) as engine:
        responses = await asyncio.gather(*(engine.infer("Rows", {"x": np.array([[float(i)]])}) for i in range(64)))
        assert [a["y"].tolist() for a in responses] == [[[2.0 * i]] for i in range(64)]
        sizes = [int(a["together"][0]) for a in responses]
        assert 1 < max(sizes) <= 8
        with pytest.raises(dragoman.errors.InvalidInput, match="inference request batch-size must be <= 8"):
            await engine.infer("Rows", {"x": np.zeros((9, 1))})


async def test_a_decorated_function_stays_a_function() -> None:
    assert halved(np.array([4.0])).tolist() == [2.0]


# --- as a program ----------------------------------------------------------------------------------------


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    what, *settings = request.param
    http_port_first = (str(MODELS / "script.py"), what)
    process = ServerProcess.on_free_ports(*settings, command=http_port_first)
    try:
        yield process.wait_until_ready()
        process.terminate()
        assert process.wait_for_exit() == 0, process.log()
        assert "Traceback" not in process.log()
    finally:
        process.kill()


@pytest.mark.parametrize(
    "program", [("function",), ("function", "placement=process"), ("function", "max_batch_size=4")], indirect=True
)
def test_a_program_that_serves_a_function(program: ServerProcess) -> None:
    tensors = [
        {"name": name, "datatype": "FP64", "shape": [2], "data": data}
        for name, data in (("width", [2.0, 3.0]), ("height", [5.0, 7.0]))
    ]
    status, body, _ = program.request("POST", "/v2/models/area/infer", {"inputs": tensors})
    assert (status, body["outputs"][0]["data"]) == (200, [10.0, 21.0])


@pytest.mark.parametrize(
    "program", [("class",), ("class", "placement=process", "replicas=2"), ("instance",)], indirect=True
)
def test_a_program_that_serves_a_model(program: ServerProcess) -> None:
    status, body = program.infer("Squares", [2.0, 3.0])
    assert (status, body["outputs"][0]["data"]) == (200, [4.0, 9.0])


def test_a_program_whose_instance_cannot_leave_the_process() -> None:
    process = ServerProcess.on_free_ports("placement=process", command=(str(MODELS / "script.py"), "instance"))
    try:
        process.wait_until_live().wait_for_log("placement 'process' needs")
        assert process.status("/v2/health/ready") == 400
    finally:
        process.kill()


def test_a_class_of_a_program_runs_in_the_process_that_it_declares() -> None:
    process = ServerProcess.on_free_ports(command=(str(MODELS / "script.py"), "isolated"))
    try:
        status, body = process.wait_until_ready().infer("IsolatedSquares", [3.0])
        squares, pid = (output["data"] for output in body["outputs"])
        assert (status, squares) == (200, [9.0])
        assert pid[0] != process.popen.pid
    finally:
        process.kill()


def test_a_program_without_a_guard(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import dragoman\n\ndef f(x: float) -> float:\n    return x\n\n"
        "dragoman.serve(f, placement='process', http_port=0, grpc_port=-1)\n"
    )
    process = ServerProcess(command=(str(tmp_path / "program.py"),))
    try:
        process.wait_for_log("model f: unavailable")
        assert 'write `if __name__ == "__main__":` before dragoman.serve(...)' in process.log()
        assert "Traceback" not in process.log()
    finally:
        process.kill()


# --- signals -----------------------------------------------------------------------------------------------


PROGRAM = """
import signal, sys, time
from pathlib import Path
import dragoman

def on_signal(number: int, frame: object) -> None:
    print("own handler:", signal.Signals(number).name, file=sys.stderr, flush=True)
    if number == signal.SIGTERM:
        signal.raise_signal(signal.SIGINT)

def wait(x: list[str]) -> float:
    folder = x[0]
    Path(folder, "begun").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return 1.0

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background programs with it ignored
signal.signal(signal.SIGTERM, on_signal)
signal.signal(signal.SIGHUP, on_signal)
http_port, grpc_port = (int(sys.argv[i]) for i in (2, 4))
try:
    dragoman.serve(wait, http_port=http_port, grpc_port=grpc_port, placement="thread", HANDLE)
    print("returned", file=sys.stderr, flush=True)
except KeyboardInterrupt:
    print("KeyboardInterrupt", file=sys.stderr, flush=True)
print("restored:", signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGHUP) is on_signal,
      signal.getsignal(signal.SIGINT) is signal.default_int_handler, file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize(
    ("handle_signals", "number", "expected"),
    [
        (True, signal.SIGTERM, ["returned"]),
        (True, signal.SIGINT, ["returned"]),
        (False, signal.SIGINT, ["KeyboardInterrupt"]),
        (False, signal.SIGTERM, ["own handler: SIGTERM", "KeyboardInterrupt"]),
    ],
)
def test_signals_of_a_program(tmp_path: Path, handle_signals: bool, number: int, expected: list[str]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("HANDLE", f"handle_signals={handle_signals}"))
    with running_server(command=(str(tmp_path / "program.py"),)) as process, ThreadPoolExecutor(1) as thread:
        response = thread.submit(process.infer, "wait", [str(tmp_path)], "BYTES")
        wait_until((tmp_path / "begun").exists, "the request")
        process.popen.send_signal(number)
        process.wait_for_log("stopping")
        (tmp_path / "go").touch()
        assert response.result()[1]["outputs"][0]["data"] == [1.0]  # a request in flight is finished
        assert process.wait_for_exit() == 0
        lines = process.log().splitlines()
        assert [line for line in lines if line in expected] == expected
        assert lines[-1] == "restored: True True"


def test_signals_are_handled_in_the_main_thread_only() -> None:
    with ThreadPoolExecutor(1) as thread, pytest.raises(RuntimeError, match="expected handle_signals=False"):
        thread.submit(dragoman.serve, double, http_port=0, grpc_port=-1).result()


class RunsProgram(dragoman.Model):
    """Runs a program that fails."""

    placement = "thread"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)

    def infer(self, call: dragoman.Infer) -> Any:
        program = "import sys; sys.stderr.write(9000 * 'x' + ' at /secret/mesh.txt: no such cell'); sys.exit(3)"
        try:
            subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            if call.inputs["x"].data[0]:
                raise ValueError("the solver failed") from error
            raise


@pytest.mark.parametrize("x", [0.0, 1.0])
async def test_the_output_of_a_program_that_failed_is_in_the_log(caplog: pytest.LogCaptureFixture, x: float) -> None:
    async with dragoman.Server(RunsProgram, http_port=0, grpc_port=-1) as server:
        body = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [x]}]}
        status, found = await asyncio.to_thread(post, server.http_url, "/v2/models/RunsProgram/infer", body)
    (record,) = [each for each in caplog.records if "failed on request" in each.message and each.levelname == "ERROR"]
    logged = logging.Formatter().format(record)
    assert "the end of its stderr:" in logged
    assert "x at /secret/mesh.txt: no such cell" in logged
    assert "sys.exit(3)" in logged  # the command
    assert "x" * 4000 not in logged
    assert status == 500
    assert "the end of" not in found["error"]
