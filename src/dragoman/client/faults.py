"""What went wrong, from what a wire said of it: a status becomes one of our errors, with the server's own words."""

import email.utils
import json
import time
from collections.abc import Mapping

from dragoman.core.errors import (
    CallerError,
    DeadlineExceeded,
    DragomanError,
    Forbidden,
    InvalidInput,
    ModelNotFound,
    NotReady,
    NotSupported,
    Overloaded,
    ServerError,
    Unauthorized,
    WorkerLost,
)
from dragoman.formats.policy import Buffer

_SHOWN = 300


class ServerUnreachable(DragomanError, ConnectionError):
    """There is no connection to the server, or it broke before the answer was there.

    `refused`: nothing listens there (yet), so the server has not seen the call.
    """

    refused = False


class Unavailable(NotReady, Overloaded):
    """503: the model is not ready, or its queue is full; HTTP does not tell which, so this is both."""


class Lost(WorkerLost, ServerUnreachable):
    """UNAVAILABLE: the server, or the worker in it, went away; gRPC does not tell which, so this is both."""


# How the library begins what it says itself.
_NO_CONNECTION = ("failed to connect", "errors resolving", "DNS resolution failed")

_BY_STATUS: Mapping[int, type[DragomanError]] = {
    400: InvalidInput,
    401: Unauthorized,
    403: Forbidden,
    404: ModelNotFound,
    405: NotSupported,
    408: DeadlineExceeded,
    413: InvalidInput,
    415: InvalidInput,
    422: InvalidInput,
    429: Overloaded,
    431: InvalidInput,
    501: NotSupported,
    503: Unavailable,
    504: DeadlineExceeded,
}

_BY_CODE: Mapping[str, type[DragomanError]] = {
    "INVALID_ARGUMENT": InvalidInput,
    "FAILED_PRECONDITION": InvalidInput,
    "OUT_OF_RANGE": InvalidInput,
    "NOT_FOUND": ModelNotFound,
    "UNIMPLEMENTED": NotSupported,
    "RESOURCE_EXHAUSTED": Overloaded,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "UNAUTHENTICATED": Unauthorized,
    "PERMISSION_DENIED": Forbidden,
}


def unreachable(place: str, why: object, *, refused: bool = False) -> ServerUnreachable:
    fault = ServerUnreachable(f"cannot reach {place}: {why}")
    fault.refused = refused
    return fault


def of_status(status: int, headers: Mapping[str, str], body: Buffer) -> DragomanError:
    """The error that an HTTP status tells."""
    kind = _BY_STATUS.get(status) or (CallerError if status < 500 else ServerError)
    told = _told(body) or f"the server answered {status} without a word"
    if 300 <= status < 400:
        told = f"the server answered {status}; expected no redirection, got one to '{headers.get('location', '')}'"
    fault = kind(told)
    fault.retry_after_s = _seconds(headers.get("retry-after", ""))
    return fault


def of_code(code: str, details: str, metadata: Mapping[str, str], place: str) -> DragomanError:
    """The error that a gRPC status tells."""
    wait_s = _seconds(metadata.get("retry-after", ""))
    if code == "UNAVAILABLE" and wait_s is None:
        return _away(details, place)
    kind = NotReady if code == "UNAVAILABLE" else _BY_CODE.get(code, ServerError)
    if code == "RESOURCE_EXHAUSTED" and "larger than" in details:  # a message, not a queue
        kind = InvalidInput
    fault = kind(details or code)
    fault.retry_after_s = wait_s
    return fault


def _away(details: str, place: str) -> DragomanError:
    if details.startswith(_NO_CONNECTION):
        return unreachable(place, details, refused="Connection refused" in details)
    return Lost(details or f"cannot reach {place}")


def _told(body: Buffer) -> str:
    """The server's own words: `{"error": ...}` as the protocol has it, `{"detail": ...}`, or the text itself."""
    text = bytes(body).decode(errors="replace").strip()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text[:_SHOWN]
    told = (found.get("error") or found.get("detail")) if isinstance(found, dict) else None
    return told if isinstance(told, str) else text[:_SHOWN]


def _seconds(text: str) -> float | None:
    """What Retry-After says: seconds or a date; None where it says neither."""
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None
