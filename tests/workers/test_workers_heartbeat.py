"""Workers that hang are found out, and workers that compute are not taken for them."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from workers_harness import ask, children, first, forget_children, processes, until  # noqa: F401 - a fixture

from dragoman.workers.supervisor import MAX_MISSED, Heartbeat, is_stopped


class Process:
    """A worker process as its heartbeat sees it."""

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


def test_a_busy_process_never_hangs_and_is_not_pinged() -> None:
    process = Process()
    assert not process.beat(1000, busy=True)
    assert not process.pings


def test_a_stopped_process_hangs_though_it_is_busy_and_no_longer_once_it_goes_on() -> None:
    process = Process()
    process.stopped = True
    assert not process.beat(MAX_MISSED - 1, busy=True)
    assert process.beat(busy=True)
    assert process.heartbeat.reason == "it is stopped"
    process.stopped = False
    assert not process.beat(busy=True)  # it may compute for minutes before it answers


def test_an_idle_process_hangs_while_it_answers_no_ping() -> None:
    process = Process()
    assert not process.beat(MAX_MISSED)
    assert process.beat()
    assert process.pings == 1
    assert process.beat(3, busy=True)  # to be given a call is no sign of life
    process.heartbeat.record_response()
    assert not process.beat(MAX_MISSED - 1)


def test_a_call_that_comes_after_a_ping_is_time_to_compute() -> None:
    process = Process()
    process.beat(MAX_MISSED - 1)
    assert not process.beat(1000, busy=True)
    assert not process.beat(MAX_MISSED - 1)  # its answer to the ping may still be on its way


@given(st.lists(st.booleans()))
def test_a_process_that_answers_never_hangs(busy: list[bool]) -> None:
    process = Process()
    for each in busy:
        pings = process.pings
        assert not process.beat(busy=each)
        if process.pings > pings:
            process.heartbeat.record_response()


def test_a_process_that_runs_or_is_gone_is_not_stopped() -> None:
    assert not is_stopped(os.getpid())
    assert not is_stopped(2**22 + 1)  # beyond the largest number that a process may have


async def test_a_stopped_worker_is_not_ready_until_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    changes: list[bool] = []
    async with processes("Acts", lambda: changes.append(bool(changes) and pool.ready), heartbeat_s=0.2) as pool:
        worker = children().pop()
        os.kill(worker, signal.SIGSTOP)
        try:
            await until(lambda: not pool.ready)
            waiting = asyncio.create_task(pool.call(ask(do="pid")))
            await asyncio.sleep(0.4)
            assert not waiting.done()
            assert not pool.ready
        finally:
            os.kill(worker, signal.SIGCONT)
        assert first(await waiting) == worker
        await until(lambda: pool.ready)
        assert changes[1:] == [False, True]
    told = [r.getMessage() for r in caplog.records if "hangs" in r.message]
    assert told == [f"model 'm': worker process {worker} hangs: it is stopped; calls go to the other workers"]


async def test_calls_pass_by_a_stopped_worker(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with processes("Acts", replicas=2, heartbeat_s=0.2) as pool:
        for _ in range(10):  # so short that a second call may be sent to a process that has one
            await pool.call(ask(do="pid"))
        held = [asyncio.create_task(pool.call(ask(do="hold", begun=tmp_path / f"b{n}", go=go))) for n in range(2)]
        await until(lambda: len(list(tmp_path.glob("b*"))) == 2)
        behind = [asyncio.create_task(pool.call(ask(do="pid"))) for _ in range(4)]
        await asyncio.sleep(0)
        stopped, other = children()
        os.kill(stopped, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.6)
            assert pool.ready
            go.touch()
            async with asyncio.timeout(20):
                assert {first(answer) for answer in await asyncio.gather(*behind)} == {other}
            assert [first(await pool.call(ask(do="pid"))) for _ in range(5)] == [other] * 5
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert {first(answer) for answer in await asyncio.gather(*held)} == {stopped, other}


async def test_an_idle_worker_that_is_stopped_is_given_no_call() -> None:
    async with processes("Acts", replicas=2, heartbeat_s=0.2) as pool:
        stopped, other = children()
        os.kill(stopped, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.6)
            async with asyncio.timeout(20):
                answers = await asyncio.gather(*(pool.call(ask(do="pid")) for _ in range(6)))
            assert {first(answer) for answer in answers} == {other}
        finally:
            os.kill(stopped, signal.SIGCONT)


async def test_a_deadline_answers_whoever_waits_for_a_stopped_worker_and_restarts_it() -> None:
    async with processes("Acts", heartbeat_s=0.2, cancel_grace_s=0.1) as pool:
        worker = children().pop()
        os.kill(worker, signal.SIGSTOP)
        await until(lambda: not pool.ready)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await pool.call(ask(do="pid"))
        async with asyncio.timeout(20):
            assert first(await pool.call(ask(do="pid"))) != worker


async def test_a_model_that_holds_the_lock_does_not_hang() -> None:
    changes: list[int] = []
    async with processes("Acts", lambda: changes.append(1), heartbeat_s=1.0) as pool:
        assert first(await pool.call(ask(do="hold the lock", for_s=2.5))) > 0
        assert len(changes) == 1


async def test_an_idle_worker_that_does_not_answer_is_not_ready_until_it_does() -> None:
    async with processes("Acts", heartbeat_s=0.2) as pool:
        worker = first(await pool.call(ask(do="hold the lock afterwards", for_s=2.0)))
        await until(lambda: not pool.ready)
        await until(lambda: pool.ready)
        assert children() == {worker}


async def test_without_a_heartbeat_nothing_hangs() -> None:
    async with processes("Acts", heartbeat_s=0.0) as pool:
        worker = children().pop()
        os.kill(worker, signal.SIGSTOP)
        await asyncio.sleep(0.3)
        assert pool.ready
        os.kill(worker, signal.SIGCONT)
