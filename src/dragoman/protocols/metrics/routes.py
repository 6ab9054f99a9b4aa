"""`GET /metrics`: what the server and its models measure, in the text format of Prometheus (version 0.0.4)."""

from collections.abc import Callable, Iterable, Mapping
from urllib.parse import parse_qs

from dragoman.core.calls import Measure, Request, Response
from dragoman.core.errors import DragomanError, PathNotFound
from dragoman.core.metrics import Family
from dragoman.protocols.metrics import tgi_names
from dragoman.protocols.wire import EngineCall, HttpError, HttpProtocol, HttpRequest, HttpResponse, Policy, Route

_DJL = "/server/metrics"  # where DJL-Serving, which LMI's operators know, tells them
_TYPE = ("content-type", "text/plain; version=0.0.4; charset=utf-8")
_Families = Callable[[Iterable[Family]], Iterable[Family]]
# Other names under which the same may be told, by whose names they are.
_NAMES: Mapping[str, _Families] = {"tgi": tgi_names.families}


def protocol(policy: Policy) -> HttpProtocol:
    """The protocol's table; empty where the operator has switched the path off."""
    paths = dict.fromkeys((policy.metrics_path, _DJL)) if policy.metrics_path else ()
    also = _NAMES.get(policy.metrics_as)

    def metrics(http: HttpRequest) -> EngineCall[tuple[Family, ...], HttpResponse]:
        return _metrics(http, also)

    return HttpProtocol("metrics", tuple(Route("GET", path, metrics) for path in paths), _error)


def _metrics(http: HttpRequest, also: _Families | None) -> EngineCall[tuple[Family, ...], HttpResponse]:
    """All that is measured, or as Prometheus' own servers have it, the families whose names the query gives."""
    wanted = parse_qs(http.query).get("name[]", [])

    def write(response: Response[tuple[Family, ...]]) -> HttpResponse:
        told = response.answer if also is None else (*response.answer, *also(response.answer))
        found = [family for family in told if not wanted or family.name in wanted]
        return HttpResponse(200, ("".join(_lines(found)).encode(),), (_TYPE,))

    return EngineCall(Request(Measure()), write)


def _lines(families: Iterable[Family]) -> Iterable[str]:
    for family in families:
        told = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        yield f"# HELP {family.name} {told}\n# TYPE {family.name} {family.kind}\n"
        for sample in family.samples:
            yield f"{sample.name}{_labels(sample.labels)} {_number(sample.value)}\n"


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_quoted(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _error(fault: DragomanError | HttpError) -> HttpResponse:
    status = fault.status if isinstance(fault, HttpError) else 404 if isinstance(fault, PathNotFound) else 500
    return HttpResponse(status, (fault.message.encode(),), (("content-type", "text/plain"),))
