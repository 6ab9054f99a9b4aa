"""Workers outlive their server: they find the next one at its address, with their model loaded."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

import dragoman
from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.errors import NotReady, WorkerLost
from dragoman.core.spec import LaunchOptions, ModelSpec
from dragoman.core.state_store import StateStore
from dragoman.core.tensor import Tensor
from dragoman.system.coroutines import complete
from dragoman.workers.process import ProcessPool
from dragoman_cluster.handshake import are_compatible
from dragoman_cluster.worker_port import WorkerPort, WorkerPortOptions
from workers.workers_harness import wait_until

SECRET = "the secret of the tests"
# Returns its process id and the input; a negative input waits for a file.
MODEL = """
import os, time
from pathlib import Path
import numpy as np
import dragoman

FOLDER = Path(__file__).parent

class Model(dragoman.Model):
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP64, (2,)),)

    def load(self):
        with (FOLDER / "loads").open("a") as file:
            file.write(f"{os.getpid()}\\n")

    def infer(self, call):
        x = call.inputs["x"].data[0]
        if x < 0:
            (FOLDER / f"begun{x:g}").touch()
            while not (FOLDER / "go").exists():
                time.sleep(0.01)
        return {"y": np.array([os.getpid(), x])}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path / "model.py"


def loads(model: Path) -> Counter[int]:
    """Return how often each process has loaded the model."""
    return Counter(map(int, (model.parent / "loads").read_text().split()))


class Workers:
    """Processes of `dragoman worker`, killed at the end."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *servers: WorkerPort | str, count: int = 1, rejoin_s: float = 60.0, code: str = "") -> list[int]:
        """Return the ids of new workers of servers, or of their addresses; `code` runs in them first."""
        start = f"{code}\nimport sys; from dragoman.cli import main; sys.exit(main(sys.argv[1:]))"
        addresses = [each if isinstance(each, str) else each.address for each in servers]
        arguments = ["worker", *(f"--join={each}" for each in addresses), "--rejoin-s", f"{rejoin_s:g}"]
        command = [sys.executable, "-c", start, *arguments]
        environment = {**os.environ, "DRAGOMAN_WORKER_SECRET": SECRET}
        started = [subprocess.Popen(command, stderr=subprocess.PIPE, env=environment) for _ in range(count)]
        self.processes += started
        return sorted(each.pid for each in started)

    async def end(self) -> list[tuple[int, str]]:
        """Return the exit codes and outputs of processes that end by themselves."""
        outputs = await asyncio.gather(*(asyncio.to_thread(each.communicate, timeout=30) for each in self.processes))
        return [(each.returncode, output.decode()) for each, (_, output) in zip(self.processes, outputs, strict=True)]


@pytest.fixture
def workers() -> Iterator[Workers]:
    started = Workers()
    yield started
    for each in started.processes:
        each.kill()
        each.communicate()


@asynccontextmanager
async def server(
    port: int = 0, secret: str = SECRET, *, is_restarted: bool = True, store: StateStore | None = None
) -> AsyncIterator[WorkerPort]:
    """The worker port of a server, which is restarted later, or ends for good with its models."""
    worker_port = WorkerPort(WorkerPortOptions(host="127.0.0.1", port=port, secret=secret.encode(), timeout_s=5.0))
    if store is not None:
        worker_port.use_store(store)
    await worker_port.start()
    try:
        yield worker_port
    finally:
        if is_restarted:
            worker_port.begin_stop()
        await worker_port.close()


@asynccontextmanager
async def served(port: WorkerPort, model: Path, replicas: int = 1) -> AsyncIterator[ProcessPool]:
    launch = LaunchOptions(launcher="join", replicas=replicas, min_ready=replicas)
    options = {"launch": launch, "replicas": replicas, "worker_port": port}
    pool = ProcessPool(
        ModelSpec(name=model.parent.name, runtime=f"{model}:Model", **options),  # type: ignore[arg-type]
        lambda: None,
    )
    try:
        await pool.start()
        yield pool
    finally:
        port.begin_stop()
        await pool.close()


async def ask(pool: ProcessPool, x: float) -> int:
    """Return the process that has answered; the answer must be that of this call."""
    response: Inference = await complete(pool.call(Request(Infer({"x": Tensor.of(np.array([float(x)]))}))))
    pid, value = response.outputs["y"].data
    assert value == x
    return int(pid)


async def pids(pool: ProcessPool, count: int) -> list[int]:
    found: set[int] = set()
    while len(found) < count:
        found |= {*await asyncio.gather(*(ask(pool, n) for n in range(4 * count)))}
    return sorted(found)


async def test_a_restarted_server_gets_its_workers_with_their_models(model: Path, workers: Workers) -> None:
    async with server() as port:
        number, started = port.port, workers.start(port, count=2)
        async with served(port, model, 2) as pool:
            assert await pids(pool, 2) == started
            held = asyncio.create_task(ask(pool, -1))
            await wait_until((model.parent / "begun-1").exists)
    with pytest.raises(NotReady):  # the server ends while one of them computes
        await held
    async with server(number) as port, served(port, model, 1) as pool:
        answers = [asyncio.create_task(ask(pool, x)) for x in (5, 6, 7)]  # by the other one
        assert len({*await asyncio.gather(*answers)}) == 1
        (model.parent / "go").touch()  # its answer is for nobody
    async with server(number) as port, served(port, model, 2) as pool:
        assert await pids(pool, 2) == started
        assert loads(model) == dict.fromkeys(started, 1)


async def test_a_changed_model_is_loaded_again(model: Path, workers: Workers) -> None:
    async with server() as port:
        number, (pid,) = port.port, workers.start(port)
        async with served(port, model) as pool:
            assert await ask(pool, 1) == pid
    model.write_text(MODEL + "# changed\n")
    async with server(number) as port, served(port, model) as pool:
        assert await ask(pool, 2) == pid
        assert loads(model) == {pid: 2}
    async with server(number) as port, served(port, model) as pool:  # kept again
        assert await ask(pool, 3) == pid
        assert loads(model) == {pid: 2}


async def test_workers_return_to_the_models_that_they_have_loaded(tmp_path: Path, workers: Workers) -> None:
    models = [tmp_path / name / "model.py" for name in ("a", "b")]
    for each in models:
        each.parent.mkdir()
        each.write_text(MODEL)
    async with server() as port:
        number = port.port
        workers.start(port, count=2)
        async with served(port, models[0]), served(port, models[1]):
            before = [loads(each) for each in models]
    (stopped,) = before[0]
    os.kill(stopped, signal.SIGSTOP)  # the worker of the other model comes first
    async with server(number) as port:

        async def serve_first() -> None:
            async with served(port, models[0]) as pool:
                assert await ask(pool, 1) == stopped

        serving = asyncio.create_task(serve_first())
        await wait_until(lambda: port._idle)  # it is not given to the model that waits
        os.kill(stopped, signal.SIGCONT)
        await serving
        async with served(port, models[1]):
            assert [loads(each) for each in models] == before


async def test_after_a_cut_the_worker_comes_back_by_itself(model: Path, workers: Workers) -> None:
    async with server() as port:
        workers.start(port)
        async with served(port, model) as pool:
            held = asyncio.create_task(ask(pool, -1))
            await wait_until((model.parent / "begun-1").exists)
            pool.supervisor.running[0]._process.kill()  # ends the connection
            with pytest.raises(WorkerLost):
                await held
            waiting = asyncio.create_task(ask(pool, 2))
            (model.parent / "go").touch()
            await waiting
            assert loads(model).total() == 1
        async with asyncio.timeout(30):
            while port.last_rejection or not port._idle:
                await asyncio.sleep(0.01)
        (idle,) = port._idle
        idle.socket.shutdown()  # while it waits for a model
        await wait_until(lambda: port._idle and port._idle[0] is not idle)


async def test_the_end_of_workers(model: Path, workers: Workers) -> None:
    async with server(is_restarted=False) as port:
        number = port.port
        pid = workers.start(port)[0]
        async with served(port, model) as pool:
            os.kill(pid, signal.SIGTERM)  # leaves
            await wait_until(lambda: not pool.supervisor.running)
        ((code, output),) = await workers.end()
        assert (code, "this worker leaves: SIGTERM" in output) == (0, True)
        workers.processes.clear()
        port.keeps_workers = False
        workers.start(port)
        launch = LaunchOptions(launcher="join")
        pool = ProcessPool(ModelSpec(name="m", runtime=f"{model}:Model", launch=launch, worker_port=port), lambda: None)
        await pool.start()
        await pool.close()  # the model is unloaded
        ((code, output),) = await workers.end()
        assert (code, "looking for it" in output) == (0, False)
        workers.processes.clear()
        workers.start(port, rejoin_s=0.3)
        async with served(port, model) as pool:
            await ask(pool, 1)
    ((code, output),) = await workers.end()  # no server comes
    assert (code, "looking for it for 0.3 s" in output) == (0, True)
    workers.processes.clear()
    async with server(number) as port:
        workers.start(port)
        async with served(port, model) as pool:
            await ask(pool, 1)
    async with server(number, "another secret, of a stranger") as port:
        ((code, output),) = await workers.end()
        assert (code, "the secrets of worker and server differ" in output) == (2, True)


@pytest.mark.parametrize(
    ("worker", "server_version", "expected"),
    [
        ("0.2.1", "0.2.1", True),
        ("0.2.1", "0.2.2", True),
        ("0.2.10", "0.2.9", True),
        ("0.2.1", "0.2.3", False),
        ("0.3.1", "0.2.1", False),
        ("1.2.1", "0.2.1", False),
        ("0.2.1.dev3", "0.2.1.dev3", True),
        ("0.2.1.dev3", "0.2.1", False),
        ("0.2", "0.2.1", False),
        ("\u0660.2.1", "0.2.1", False),
        ("", "0.2.1", False),
    ],
)
def test_versions_of_one_patch_release_apart_are_compatible(worker: str, server_version: str, expected: bool) -> None:
    assert are_compatible(worker, server_version) is expected
    assert are_compatible(server_version, worker) is expected


async def test_a_worker_of_the_next_patch_release_is_accepted(model: Path, workers: Workers) -> None:
    release, _, patch = dragoman.__version__.rpartition(".")
    code = f"import dragoman._version as v; v.__version__ = '{release}.{int(patch) + 1}'"
    async with server() as port:
        workers.start(port, code=code)
        async with served(port, model) as pool:
            assert await ask(pool, 1)
