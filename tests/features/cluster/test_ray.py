"""Workers in actors of a Ray cluster of two nodes on this machine; run by ./scripts/test-clusters.

Each call is answered exactly once: right, or with an error that says that its worker was lost.
"""

import asyncio
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.errors import ModelFailed, NotReady, WorkerLost
from dragoman.core.spec import LaunchOptions
from dragoman.workers.process import ProcessPool
from dragoman_cluster.launchers.jobs import JobState
from dragoman_cluster.worker_port import KeptJob, WorkerPort
from features.cluster.test_jobs_after_restart import stop, with_store
from features.cluster.test_join import open_port, outcomes_of_pids, pids
from workers.workers_harness import call, print_outcomes, spec_of, wait_until

pytestmark = pytest.mark.skipif(
    "DRAGOMAN_TEST_CLUSTERS" not in os.environ or importlib.util.find_spec("ray") is None,
    reason="run by ./scripts/test-clusters, which installs Ray",
)
LONG_S = 60.0
AUTHENTICATION = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}

Command = Callable[[str], str]


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, Command]]:
    """The address of a cluster without CPUs, and a function that runs a command of `ray_cluster`."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ray_cluster.py"))],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **AUTHENTICATION},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stderr is not None

    def read(is_wanted: Callable[[str], bool]) -> str:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if is_wanted(line.strip()):
                return line.strip()
        raise AssertionError("".join(lines))

    def run(command: str) -> str:
        assert process.stdin is not None
        print(command, file=process.stdin, flush=True)
        return read(str.isdecimal)

    yield read(lambda line: line.startswith("127.0.0.1:") or (line.count(".") == 3 and line.count(":") == 1)), run
    process.stdin.close()
    process.wait(60)
    process.stderr.close()


@pytest.fixture(autouse=True)
def address(cluster: tuple[str, Command], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RAY_ADDRESS": cluster[0], **AUTHENTICATION}.items():
        monkeypatch.setenv(name, value)


def new_pool(port: WorkerPort, **launch: Any) -> ProcessPool:
    options = LaunchOptions(launcher="ray", **launch)
    return ProcessPool(spec_of("Actions", launch=options, replicas=options.replicas, worker_port=port), lambda: None)


@asynccontextmanager
async def actors(port: WorkerPort, **launch: Any) -> AsyncIterator[ProcessPool]:
    pool = new_pool(port, **launch)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def drivers() -> list[str]:
    found = subprocess.run(["ps", "-o", "args", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if "dragoman_cluster.launchers.ray" in line]


async def test_nodes_join_and_leave(cluster: tuple[str, Command], tmp_path: Path) -> None:
    _, run = cluster
    handler = signal.getsignal(signal.SIGTERM)
    async with open_port() as port:
        pool = new_pool(port, replicas=2, resources={"cpus": 1})
        starting = asyncio.create_task(pool.start())
        await wait_until(lambda: "not placed: none of 1 nodes has CPU 1, and 1 more" in pool.waiting, LONG_S)
        assert pool.waiting.startswith("waiting for resources: Ray actor ")
        first_node = await asyncio.to_thread(run, "add 2")
        await starting
        try:
            first = await pids(pool, 2)
            held = asyncio.create_task(call(pool, do="hold", begun=tmp_path / "begun", go=tmp_path / "go"))
            await wait_until((tmp_path / "begun").exists)
            queued = asyncio.create_task(outcomes_of_pids(pool, 100))
            (busy,) = [replica for replica in pool.supervisor.running if replica.held]
            os.kill(int(busy.description.split()[2]), signal.SIGKILL)
            with pytest.raises(WorkerLost, match=r"Ray actor \w+ ended with exit code -9"):
                await held
            print_outcomes("Ray worker killed", [held.exception(), *await queued])
            assert len(await queued) == 100
            again = await asyncio.wait_for(pids(pool, 2), LONG_S)  # on the same node, whose two CPUs were in use
            assert first != again

            second_node = await asyncio.to_thread(run, "add 2")
            node_is_lost = asyncio.create_task(asyncio.to_thread(run, f"kill {first_node}"))
            results: list[object] = []
            while not node_is_lost.done() or len(results) < 200:
                results += await asyncio.gather(*(call(pool, do="pid") for _ in range(4)), return_exceptions=True)
            counts = print_outcomes("Ray node killed", results)
            assert counts["WorkerLost"] <= 2  # of two workers
            assert counts["right"] + counts["WorkerLost"] == len(results)
            again = await pids(pool, 2)
            assert len(again) == 2
            assert second_node == "1"
        finally:
            await pool.close()
        await wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in again), LONG_S)
        await wait_until(lambda: not drivers(), LONG_S)
    assert signal.getsignal(signal.SIGTERM) is handler


async def test_the_next_server_adopts_actors(cluster: tuple[str, Command], tmp_path: Path) -> None:
    """Detached ones; the driver of the first server ends with it."""
    _, run = cluster
    await asyncio.to_thread(run, "add 1")
    async with with_store(tmp_path) as port:
        number, pool = port.port, new_pool(port)
        await pool.start()
        (pid,) = await pids(pool, 1)
        driver = pool._launcher._driver._process  # type: ignore[attr-defined]
        await stop(pool, port, is_killed=True)
    driver.communicate(b"")  # as when the server that holds its pipes is gone
    async with with_store(tmp_path, number) as port:
        pool = new_pool(port)
        await pool.start()
        assert await pids(pool, 1) == [pid]
        (job,) = [kept.job for kept in port._jobs.read(KeptJob).values()]  # type: ignore[union-attr]
        assert await pool._launcher.states([job]) == {job: JobState("running", "placed")}  # type: ignore[attr-defined]
        await stop(pool, port)  # not kept this time
        await wait_until(lambda: not Path(f"/proc/{pid}").exists(), LONG_S)
        await wait_until(lambda: not drivers(), LONG_S)
        assert await pool._launcher.states([job]) == {}  # type: ignore[attr-defined]
        pool._launcher.release(job)  # type: ignore[attr-defined]


async def test_actors_of_a_group_are_not_kept(tmp_path: Path) -> None:
    async with with_store(tmp_path) as port:
        with pytest.raises(ModelFailed, match=r"'placement\.keep': expected strategy DEFAULT or SPREAD, got PACK"):
            new_pool(port, keep=True, resources={"strategy": "PACK"})


async def test_placement_groups_and_resources() -> None:
    """Each worker of STRICT_SPREAD needs a node of its own, of which there is one with CPUs."""
    async with open_port() as port:
        async with actors(port, resources={"cpus": 0.5, "node1": 0.1, "strategy": "STRICT_PACK"}, replicas=2) as pool:
            assert len(await pids(pool, 2)) == 2
        pool = new_pool(port, replicas=2, resources={"cpus": 0.5, "strategy": "STRICT_SPREAD"})
        starting = asyncio.create_task(pool.start())
        await wait_until(lambda: "not placed: " in pool.waiting, LONG_S)
        await asyncio.sleep(2)
        assert not starting.done()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await pool.close()
        await wait_until(lambda: not drivers(), LONG_S)


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"cpus": -1}, "'placement.resources.cpus': expected a number, 0 or more, got -1"),
        ({"strategy": "spread"}, "'placement.resources.strategy': expected one of DEFAULT, SPREAD, .*, got 'spread'"),
    ],
)
async def test_invalid_resources(resources: dict[str, Any], message: str) -> None:
    async with open_port() as port:
        with pytest.raises(ModelFailed, match=message):
            new_pool(port, resources=resources)


async def test_a_port_that_is_not_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself tries for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        used = f"127.0.0.1:{silent.getsockname()[1]}"
        for address, reason in [
            ("127.0.0.1:1", "nothing listens at 127.0.0.1:1: .*Connection refused"),
            (used, f"the cluster at {used} has not responded for 30 s"),
        ]:
            monkeypatch.setenv("RAY_ADDRESS", address)
            async with open_port() as port:
                pool = new_pool(port)
                with pytest.raises(NotReady, match=f"^failed to load 'm', Ray: {reason}$"):
                    await asyncio.wait_for(pool.start(), LONG_S)
                await pool.close()
            await wait_until(lambda: not drivers(), LONG_S)


async def test_a_cluster_that_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason stays while the model is loaded again."""
    for name in AUTHENTICATION:
        monkeypatch.delenv(name)
    reason = "Ray: Failed to connect .*Authentication token is missing or incorrect; set RAY_AUTH_MODE=token and the t"
    async with open_port() as port:
        with pytest.raises(NotReady, match=f"failed to load 'm', {reason}"):
            await asyncio.wait_for(new_pool(port).start(), LONG_S)
        again = new_pool(port)
        starting = asyncio.create_task(again.start())
        await wait_until(lambda: re.search(reason, again.waiting) is not None, LONG_S)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await again.close()
