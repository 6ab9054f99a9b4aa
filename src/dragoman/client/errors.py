"""Errors of the client: HTTP and gRPC statuses as exceptions, with the message of the server."""

import email.utils
import time
from collections.abc import Mapping

from dragoman.core import errors
from dragoman.core.documents import parse_json
from dragoman.formats.policy import Buffer

_SHOWN = 300


class ServerUnreachable(errors.DragomanError, ConnectionError):
    """The server cannot be reached, or the connection was lost before the response was complete.

    `refused`: nothing listens there (yet), so the server did not receive the call.
    """

    refused = False


class ServiceUnavailable(errors.NotReady, errors.Overloaded):
    """503: the model is not ready or its queue is full; HTTP has one status for both."""


class ConnectionLost(errors.WorkerLost, ServerUnreachable):
    """UNAVAILABLE: the server or one of its workers ended; gRPC has one status for both."""


_BY_STATUS: Mapping[int, type[errors.DragomanError]] = {
    400: errors.InvalidInput,
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.ModelNotFound,
    405: errors.NotSupported,
    408: errors.DeadlineExceeded,
    413: errors.InvalidInput,
    415: errors.InvalidInput,
    422: errors.InvalidInput,
    429: errors.Overloaded,
    431: errors.InvalidInput,
    501: errors.NotSupported,
    503: ServiceUnavailable,
    504: errors.DeadlineExceeded,
}

_BY_CODE: Mapping[str, type[errors.DragomanError]] = {
    "INVALID_ARGUMENT": errors.InvalidInput,
    "FAILED_PRECONDITION": errors.InvalidInput,
    "OUT_OF_RANGE": errors.InvalidInput,
    "NOT_FOUND": errors.ModelNotFound,
    "ALREADY_EXISTS": errors.AlreadyLoaded,
    "UNIMPLEMENTED": errors.NotSupported,
    "RESOURCE_EXHAUSTED": errors.Overloaded,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "UNAUTHENTICATED": errors.Unauthorized,
    "PERMISSION_DENIED": errors.Forbidden,
}


def server_unreachable(name: str, why: object, *, refused: bool = False) -> ServerUnreachable:
    error = ServerUnreachable(f"cannot reach {name}: {why}")
    error.refused = refused
    return error


def error_of_status(status: int, headers: Mapping[str, str], body: Buffer) -> errors.DragomanError:
    kind = _BY_STATUS.get(status) or (errors.CallerError if status < 500 else errors.ServerError)
    message = _message_in(body) or f"the server answered {status} without a message"
    if 300 <= status < 400:
        message = f"the server answered {status}; expected no redirect, got one to '{headers.get('location', '')}'"
    error = kind(message)
    error.retry_after_s = _retry_after_s(headers.get("retry-after", ""))
    return error


def error_of_code(code: str, details: str, metadata: Mapping[str, str], name: str) -> errors.DragomanError:
    """Return the error of a gRPC status."""
    wait_s = _retry_after_s(metadata.get("retry-after", ""))
    if code == "UNAVAILABLE" and wait_s is None:
        return ConnectionLost(details or f"cannot reach {name}")
    kind = errors.NotReady if code == "UNAVAILABLE" else _BY_CODE.get(code, errors.ServerError)
    if code == "RESOURCE_EXHAUSTED" and "larger than" in details:  # a message, not a queue
        kind = errors.InvalidInput
    error = kind(details or code)
    error.retry_after_s = wait_s
    return error


def _message_in(body: Buffer) -> str:
    """Return the message in an error body: `{"error": ...}` of the protocol, `{"detail": ...}`, or the whole text."""
    text = bytes(body).decode(errors="replace").strip()
    try:
        parsed = parse_json(text)
    except ValueError:
        return text[:_SHOWN]
    message = (parsed.get("error") or parsed.get("detail")) if isinstance(parsed, dict) else None
    return message if isinstance(message, str) else text[:_SHOWN]


def _retry_after_s(text: str) -> float | None:
    """Parse Retry-After, seconds or a date, into seconds from now; None if it is neither."""
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None
