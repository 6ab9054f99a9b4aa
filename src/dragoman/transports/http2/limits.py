"""Limits of one HTTP/2 connection."""

from dataclasses import dataclass

from dragoman.transports.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Limits:
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
