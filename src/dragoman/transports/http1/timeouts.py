"""Timeouts of an HTTP/1.1 connection in each stage of a request."""

from enum import IntEnum

from dragoman.protocols.wire import HttpError
from dragoman.transports.limits import Limits

# How long a client may go on sending after its request was rejected.
_LINGER_S = 2.0
# The timeout of a body grows by a second for this many bytes received.
_MIN_BYTES_PER_S = 1 << 16
_CLOSE = (("connection", "close"),)


class Stage(IntEnum):
    """The event that a connection waits for, in order; see the table of `connection`."""

    NEW = 0
    BETWEEN = 1
    IDLE = 2
    HEAD = 3
    BODY = 4
    QUEUED = 5
    RESPONDING = 6
    LINGER = 7
    CLOSING = 8
    GONE = 9

    def timeout_error(self, limits: Limits, received: int) -> HttpError | None:
        """Return the error for a client that exceeded its timeout; None to close without a response."""
        if self is Stage.HEAD:
            text = f"the request head did not come within {limits.header_timeout_s} s"
            return HttpError(408, text, _CLOSE)
        if self is Stage.BODY:
            text = f"the body came too slowly: {received} bytes in {limits.body_timeout_s} s"
            return HttpError(408, text, _CLOSE)
        return None


def deadline_s(stage: Stage, since_s: float, received: int, limits: Limits) -> float:
    """Return the deadline of a stage that began at `since_s`, after `received` bytes of a body."""
    if stage is Stage.IDLE:
        return since_s + limits.keep_alive_timeout_s
    if stage is Stage.BODY:
        return since_s + limits.body_timeout_s + received / _MIN_BYTES_PER_S
    if stage is Stage.CLOSING:
        return since_s + limits.write_timeout_s
    return since_s + (_LINGER_S if stage is Stage.LINGER else limits.header_timeout_s)
