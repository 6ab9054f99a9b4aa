"""A worker pool of threads, each with a replica of the model."""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import closing
from typing import Any

from dragoman.core.calls import Request
from dragoman.core.errors import DragomanError, ModelFailed, public_text
from dragoman.core.metrics import Family
from dragoman.core.spec import ModelSpec
from dragoman.system.request_context import set_context
from dragoman.system.threads import limit_library_threads
from dragoman.workers.executor import Executor
from dragoman.workers.frames import FrameKind
from dragoman.workers.inline import GRACE_S, Availability, InlinePool, unloading
from dragoman.workers.jobs import Job, JobRunner
from dragoman.workers.pool import WINDOW, A, Loaded
from dragoman.workers.results import copy_outputs

__all__ = ["InlinePool", "ThreadPool"]  # the entry points of both pools name this module

log = logging.getLogger("dragoman.worker")


class ThreadPool(JobRunner):
    """Each replica of the model has a thread of its own; all take calls from one queue.

    An `async` model runs on the event loop instead.
    """

    def __init__(self, spec: ModelSpec, changed: Callable[[], None]) -> None:
        super().__init__()
        self._spec = spec
        self._changed = changed
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: deque[tuple[Job, Any, BaseException | None, bool]] = deque()
        self._is_flush_scheduled = False
        self._replicas: list[tuple[Executor, threading.Thread]] = []
        self._inline: InlinePool | None = None
        self._availability = Availability(changed)
        self._pending: set[Job] = set()

    @property
    def ready(self) -> bool:
        return self._inline.ready if self._inline is not None else bool(self._replicas) and not self.unavailable

    @property
    def unavailable(self) -> str:
        return self._inline.unavailable if self._inline is not None else self._availability.reason

    @property
    def capacity(self) -> int:
        return self._inline.capacity if self._inline is not None else max(1, len(self._replicas))

    @property
    def replicated(self) -> bool:
        return self._inline is None and self._spec.target is None

    async def start(self) -> Loaded:
        self._loop = asyncio.get_running_loop()
        executors = [await Executor.load(self._spec, "thread")]
        if executors[0].loaded.concurrent:
            self._inline = InlinePool(self._spec, self._changed)
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
            thread.start()
            self._replicas.append((executor, thread))
        self._availability.watch(executors)
        self._changed()
        return executors[0].loaded

    def measurements(self) -> Sequence[Family]:
        if self._inline is not None:
            return self._inline.measurements()
        return [family for executor, _ in self._replicas for family in executor.measurements()]

    def call(self, request: Request[A]) -> A | Coroutine[Any, Any, A]:
        return super().call(request) if self._inline is None else self._inline.call(request)

    def stream(self, request: Request[Any]) -> AsyncGenerator[Any, None]:
        return super().stream(request) if self._inline is None else self._inline.stream(request)

    def submit(self, job: Job) -> None:
        if not self._replicas:
            raise unloading(self._spec)
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
        self._changed()
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
        limit_library_threads(self._spec.replicas, of_thread=True)
        while (job := self._queue.get()) is not None:
            self._compute(executor, job)
            del job  # an idle thread must not keep tensors alive

    def _compute(self, executor: Executor, job: Job) -> None:
        request = job.request
        if request is None:
            return
        set_context(job.context)
        try:
            if job.credits is None:
                self._post(job, copy_outputs(executor.call(request), request.call), None, True)
            else:
                self._compute_stream(executor, job, request, job.credits)
        except DragomanError as error:
            self._post(job, None, error, True)
        except BaseException as error:
            self._post(job, None, ModelFailed(public_text(error)), True)

    def _compute_stream(self, executor: Executor, job: Job, request: Request[Any], credit: threading.Semaphore) -> None:
        with closing(executor.stream(request)) as chunks:
            for chunk in chunks:
                self._post(job, copy_outputs(chunk, request.call), None, False)
                credit.acquire()
                if job.is_cancelled:
                    break
        self._post(job, None, None, True)

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
