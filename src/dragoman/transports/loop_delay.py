"""Reject requests while the event loop is late: models that run in it have no other queue."""

import asyncio
import time
from collections import Counter
from typing import Final

from dragoman.protocols.wire import HttpError

LOOP_LATE: Final = HttpError(503, "the server is overloaded (max_loop_delay_s)", (("retry-after", "1"),))


class LoopDelay:
    """Limits how long a request waits for the requests before it in an iteration of the event loop.

    Requests that arrive during an iteration are handled in the next one, in order of arrival. A request is rejected if
    its
    turn comes more than `limit_s` after the first request of its iteration. This bounds the length of iterations, and
    so the
    waiting time of every request, including rejected ones. 0 disables the limit.
    """

    def __init__(self, limit_s: float, rejected: Counter[str]) -> None:
        self.is_limited = limit_s > 0
        self._limit_s = limit_s
        self._rejected = rejected
        self._late_s = 0.0  # end of the time in which this iteration accepts requests; 0 before its first request

    def rejects(self) -> bool:
        """Return whether the request whose turn it is must be rejected; if so, count it."""
        if not self.is_limited:
            return False
        now_s = time.monotonic()
        if not self._late_s:
            self._late_s = now_s + self._limit_s
            asyncio.get_running_loop().call_soon(self._end_iteration)
            return False
        if now_s < self._late_s:
            return False
        self._rejected["loop_delay"] += 1
        return True

    def _end_iteration(self) -> None:
        self._late_s = 0.0
