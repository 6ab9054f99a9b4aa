"""Threads that do not keep a process from ending."""

import gc
import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from dragoman.system.threads import DaemonThreads
from e2e.server_process import wait_until


def test_the_number_of_threads_is_bounded() -> None:
    threads = DaemonThreads(3, "few")
    meeting = threading.Barrier(3)
    names = {f.result(20) for f in [threads.submit(_meet, meeting) for _ in range(9)]}
    assert names == {"few-1", "few-2", "few-3"}
    threads.shutdown()


def _meet(meeting: threading.Barrier) -> str:
    meeting.wait(20)
    return threading.current_thread().name


def test_idle_threads_are_reused() -> None:
    threads = DaemonThreads(8, "again")
    for _ in range(20):
        assert threads.submit(threading.current_thread).result(20).name == "again-1"
        wait_until(lambda: threads.idle.acquire(blocking=False), "the thread waits")
        threads.idle.release()
    threads.shutdown()


def test_errors_reach_the_caller() -> None:
    threads = DaemonThreads(1, "faults")
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(20)
    with pytest.raises(SystemExit):
        threads.submit(sys.exit, 3).result(20)
    assert threads.submit(lambda: 4).result(20) == 4
    threads.shutdown()


def _wait(started: threading.Event, proceed: threading.Event) -> bool:
    started.set()
    return proceed.wait(20)


def test_queued_jobs_are_cancelled_or_run_at_shutdown() -> None:
    for cancel in (True, False):
        threads = DaemonThreads(1, "ends")
        started, proceed = threading.Event(), threading.Event()
        first = threads.submit(_wait, started, proceed)
        second = threads.submit(lambda: 2)
        assert started.wait(20)
        threads.shutdown(cancel_futures=cancel)
        with pytest.raises(RuntimeError, match="after shutdown"):
            threads.submit(int)
        proceed.set()
        assert first.result(20)
        if cancel:
            with pytest.raises(CancelledError):
                second.result(20)
        else:
            assert second.result(20) == 2


def test_threads_end_with_their_executor() -> None:
    threads = DaemonThreads(2, "collected")
    threads.submit(int).result(20)
    del threads
    gc.collect()
    wait_until(lambda: not any(t.name.startswith("collected") for t in threading.enumerate()), "the thread ends")


def test_a_waiting_thread_does_not_block_the_exit_of_its_process() -> None:
    code = "import threading\nfrom dragoman.system.threads import DaemonThreads\nt = DaemonThreads(1, 'x')\n"
    code += "e = threading.Event()\nt.submit(lambda: (e.set(), threading.Event().wait()))\ne.wait()\nprint('done')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "done\n"
