"""Work on large requests, a little in each turn of the event loop, so that small ones are answered between them."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger("dragoman.http")

# Requests from this size on count as large, in bytes.
LARGE_REQUEST = 1 << 14
# How long all large requests may keep one turn of the loop. At least one is worked on in each such turn.
_BUDGET_S = 0.01
# After so much time the loop gets a turn without large requests: a new connection takes a few turns to be answered.
_TURN_S = 0.002


class Turns:
    """Runs functions in order: at once while there is time left in this turn of the loop, else in a later one."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        budget_s: float = _BUDGET_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._loop = loop
        self._budget_s = budget_s
        self._clock = clock
        self._spent_s = 0.0
        self._queue: deque[Callable[[], object]] = deque()
        self._scheduled = False
        self._owed = 0  # turns without large requests

    def run(self, work: Callable[[], object]) -> bool:
        """Run it now or later; return whether it was run now. An exception of it is logged."""
        now = not self._is_over()
        if now:
            self._run(work)
        else:
            self._queue.append(work)
        return now

    async def wait(self) -> None:
        """Return when the caller may work on a large request; nobody else is let in this turn."""
        if self._is_over():
            turn = self._loop.create_future()
            self._queue.append(lambda: self._let_in(turn))
            await turn
        else:
            self._spend(self._budget_s)

    def _is_over(self) -> bool:
        """Whether this turn of the loop has no time left, or others wait for it."""
        return self._scheduled and (bool(self._queue) or self._owed > 0 or self._spent_s >= self._budget_s)

    def _let_in(self, turn: asyncio.Future[None]) -> None:
        if not turn.done():
            turn.set_result(None)
            self._spend(self._budget_s)

    def _run(self, work: Callable[[], object]) -> None:
        began_s = self._clock()
        try:
            work()
        except Exception:
            log.exception("a request failed")
        self._spend(self._clock() - began_s)

    def _spend(self, spent_s: float) -> None:
        self._spent_s += spent_s
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        """The next turn of the loop."""
        self._owed += int(self._spent_s / _TURN_S)
        self._spent_s = 0.0
        if self._owed:
            self._owed -= 1
            self._loop.call_soon(self._next)
            return
        self._scheduled = False
        while self._queue and self._spent_s < self._budget_s:
            self._run(self._queue.popleft())
