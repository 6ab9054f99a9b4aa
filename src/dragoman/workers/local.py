"""A pool in this process: threads that each hold a replica of the model, or the event loop."""

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
from dragoman.workers.availability import Availability
from dragoman.workers.cores import keep_to_share
from dragoman.workers.execute import Executor
from dragoman.workers.inline import GRACE_S, InlinePool, stopped
from dragoman.workers.output_copies import copy_outputs
from dragoman.workers.pool import WINDOW, A, Loaded
from dragoman.workers.settled import settle
from dragoman.workers.streams import Stream

__all__ = ["InlinePool", "ThreadPool"]  # plugins know both places of this process by this module

log = logging.getLogger("dragoman.worker")


class _Job:
    """One call on its way to a thread. `deliver` runs on the event loop, once a piece and once at the end.

    `credits` bounds how far a stream runs ahead of its reader; a plain call has none.
    """

    __slots__ = ("cancelled", "credits", "deliver", "request")

    def __init__(self, request: Request[Any], deliver: Callable[[Any, BaseException | None, bool], None]) -> None:
        self.request: Request[Any] | None = request
        self.deliver = deliver
        self.cancelled = False
        self.credits: threading.Semaphore | None = None

    def cancel(self) -> None:
        self.cancelled = True
        self.request = None  # a busy thread may come to this job late, and its tensors are large
        if self.credits is not None:
            self.credits.release()


class ThreadPool:
    """Each replica of the model has a thread of its own; all take from one queue.

    An `async` model runs on the event loop instead, whatever was asked for.
    """

    def __init__(self, spec: ModelSpec, changed: Callable[[], None]) -> None:
        self._spec = spec
        self._changed = changed
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._outcomes: deque[tuple[_Job, Any, BaseException | None, bool]] = deque()
        self._woken = False
        self._replicas: list[tuple[Executor, threading.Thread]] = []
        self._inline: InlinePool | None = None
        self._availability = Availability(changed)
        self._pending: set[_Job] = set()

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
            return await self._inline.call(request)
        future: asyncio.Future[A] = self._loop.create_future()
        job = _Job(request, partial(settle, future))
        self._put(job)
        try:
            return await future
        finally:
            self._drop(job)

    async def stream(self, request: Request[A]) -> AsyncGenerator[A, None]:
        if self._inline is not None:
            async with aclosing(self._inline.stream(request)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        ahead = threading.Semaphore(WINDOW)
        stream = Stream(ahead.release, lambda: self._drop(job))
        job = _Job(request, stream.deliver)
        job.credits = ahead
        self._put(job)
        async with aclosing(stream.pieces()) as pieces:
            async for piece in pieces:
                yield piece

    async def close(self) -> None:
        if self._inline is not None:
            await self._inline.close()
        replicas, self._replicas = self._replicas, []
        self._availability.close()
        if not replicas:
            return
        self._changed()
        for job in list(self._pending):
            job.cancel()
            job.deliver(None, stopped(self._spec), True)
        for _ in replicas:
            self._jobs.put(None)
        await asyncio.to_thread(_join, [thread for _, thread in replicas])
        for executor, thread in replicas:
            if thread.is_alive():  # a thread cannot be stopped, and a model in use not be closed
                log.warning("model '%s' still computes; it is left to end by itself", self._spec.name)
            else:
                await executor.close()

    def _put(self, job: _Job) -> None:
        if not self._replicas:
            raise stopped(self._spec)
        self._pending.add(job)
        self._jobs.put(job)

    def _drop(self, job: _Job) -> None:
        """Nobody waits for it any more."""
        job.cancel()
        self._pending.discard(job)

    # --- in the model's thread ---------------------------------------------------------------------------

    def _work(self, executor: Executor) -> None:
        keep_to_share(self._spec.replicas, of_thread=True)
        while (job := self._jobs.get()) is not None:
            self._answer(executor, job)
            del job  # an idle thread keeps nobody's tensors

    def _answer(self, executor: Executor, job: _Job) -> None:
        request = job.request
        if request is None:
            return
        try:
            if job.credits is None:
                self._post(job, copy_outputs(executor.one(request), request.call), None, True)
            else:
                self._stream(job, executor, request, job.credits)
        except DragomanError as fault:
            self._post(job, None, fault, True)
        except BaseException as fault:
            self._post(job, None, ModelFailed(public_text(fault)), True)

    def _stream(self, job: _Job, executor: Executor, request: Request[Any], credit: threading.Semaphore) -> None:
        with closing(executor.pieces(request)) as pieces:
            for piece in pieces:
                self._post(job, copy_outputs(piece, request.call), None, False)
                credit.acquire()
                if job.cancelled:
                    break
        self._post(job, None, None, True)

    def _post(self, job: _Job, value: Any, error: BaseException | None, last: bool) -> None:
        # One wake-up of the loop serves all outcomes that gather until it runs.
        self._outcomes.append((job, value, error, last))
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._flush)
            except RuntimeError:  # the loop is closed: nobody waits any more
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
