"""Errors of Anthropic's API, and the description of its routes for OpenAPI."""

from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.core.errors import (
    DeadlineExceeded,
    DragomanError,
    Forbidden,
    InvalidInput,
    ModelNotFound,
    NotReady,
    NotSupported,
    Overloaded,
    RateLimited,
    Unauthorized,
)
from dragoman.protocols.parameters import body_schema
from dragoman.protocols.wire import EVENT_STREAM, JSON, Operation, find_error_row, replace_surrogates
from dragoman_text.apis.anthropic.request import CONVERSATION, PARAMETERS
from dragoman_text.apis.common.messages import MESSAGES, json_errors

REFERENCE = "https://docs.claude.com/en/api/messages"

_ERRORS: Sequence[tuple[type[DragomanError], int, str]] = (
    (InvalidInput, 400, "invalid_request_error"),
    (NotSupported, 400, "invalid_request_error"),
    (ModelNotFound, 404, "not_found_error"),
    (Unauthorized, 401, "authentication_error"),
    (Forbidden, 403, "permission_error"),
    (RateLimited, 429, "rate_limit_error"),
    (NotReady, 503, "overloaded_error"),
    (Overloaded, 503, "overloaded_error"),
    (DeadlineExceeded, 504, "timeout_error"),
)
_OTHER_TYPES: Mapping[int, str] = {413: "request_too_large", 404: "not_found_error"}


ERRORS = json_errors(status for _, status, _ in _ERRORS)
_MAX_TOKENS = {"type": "integer", "minimum": 1}
CREATE = Operation(
    "Create a message",
    {200: {JSON: dict[str, Any], EVENT_STREAM: None}},
    {JSON: body_schema(PARAMETERS, messages=MESSAGES, max_tokens=_MAX_TOKENS)},
)
COUNT = Operation(
    "Count the tokens of a message", {200: {JSON: dict[str, Any]}}, {JSON: body_schema(CONVERSATION, messages=MESSAGES)}
)

_VERSION = {"anthropic-version": {"type": "string"}}
_PAGE = {"limit": {"type": "integer", "minimum": 1, "maximum": 1000}, "after_id": {}, "before_id": {}}
MODELS = Operation("List the text models", {200: {JSON: dict[str, Any]}}, query=_PAGE, headers=_VERSION)
MODEL = Operation("Describe a text model", {200: {JSON: dict[str, Any]}}, headers=_VERSION)


def error_status(error: DragomanError) -> int:
    return _row(error)[0]


def _row(error: DragomanError) -> tuple[int, str]:
    status, kind = find_error_row(error, _ERRORS) or (500, "api_error")
    return status, kind


def format_error_body(error: DragomanError, request_id: str) -> dict[str, Any]:
    return error_object(_row(error)[1], error.message, request_id)


def error_object(kind: str, message: str, request_id: str, details: Mapping[str, Any] | None = None) -> dict[str, Any]:
    error = {"type": kind, "message": replace_surrogates(message), **({"details": details} if details else {})}
    return {"type": "error", "error": error, "request_id": request_id}


def type_of_status(status: int) -> str:
    """Return Anthropic's error type for an HTTP status."""
    return _OTHER_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
