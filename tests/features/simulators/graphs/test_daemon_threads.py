"""Threads that do not keep a process from ending, and functions in them that can be stopped."""

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest

from dragoman.system.threads import DaemonThreads, TimeLimitExceededError, Turns, run_stoppable
from e2e.server_process import wait_until


def test_the_number_of_threads_is_bounded() -> None:
    threads = DaemonThreads(3, "few")
    meeting = threading.Barrier(3)
    names = {f.result(60) for f in [threads.submit(_meet, meeting) for _ in range(9)]}
    assert names == {"few-1", "few-2", "few-3"}
    threads.shutdown()


def _meet(meeting: threading.Barrier) -> str:
    meeting.wait(60)
    return threading.current_thread().name


def test_idle_threads_are_reused() -> None:
    threads = DaemonThreads(8, "again")
    for _ in range(20):
        assert threads.submit(threading.current_thread).result(60).name == "again-1"
        wait_until(lambda: threads.idle.acquire(blocking=False), "the thread waits")
        threads.idle.release()
    threads.shutdown()


def test_errors_reach_the_caller() -> None:
    threads = DaemonThreads(1, "faults")
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(60)
    with pytest.raises(SystemExit):
        threads.submit(sys.exit, 3).result(60)
    assert threads.submit(lambda: 4).result(60) == 4
    threads.shutdown()


def _wait(started: threading.Event, proceed: threading.Event) -> bool:
    started.set()
    return proceed.wait(60)


def test_queued_jobs_are_cancelled_or_run_at_shutdown() -> None:
    for cancel in (True, False):
        threads = DaemonThreads(1, "ends")
        started, proceed = threading.Event(), threading.Event()
        first = threads.submit(_wait, started, proceed)
        second = threads.submit(lambda: 2)
        assert started.wait(60)
        threads.shutdown(cancel_futures=cancel)
        with pytest.raises(RuntimeError, match="after shutdown"):
            threads.submit(int)
        proceed.set()
        assert first.result(60)
        if cancel:
            with pytest.raises(CancelledError):
                second.result(60)
        else:
            assert second.result(60) == 2


def test_threads_end_with_their_executor() -> None:
    threads = DaemonThreads(2, "collected")
    threads.submit(int).result(60)
    del threads
    gc.collect()
    wait_until(lambda: not any(t.name.startswith("collected") for t in threading.enumerate()), "the thread ends")


def test_a_waiting_thread_does_not_block_the_exit_of_its_process() -> None:
    code = "import threading\nfrom dragoman.system.threads import DaemonThreads\nt = DaemonThreads(1, 'x')\n"
    code += "e = threading.Event()\nt.submit(lambda: (e.set(), threading.Event().wait()))\ne.wait()\nprint('done')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "done\n"


# --- functions that can be stopped ---------------------------------------------------------------------------


def endless(started: threading.Event | None = None) -> Callable[[], None]:
    def run() -> None:
        if started is not None:
            started.set()
        while True:
            pass

    return run


async def test_a_function_over_its_limit_is_stopped() -> None:
    threads = DaemonThreads(2, "stopped")
    for _ in range(5):  # a thread that was not stopped would be lost
        with pytest.raises(TimeLimitExceededError):
            await run_stoppable(threads, endless(), 0.02)
    assert await run_stoppable(threads, lambda: 7, 20) == 7
    with pytest.raises(ZeroDivisionError):
        await run_stoppable(threads, lambda: 1 // 0, 20)
    threads.shutdown()


async def test_the_event_loop_runs_meanwhile() -> None:
    threads, turns = DaemonThreads(1, "beside"), 0
    task = asyncio.ensure_future(run_stoppable(threads, endless(), 0.5))
    while not task.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert turns > 1  # it would be one if the loop did not run
    assert isinstance(task.exception(), TimeLimitExceededError)
    threads.shutdown()


async def test_the_function_of_a_cancelled_caller_is_stopped() -> None:
    threads, started = DaemonThreads(1, "cancelled"), threading.Event()
    task = asyncio.ensure_future(run_stoppable(threads, endless(started), 60))
    waiting = asyncio.ensure_future(run_stoppable(threads, started.clear, 60))
    assert await asyncio.to_thread(started.wait, 20)
    waiting.cancel()  # not started yet
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await run_stoppable(threads, started.is_set, 20)
    threads.shutdown()


async def test_a_function_that_returns_as_it_is_stopped_leaves_its_thread_clean() -> None:
    """The exception is on its way when the function has ended: it must not be raised in the next one."""
    threads = DaemonThreads(1, "race")
    for i in range(200):
        with suppress(TimeLimitExceededError):
            await run_stoppable(threads, lambda: sum(range(2000)), 0.00001 * (i % 40))
        assert await run_stoppable(threads, threading.current_thread, 20) is not None
    assert (await run_stoppable(threads, threading.current_thread, 20)).name == "race-1"
    threads.shutdown()


# --- a lock of threads that may be given up -----------------------------------------------------------------


def test_turns_are_taken_by_one_thread_at_a_time() -> None:
    turns, inside, most = Turns(), list[int](), list[int]()

    def take() -> None:
        for _ in range(200):
            with turns:
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=take, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1] * 800
    assert not turns.locked()


def test_the_turn_of_a_thread_that_was_given_up() -> None:
    turns, taken, end = Turns(), threading.Event(), threading.Event()

    def hold() -> None:
        with turns:
            taken.set()
            end.wait(60)

    stuck = threading.Thread(target=hold, daemon=True)
    stuck.start()
    assert taken.wait(60)
    turns.abandon(stuck)
    with turns:
        end.set()
        stuck.join(20)  # it leaves, and takes nothing from this thread
        assert turns.locked()
    assert not turns.locked()
