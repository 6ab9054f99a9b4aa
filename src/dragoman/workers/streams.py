"""A stream from a worker to its reader, bounded in how far it runs ahead and how long it waits."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from dragoman.core.errors import DeadlineExceeded
from dragoman.workers import pool


class Stream:
    """The chunks of a stream that have arrived and are not read yet.

    credit: called with the number of further chunks that the worker may send, `step` at a time.
    left: called when the reader has closed the stream, or has read nothing for 30 s while the worker waits.
    patient: no such time limit, because no other call waits for this worker.
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
        # Bounded by the window: the worker waits for credit before each chunk beyond it.
        self._arrived: asyncio.Queue[tuple[Any, BaseException | None, bool]] = asyncio.Queue()
        self._stalled: asyncio.TimerHandle | None = None

    def deliver(self, value: Any, error: BaseException | None, last: bool) -> None:
        """Add a chunk, an error or the end."""
        self._arrived.put_nowait((value, error, last))
        self._sent += 1
        self._over = self._over or last or error is not None
        self._watch()

    async def chunks(self) -> AsyncGenerator[Any, None]:
        """Yield the chunks as they arrive; raise the error that ends them."""
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
        """Restart the time limit of the reader if the worker waits for it."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if self._sent > self._allowed and not (self._over or self._patient):
            self._stalled = asyncio.get_running_loop().call_later(pool.STALL_S, self._give_up)

    def _give_up(self) -> None:
        self._left()
        message = f"the reader of this stream is too slow: it took nothing for {pool.STALL_S:g} s"
        self._arrived.put_nowait((None, DeadlineExceeded(message), True))
