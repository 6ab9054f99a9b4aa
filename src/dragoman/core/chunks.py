"""Streams of chunks that are passed to their reader by a call for each, however many layers lie between.

A `ChunkStream` runs in the task of its reader. What its source yields goes to the reader's `Take` function, through
those of the layers. An engine with steps in a thread, or a worker process, brings chunks in callbacks of the event
loop: its `Relay` passes them on within the callback, and the task goes on sleeping. It wakes where something has to
wait: the reader cannot take more, or the stream ends.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import partial, wraps
from typing import Any, Generic, TypeVar

from dragoman.core.foreign_code import ClientDisconnected

A = TypeVar("A")

# Takes a chunk; returns what to await before the next one, if anything. It raises, and the awaitable raises, only what
# ends the reader: CancelledError or one of its subclasses.
Take = Callable[[A], Awaitable[None] | None]
NOTHING: Any = object()  # no chunk yet

# Chunks after which other tasks of the event loop get a turn, even if a generator never waits.
_CHUNKS_PER_TURN = 16


class ReaderClosed(ClientDisconnected):
    """A reader takes no further chunk. It ends a stream as the cancellation of its task does."""


class StreamEnd(Exception):
    """There are no further chunks."""


class ChunkStream(Generic[A]):
    """The chunks of one call, for one reader: `send_to` is the fast way, iteration takes a task for each stream.

    run: passes the chunks to a `Take`, and returns after the last one. Cancelling it cancels the call.
    """

    __slots__ = ("_chunks", "_run")

    def __init__(self, run: Callable[[Take[A]], Coroutine[Any, Any, None]]) -> None:
        self._run = run
        self._chunks: AsyncGenerator[A, None] | None = None

    @classmethod
    def of(cls, chunks: AsyncGenerator[A, None]) -> "ChunkStream[A]":
        """Return the chunks of a generator, which is closed at the end."""
        return cls(partial(_send_all, chunks))

    def send_to(self, take: Take[A]) -> Coroutine[Any, Any, None]:
        """Pass each chunk to `take`, and return after the last one. Raises the error that ends the stream."""
        return self._run(take)

    def __aiter__(self) -> "ChunkStream[A]":
        return self

    def __anext__(self) -> Coroutine[Any, Any, A]:
        if self._chunks is None:
            self._chunks = _pull(self._run)
        return self._chunks.__anext__()

    async def aclose(self) -> None:
        """Cancel the call, unless it has ended."""
        if self._chunks is not None:
            await self._chunks.aclose()


def pushes(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., ChunkStream[Any]]:
    """Make a method of a coroutine function, whose last argument is a `Take`, that returns a `ChunkStream`."""

    @wraps(function)
    def method(*arguments: Any) -> ChunkStream[Any]:
        return ChunkStream(partial(function, *arguments))

    method.returns_chunk_stream = True  # type: ignore[attr-defined]
    return method


async def _send_all(chunks: AsyncGenerator[A, None], take: Take[A]) -> None:
    count = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            if (wait := take(chunk)) is not None:
                await wait
            count += 1
            if not count % _CHUNKS_PER_TURN:
                await asyncio.sleep(0)


async def _pull(run: Callable[[Take[A]], Coroutine[Any, Any, None]]) -> AsyncGenerator[A, None]:
    """Yield the chunks of a stream that runs in a task, which goes on when the next one is requested."""
    loop = asyncio.get_running_loop()
    taken: list[A] = []
    arrived, resumed = loop.create_future(), loop.create_future()

    def take(chunk: A) -> Awaitable[None]:
        nonlocal resumed
        taken.append(chunk)
        resumed = loop.create_future()
        wake()
        return resumed

    def wake(_task: object = None) -> None:
        if not arrived.done():
            arrived.set_result(None)

    task = loop.create_task(run(take))
    task.add_done_callback(wake)
    try:
        while True:
            await arrived
            if not taken:
                await task
                return
            yield taken.pop()
            arrived = loop.create_future()
            if task.done():
                wake()
            elif not resumed.done():
                resumed.set_result(None)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # mark as retrieved


class Relay(Generic[A]):
    """Passes chunks that callbacks bring to a reader: in the callback, or in `run` while the reader makes it wait.

    next_chunk: returns the next chunk, NOTHING if there is none yet. Raises StreamEnd, or the error that ends the
        stream. Called again once the reader has taken the last chunk.
    """

    __slots__ = ("_error", "_next", "_take", "_wait", "_waiting")

    def __init__(self, take: Take[A], next_chunk: Callable[[], A]) -> None:
        self._take = take
        self._next = next_chunk
        self._waiting: asyncio.Future[None] | None = None  # of `run`, while the reader is ready for a chunk
        self._wait: Awaitable[None] | None = None  # for the reader
        self._error: BaseException | None = None

    def wake(self) -> None:
        """Pass on what has arrived. Call it on the event loop after each change of what `next_chunk` returns."""
        waiting = self._waiting
        if waiting is None or waiting.done():
            return
        self._waiting = None
        try:
            while (chunk := self._next()) is not NOTHING:
                if (wait := self._take(chunk)) is not None:
                    self._wait = wait
                    waiting.set_result(None)
                    return
        except BaseException as error:  # raised in the task of `run`
            self._error = error
            waiting.set_result(None)
        else:
            self._waiting = waiting

    async def run(self) -> None:
        """Return after the last chunk. Raises the error that ends the stream."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                chunk = self._next()
                if chunk is NOTHING:
                    self._waiting = loop.create_future()
                    await self._waiting
                    if self._error is not None:
                        raise self._error
                    wait, self._wait = self._wait, None
                else:
                    wait = self._take(chunk)
                del chunk
                if wait is not None:
                    await wait
        except StreamEnd:
            return
        finally:
            self._waiting = self._error = None
            if isinstance(self._wait, Coroutine):
                self._wait.close()
