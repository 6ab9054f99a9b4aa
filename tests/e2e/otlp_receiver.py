"""OpenTelemetry collector for tests: receives traces, metrics and logs over OTLP, by HTTP and by gRPC."""

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from e2e.server_process import wait_until

SERVER = trace_pb2.Span.SPAN_KIND_SERVER


class Span(NamedTuple):
    """A received span; ids are hexadecimal, times in nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    attributes: dict[str, Any]
    state: str
    is_error: bool
    resource: dict[str, Any]


class LogLine(NamedTuple):
    """A received log line."""

    body: str
    severity: int
    logger: str
    trace_id: str
    span_id: str
    attributes: dict[str, Any]
    time: int


@dataclass(frozen=True)
class Point:
    """A received point of a metric: of a histogram its count, sum and buckets, of a counter its value as sum."""

    attributes: dict[str, Any]
    count: int
    sum: float
    buckets: list[int]
    bounds: list[float]
    unit: str
    start: int
    temporality: int


DELTA, CUMULATIVE = 1, 2


class OtlpReceiver:
    """Store received spans, metrics and log lines; respond with `status` after `respond` is set."""

    def __init__(self) -> None:
        self.status = 200
        self.logs: list[LogLine] = []
        self.metrics: list[dict[str, list[Point]]] = []  # of each export
        self.resources: list[dict[str, Any]] = []  # of metrics
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.spans: list[Span] = []
        self.respond = threading.Event()
        self.respond.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.receive(self.path, dict(self.headers.items()), body)
                receiver.respond.wait()
                self.send_response(receiver.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def receive(self, path: str, headers: dict[str, str], body: bytes) -> None:
        body = gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in headers.items()})
        match path:
            case "/v1/traces":
                self.take_spans(ExportTraceServiceRequest.FromString(body))
            case "/v1/metrics":
                self.take_metrics(metrics_service_pb2.ExportMetricsServiceRequest.FromString(body))
            case "/v1/logs":
                self.take_logs(logs_service_pb2.ExportLogsServiceRequest.FromString(body))
            case _:
                raise AssertionError(path)

    def take_spans(self, request: ExportTraceServiceRequest) -> None:
        for group in request.resource_spans:
            resource = _attributes(group.resource.attributes)
            self.spans += [_span(span, resource) for scope in group.scope_spans for span in scope.spans]

    def take_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        found: dict[str, list[Point]] = {}
        for group in request.resource_metrics:
            self.resources.append(_attributes(group.resource.attributes))
            for metric in (metric for scope in group.scope_metrics for metric in scope.metrics):
                data = getattr(metric, metric.WhichOneof("data") or "")
                found[metric.name] = [_point(point, metric.unit, data) for point in data.data_points]
        self.metrics.append(found)

    def take_logs(self, request: logs_service_pb2.ExportLogsServiceRequest) -> None:
        for scope in (scope for group in request.resource_logs for scope in group.scope_logs):
            self.logs += [
                LogLine(
                    line.body.string_value,
                    line.severity_number,
                    scope.scope.name,
                    line.trace_id.hex(),
                    line.span_id.hex(),
                    _attributes(line.attributes),
                    line.time_unix_nano,
                )
                for line in scope.log_records
            ]

    def points(self, name: str, **attributes: Any) -> list[Point]:
        """Wait for points of a metric with these attributes, in which `_` stands for `.`; return those of the last
        export."""

        def found() -> list[Point]:
            points: list[Point] = next((each[name] for each in reversed(self.metrics) if name in each), [])
            return [
                point
                for point in points
                if {key.replace(".", "_"): value for key, value in point.attributes.items()}.items()
                >= attributes.items()
            ]

        return wait_until(found, f"{name} {attributes}") or []

    def line(self, text: str) -> LogLine:
        """Wait for a log line with this text."""
        return wait_until(lambda: next((line for line in self.logs if text in line.body), None), text)  # type: ignore[return-value]

    def trace(self, trace_id: str, count: int) -> list[Span]:
        """Wait for this number of spans of a trace, with their parents; return them in the order of their start."""

        def found() -> list[Span] | None:
            spans = [span for span in self.spans if span.trace_id == trace_id]
            ids = {span.span_id for span in spans}  # one request may be sent in two parts
            has_parents = all(span.kind == SERVER or span.parent_id in ids for span in spans)
            return spans if has_parents and len(spans) >= count else None

        return sorted(wait_until(found, f"{count} spans") or (), key=lambda span: (span.start, -span.end))

    def close(self) -> None:
        self.respond.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class GrpcReceiver(OtlpReceiver):
    """The same over gRPC; its `url` is that of the gRPC port."""

    def __init__(self) -> None:
        super().__init__()
        receiver = self

        class Traces(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
                receiver.headers.append({name: str(value) for name, value in context.invocation_metadata()})
                receiver.take_spans(request)
                return trace_service_pb2.ExportTraceServiceResponse()

        class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
                receiver.take_metrics(request)
                return metrics_service_pb2.ExportMetricsServiceResponse()

        class Logs(logs_service_pb2_grpc.LogsServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
                receiver.take_logs(request)
                return logs_service_pb2.ExportLogsServiceResponse()

        self._grpc = grpc.server(ThreadPoolExecutor(3))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), self._grpc)  # type: ignore[no-untyped-call]
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), self._grpc)  # type: ignore[no-untyped-call]
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server(Logs(), self._grpc)  # type: ignore[no-untyped-call]
        port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._grpc.start()
        self.url = f"http://127.0.0.1:{port}"

    def close(self) -> None:
        super().close()
        self._grpc.stop(0).wait()


@contextmanager
def running_receiver(kind: type[OtlpReceiver] = OtlpReceiver) -> Iterator[OtlpReceiver]:
    receiver = kind()
    try:
        yield receiver
    finally:
        receiver.close()


def exported(receiver: OtlpReceiver) -> dict[str, str]:
    """Return the variables with which a server exports everything to a receiver."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc" if isinstance(receiver, GrpcReceiver) else "http/protobuf",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-collector-key=tulip",
        "OTEL_METRICS_EXPORTER": "otlp",
        "OTEL_LOGS_EXPORTER": "otlp",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_METRIC_EXPORT_INTERVAL": "50",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "OTEL_BLRP_SCHEDULE_DELAY": "50",
    }


def _point(point: Any, unit: str, data: Any) -> Point:
    is_histogram = hasattr(point, "bucket_counts")
    value = point.sum if is_histogram else point.as_int or point.as_double
    buckets = [*point.bucket_counts] if is_histogram else []
    bounds = [*point.explicit_bounds] if is_histogram else []
    count = point.count if is_histogram else 0
    start = point.start_time_unix_nano
    return Point(
        _attributes(point.attributes), count, value, buckets, bounds, unit, start, data.aggregation_temporality
    )


def _span(span: trace_pb2.Span, resource: dict[str, Any]) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        span.trace_state,
        span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    def value(pair: KeyValue) -> Any:
        kind = str(pair.value.WhichOneof("value"))
        if kind == "array_value":
            return [getattr(each, str(each.WhichOneof("value"))) for each in pair.value.array_value.values]
        return getattr(pair.value, kind)

    return {pair.key: value(pair) for pair in pairs}
