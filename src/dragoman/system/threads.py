"""A thread pool that does not keep its process from exiting."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

_Job = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads(Executor):
    """An executor with a maximum number of threads, each started when first needed.

    Unlike those of ThreadPoolExecutor its threads end with the process: a server that stops does not wait for a
    simulator elsewhere that takes an hour or never answers.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # threads that wait for a job nobody was given
        self._lock = threading.Lock()
        self._started = 0
        self._closed = False
        weakref.finalize(self, _end, self._jobs, most).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """See `Executor.submit`. Raises RuntimeError after `shutdown`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._jobs.put((future, lambda: fn(*args, **kwargs)))
            if not self._idle.acquire(blocking=False) and self._started < self._most:
                self._started += 1
                name = f"{self._name}-{self._started}"
                threading.Thread(target=_work, args=(self._jobs, self._idle), name=name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more jobs. Running jobs continue and are not waited for."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                _cancel(self._jobs)
            _end(self._jobs, self._started)


def _work(jobs: "queue.SimpleQueue[_Job | None]", idle: threading.Semaphore) -> None:
    while True:
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            idle.release()
            job = jobs.get()
        if job is None:
            return
        future, call = job
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:  # whoever waits raises it
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del job, future, call  # an idle thread keeps nobody's arrays


def _cancel(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    while True:
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            return
        if job is not None:
            job[0].cancel()


def _end(jobs: "queue.SimpleQueue[_Job | None]", count: int) -> None:
    for _ in range(count):
        jobs.put(None)
