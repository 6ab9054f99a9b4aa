"""Metrics of the server and its models in the Prometheus formats, also by the names of other servers."""

from collections.abc import Callable, Iterable
from urllib.parse import parse_qs

from dragoman import plugins
from dragoman.core.calls import Measure, Request, Response
from dragoman.core.errors import DragomanError
from dragoman.core.metrics import Family
from dragoman.protocols.metrics import exposition
from dragoman.protocols.wire import (
    EngineCall,
    ErrorResponses,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    Operation,
    Policy,
    Route,
    error_headers,
    statuses,
)

_TEXT = ("content-type", "text/plain")
_OPERATION = Operation(
    "Export metrics for Prometheus",
    {200: {"text/plain": str, "application/openmetrics-text": str}},
    query={"name[]": {"type": "array", "items": {"type": "string"}}},
)
_Families = Callable[[Iterable[Family]], Iterable[Family]]


def protocol(policy: Policy) -> HttpProtocol:
    errors = ErrorResponses(statuses(), {"text/plain": str})
    return HttpProtocol("metrics", routes(policy, policy.metrics_path), _format_error, errors=errors)


def routes(policy: Policy, path: str) -> tuple[Route, ...]:
    """Return the route of the metrics at a path, none if metrics are disabled."""
    also: _Families | None = plugins.find("metric_names", policy.metrics_as) if policy.metrics_as else None

    def metrics(http: HttpRequest) -> EngineCall[tuple[Family, ...], HttpResponse]:
        return _metrics(http, also)

    route = Route("GET", path, metrics, role="read", is_administrative=True, operation=_OPERATION)
    return (route,) if policy.metrics_path else ()


def _metrics(http: HttpRequest, also: _Families | None) -> EngineCall[tuple[Family, ...], HttpResponse]:
    """Export all metrics, or like Prometheus' own client libraries those named by `name[]` in the query."""
    names = parse_qs(http.query).get("name[]", [])

    def format_response(response: Response[tuple[Family, ...]]) -> HttpResponse:
        exported = response.answer if also is None else (*response.answer, *also(response.answer))
        selected = [family for family in exported if not names or family.name in names]
        text, content_type = exposition.encode(selected, http.headers.get("accept", ""))
        body, is_compressed = exposition.compress(text, http.headers.get("accept-encoding", ""))
        encoding = (("content-encoding", "gzip"),) if is_compressed else ()
        return HttpResponse(200, (body,), (("content-type", content_type), ("vary", "accept-encoding"), *encoding))

    return EngineCall(Request(Measure()), format_response, in_thread=True)


def _format_error(error: DragomanError | HttpError, _request_id: str = "") -> HttpResponse:
    text = error.message.encode(errors="replace")
    if isinstance(error, HttpError):
        return HttpResponse(error.status, (text,), (_TEXT, *error.headers))
    return HttpResponse(error.status, (text,), (_TEXT, *error_headers(error)))
