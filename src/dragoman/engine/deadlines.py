"""Deadlines of calls: readings of the monotonic clock."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import closing
from typing import Any, TypeVar

from dragoman.core.errors import DeadlineExceeded
from dragoman.system.coroutines import Pending, begin, ensure_task

A = TypeVar("A")


async def before(deadline_s: float, coroutine: Coroutine[Any, Any, A]) -> A:
    """Return the result of a coroutine, or raise DeadlineExceeded. A result that is there at once needs no timer."""
    begun = begin(coroutine)
    if not isinstance(begun, Pending):
        return begun
    with closing(begun):
        await ensure_task()
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                return await begun
        except TimeoutError as error:
            raise DeadlineExceeded("Request timeout expired") from error


def remaining_s(deadline_s: float | None) -> float | None:
    """Return the seconds until a deadline, for `asyncio.timeout`."""
    return None if deadline_s is None else deadline_s - time.monotonic()
