"""A pool of threads, each with a replica of the model."""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Any

from dragoman.core.calls import Request
from dragoman.core.error_text import public_text
from dragoman.core.errors import DragomanError, ModelFailed
from dragoman.core.metrics import Family
from dragoman.core.spec import ModelSpec
from dragoman.system.coroutines import complete
from dragoman.workers.availability import Availability
from dragoman.workers.cores import keep_to_share
from dragoman.workers.execute import Executor
from dragoman.workers.frames import FrameKind
from dragoman.workers.inline import GRACE_S, InlinePool, unloading
from dragoman.workers.job import Job, settle
from dragoman.workers.output_copies import copy_outputs
from dragoman.workers.pool import WINDOW, A, Loaded
from dragoman.workers.streams import Stream

__all__ = ["InlinePool", "ThreadPool"]  # the entry points of both pools name this module

log = logging.getLogger("dragoman.worker")


class ThreadPool:
    """Each replica of the model has a thread of its own; all take calls from one queue.

    An `async` model runs on the event loop instead.
    """

    def __init__(self, spec: ModelSpec, changed: Callable[[], None]) -> None:
        self._spec = spec
        self._changed = changed
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._outcomes: deque[tuple[Job, Any, BaseException | None, bool]] = deque()
        self._woken = False
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
            return self._inline.hold(executors[0])
        try:
            while self._spec.target is None and len(executors) < self._spec.replicas:
                executors.append(await Executor.load(self._spec, "thread"))
        except BaseException:
            for executor in executors:
                await executor.close()
            raise
        keep_to_share(self._spec.replicas)
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

    async def call(self, request: Request[A]) -> A:
        if self._inline is not None:
            return await complete(self._inline.call(request))
        future: asyncio.Future[A] = self._loop.create_future()
        job = Job(0, FrameKind.CALL, request, partial(settle, future))
        self._put(job)
        try:
            return await future
        finally:
            self._cancel(job)

    async def stream(self, request: Request[A]) -> AsyncGenerator[A, None]:
        if self._inline is not None:
            async with aclosing(self._inline.stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        allowance = threading.Semaphore(WINDOW)
        stream = Stream(allowance.release, lambda: self._cancel(job))
        job = Job(0, FrameKind.STREAM, request, stream.deliver)
        job.credits = allowance
        self._put(job)
        async with aclosing(stream.chunks()) as chunks:
            async for chunk in chunks:
                yield chunk

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
            job.cancel()
        for _ in replicas:
            self._jobs.put(None)
        await asyncio.to_thread(_join, [thread for _, thread in replicas])
        for executor, thread in replicas:
            if thread.is_alive():  # a thread cannot be stopped, and a model in use cannot be closed
                log.warning("model '%s': a call still runs after unloading; its thread is left to end", self._spec.name)
            else:
                await executor.close()

    def _put(self, job: Job) -> None:
        if not self._replicas:
            raise unloading(self._spec)
        self._pending.add(job)
        self._jobs.put(job)

    def _cancel(self, job: Job) -> None:
        job.cancel()
        self._pending.discard(job)

    # --- in the model's thread ---------------------------------------------------------------------------

    def _work(self, executor: Executor) -> None:
        keep_to_share(self._spec.replicas, of_thread=True)
        while (job := self._jobs.get()) is not None:
            self._compute(executor, job)
            del job  # an idle thread must not keep tensors alive

    def _compute(self, executor: Executor, job: Job) -> None:
        request = job.request
        if request is None:
            return
        try:
            if job.credits is None:
                self._post(job, copy_outputs(executor.one(request), request.call), None, True)
            else:
                self._stream(job, executor, request, job.credits)
        except DragomanError as error:
            self._post(job, None, error, True)
        except BaseException as error:
            self._post(job, None, ModelFailed(public_text(error)), True)

    def _stream(self, job: Job, executor: Executor, request: Request[Any], allowance: threading.Semaphore) -> None:
        with closing(executor.pieces(request)) as chunks:
            for chunk in chunks:
                self._post(job, copy_outputs(chunk, request.call), None, False)
                allowance.acquire()
                if job.is_cancelled:
                    break
        self._post(job, None, None, True)

    def _post(self, job: Job, value: Any, error: BaseException | None, last: bool) -> None:
        # One wake-up of the event loop delivers all outcomes that have gathered until it runs.
        self._outcomes.append((job, value, error, last))
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._flush)
            except RuntimeError:  # the event loop is closed
                self._outcomes.clear()

    def _flush(self) -> None:
        self._woken = False
        while self._outcomes:
            job, value, error, last = self._outcomes.popleft()
            job.deliver(value, error, last)


def _join(threads: list[threading.Thread]) -> None:
    end_s = time.monotonic() + GRACE_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
