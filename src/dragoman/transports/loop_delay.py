"""Reject requests while the event loop is late: models that run in it have no other queue."""

import asyncio
import math
import time
from collections import Counter
from typing import Final

from dragoman.protocols.wire import HttpError

LOOP_LATE: Final = HttpError(503, "the server is overloaded (max_loop_delay_s)", (("retry-after", "1"),))


class LoopDelay:
    """Limits how long a request waits for others in the event loop, from its arrival.

    Requests that arrive during an iteration are handled in the next one, in order of arrival: they wait for the rest of
    one iteration and for the requests before them in the next. So an iteration may take half of `limit_s`: it accepts
    requests for a third, from its beginning, and rejects those whose turn comes later, which takes time, too. It, and
    with it the waiting time of accepted and rejected requests, is longer only where a single call is, or where far more
    are rejected than accepted. 0 disables the limit.

    large_messages_s: the most time for large messages that earlier iterations have left, which come first.
    """

    def __init__(self, limit_s: float, rejected: Counter[str]) -> None:
        self.is_limited = limit_s > 0
        self._accepting_s = limit_s / 3
        self.large_messages_s = limit_s / 6 if self.is_limited else math.inf
        self._rejected = rejected
        self._late_s = 0.0  # end of the time in which this iteration accepts requests; 0 before its first request

    def rejects(self) -> bool:
        """Return whether the request whose turn it is must be rejected; if so, count it."""
        if not self.is_limited:
            return False
        now_s = time.monotonic()
        if not self._late_s:
            self.begin_iteration(now_s)
            return False
        if now_s < self._late_s:
            return False
        self._rejected["loop_delay"] += 1
        return True

    def begin_iteration(self, now_s: float) -> None:
        """Begin an iteration, on the clock of `time.monotonic`, unless it has begun."""
        if self.is_limited and not self._late_s:
            self._late_s = now_s + self._accepting_s
            asyncio.get_running_loop().call_soon(self._end_iteration)

    def _end_iteration(self) -> None:
        self._late_s = 0.0
