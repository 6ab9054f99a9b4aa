"""Deadlines of calls: readings of the monotonic clock."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import closing
from typing import Any, TypeVar

from dragoman.core.errors import DeadlineExceeded
from dragoman.system.coroutines import Pending, begin, ensure_task
from dragoman.workers.pool import Pool

A = TypeVar("A")
WAITING = "waiting for workers"  # without the addresses and commands in `Pool.waiting`


async def with_deadline(deadline_s: float, coroutine: Coroutine[Any, Any, A], pool: Pool | None) -> A:
    """Return the result of a coroutine, or raise DeadlineExceeded. A result that is there at once needs no timer.

    pool: the workers that it waits for; see `deadline_error`.
    """
    pending = begin(coroutine)
    if not isinstance(pending, Pending):
        return pending
    with closing(pending):
        await ensure_task()
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                return await pending
        except TimeoutError as error:
            raise deadline_error(pool) from error


def deadline_error(pool: Pool | None) -> DeadlineExceeded:
    """Return the error of a call whose deadline has passed; it says whether its model waits for workers."""
    waits = pool is not None and pool.waiting
    return DeadlineExceeded(f"Request timeout expired: {WAITING}" if waits else "Request timeout expired")


def remaining_s(deadline_s: float | None) -> float | None:
    """Return the seconds until a deadline, for `asyncio.timeout`."""
    return None if deadline_s is None else deadline_s - time.monotonic()
