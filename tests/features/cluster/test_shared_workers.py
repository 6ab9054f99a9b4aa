"""Workers that several servers share: one model for all, one call at a time, and servers that come and go."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dragoman.core.calls import Infer, Request
from dragoman.core.errors import InvalidInput, NotReady
from dragoman.core.spec import LaunchOptions, ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.workers.process import ProcessPool
from dragoman_cluster.join import parse_addresses
from dragoman_cluster.worker_port import WorkerPort
from e2e.server_process import ServerProcess, free_ports, wait_until
from features.cluster.test_rejoin import MODEL, SECRET, Workers, ask, loads, served, server, workers  # noqa: F401
from workers import workers_harness

STREAMS = """
import dragoman
import numpy as np
from pathlib import Path

class Model(dragoman.Model):
    inputs = outputs = (dragoman.TensorSpec("x", dragoman.FP64, (1,)),)
    is_busy = False

    def infer(self, call):
        if self.is_busy:
            raise RuntimeError("two calls at once")
        self.is_busy = True
        for _ in range(int(call.inputs["x"].data[0])):
            yield {"x": call.inputs["x"].data}
        self.is_busy = False
"""
SETTINGS = """
[model]
uri = "model.py:Model"
idempotent = true
[model.placement]
launcher = "join"
replicas = 2
min_ready = 2
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path / "model.py"


def new_pool(port: WorkerPort, model: Path, **parameters: int) -> ProcessPool:
    spec = ModelSpec(
        name=model.parent.name,
        runtime=f"{model}:Model",
        launch=LaunchOptions(launcher="join"),
        worker_port=port,
        parameters=parameters,
    )
    return ProcessPool(spec, lambda: None)


async def test_servers_share_a_model_that_is_loaded_once(model: Path, workers: Workers) -> None:  # noqa: F811
    """It ends when both have unloaded it, not when one has."""
    async with server() as one, server() as other:
        (pid,) = workers.start(one, other)
        pools = [new_pool(port, model) for port in (one, other)]
        await asyncio.gather(*(pool.start() for pool in pools))
        assert [await ask(pool, x) for x, pool in enumerate(pools)] == [pid, pid]
        assert loads(model) == {pid: 1}
        await pools[0].close()
        assert await ask(pools[1], 3) == pid
        await workers_harness.wait_until(lambda: one._idle)  # it may be loaded there again
        again = new_pool(one, model)
        await again.start()
        assert await ask(again, 4) == pid
        assert loads(model) == {pid: 1}
        await asyncio.gather(again.close(), pools[1].close())
        ((code, _),) = await workers.end()
        assert code == 0


async def test_a_stream_of_one_server_is_not_interrupted_by_calls_of_another(
    model: Path,
    workers: Workers,  # noqa: F811
) -> None:
    model.write_text(STREAMS)
    async with server() as one, server() as other:
        workers.start(one, other)
        async with served(one, model) as first, served(other, model) as second:

            async def count(pool: ProcessPool, length: int) -> int:
                request = Request(Infer({"x": Tensor.of(np.array([float(length)]))}))
                return len([chunk async for chunk in pool.stream(request)])

            counts = await asyncio.gather(*(count(pool, 40) for pool in (first, second) * 4))
            assert counts == [40] * 8


async def test_a_server_with_another_model_is_refused(model: Path, workers: Workers) -> None:  # noqa: F811
    """Also one with sequences, whose states the servers would mix."""
    async with server() as one, server() as other:
        (pid,) = workers.start(one, other)
        async with served(one, model) as pool:
            await ask(pool, 1)
            with pytest.raises(NotReady, match="another server uses another model here, or other files or settings"):
                await new_pool(other, model, a=1).start()
            assert await ask(pool, 2) == pid
            assert loads(model) == {pid: 1}


async def test_a_stateful_model_is_for_one_server(model: Path, workers: Workers) -> None:  # noqa: F811
    model.write_text(MODEL.replace("    outputs =", "    sequences = dragoman.SequenceOptions()\n    outputs ="))
    async with server() as one, server() as other:
        workers.start(one, other)
        async with served(one, model):
            with pytest.raises(NotReady, match="its model has sequences, which two servers cannot share"):
                await new_pool(other, model).start()


async def test_a_long_call_outlives_the_other_server(model: Path, workers: Workers) -> None:  # noqa: F811
    """A worker that computes for longer than `rejoin_s` ends if its server is gone, but not if one of two is."""
    code = "import dragoman_cluster.link as link; link._CLOSING_S = 0.2"
    async with server() as one, server() as other:
        (pid,) = workers.start(one, other, rejoin_s=0.2, code=code)
        async with served(one, model) as pool, served(other, model):
            held = asyncio.create_task(ask(pool, -1))
            await workers_harness.wait_until((model.parent / "begun-1").exists)
            break_connections(other)
            assert not (await asyncio.wait({held}, timeout=1.0))[0]
            (model.parent / "go").touch()
            assert await held == pid


def break_connections(port: WorkerPort) -> None:
    for link in [*port._links]:
        link.shutdown()


@pytest.mark.parametrize(
    "addresses", [["a:1/ticket", "b:1"], ["a:1", "a:1"], ["a:1", "b"]], ids=["ticket", "twice", "invalid"]
)
def test_invalid_addresses(addresses: list[str]) -> None:
    with pytest.raises(InvalidInput, match="--join: expected"):
        parse_addresses(addresses)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.py").write_text(MODEL.replace(".parent", ".parents[1]"))
    (tmp_path / "m" / "dragoman.toml").write_text(SETTINGS)
    started: list[ServerProcess] = []
    yield started
    for each in started:
        each.kill()


async def test_a_server_is_killed_under_load_and_comes_back(
    tmp_path: Path,
    servers: list[ServerProcess],
    workers: Workers,  # noqa: F811
) -> None:
    """Callers send a call again to the next server if theirs is gone: none is lost, and no model loads again."""
    ports = free_ports(2)
    environment = {"DRAGOMAN_WORKER_SECRET": SECRET}

    def start(port: int) -> ServerProcess:
        return ServerProcess.on_free_ports(
            str(tmp_path / "m"), "--worker-port", str(port), environment=environment, imports=("dragoman_cluster",)
        )

    servers += [start(port) for port in ports]
    workers.start(*(f"127.0.0.1:{port}" for port in ports), count=2)
    for each in servers:
        await asyncio.to_thread(wait_until, lambda each=each: each.status("/v2/health/ready") == 200, "ready")
    is_over, values, sent = False, [], [0, 0]

    def call_until_over(number: int) -> None:
        value = float(number)
        while not is_over:
            value += 10
            while True:
                number += 1
                try:
                    status, body = servers[number % 2].infer("m", [value])
                except OSError:
                    continue
                if status == 200:
                    values.append((value, body["outputs"][0]["data"][1]))
                    sent[number % 2] += 1
                    break
                assert status == 503, body

    callers = [asyncio.create_task(asyncio.to_thread(call_until_over, number)) for number in range(4)]
    await workers_harness.wait_until(lambda: min(sent) > 20)
    servers[0].popen.send_signal(signal.SIGKILL)
    servers[0].popen.wait()
    before = sent[1]
    await workers_harness.wait_until(lambda: sent[1] > before + 20)
    killed, servers[0] = servers[0], start(ports[0])
    killed.kill()
    sent[0] = 0
    await asyncio.to_thread(wait_until, lambda: sent[0] > 20, "calls of the server that came back")
    is_over = True
    await asyncio.gather(*callers)
    assert all(sent_value == value for sent_value, value in values)
    assert [*loads(tmp_path / "model.py").values()] == [1, 1]
    assert {os.waitid(os.P_PID, each.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for each in workers.processes} == {None}
