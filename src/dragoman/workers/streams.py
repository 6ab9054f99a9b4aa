"""A stream on its way from a worker to its reader: bounded in how far it runs ahead, and in how long it waits."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from dragoman.core.errors import DeadlineExceeded
from dragoman.workers import pool


class Stream:
    """The pieces that have come and are not read yet.

    `credit` is told how many pieces further the worker may go, `step` at a time. `left` is called when nobody reads any
    more, be it that the reader has held the worker up for too long: other calls wait for that worker, unless it is
    `patient`.
    """

    def __init__(
        self, credit: Callable[[int], None], left: Callable[[], None], step: int = 1, *, patient: bool = False
    ) -> None:
        self._patient = patient
        self._credit = credit
        self._left = left
        self._step = step
        self._allowed = pool.WINDOW
        self._sent = 0
        self._over = False  # whether nothing comes any more
        # Bounded by the window: the worker waits for a credit before each piece beyond it.
        self._arrived: asyncio.Queue[tuple[Any, BaseException | None, bool]] = asyncio.Queue()
        self._stalled: asyncio.TimerHandle | None = None

    def deliver(self, value: Any, error: BaseException | None, last: bool) -> None:
        """Take in a piece, an error or the end from the worker."""
        self._arrived.put_nowait((value, error, last))
        self._sent += 1
        self._over = self._over or last or error is not None
        self._watch()

    async def chunks(self) -> AsyncGenerator[Any, None]:
        """The pieces as they come; raises the error that ends them."""
        read = 0
        try:
            while True:
                value, error, last = await self._arrived.get()
                if error is not None:
                    raise error
                if last:
                    return
                yield value
                read += 1
                if read % self._step == 0:
                    self._allowed += self._step
                    self._credit(self._step)
                self._watch()
        finally:
            self._over = True
            self._watch()
            self._left()

    def _watch(self) -> None:
        """Count anew for how long the reader takes nothing while the worker waits for it."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if self._sent > self._allowed and not (self._over or self._patient):
            self._stalled = asyncio.get_running_loop().call_later(pool.STALL_S, self._give_up)

    def _give_up(self) -> None:
        self._left()
        told = f"the reader of this stream is too slow: it took nothing for {pool.STALL_S:g} s"
        self._arrived.put_nowait((None, DeadlineExceeded(told), True))
