"""LMI's asynchronous responses: `x-synchronous: false` returns a token, `x-starting-token` fetches chunks."""

from collections.abc import Callable

from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.protocols.lmi.request import attributes
from dragoman.protocols.wire import (
    BackgroundCall,
    EndpointResult,
    Headers,
    HttpError,
    HttpRequest,
    HttpResponse,
    PartialResult,
    ResultPoll,
    json_response,
)

_SYNCHRONOUS = "x-synchronous"
_STARTING = "x-starting-token"
_NEXT = "x-next-token"
_MOST = "x-max-items"
_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_ALL = 1 << 31


def fetched(http: HttpRequest, error: Callable[[DragomanError | HttpError], HttpResponse]) -> ResultPoll | None:
    """Return the fetch of an earlier response; None for a new request. Raises InvalidInput for an invalid number."""
    token = _header(http, _STARTING)
    if not token:
        return None
    most = _header(http, _MOST) or "-1"
    if not most.removeprefix("-").isdecimal() or len(most) > 9:
        raise InvalidInput(f"`{_MOST}` must be an integer; got '{most[:64]}'")

    def format_response(part: PartialResult | None) -> HttpResponse:
        if part is None:
            return error(HttpError(400, f"Invalid {_STARTING}: {token[:64]}"))
        if part.status == 0:
            pending = {"code": 202, "message": "The model result is not yet available"}
            return json_response(pending, 202, _next(part.next_token))
        if part.is_truncated:
            return error(HttpError(500, "the answer was cut off before its end"))
        return HttpResponse(part.status, part.body, (*part.headers, *_next(part.next_token)))

    return ResultPoll(token, int(most) if int(most) > 0 else _ALL, format_response)


def later(
    http: HttpRequest, asked: EndpointResult, error: Callable[[DragomanError | HttpError], HttpResponse]
) -> EndpointResult:
    """Return the request as it is, or one that is answered later if its headers ask for that."""
    if _header(http, _SYNCHRONOUS).lower() != "false":
        return asked
    return BackgroundCall(asked, error, lambda token: HttpResponse(200, (), _next(token)))


def _header(http: HttpRequest, name: str) -> str:
    """Return a header, or the same property in SageMaker's custom attributes."""
    return http.headers.get(name) or attributes(http).get(name, "")


def _next(token: str) -> Headers:
    return ((_NEXT, token), (_ATTRIBUTES, f"{_NEXT}={token}")) if token else ()
