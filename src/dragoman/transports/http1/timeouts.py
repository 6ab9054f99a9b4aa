"""Timeouts of an HTTP/1.1 connection, by what it waits for."""

from enum import Enum

from dragoman.protocols.wire import HttpError
from dragoman.transports.limits import Limits

# How long a client whose request was refused may go on sending before it is cut off.
_LINGER_S = 2.0
# A second more is given for each so many bytes of a body.
_RATE = 1 << 16
_CLOSE = (("connection", "close"),)


class Stage(Enum):
    """What is awaited: a word at all, the next request, the rest of a head or of a body, that the client leaves; or
    nothing any more."""

    NEW = 0
    IDLE = 1
    HEAD = 2
    BODY = 3
    LINGER = 4
    GONE = 5

    def fault(self, limits: Limits, received: int) -> HttpError | None:
        """What a client is told that took too long; None where it is hung up on silently."""
        if self is Stage.HEAD:
            text = f"the request head did not come within {limits.header_timeout_s} s"
            return HttpError(408, text, _CLOSE)
        if self is Stage.BODY:
            text = f"the body came too slowly: {received} bytes in {limits.body_timeout_s} s"
            return HttpError(408, text, _CLOSE)
        return None


def due_s(stage: Stage, since_s: float, received: int, limits: Limits) -> float:
    """Until when it has to be there, where it is awaited since `since_s` and so much of it has come."""
    if stage is Stage.IDLE:
        return since_s + limits.keep_alive_timeout_s
    if stage is Stage.BODY:
        return since_s + limits.body_timeout_s + received / _RATE
    return since_s + (_LINGER_S if stage is Stage.LINGER else limits.header_timeout_s)
