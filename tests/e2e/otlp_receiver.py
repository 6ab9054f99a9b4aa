"""OpenTelemetry collector for tests: receives traces over OTLP/HTTP and stores their spans."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

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


class OtlpReceiver:
    """Store received spans; respond with `status` after `delay` is set."""

    def __init__(self) -> None:
        self.status = 200
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
        assert path == "/v1/traces"
        body = gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in headers.items()})
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _attributes(group.resource.attributes)
            self.spans += [_span(span, resource) for scope in group.scope_spans for span in scope.spans]

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


@contextmanager
def running_receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    try:
        yield receiver
    finally:
        receiver.close()


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
        return getattr(pair.value, str(pair.value.WhichOneof("value")))

    return {pair.key: value(pair) for pair in pairs}
