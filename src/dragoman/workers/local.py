"""A pool in this process: on the event loop, or in threads that each hold a replica of the model."""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from dragoman.core.calls import Request
from dragoman.core.errors import DragomanError, ModelFailed, WorkerLost
from dragoman.core.spec import ModelSpec
from dragoman.workers.execute import Executor
from dragoman.workers.pool import A, Loaded

# How many pieces of a stream a model may be ahead of its reader.
WINDOW = 16


class InlinePool:
    """The model runs on the event loop: for `async` models, and for those that answer at once."""

    def __init__(self, spec: ModelSpec, changed: Callable[[], None]) -> None:
        self._spec = spec
        self._changed = changed
        self._executor: Executor | None = None

    @property
    def ready(self) -> bool:
        return self._executor is not None

    @property
    def capacity(self) -> int:
        return 1

    async def start(self) -> Loaded:
        self._executor = await Executor.load(self._spec)
        self._changed()
        return self._executor.loaded

    async def call(self, request: Request[A]) -> A:
        answer: A = await self._running().one_async(request)
        return answer

    async def stream(self, request: Request[A]) -> AsyncGenerator[A, None]:
        async for piece in self._running().pieces_async(request):
            yield piece

    async def close(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            await executor.close()
            self._changed()

    def _running(self) -> Executor:
        if self._executor is None:
            raise WorkerLost(f"model '{self._spec.name}' is stopped")
        return self._executor


class _Job:
    """One call on its way to a thread. `deliver` runs on the event loop, once a piece and once at the end.

    `credits` bounds how far a stream runs ahead of its reader; a plain call has none.
    """

    __slots__ = ("cancelled", "credits", "deliver", "request")

    def __init__(self, request: Request[Any], deliver: Callable[[Any, BaseException | None, bool], None]) -> None:
        self.request = request
        self.deliver = deliver
        self.cancelled = False
        self.credits: threading.Semaphore | None = None

    def cancel(self) -> None:
        self.cancelled = True
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
        self._executors: list[Executor] = []
        self._on_loop = False
        self._pending: set[_Job] = set()

    @property
    def ready(self) -> bool:
        return bool(self._executors)

    @property
    def capacity(self) -> int:
        return max(1, len(self._executors))

    async def start(self) -> Loaded:
        self._loop = asyncio.get_running_loop()
        executors = [await Executor.load(self._spec)]
        self._on_loop = executors[0].asynchronous
        if not self._on_loop and self._spec.target is None:
            executors += [await Executor.load(self._spec) for _ in range(self._spec.replicas - 1)]
        self._executors = executors
        if not self._on_loop:
            for number, executor in enumerate(executors):
                name = f"{self._spec.name}-{number}"
                threading.Thread(target=self._work, args=(executor,), name=name, daemon=True).start()
        self._changed()
        return executors[0].loaded

    async def call(self, request: Request[A]) -> A:
        if self._on_loop:
            answer: A = await self._running().one_async(request)
            return answer
        self._running()
        future: asyncio.Future[A] = self._loop.create_future()

        def deliver(value: Any, error: BaseException | None, _last: bool) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        job = _Job(request, deliver)
        self._pending.add(job)
        self._jobs.put(job)
        try:
            return await future
        finally:
            job.cancelled = True
            self._pending.discard(job)

    async def stream(self, request: Request[A]) -> AsyncGenerator[A, None]:
        if self._on_loop:
            async for piece in self._running().pieces_async(request):
                yield piece
            return
        self._running()
        # Bounded by the window: the thread waits for a credit before each further piece.
        arrived: asyncio.Queue[tuple[Any, BaseException | None, bool]] = asyncio.Queue()
        job = _Job(request, lambda *piece: arrived.put_nowait(piece))
        job.credits = threading.Semaphore(WINDOW)
        self._pending.add(job)
        self._jobs.put(job)
        try:
            while True:
                value, error, last = await arrived.get()
                if error is not None:
                    raise error
                if last:
                    return
                yield value
                job.credits.release()
        finally:
            job.cancel()
            self._pending.discard(job)

    async def close(self) -> None:
        executors, self._executors = self._executors, []
        for job in list(self._pending):
            job.cancel()
            job.deliver(None, WorkerLost(f"model '{self._spec.name}' is stopped"), True)
        if not self._on_loop:
            for _ in executors:
                self._jobs.put(None)
        for executor in executors:
            await executor.close()
        self._changed()

    def _running(self) -> Executor:
        if not self._executors:
            raise WorkerLost(f"model '{self._spec.name}' is stopped")
        return self._executors[0]

    # --- in the model's thread ---------------------------------------------------------------------------

    def _work(self, executor: Executor) -> None:
        while (job := self._jobs.get()) is not None:
            if job.cancelled:
                continue
            try:
                if job.credits is None:
                    self._post(job, executor.one(job.request), None, True)
                else:
                    self._stream(job, executor.pieces(job.request), job.credits)
            except DragomanError as fault:
                self._post(job, None, fault, True)
            except BaseException as fault:
                self._post(job, None, ModelFailed(f"{type(fault).__name__}: {fault}"), True)

    def _stream(self, job: _Job, pieces: Iterator[Any], credit: threading.Semaphore) -> None:
        for piece in pieces:
            self._post(job, piece, None, False)
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
