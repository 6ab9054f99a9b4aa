"""`GET /metrics`: metrics of the server and its models in the Prometheus text format, version 0.0.4."""

from collections.abc import Callable, Iterable, Mapping
from urllib.parse import parse_qs

from dragoman.core.calls import Measure, Request, Response
from dragoman.core.errors import DragomanError, PathNotFound
from dragoman.core.metrics import Family
from dragoman.protocols.metrics import tgi_names
from dragoman.protocols.wire import EngineCall, HttpError, HttpProtocol, HttpRequest, HttpResponse, Policy, Route

_DJL = "/server/metrics"  # the path in DJL-Serving, on which LMI runs
_TYPE = ("content-type", "text/plain; version=0.0.4; charset=utf-8")
_Families = Callable[[Iterable[Family]], Iterable[Family]]
# Further metrics under the names of other servers, by `metrics_as`.
_NAMES: Mapping[str, _Families] = {"tgi": tgi_names.families}


def protocol(policy: Policy) -> HttpProtocol:
    """Return the routes of the protocol, none if metrics are disabled."""
    paths = dict.fromkeys((policy.metrics_path, _DJL)) if policy.metrics_path else ()
    also = _NAMES.get(policy.metrics_as)

    def metrics(http: HttpRequest) -> EngineCall[tuple[Family, ...], HttpResponse]:
        return _metrics(http, also)

    return HttpProtocol("metrics", tuple(Route("GET", path, metrics) for path in paths), _format_error)


def _metrics(http: HttpRequest, also: _Families | None) -> EngineCall[tuple[Family, ...], HttpResponse]:
    """Export all metrics, or like Prometheus' own client libraries those named by `name[]` in the query."""
    names = parse_qs(http.query).get("name[]", [])

    def format_response(response: Response[tuple[Family, ...]]) -> HttpResponse:
        exported = response.answer if also is None else (*response.answer, *also(response.answer))
        selected = [family for family in exported if not names or family.name in names]
        return HttpResponse(200, ("".join(_lines(selected)).encode(),), (_TYPE,))

    return EngineCall(Request(Measure()), format_response)


def _lines(families: Iterable[Family]) -> Iterable[str]:
    for family in families:
        help_text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        yield f"# HELP {family.name} {help_text}\n# TYPE {family.name} {family.kind}\n"
        for sample in family.samples:
            yield f"{sample.name}{_labels(sample.labels)} {_number(sample.value)}\n"


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _format_error(error: DragomanError | HttpError) -> HttpResponse:
    status = error.status if isinstance(error, HttpError) else 404 if isinstance(error, PathNotFound) else 500
    return HttpResponse(status, (error.message.encode(),), (("content-type", "text/plain"),))
