"""Limits of one HTTP/2 connection, also on the rate of empty frames, reset streams and pings."""

import time
from collections.abc import Callable

import msgspec

from dragoman.formats.http2 import frames
from dragoman.formats.http2.frames import FrameWriter, Http2ConnectionError
from dragoman.transports.limits import Limits


class Http2Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one HTTP/2 connection; sizes in bytes, times in seconds.

    A client may send `stream_window` bytes of a stream and `connection_window` of all before they are acknowledged.
    `max_header_bytes` limits the fields of a request, each counted as its name, value and 32 bytes more, and
    `max_headers` their number. `connection_window` is at least 65,535. While more than `max_unsent` bytes of responses
    wait for the client to make room, further requests wait too. Pings are allowed every `ping_interval_s`, or sooner
    after a response was sent; `ping_strikes` more may come sooner (gRPC proposal A8).
    """

    max_streams: int = 500
    stream_window: int = 1 << 20
    connection_window: int = 16 << 20
    max_frame: int = 1 << 20
    max_unsent: int = 16 << 20
    max_header_bytes: int = 16 << 10
    max_headers: int = 256
    ping_interval_s: float = 10.0
    ping_strikes: int = 2


def http2_limits(limits: Limits) -> Http2Limits:
    """Return the limits of a connection that follow from those of its server."""
    return Http2Limits(
        max_streams=limits.max_streams, max_header_bytes=limits.max_header_bytes, max_headers=limits.max_headers
    )


# Streams that a client resets soon after they began, or makes us reset: at once, and per second. Each frame of a
# response earns one more. Later resets (at a deadline) are limited by the number of open streams.
_RESETS = 1000, 100.0
# Frames that carry nothing (SETTINGS, small WINDOW_UPDATE, empty DATA): at once, and per second.
_EMPTY_FRAMES = 1000, 100.0
# How many more of them each request or response allows.
_EARNED_BY_REQUEST, _EARNED_BY_FRAME, _BYTES_TO_EARN = 8, 4, 1 << 12
# Early pings that responses may earn: clients measure the round-trip time by pings while they read.
_MAX_EARNED_PINGS = 100


class TokenBucket:
    """`burst` events at once, `per_s` in the long run."""

    __slots__ = ("_burst", "_clock", "_left", "_per_s", "_since_s")

    def __init__(self, burst: int, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left = float(burst)
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._since_s = clock()

    def take(self) -> bool:
        """Take one token; return False if none is left."""
        self._left -= 1
        if self._left >= 0:
            return True
        now_s = self._clock()
        self._left = min(self._burst, self._left + (now_s - self._since_s) * self._per_s)
        self._since_s = now_s
        return self._left >= 0

    def add(self, count: int) -> None:
        if self._left < self._burst:
            self._left += count


class RateLimits:
    """Each method counts one event and raises Http2ConnectionError ENHANCE_YOUR_CALM if there were too many.

    `empty_frames`: for frames that carry nothing; call `count_empty_frame` if it has no token left.
    """

    __slots__ = (
        "_clock",
        "_earned",
        "_frames_at_ping",
        "_frames_at_reset",
        "_limits",
        "_pinged_s",
        "_pings_earned",
        "_resets",
        "_strikes",
        "_writer",
        "empty_frames",
    )  # fmt: skip

    def __init__(self, limits: Http2Limits, writer: FrameWriter, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._writer = writer
        self._clock = clock
        self._resets = TokenBucket(*_RESETS, clock)
        self.empty_frames = TokenBucket(*_EMPTY_FRAMES, clock)
        self._earned = self._frames_at_reset = self._frames_at_ping = 0
        self._pinged_s = -limits.ping_interval_s
        self._pings_earned = self._strikes = 0

    def count_empty_frame(self, requests: int) -> None:
        """Count a frame for which `empty_frames` had no token; `requests` is the number of requests so far."""
        earned = _EARNED_BY_REQUEST * requests + _EARNED_BY_FRAME * self._writer.response_frames
        earned += self._writer.body_bytes // _BYTES_TO_EARN
        self.empty_frames.add(earned - self._earned)
        self._earned = earned
        if not self.empty_frames.take():
            raise Http2ConnectionError(frames.ENHANCE_YOUR_CALM, "too many frames that bring nothing")

    def count_reset(self) -> None:
        """Count a stream that was reset early, or malformed."""
        if self._resets.take():
            return
        sent = self._writer.response_frames
        self._resets.add(sent - self._frames_at_reset)
        self._frames_at_reset = sent
        if not self._resets.take():
            raise Http2ConnectionError(frames.ENHANCE_YOUR_CALM, "too many streams were reset, or malformed")

    def count_ping(self) -> None:
        now_s, sent = self._clock(), self._writer.response_frames
        earned = self._pings_earned + sent - self._frames_at_ping
        self._frames_at_ping = sent
        if now_s - self._pinged_s < 0.9 * self._limits.ping_interval_s:  # clocks and round-trip times differ
            earned -= 1
            self._strikes += earned < 0
        else:
            self._strikes = 0
        if self._strikes > self._limits.ping_strikes:
            raise Http2ConnectionError(frames.ENHANCE_YOUR_CALM, "too_many_pings")  # gRPC clients know this text
        self._pings_earned = max(0, min(earned, _MAX_EARNED_PINGS))
        self._pinged_s = now_s
