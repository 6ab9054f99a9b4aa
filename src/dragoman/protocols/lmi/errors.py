"""Format errors as LMI does: 424 for failed inference, and code, type and message for the rest."""

from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.core.errors import (
    AlreadyLoaded,
    DeadlineExceeded,
    DragomanError,
    Forbidden,
    InvalidInput,
    ModelNameMissing,
    ModelNotFound,
    NotReady,
    NotSupported,
    OutOfMemory,
    Overloaded,
    PathNotFound,
    ServerError,
    Unauthorized,
)
from dragoman.protocols.lmi.formats import Formatter, dynamic_error_body, to_json
from dragoman.protocols.lmi.request import LmiRequest
from dragoman.protocols.wire import JSON_TYPE, Headers, HttpError, HttpResponse, find_error_row, retry_after

# The statuses that LMI's operators may choose, by the names of its properties without `_http_code`.
CODES: Mapping[str, int] = {
    "bad_request": 400,
    "wlm_error": 503,
    "throttle_error": 503,
    "timeout": 504,
    "server_error": 500,
}
# Errors in the format of DJL Serving: a status, or the name of a configurable one, and the type.
_TYPES: Sequence[tuple[type[DragomanError], int | str, str]] = (
    (ModelNameMissing, "bad_request", "BadRequestException"),
    (AlreadyLoaded, 409, "ConflictStatusException"),  # SageMaker's multi-model endpoints rely on these two
    (OutOfMemory, 507, "WlmOutOfMemoryException"),
    (NotSupported, "bad_request", "BadRequestException"),
    (PathNotFound, 404, "ResourceNotFoundException"),
    (ModelNotFound, 404, "ModelNotFoundException"),
    (Unauthorized, 401, "UnauthorizedException"),
    (Forbidden, 403, "ForbiddenException"),
    (NotReady, "wlm_error", "ServiceUnavailableException"),
    (Overloaded, "throttle_error", "WlmCapacityException"),
    (DeadlineExceeded, "timeout", "TimeoutException"),
)
_HTTP_TYPES: Mapping[int, str] = {404: "ResourceNotFoundException", 405: "MethodNotAllowedException"}


def parse_codes(text: str) -> Mapping[str, int]:
    """Parse `name=status,...`; others keep their default. Raises InvalidInput naming what is wrong."""
    found = dict(CODES)
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, status = (each.strip() for each in part.partition("="))
        if name not in CODES or not status.isdecimal() or not 400 <= int(status[:4]) <= 599:
            raise InvalidInput(
                f"setting 'lmi_http_codes': expected name=status, with a status from 400 to 599 and a name of "
                f"{', '.join(CODES)}; got '{part}'"
            )
        found[name] = int(status)
    return found


class LmiErrors:
    """Formats errors with the statuses that the operator has configured."""

    def __init__(self, chosen: Mapping[str, int]) -> None:
        self._codes = chosen

    def write(self, error: DragomanError | HttpError) -> HttpResponse:
        """Format an error of a request that reached no model."""
        if isinstance(error, HttpError):
            bad = error.status < 500
            kind = _HTTP_TYPES.get(error.status, "BadRequestException" if bad else "InternalServerException")
            status = {400: self._codes["bad_request"], 500: self._codes["server_error"]}.get(error.status, error.status)
            return _json({"code": status, "type": kind, "message": error.message}, status, error.headers)
        row = find_error_row(error, _TYPES)
        if row is None:
            return _json({"error": error.message, "code": 424}, 424)
        code, name = row
        status = self._codes[code] if isinstance(code, str) else code
        return _json({"code": status, "type": name, "message": error.message}, status, retry_after(error))

    def format_failure(self, error: DragomanError, found: LmiRequest, formatter: Formatter) -> HttpResponse:
        """Format an error that occurred before the first chunk was sent."""
        error = found.given.with_client_names(error)
        headers = (JSON_TYPE, *found.given.headers)
        if isinstance(error, ServerError | InvalidInput) and not found.rolling:
            return format_dynamic(error, found.given.headers)
        if isinstance(error, ServerError) and not formatter.streams:
            return HttpResponse(424, (formatter.format_failure(),), headers)
        return self.write(error)


def format_dynamic(error: DragomanError, headers: Headers = ()) -> HttpResponse:
    """Format an error in the dynamic-batch schema."""
    return _json(dynamic_error_body(error), 424, headers)


def _json(value: Any, status: int, headers: Headers = ()) -> HttpResponse:
    return HttpResponse(status, (to_json(value),), (JSON_TYPE, *headers))
