"""Timeouts of an HTTP/1.1 connection in each stage of a request."""

from enum import Enum

from dragoman.protocols.wire import HttpError
from dragoman.transports.limits import Limits

# How long a client may go on sending after its request was rejected.
_LINGER_S = 2.0
# The timeout of a body grows by a second for this many bytes received.
_MIN_BYTES_PER_S = 1 << 16
_CLOSE = (("connection", "close"),)


class Stage(Enum):
    """The event that a connection waits for: its first request, the next one, the rest of headers or of a body, the
    client's disconnection after an error; GONE once it is closed."""

    NEW = 0
    IDLE = 1
    HEAD = 2
    BODY = 3
    LINGER = 4
    GONE = 5

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
    return since_s + (_LINGER_S if stage is Stage.LINGER else limits.header_timeout_s)
