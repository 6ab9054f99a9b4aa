"""Heartbeats: workers that hang are detected, workers that compute do not count as hung."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.workers.supervisor import MAX_MISSED, Heartbeat, is_stopped
from workers.workers_harness import call, children, first_value, forget_children, make_request, processes, wait_until  # noqa: F401 - a fixture


class Process:
    """A fake worker process with its heartbeat."""

    def __init__(self) -> None:
        self.stopped = False
        self.pings = 0
        self.heartbeat = Heartbeat(lambda: self.stopped, self._ping)

    def _ping(self) -> None:
        self.pings += 1

    def beat(self, times: int = 1, *, busy: bool = False) -> bool:
        for _ in range(times):
            self.heartbeat.check(busy=busy)
        return self.heartbeat.is_hung


def test_a_busy_process_is_not_pinged_and_not_hung() -> None:
    process = Process()
    assert not process.beat(1000, busy=True)
    assert not process.pings


def test_a_stopped_process_is_hung_until_it_continues() -> None:
    process = Process()
    process.stopped = True
    assert not process.beat(MAX_MISSED - 1, busy=True)
    assert process.beat(busy=True)
    assert process.heartbeat.reason == "it is stopped"
    process.stopped = False
    assert not process.beat(busy=True)  # it may compute for minutes before it responds


def test_an_idle_process_is_hung_while_it_does_not_respond() -> None:
    process = Process()
    assert not process.beat(MAX_MISSED)
    assert process.beat()
    assert process.pings == 1
    assert process.beat(3, busy=True)  # sending a call does not count as a response
    process.heartbeat.record_response()
    assert not process.beat(MAX_MISSED - 1)


def test_a_process_that_computes_after_a_ping_is_not_hung() -> None:
    process = Process()
    process.beat(MAX_MISSED - 1)
    assert not process.beat(1000, busy=True)
    assert not process.beat(MAX_MISSED - 1)  # its response to the ping may not have arrived yet


@given(st.lists(st.booleans()))
def test_a_process_that_responds_is_never_hung(busy: list[bool]) -> None:
    process = Process()
    for each in busy:
        pings = process.pings
        assert not process.beat(busy=each)
        if process.pings > pings:
            process.heartbeat.record_response()


def test_running_and_unknown_processes_are_not_stopped() -> None:
    assert not is_stopped(os.getpid())
    assert not is_stopped(2**22 + 1)  # larger than any process id


async def test_readiness_is_false_while_a_worker_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    changes: list[bool] = []
    async with processes("Actions", lambda: changes.append(bool(changes) and pool.ready), heartbeat_s=0.2) as pool:
        worker = children().pop()
        os.kill(worker, signal.SIGSTOP)
        try:
            await wait_until(lambda: not pool.ready)
            waiting = asyncio.create_task(call(pool, do="pid"))
            await asyncio.sleep(0.4)
            assert not waiting.done()
            assert not pool.ready
        finally:
            os.kill(worker, signal.SIGCONT)
        assert first_value(await waiting) == worker
        await wait_until(lambda: pool.ready)
        assert changes[1:] == [False, True]
    messages = [r.getMessage() for r in caplog.records if "hangs" in r.message]
    assert messages == [f"model 'm': worker process {worker} hangs: it is stopped; calls go to the other workers"]


async def test_queued_calls_move_from_a_stopped_worker_to_others(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with processes("Actions", replicas=2, heartbeat_s=0.2) as pool:
        for _ in range(10):  # fast calls: the pool may then send a second call to a busy process
            await call(pool, do="pid")
        running = [asyncio.create_task(call(pool, do="hold", begun=tmp_path / f"b{n}", go=go)) for n in range(2)]
        await wait_until(lambda: len(list(tmp_path.glob("b*"))) == 2)
        queued = [asyncio.create_task(call(pool, do="pid")) for _ in range(4)]
        await asyncio.sleep(0)
        stopped, other = children()
        os.kill(stopped, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.6)
            assert pool.ready
            go.touch()
            async with asyncio.timeout(60):
                assert {first_value(response) for response in await asyncio.gather(*queued)} == {other}
            assert [first_value(await call(pool, do="pid")) for _ in range(5)] == [other] * 5
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert {first_value(response) for response in await asyncio.gather(*running)} == {stopped, other}


async def test_a_stopped_idle_worker_gets_no_calls() -> None:
    async with processes("Actions", replicas=2, heartbeat_s=0.2) as pool:
        stopped, other = children()
        os.kill(stopped, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.6)
            async with asyncio.timeout(60):
                responses = await asyncio.gather(*(call(pool, do="pid") for _ in range(6)))
            assert {first_value(response) for response in responses} == {other}
        finally:
            os.kill(stopped, signal.SIGCONT)


async def test_a_timeout_restarts_a_stopped_worker() -> None:
    async with processes("Actions", heartbeat_s=0.2, cancel_grace_s=0.1) as pool:
        worker = children().pop()
        os.kill(worker, signal.SIGSTOP)
        await wait_until(lambda: not pool.ready)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await call(pool, do="pid")
        async with asyncio.timeout(60):
            assert first_value(await call(pool, do="pid")) != worker


async def test_a_model_that_holds_the_interpreter_lock_is_not_hung() -> None:
    changes: list[int] = []
    async with processes("Actions", lambda: changes.append(1), heartbeat_s=1.0) as pool:
        assert first_value(await call(pool, do="hold the lock", for_s=2.5)) > 0
        assert len(changes) == 1


async def test_readiness_is_false_while_an_idle_worker_does_not_respond() -> None:
    async with processes("Actions", heartbeat_s=0.2) as pool:
        worker = first_value(await call(pool, do="hold the lock afterwards", for_s=2.0))
        await wait_until(lambda: not pool.ready)
        await wait_until(lambda: pool.ready)
        assert children() == {worker}


async def test_without_heartbeats_a_stopped_worker_stays_ready() -> None:
    async with processes("Actions", heartbeat_s=0.0) as pool:
        worker = children().pop()
        os.kill(worker, signal.SIGSTOP)
        await asyncio.sleep(0.3)
        assert pool.ready
        os.kill(worker, signal.SIGCONT)
