"""A worker pool on the event loop of this process."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any

from dragoman.core.calls import Request
from dragoman.core.errors import NotReady
from dragoman.core.metrics import Family
from dragoman.core.model import Model
from dragoman.core.spec import ModelSpec
from dragoman.system.coroutines import ensure_task
from dragoman.workers.executor import Executor
from dragoman.workers.pool import CONCURRENT, A, Loaded
from dragoman.workers.results import copy_outputs

# Seconds that calls may take to end when their pool is closed.
GRACE_S = 1.0
# Chunks after which other tasks of the event loop get a turn, even if an `async` model never waits.
_CHUNKS_PER_TURN = 16
# Interval at which a model is asked whether it is available, in seconds.
_AVAILABILITY_INTERVAL_S = 1.0


class InlinePool:
    """The model runs on the event loop: for `async` models, and for fast ones."""

    replicated = False

    def __init__(self, spec: ModelSpec, changed: Callable[[], None]) -> None:
        self._spec = spec
        self._changed = changed
        self._executor: Executor | None = None
        self._availability = Availability(changed)
        self._running: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self._executor is not None and not self.unavailable

    @property
    def unavailable(self) -> str:
        return self._availability.reason

    @property
    def capacity(self) -> int:
        if self._executor is None or not self._executor.loaded.concurrent:
            return 1
        return CONCURRENT * max(1, self._spec.replicas)

    async def start(self) -> Loaded:
        return self.use(await Executor.load(self._spec, "inline"))

    def use(self, executor: Executor) -> Loaded:
        """Use a model that is already loaded."""
        self._executor = executor
        self._availability.watch([executor])
        self._changed()
        return executor.loaded

    def measurements(self) -> Sequence[Family]:
        return () if self._executor is None else self._executor.measurements()

    def call(self, request: Request[A]) -> A | Coroutine[Any, Any, A]:
        executor = self._executor
        if executor is None:
            raise unloading(self._spec)
        if executor.loaded.concurrent:
            return self._call_async(executor, request)
        response: A = copy_outputs(executor.call(request), request.call)
        return response

    async def _call_async(self, executor: Executor, request: Request[A]) -> A:
        await ensure_task()  # code of the model may need a task
        with self._interruptible():
            response: A = copy_outputs(await executor.call_async(request), request.call)
        return response

    async def stream(self, request: Request[A]) -> AsyncGenerator[A, None]:
        if self._executor is None:
            raise unloading(self._spec)
        count = 0
        async with aclosing(self._executor.stream_async(request)) as chunks:
            while self._executor is not None:
                count += 1
                if not count % _CHUNKS_PER_TURN:
                    await asyncio.sleep(0)
                try:
                    with self._interruptible():
                        chunk = await anext(chunks)
                except StopAsyncIteration:
                    return
                yield copy_outputs(chunk, request.call)
        raise unloading(self._spec)

    async def close(self) -> None:
        executor, self._executor = self._executor, None
        self._availability.close()
        if executor is None:
            return
        self._changed()
        for task in self._running:
            task.cancel()
        if self._running:  # the model is closed when nothing uses it any more, if that does not take too long
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), GRACE_S)
        await executor.close()

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let `close` cancel what this task awaits, as `asyncio.timeout` does: the caller gets NotReady."""
        task = asyncio.current_task()
        assert task is not None, "a pool is called from a task"
        self._running.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._executor is None and not task.uncancel():
                raise unloading(self._spec) from None
            raise
        finally:
            self._running.discard(task)
            if self._executor is None and not self._running:
                self._idle.set()


def unloading(spec: ModelSpec) -> NotReady:
    """Return the error of a call to a pool that is closed."""
    return NotReady(f"model '{spec.name}' is unloading")


class Availability:
    """Whether a model in this process, with one or more replicas, can answer calls.

    reason: why no replica can answer, "" while one can. changed: called when it becomes empty or not empty.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.reason = ""
        self._changed = changed
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
                self._changed()
            await asyncio.sleep(_AVAILABILITY_INTERVAL_S)
