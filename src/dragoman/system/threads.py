"""Threads that do not keep their process from exiting, cancellation in them, and thread counts of libraries."""

import asyncio
import ctypes
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Final, Generic, ParamSpec, TypeVar

from dragoman.system.cpus import thread_limit

log = logging.getLogger("dragoman.worker")
T = TypeVar("T")
P = ParamSpec("P")

# Name of the threads that load models.
LOAD_THREAD: Final = "load"
# Seconds after which a thread that was stopped, but has not ended, is given up: it waits in code of another language.
_UNSTOPPABLE_S = 10.0


class Turns:
    """A lock that can be taken from a thread that has been given up."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[threading.Thread] = []

    def __enter__(self) -> None:
        thread = threading.current_thread()
        with self._changed:
            self._queue.append(thread)
            try:
                self._changed.wait_for(lambda: self._queue[0] is thread)
            except BaseException:
                self.abandon(thread)
                raise

    def __exit__(self, *_error: object) -> None:
        self.abandon(threading.current_thread())

    def locked(self) -> bool:
        """Return whether a thread holds the lock."""
        return bool(self._queue)

    def abandon(self, thread: threading.Thread) -> None:
        """Give the turn of a thread to the next one."""
        with self._changed:
            if thread in self._queue:
                self._queue.remove(thread)
                self._changed.notify_all()


# Loaders that keep state in variables of the process hold this lock; two loads at a time would corrupt each other.
# While it loads a model, transformers changes PyTorch (no tied weights, tensors without memory); torch.export.load has
# one deserializer.
PYTORCH_LOADS: Final = Turns()

_Job = tuple["Future[Any]", Callable[[], Any]]
Discard = Callable[[Any], None]


class DaemonThreads(Executor):
    """An executor with a maximum number of threads, each started when it is first needed.

    Unlike those of ThreadPoolExecutor its threads end with the process: a server that stops does not wait for a call
    to another server that takes an hour or never returns.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.idle = threading.Semaphore(0)  # idle threads for which no job is queued
        self._lock = threading.Lock()
        self._started = 0
        self._closed = False
        weakref.finalize(self, _stop_threads, self._jobs, max_threads).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """See `Executor.submit`. Raises RuntimeError after `shutdown`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._jobs.put((future, lambda: fn(*args, **kwargs)))
            if not self.idle.acquire(blocking=False) and self._started < self._max_threads:
                self._started += 1
                name = f"{self._name}-{self._started}"
                threading.Thread(target=_run_jobs, args=(self._jobs, self.idle), name=name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more jobs. Running jobs continue and are not waited for."""
        with self._lock:
            self._closed = True
            while cancel_futures:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if job is not None:
                    job[0].cancel()
            _stop_threads(self._jobs, self._started)


def _run_jobs(jobs: "queue.SimpleQueue[_Job | None]", idle: threading.Semaphore) -> None:
    while True:
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            idle.release()
            job = jobs.get()
        if job is None:
            return
        future, function = job
        if future.set_running_or_notify_cancel():
            try:
                result = function()
            except BaseException as error:
                future.set_exception(settable(error))
            else:
                future.set_result(result)
                del result
        del job, future, function  # an idle thread must not keep arrays alive


def settable(error: BaseException) -> BaseException:
    """Return an exception that can be set on a future.

    Those of asyncio reject StopIteration, and would never be done; GeneratorExit closes the task that awaits one.
    """
    is_control = isinstance(error, StopIteration | GeneratorExit)
    return RuntimeError(f"{type(error).__name__}: {error}") if is_control else error


def _stop_threads(jobs: "queue.SimpleQueue[_Job | None]", count: int) -> None:
    for _ in range(count):
        jobs.put(None)


async def call_in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, for a function that may raise anything."""
    return await asyncio.to_thread(_call, function, *args, **kwargs)


def _call(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return function(*args, **kwargs)
    except (StopIteration, GeneratorExit) as error:
        raise settable(error) from error


# --- functions that can be stopped ---------------------------------------------------------------------------


class Stopped(BaseException):
    """Raised in a thread to stop the function that it runs."""


class TimeLimitExceededError(Exception):
    """A function took longer than its limit, and was stopped."""


class StoppableCall(Generic[T]):
    """A function that runs in a thread until `stop`, which raises Stopped in it.

    A function stops at its next instruction of Python; code of another language runs on until it returns.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._thread: int | None = None  # while the function runs
        self._is_stopped = False

    def __call__(self) -> T:
        """Return the value of the function. Raises its exception, or Stopped."""
        with self._lock:
            if self._is_stopped:
                raise Stopped
            self._thread = threading.get_ident()
        try:
            return self._function()
        finally:
            self._finish()

    def _finish(self) -> None:
        """Wait for an exception that is on its way: it must not be raised in other work of this thread."""
        is_stopped = False
        try:
            with self._lock:
                self._thread, is_stopped = None, self._is_stopped
            for _ in range(_STOP_ROUNDS if is_stopped else 0):
                time.sleep(0.001)
        except Stopped:
            pass

    def stop(self) -> None:
        """Stop the function, or do not start it; from another thread."""
        with self._lock:
            if not self._is_stopped and self._thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(Stopped))
            self._is_stopped = True


# Milliseconds after which an exception has been raised in a thread, if it has not been already.
_STOP_ROUNDS = 20


async def run_stoppable(
    executor: Executor, function: Callable[[], T], limit_s: float, *, until_ended: bool = False
) -> T:
    """Return the value of a function that runs in a thread of an executor. Raises its exception.

    If this is cancelled, or takes longer than `limit_s`, the function is stopped; in the second case it raises
    TimeLimitExceededError. until_ended: not before the function has ended.
    """
    call = StoppableCall(function)
    job = asyncio.get_running_loop().run_in_executor(executor, call)
    job.add_done_callback(_ignore)
    try:
        done, _ = await asyncio.wait({job}, timeout=limit_s)
    finally:
        if not job.done():
            call.stop()
            if until_ended:
                await asyncio.wait({job})
    if not done:
        raise TimeLimitExceededError
    return job.result()


def run_in_time(function: Callable[[], T], limit_s: float) -> T:
    """Return the value of a function that runs in this thread, which may load a model. Raises its exception.

    After `limit_s` seconds the function is stopped, and this raises TimeLimitExceededError.
    """
    call = StoppableCall(function)
    timer = threading.Timer(limit_s, call.stop)
    timer.daemon = True
    timer.start()
    try:
        return call()
    except Stopped:
        raise TimeLimitExceededError from None
    finally:
        timer.cancel()


def _ignore(job: "asyncio.Future[Any]") -> None:
    """Take the exception of a job, so that it is not logged if nobody waits for the result any more."""
    if not job.cancelled():
        job.exception()


# --- one function in a thread of its own -----------------------------------------------------------------


async def run_here(
    function: Callable[..., Any], *arguments: Any, discard: Discard, limit_s: float | None = None
) -> Any:
    """Run a function in this thread, with the interface of `run_in_thread`, without a limit."""
    return function(*arguments)


async def run_in_thread(
    function: Callable[..., Any], *arguments: Any, discard: Discard, limit_s: float | None = None
) -> Any:
    """Run a function in a daemon thread and return its result.

    If this coroutine is cancelled, the function runs on, and `discard` is called with its result, in a thread. After
    `limit_s` seconds it is stopped, and this raises TimeLimitExceededError.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    call = StoppableCall(partial(function, *arguments))

    def run() -> None:
        with suppress(RuntimeError):  # the event loop is closed
            try:
                result = call()
            except BaseException as error:
                loop.call_soon_threadsafe(future.set_exception, settable(error))
            else:
                loop.call_soon_threadsafe(future.set_result, result)

    def discard_result(done: asyncio.Future[Any]) -> None:
        if done.exception() is None:
            threading.Thread(target=discard, args=(done.result(),), name="discard", daemon=True).start()

    thread = threading.Thread(target=copy_context().run, args=(run,), name=LOAD_THREAD, daemon=True)
    thread.start()
    try:
        done, _ = await asyncio.wait({future}, timeout=limit_s)  # does not cancel it when the caller is cancelled
    except asyncio.CancelledError:
        future.add_done_callback(discard_result)
        raise
    if not done:
        call.stop()
        future.add_done_callback(discard_result)
        loop.call_later(_UNSTOPPABLE_S, PYTORCH_LOADS.abandon, thread)
        raise TimeLimitExceededError
    return future.result()


def is_loading() -> bool:
    """Return whether a thread of this process loads a model."""
    return any(thread.name == LOAD_THREAD for thread in threading.enumerate())


# --- threads of libraries --------------------------------------------------------------------------------


def limit_library_threads(replicas: int, *, of_thread: bool = False) -> None:
    """Limit linear algebra libraries of this process to one replica's share of the cores, if threadpoolctl is there.

    OpenMP counts by thread, so each thread that computes limits itself (`of_thread`); OpenBLAS has one limit for all.
    """
    if limit := thread_limit(replicas):
        try:
            from threadpoolctl import threadpool_limits  # scikit-learn installs it

            threadpool_limits(limits=limit, user_api="openmp" if of_thread else None)
        except ImportError:
            pass
        except Exception:  # it asks each library for its version, which some do not tell
            log.warning("the threads of linear algebra libraries cannot be limited", exc_info=True)


A = TypeVar("A")
C = TypeVar("C")

_CANCELLED: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


def run_cancellable(cancelled: threading.Event, method: Callable[[C], A], call: C) -> A:
    """Return `method(call)`; inside it `cancellation_check()` reports `cancelled`."""
    token = _CANCELLED.set(cancelled)
    try:
        return method(call)
    finally:
        _CANCELLED.reset(token)


def cancellation_check() -> Callable[[], bool]:
    """Return a function, for any thread, that is true once the caller of the current call no longer waits."""
    cancelled = _CANCELLED.get()
    return cancelled.is_set if cancelled is not None else bool
