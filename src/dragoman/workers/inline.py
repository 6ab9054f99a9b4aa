"""A pool on the event loop of this process."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any

from dragoman.core.calls import Request
from dragoman.core.errors import NotReady
from dragoman.core.metrics import Family
from dragoman.core.spec import ModelSpec
from dragoman.system.coroutines import ensure_task
from dragoman.workers.availability import Availability
from dragoman.workers.execute import Executor
from dragoman.workers.output_copies import copy_outputs
from dragoman.workers.pool import CONCURRENT, A, Loaded

# Seconds that calls may take to end when their pool is closed.
GRACE_S = 1.0
# Chunks after which other tasks of the event loop get a turn, even if an `async` model never waits.
_TURN = 16


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
        return self.hold(await Executor.load(self._spec, "inline"))

    def hold(self, executor: Executor) -> Loaded:
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
        answer: A = copy_outputs(executor.one(request), request.call)
        return answer

    async def _call_async(self, executor: Executor, request: Request[A]) -> A:
        await ensure_task()  # the model's own code may count on a task
        with self._interrupted_by_close():
            answer: A = copy_outputs(await executor.one_async(request), request.call)
        return answer

    async def stream(self, request: Request[A]) -> AsyncGenerator[A, None]:
        if self._executor is None:
            raise unloading(self._spec)
        given = 0
        async with aclosing(self._executor.pieces_async(request)) as pieces:
            while self._executor is not None:
                given += 1
                if not given % _TURN:
                    await asyncio.sleep(0)
                try:
                    with self._interrupted_by_close():
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                yield copy_outputs(piece, request.call)
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
    def _interrupted_by_close(self) -> Iterator[None]:
        """Let `close` cancel what this task awaits, as `asyncio.timeout` does: the caller sees NotReady."""
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
