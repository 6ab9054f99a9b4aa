"""Streams of chunks: order, waiting readers, errors and the end of the reader."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

import pytest

from dragoman.core.chunks import NOTHING, ChunkStream, ReaderClosed, Relay, StreamEnd, Take, pushes
from dragoman.core.errors import ModelFailed


class Source:
    """Chunks that a test brings; None ends the stream."""

    def __init__(self) -> None:
        self.arrived: deque[Any] = deque()
        self.is_closed = False
        self.wake: Any = None

    def bring(self, *chunks: Any) -> None:
        self.arrived.extend(chunks)
        self.wake()

    def _next(self) -> Any:
        if not self.arrived:
            return NOTHING
        chunk = self.arrived.popleft()
        if chunk is None:
            raise StreamEnd
        if isinstance(chunk, Exception):
            raise chunk
        return chunk

    @pushes
    async def chunks(self, take: Take[int]) -> None:
        relay = Relay(take, self._next)
        self.wake = relay.wake
        try:
            await relay.run()
        finally:
            self.is_closed = True


async def start(source: Source, take: Take[int]) -> asyncio.Task[None]:
    reading = asyncio.create_task(source.chunks().send_to(take))
    while source.wake is None:
        await asyncio.sleep(0)
    return reading


async def test_a_chunk_is_taken_in_the_callback_that_brings_it() -> None:
    source, taken = Source(), list[int]()
    reading = await start(source, taken.append)
    await asyncio.sleep(0)
    source.bring(1)
    assert taken == [1]
    source.bring(2, 3)
    assert taken == [1, 2, 3]
    source.bring(None)
    await reading
    assert source.is_closed


async def test_a_reader_that_waits_gets_the_rest_in_order_later() -> None:
    source, taken, gate = Source(), list[int](), asyncio.Event()

    def take(chunk: int) -> Awaitable[Any] | None:
        taken.append(chunk)
        return gate.wait() if chunk == 2 else None

    reading = await start(source, take)
    await asyncio.sleep(0)
    source.bring(1, 2, 3)
    source.bring(4)
    await asyncio.sleep(0)
    source.bring(5)
    assert taken == [1, 2]
    gate.set()
    source.bring(None)
    await reading
    assert taken == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("sleeps", [0, 1])
async def test_an_error_of_the_source_or_of_the_reader_ends_the_stream(sleeps: int) -> None:
    for error in (ModelFailed("no"), ReaderClosed()):
        source, taken = Source(), list[int]()

        def take(chunk: int, error: BaseException = error, taken: list[int] = taken) -> None:
            taken.append(chunk)
            if isinstance(error, ReaderClosed):
                raise error

        reading = await start(source, take)
        for _ in range(sleeps):
            await asyncio.sleep(0)
        source.bring(1, error if isinstance(error, ModelFailed) else 2)
        with pytest.raises(type(error) if isinstance(error, ModelFailed) else asyncio.CancelledError):
            await reading
        assert taken == [1]
        source.bring(3)
        assert taken == [1]
        assert source.is_closed


async def test_a_cancelled_reader_takes_nothing_more() -> None:
    source, taken = Source(), list[int]()
    reading = await start(source, taken.append)
    await asyncio.sleep(0)
    reading.cancel()
    source.bring(1)
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert taken == []
    assert source.is_closed


async def test_iteration_takes_one_chunk_at_a_time_and_closing_cancels() -> None:
    source = Source()
    chunks = source.chunks()
    waiting = asyncio.ensure_future(anext(chunks))
    while source.wake is None:
        await asyncio.sleep(0)
    source.bring(1, 2, 3)
    assert await waiting == 1
    assert list(source.arrived) == [2, 3]
    assert await anext(chunks) == 2
    assert list(source.arrived) == [3]
    await chunks.aclose()
    assert source.is_closed
    source = Source()
    source.wake = lambda: None
    source.bring(1, ModelFailed("no"))
    with pytest.raises(ModelFailed, match="no"):
        assert [chunk async for chunk in source.chunks()] == []


async def test_a_generator_is_closed_when_its_reader_ends() -> None:
    closed = []

    async def count() -> AsyncGenerator[int, None]:
        try:
            for number in range(100):
                yield number
        finally:
            closed.append(True)

    taken = [chunk async for chunk in ChunkStream.of(count())]
    assert taken == list(range(100))
    stream = ChunkStream.of(count())
    assert await anext(stream) == 0
    await stream.aclose()
    assert closed == [True, True]


async def test_a_generator_that_never_waits_leaves_turns_to_other_tasks() -> None:
    turns = []

    async def count() -> AsyncGenerator[int, None]:
        for number in range(100):
            yield number

    asyncio.get_running_loop().call_soon(lambda: turns.append(len(taken)))
    taken: list[int] = []
    await ChunkStream.of(count()).send_to(taken.append)
    assert turns == [16]
