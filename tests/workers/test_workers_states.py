"""States of pools and replicas that end: what they wait for, and what an exit says about the health of a worker."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from dragoman.core.calls import Infer
from dragoman.core.errors import DragomanError, ModelFailed, NotReady, WorkerLost
from dragoman.core.signature import Signature
from dragoman.core.spec import LaunchOptions
from dragoman.workers.frames import FrameKind, encode
from dragoman.workers.jobs import Job
from dragoman.workers.pool import Loaded
from dragoman.workers.process import ProcessPool
from dragoman.workers.replica import Replica
from dragoman.workers.worker_messages import serialize_message
from workers.workers_harness import call, make_request, spec_of, wait_until

REASON = "SIGTERM"


async def test_a_closed_pool_waits_for_no_worker() -> None:
    pool = ProcessPool(spec_of("Echo", launch=LaunchOptions(replicas=2), replicas=2), lambda: None)
    assert pool.waiting == "waiting for worker processes: 0 of 2 are loaded"
    assert [worker.state for worker in pool.workers()] == ["waiting", "waiting"]
    await pool.start()
    await pool.close()
    assert (pool.waiting, pool.unavailable, pool.workers(), pool.ready) == ("", "", (), False)
    assert set(pool.states().values()) == {0}
    with pytest.raises(NotReady, match="unloading"):
        await call(pool)


class FakeProcess:
    """A `WorkerProcess` whose frames the test sends. `kill` ends it."""

    has_own_clock = False
    host = ""
    memory = None
    description = "fake process"
    exit_reason = "killed by SIGKILL"
    was_killed_by_system = False
    needs_farewell = False
    pid = 0

    def __init__(self) -> None:
        self.socket, self._worker = socket.socketpair()
        self.closed, self.exited, self.killed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def send(self, kind: FrameKind, value: object) -> None:
        self._worker.sendall(b"".join(encode(kind, 0, value, serializer=serialize_message)))

    def is_stopped(self) -> bool:
        return False

    def kill(self) -> None:
        self.killed.set()
        self.closed.set()

    async def wait(self, _grace_s: Callable[[], float], cleanup: Callable[[], None]) -> None:
        await self.closed.wait()
        cleanup()
        self._worker.close()
        self.exited.set()


class FakeLauncher:
    starts_workers = True
    waiting_for = "fake processes"

    def __init__(self) -> None:
        self.process = FakeProcess()

    async def launch(self) -> Any:
        return self.process


async def started(process: FakeProcess, launcher: FakeLauncher, **options: Any) -> Replica:
    replica = Replica(spec_of("Echo", **options), launcher, lambda: None)
    process.send(FrameKind.LOADED, Loaded(Signature(), "python", frozenset({Infer})))
    await replica.start()
    return replica


def send(replica: Replica, errors: list[BaseException | None]) -> Job:
    job = Job(1, FrameKind.CALL, make_request(), lambda _value, error, _last: errors.append(error))
    replica.send(job, replica.encode(job))
    return job


async def test_a_worker_that_leaves_is_ended_after_its_last_job_and_that_is_no_crash() -> None:
    launcher = FakeLauncher()
    process = launcher.process
    replica = await started(process, launcher)
    assert replica.has_capacity
    process.send(FrameKind.DRAIN, REASON)
    await asyncio.wait_for(replica.exited.wait(), 60)
    assert (replica.has_capacity, replica.was_killed, replica.exit_reason) == (False, True, "killed by SIGKILL")
    assert replica.unavailable == "its worker leaves: SIGTERM"


async def test_a_worker_may_leave_as_soon_as_it_is_loaded() -> None:
    launcher = FakeLauncher()
    replica = Replica(spec_of("Echo"), launcher, lambda: None)
    launcher.process.send(FrameKind.LOADED, Loaded(Signature(), "python", frozenset({Infer})))
    launcher.process.send(FrameKind.DRAIN, REASON)
    await replica.start()
    await asyncio.wait_for(replica.exited.wait(), 60)
    assert (replica.has_capacity, replica.was_killed) == (False, True)


@pytest.mark.parametrize("end", ["cancelled job", "leaves too"])
async def test_the_exit_of_a_worker_whose_model_has_failed_counts_as_a_crash(end: str) -> None:
    """Also if it is killed because of a job that it does not end, or announces later that it leaves."""
    launcher, errors = FakeLauncher(), list[BaseException | None]()
    process = launcher.process
    replica = await started(process, launcher, cancel_grace_s=0.01)
    job = send(replica, errors)
    process.send(FrameKind.DRAIN, WorkerLost("the engine is dead"))
    await wait_until(lambda: replica.unavailable)
    assert not process.killed.is_set()
    if end == "leaves too":
        process.send(FrameKind.DRAIN, REASON)
        process.send(FrameKind.PONG, "")
        await asyncio.sleep(0.05)
    replica.cancel(job)
    await asyncio.wait_for(replica.exited.wait(), 60)
    assert not replica.was_killed
    assert replica.unavailable == "its worker has failed: the engine is dead"
    assert replica.exit_reason == "its worker has failed: the engine is dead"


async def test_a_worker_that_does_not_end_a_cancelled_job_is_killed_and_that_is_no_crash() -> None:
    launcher = FakeLauncher()
    replica = await started(launcher.process, launcher, cancel_grace_s=0.01)
    replica.cancel(send(replica, []))
    await asyncio.wait_for(replica.exited.wait(), 60)
    assert (replica.was_killed, replica.exit_reason) == (True, "killed by SIGKILL")


@pytest.mark.parametrize(
    ("reason", "error"),
    [(REASON, NotReady("failed to load 'm', its worker leaves: SIGTERM")), (None, ModelFailed("died"))],
)
async def test_a_worker_that_leaves_while_it_loads(reason: str | None, error: DragomanError) -> None:
    launcher = FakeLauncher()
    replica = Replica(spec_of("Echo"), launcher, lambda: None)
    if reason is None:
        launcher.process.kill()
    else:
        launcher.process.send(FrameKind.DRAIN, reason)
    with pytest.raises(type(error), match=error.message):
        await replica.start()
    assert not replica.has_capacity
