"""Custom handlers of models, which answer paths of their own, and the headers that models set in responses."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial

from msgspec.structs import replace

from dragoman.core.calls import DescribeModels, Handle, Handled, ModelDescription, Request, Response
from dragoman.core.errors import DragomanError, InvalidOutput
from dragoman.core.paths import match_handler
from dragoman.protocols.wire import (
    Endpoint,
    EndpointResult,
    EngineCall,
    Headers,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    HttpStream,
    Policy,
    PreliminaryCall,
    Route,
)
from dragoman.system.request_context import HEADER


def handler_stream(call: EngineCall[Handled, HttpResponse]) -> HttpStream[Handled]:
    """Return a call of a handler that may stream its response; an error after the first chunk ends the connection."""
    return HttpStream(
        call.request,
        lambda response: response.answer.content,
        _raise,
        format_whole=lambda response: None if response.answer.is_chunk else call.format_response(response),
    )


def _raise(error: DragomanError) -> bytes:
    raise error


def handler_call(
    http: HttpRequest, policy: Policy, model: str = "", version: str = "", path: str = ""
) -> EngineCall[Handled, HttpResponse]:
    """Return the call of the custom handler for the path of the request, or for `path`, of a model or of any model."""
    call = Handle(
        method=http.method,
        path=path or http.path,
        query=http.query,
        content=bytes(http.body),
        content_type=http.headers.get("content-type", ""),
    )
    metadata = policy.forwarded_headers(http.headers) if policy.forward_headers else {}
    return EngineCall(Request(call, model, version, metadata=metadata), _format_handled)


def _format_handled(response: Response[Handled]) -> HttpResponse:
    handled = response.answer
    if not 200 <= handled.status <= 599:
        raise InvalidOutput(f"the model returned the status {handled.status}; expected 200 to 599")
    content_type = handled.content_type.replace("\r", "").replace("\n", "")
    headers = (("content-type", content_type),) if content_type else ()
    return HttpResponse(handled.status, (handled.content,), headers + check_headers(handled.metadata))


# --- handlers at the paths of protocols ------------------------------------------------------------------------

_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})
_OPEN_INFERENCE = "/v2"


def prefer_handlers(protocols: Sequence[HttpProtocol], policy: Policy, *, needs_keys: bool) -> list[HttpProtocol]:
    """Return the protocols with custom handlers taking precedence over their routes, as in MLServer.

    Paths below /v2 keep their precedence, as they do in MLServer. So do health checks, which are answered beyond the
    limits and without a key. If there are API keys, only routes for the role infer are changed.
    """
    methods: dict[str, set[str]] = defaultdict(set)
    for protocol in protocols:
        for route in filter(_is_outside_open_inference, protocol.routes):
            methods[_path_key(route)].add(route.method)
    extended = []
    for protocol in protocols:
        routes = [
            replace(route, endpoint=partial(_call_handler_or, route.endpoint, frozenset(), policy))
            if _is_outside_open_inference(route) and _may_be_handler(route, needs_keys)
            else route
            for route in protocol.routes
        ]
        for route in filter(_is_outside_open_inference, protocol.routes):
            known = frozenset(methods.pop(_path_key(route), _METHODS))
            endpoint = partial(_call_handler_or, None, known, policy)
            routes += [Route(method, route.pattern, endpoint, role="infer") for method in _METHODS - known]
        extended.append(replace(protocol, routes=tuple(routes)))
    return extended


def _path_key(route: Route) -> str:
    """Return the pattern of a route without the names of its parameters."""
    return re.sub(r"\{.*?\}", "{}", route.pattern)


def _is_outside_open_inference(route: Route) -> bool:
    return route.pattern != _OPEN_INFERENCE and not route.pattern.startswith(f"{_OPEN_INFERENCE}/")


def _may_be_handler(route: Route, needs_keys: bool) -> bool:
    return not (route.health or route.calls_handlers) and (
        route.role == "infer" or not (needs_keys or route.role == "admin")
    )


def _call_handler_or(
    endpoint: Endpoint | None, known: Iterable[str], policy: Policy, http: HttpRequest
) -> PreliminaryCall[tuple[ModelDescription, ...]]:
    """Call the custom handler of a path, else the endpoint of the protocol; 405 if it has none for the method."""

    def choose(response: Response[tuple[ModelDescription, ...]]) -> EndpointResult:
        for described in response.answer:
            if match_handler(described.handlers, http.method, http.path) is not None:
                return handler_call(http, policy)
        if endpoint is None:
            allow = ", ".join(sorted({*known, "OPTIONS"} | ({"HEAD"} if "GET" in known else set())))
            raise HttpError(
                405, f"method {http.method} is not allowed here; expected one of {allow}", (("allow", allow),)
            )
        return endpoint(http)

    return PreliminaryCall(Request(DescribeModels()), choose)


# --- headers that a model sets -------------------------------------------------------------------------------

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)  # RFC 9110, 5.1: a token
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")  # no line break, which would start another header
_RESERVED = re.compile(
    r"(connection|keep-alive|te|trailer|upgrade|transfer-encoding|date|server|content-.*|inference-header-.*|vary)",
    re.ASCII,
)
# gRPC: names that end in -bin have binary values, names that begin with grpc- are reserved.
_METADATA_NAME = re.compile(r"(?!grpc-)[0-9a-z_.-]+(?<!-bin)", re.ASCII)
_METADATA_VALUE = re.compile(r"[\x20-\x7e]*")


def check_headers(metadata: Mapping[str, str]) -> Headers:
    """Return a model's headers with names in lower case, without x-request-id, which the server sends.

    Raises InvalidOutput for one that is invalid or reserved.
    """
    headers = (_check_header(name, value) for name, value in metadata.items())
    return tuple(header for header in headers if header[0] != HEADER)


def check_metadata(metadata: Mapping[str, str]) -> Headers:
    """Return a model's headers as gRPC metadata, whose names and values are more limited."""
    headers = check_headers(metadata)
    for name, value in headers:
        if _METADATA_NAME.fullmatch(name) is None or _METADATA_VALUE.fullmatch(value) is None:
            raise InvalidOutput(f"the model set the header {name[:64]!r}, which is not valid as gRPC metadata")
    return headers


def _check_header(name: str, value: str) -> tuple[str, str]:
    lower = _check_name(name)
    if _VALUE.fullmatch(value) is None:
        raise InvalidOutput(f"the model set the header {name!r} to a value with control characters")
    return lower, value.strip()


@lru_cache(maxsize=256)
def _check_name(name: str) -> str:
    """Return the name in lower case. Raises InvalidOutput if a model may not set it."""
    lower = name.lower()
    if _NAME.fullmatch(lower) is None or _RESERVED.fullmatch(lower) is not None:
        raise InvalidOutput(f"the model set the header {name[:64]!r}, which is not one that a model may set")
    return lower
