"""Pools without processes: models on the event loop, or in threads with a replica each."""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any

from dragoman.core.calls import Generate, Request
from dragoman.core.chunks import ChunkStream, Take
from dragoman.core.errors import NotReady, WorkerLost, public_text
from dragoman.core.foreign_code import public_error
from dragoman.core.metrics import Family
from dragoman.core.model import Model
from dragoman.core.spec import ModelSpec
from dragoman.core.worker_status import WorkerStatus
from dragoman.system.call_times import current_call
from dragoman.system.coroutines import ensure_task
from dragoman.system.request_context import set_context
from dragoman.system.threads import limit_library_threads
from dragoman.workers.executor import Executor
from dragoman.workers.frames import FrameKind
from dragoman.workers.jobs import Job, JobRunner
from dragoman.workers.pool import CONCURRENT, WINDOW, A, Loaded
from dragoman.workers.results import copy_outputs

# Seconds that calls may take to end when their pool is closed.
GRACE_S = 1.0
# Interval at which a model is asked whether it is available, in seconds.
_AVAILABILITY_INTERVAL_S = 1.0


class InlinePool:
    """The model runs on the event loop: for `async` models, and for fast ones."""

    is_replicated = False
    waiting = ""

    def __init__(self, spec: ModelSpec, on_change: Callable[[], None]) -> None:
        self.spec = spec
        self._on_change = on_change
        self.on_capacity: Callable[[], None] = lambda: None  # it never grows
        self.executor: Executor | None = None
        self._availability = Availability(on_change)
        self.running: set[asyncio.Task[Any]] = set()
        self.idle = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self.executor is not None and not self.unavailable

    @property
    def unavailable(self) -> str:
        return self._availability.reason

    @property
    def capacity(self) -> int:
        if self.executor is None or not self.executor.loaded.concurrent:
            return 1
        return CONCURRENT * max(1, self.spec.replicas)

    async def start(self) -> Loaded:
        return self.use(await Executor.load(self.spec, "inline"))

    def use(self, executor: Executor) -> Loaded:
        """Use a model that is already loaded."""
        self.executor = executor
        self._availability.watch([executor])
        self._on_change()
        return executor.loaded

    def workers(self) -> tuple[WorkerStatus, ...]:
        return ()

    def states(self) -> Mapping[str, int]:
        count, is_busy = int(self.executor is not None), bool(self.running)
        return {"busy": count * is_busy, "idle": count * (not is_busy)}

    def process_ids(self) -> Mapping[int, int]:
        return {}

    def measurements(self) -> Sequence[Family]:
        return () if self.executor is None else self.executor.measurements()

    def call(self, request: Request[A]) -> A | Coroutine[Any, Any, A]:
        executor = self.executor
        if executor is None:
            raise unloading(self.spec)
        if executor.loaded.concurrent:
            return self._call_async(executor, request)
        response: A = copy_outputs(executor.call(request), request.call)
        return response

    async def _call_async(self, executor: Executor, request: Request[A]) -> A:
        await ensure_task()  # code of the model may need a task
        with _Interruptible(self):
            response: A = copy_outputs(await executor.call_async(request), request.call)
        return response

    def stream(self, request: Request[A]) -> ChunkStream[A]:
        return ChunkStream(partial(self._stream, request))

    async def _stream(self, request: Request[A], take: Take[A]) -> None:
        if self.executor is None:
            raise unloading(self.spec)
        call = request.call
        is_text = type(call) is Generate  # without arrays
        with _Interruptible(self):
            await self.executor.stream_async(request, take if is_text else lambda c: take(copy_outputs(c, call)))

    async def close(self) -> None:
        executor, self.executor = self.executor, None
        self._availability.close()
        if executor is None:
            return
        self._on_change()
        for task in self.running:
            task.cancel()
        if self.running:  # the model is closed once nothing uses it, if that does not take too long
            with suppress(TimeoutError):
                await asyncio.wait_for(self.idle.wait(), GRACE_S)
        await executor.close()


class _Interruptible:
    """Context in which `InlinePool.close` cancels the current task. A generator would take three times as long.

    Raises NotReady if it was `close` that cancelled the task, as `asyncio.timeout` does.
    """

    __slots__ = ("_pool", "task")

    def __init__(self, pool: InlinePool) -> None:
        task = asyncio.current_task()
        assert task is not None, "a pool is called from a task"
        self._pool = pool
        self.task = task

    def __enter__(self) -> None:
        self._pool.running.add(self.task)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pool = self._pool
        pool.running.discard(self.task)
        if pool.executor is None:
            if not pool.running:
                pool.idle.set()
            if kind is not None and issubclass(kind, asyncio.CancelledError) and not self.task.uncancel():
                raise unloading(pool.spec) from None


def unloading(spec: ModelSpec) -> NotReady:
    """Return the error of a call to a pool that is closed."""
    return NotReady(f"model '{spec.name}' is unloading")


class Availability:
    """Whether a model in this process, with one or more replicas, can answer calls.

    reason: why no replica can answer, "" while one can. on_change: called when it becomes empty or not empty.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.reason = ""
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None

    def watch(self, executors: Sequence[Executor]) -> None:
        """Start to ask the model at intervals, unless it is always available."""
        if any(type(executor.model).unavailable is not Model.unavailable for executor in executors):
            self._task = asyncio.get_running_loop().create_task(self._poll(executors))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _poll(self, executors: Sequence[Executor]) -> None:
        while True:
            reasons = [executor.unavailable() for executor in executors]
            before, self.reason = self.reason, "" if "" in reasons else reasons[0]
            if bool(before) != bool(self.reason):
                self._on_change()
            await asyncio.sleep(_AVAILABILITY_INTERVAL_S)


__all__ = ["InlinePool", "ThreadPool"]  # the entry points of both pools name this module

log = logging.getLogger("dragoman.worker")


class ThreadPool(JobRunner):
    """Each replica of the model has a thread of its own; all take calls from one queue.

    An `async` model runs on the event loop instead. A thread goes on whatever the model raises. If one ends
    nevertheless, the other replicas answer; without any, calls fail and the model is not ready.
    """

    waiting = ""

    def __init__(self, spec: ModelSpec, on_change: Callable[[], None]) -> None:
        super().__init__()
        self._spec = spec
        self._on_change = on_change
        self.on_capacity: Callable[[], None] = lambda: None  # it never grows
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: deque[tuple[Job, Any, BaseException | None, bool]] = deque()
        self._is_flush_scheduled = False
        self._replicas: list[tuple[Executor, threading.Thread]] = []
        self._inline: InlinePool | None = None
        self._availability = Availability(on_change)
        self._pending: set[Job] = set()
        self._running = 0  # threads
        self._busy: set[Executor] = set()  # those that compute; each thread adds and removes its own
        self._ended = ""  # why no thread runs

    @property
    def ready(self) -> bool:
        return self._inline.ready if self._inline is not None else bool(self._replicas) and not self.unavailable

    @property
    def unavailable(self) -> str:
        return self._inline.unavailable if self._inline is not None else self._ended or self._availability.reason

    @property
    def capacity(self) -> int:
        return self._inline.capacity if self._inline is not None else max(1, len(self._replicas))

    @property
    def is_replicated(self) -> bool:
        return self._inline is None and self._spec.target is None

    async def start(self) -> Loaded:
        self._loop = asyncio.get_running_loop()
        executors = [await Executor.load(self._spec, "thread")]
        if executors[0].loaded.concurrent:
            self._inline = InlinePool(self._spec, self._on_change)
            return self._inline.use(executors[0])
        try:
            while self._spec.target is None and len(executors) < self._spec.replicas:
                executors.append(await Executor.load(self._spec, "thread"))
        except BaseException:
            for executor in executors:
                await executor.close()
            raise
        limit_library_threads(self._spec.replicas)
        for number, executor in enumerate(executors):
            name = f"{self._spec.name}-{number}"
            thread = threading.Thread(target=self._work, args=(executor,), name=name, daemon=True)
            self._running += 1
            thread.start()
            self._replicas.append((executor, thread))
        self._availability.watch(executors)
        self._on_change()
        return executors[0].loaded

    def workers(self) -> tuple[WorkerStatus, ...]:
        return ()

    def states(self) -> Mapping[str, int]:
        if self._inline is not None:
            return self._inline.states()
        busy = len(self._busy)
        return {"busy": busy, "idle": max(0, self._running - busy)}

    def process_ids(self) -> Mapping[int, int]:
        return {}

    def measurements(self) -> Sequence[Family]:
        if self._inline is not None:
            return self._inline.measurements()
        return [family for executor, _ in self._replicas for family in executor.measurements()]

    def call(self, request: Request[A]) -> A | Coroutine[Any, Any, A]:
        return super().call(request) if self._inline is None else self._inline.call(request)

    def stream(self, request: Request[Any]) -> ChunkStream[Any]:
        return super().stream(request) if self._inline is None else self._inline.stream(request)

    def submit(self, job: Job) -> None:
        if not self._replicas:
            raise unloading(self._spec)
        if self._ended:
            raise WorkerLost(self._ended)
        if job.kind == FrameKind.STREAM:
            job.credits = threading.Semaphore(WINDOW)
        self._pending.add(job)
        self._queue.put(job)

    def cancel(self, job: Job) -> None:
        job.cancel()
        self._pending.discard(job)

    def credit(self, job: Job, count: int) -> None:
        assert job.credits is not None, "a stream has credits"
        job.credits.release(count)

    async def close(self) -> None:
        if self._inline is not None:
            await self._inline.close()
        replicas, self._replicas = self._replicas, []
        self._availability.close()
        if not replicas:
            return
        self._on_change()
        for job in list(self._pending):
            job.deliver(None, unloading(self._spec), True)
            self.cancel(job)
        for _ in replicas:
            self._queue.put(None)
        await asyncio.to_thread(_join, [thread for _, thread in replicas])
        for executor, thread in replicas:
            if thread.is_alive():  # a thread cannot be stopped, and a model in use cannot be closed
                log.warning("model '%s': a call still runs after unloading; its thread is left to end", self._spec.name)
            else:
                await executor.close()

    # --- in the model's thread ---------------------------------------------------------------------------

    def _work(self, executor: Executor) -> None:
        job: Job | None = None
        try:
            limit_library_threads(self._spec.replicas, of_thread=True)
            while (job := self._queue.get()) is not None:
                self._busy.add(executor)
                self._compute(executor, job)
                self._busy.discard(executor)
                job = None  # an idle thread must not keep tensors alive
        except BaseException as error:  # not of the model
            log.exception("model '%s': the thread of a replica has ended", self._spec.name)
            self._busy.discard(executor)
            ended = WorkerLost(f"model '{self._spec.name}': the thread that runs it has ended: {public_text(error)}")
            if job is not None:
                self._post(job, None, ended, True)
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._handle_end, ended)

    def _compute(self, executor: Executor, job: Job) -> None:
        request = job.request
        if request is None:
            return
        set_context(job.context)
        current_call.set(request.times)
        try:
            if job.credits is None:
                self._post(job, copy_outputs(executor.call(request), request.call), None, True)
            else:
                self._compute_stream(executor, job, request, job.credits)
        except BaseException as error:
            self._post(job, None, public_error(error, f"model '{executor.name}' failed"), True)
        finally:
            del job  # as in `JobRunner.call`

    def _compute_stream(self, executor: Executor, job: Job, request: Request[Any], credit: threading.Semaphore) -> None:
        with closing(executor.stream(request)) as chunks:
            for chunk in chunks:
                self._post(job, copy_outputs(chunk, request.call), None, False)
                credit.acquire()
                if job.is_cancelled:
                    break
        self._post(job, None, None, True)

    def _handle_end(self, error: WorkerLost) -> None:
        """Fail the calls if no thread is left that could answer them; runs on the event loop."""
        self._running -= 1
        if not self._running:
            self._ended = error.message
            for job in list(self._pending):
                job.deliver(None, error, True)
            self._pending.clear()
            self._on_change()

    def _post(self, job: Job, value: Any, error: BaseException | None, last: bool) -> None:
        # One wake-up of the event loop delivers all results that are queued until it runs.
        self._results.append((job, value, error, last))
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._flush)
            except RuntimeError:  # the event loop is closed
                self._results.clear()

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        while self._results:
            job, value, error, last = self._results.popleft()
            if last:
                self._pending.discard(job)
            job.deliver(value, error, last)


def _join(threads: list[threading.Thread]) -> None:
    end_s = time.monotonic() + GRACE_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
