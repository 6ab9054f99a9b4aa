"""Coroutines run to their end by the thread that asks: what they wait for blocks it, so they never suspend."""

import time
from collections.abc import AsyncGenerator, Awaitable, Generator
from typing import TypeVar

T = TypeVar("T")


def done(waited: Awaitable[T]) -> T:
    """What it comes to."""
    try:
        next(waited.__await__())
    except StopIteration as end:
        found: T = end.value
        return found
    raise AssertionError("a client that blocks has nothing to wait for on an event loop")


def each(pieces: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """What it yields, one by one."""
    try:
        while True:
            yield done(anext(pieces))
    except StopAsyncIteration:
        return
    finally:
        done(pieces.aclose())


async def sleep(delay: float) -> None:
    time.sleep(delay)  # noqa: ASYNC251 - there is no event loop to hold up
