"""Errors of the client: HTTP and gRPC statuses as exceptions, with the message of the server."""

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
    """The server cannot be reached, or the connection was lost before the response was complete.

    `refused`: nothing listens there (yet), so the server did not receive the call.
    """

    refused = False


class ServiceUnavailable(NotReady, Overloaded):
    """503: the model is not ready or its queue is full; HTTP has one status for both."""


class ConnectionLost(WorkerLost, ServerUnreachable):
    """UNAVAILABLE: the server or one of its workers ended; gRPC has one status for both."""


# Prefixes of messages that grpcio itself writes.
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
    503: ServiceUnavailable,
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


def server_unreachable(name: str, why: object, *, refused: bool = False) -> ServerUnreachable:
    error = ServerUnreachable(f"cannot reach {name}: {why}")
    error.refused = refused
    return error


def error_of_status(status: int, headers: Mapping[str, str], body: Buffer) -> DragomanError:
    """Return the error of an HTTP response."""
    kind = _BY_STATUS.get(status) or (CallerError if status < 500 else ServerError)
    message = _message_in(body) or f"the server answered {status} without a message"
    if 300 <= status < 400:
        message = f"the server answered {status}; expected no redirect, got one to '{headers.get('location', '')}'"
    error = kind(message)
    error.retry_after_s = _retry_after_s(headers.get("retry-after", ""))
    return error


def error_of_code(code: str, details: str, metadata: Mapping[str, str], name: str) -> DragomanError:
    """Return the error of a gRPC status."""
    wait_s = _retry_after_s(metadata.get("retry-after", ""))
    if code == "UNAVAILABLE" and wait_s is None:
        return _connection_lost(details, name)
    kind = NotReady if code == "UNAVAILABLE" else _BY_CODE.get(code, ServerError)
    if code == "RESOURCE_EXHAUSTED" and "larger than" in details:  # a message, not a queue
        kind = InvalidInput
    error = kind(details or code)
    error.retry_after_s = wait_s
    return error


def _connection_lost(details: str, name: str) -> DragomanError:
    if details.startswith(_NO_CONNECTION):
        return server_unreachable(name, details, refused="Connection refused" in details)
    return ConnectionLost(details or f"cannot reach {name}")


def _message_in(body: Buffer) -> str:
    """Return the message in an error body: `{"error": ...}` of the protocol, `{"detail": ...}`, or the whole text."""
    text = bytes(body).decode(errors="replace").strip()
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
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
