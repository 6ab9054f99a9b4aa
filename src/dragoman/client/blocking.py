"""Run coroutines whose awaited calls block the thread, so that they never suspend."""

import time
from collections.abc import AsyncGenerator, Awaitable, Generator
from typing import TypeVar

T = TypeVar("T")


def run_blocking(coroutine: Awaitable[T]) -> T:
    """Run a coroutine and return its result."""
    try:
        next(coroutine.__await__())
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a blocking client must not wait on an event loop")


def iterate_blocking(responses: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Iterate over an asynchronous generator."""
    try:
        while True:
            yield run_blocking(anext(responses))
    except StopAsyncIteration:
        return
    finally:
        run_blocking(responses.aclose())


async def sleep(delay: float) -> None:
    time.sleep(delay)  # noqa: ASYNC251 - no event loop runs here
