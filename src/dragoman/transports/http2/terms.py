"""What a connection allows its client, and the patience it has with what is of no use."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from dragoman.transports.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Bounds of one HTTP/2 connection; sizes in bytes, times in seconds.

    A client may send `stream_window` bytes of a stream and `connection_window` of all before it hears that they were
    taken. `max_header_bytes` bounds the fields of a request, each counted as its name, value and 32 bytes more,
    and `max_headers` their number.
    `connection_window` is at least 65,535. While more than `max_unsent` bytes of answers wait for the client to make
    room, further requests wait too.
    """

    max_streams: int = 500
    stream_window: int = 1 << 20
    connection_window: int = 16 << 20
    max_frame: int = 1 << 20
    max_unsent: int = 16 << 20
    max_header_bytes: int = 16 << 10
    max_headers: int = 256
    # Between pings where nothing was sent to the client meanwhile, and how many may come sooner (gRPC: A8).
    ping_interval_s: float = 10.0
    ping_strikes: int = 2


class Allowance:
    """A number of things that come back with time: `burst` at once, `per_s` in the long run."""

    __slots__ = ("_burst", "_clock", "_left", "_per_s", "_since_s")

    def __init__(self, burst: int, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left = float(burst)
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._since_s = clock()

    def spend(self) -> bool:
        """Take one; False where none is left."""
        self._left -= 1
        if self._left >= 0:
            return True
        now_s = self._clock()
        self._left = min(self._burst, self._left + (now_s - self._since_s) * self._per_s)
        self._since_s = now_s
        return self._left >= 0

    def earn(self, count: int) -> None:
        """Give some back, for something of use."""
        if self._left < self._burst:
            self._left += count


def terms(limits: Limits) -> Terms:
    """The terms that go with a transport's limits."""
    return Terms(
        max_streams=limits.max_streams, max_header_bytes=limits.max_header_bytes, max_headers=limits.max_headers
    )
