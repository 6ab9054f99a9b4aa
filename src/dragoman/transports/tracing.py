"""Export the spans of sampled requests over OTLP/HTTP; the only module that imports OpenTelemetry."""

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.re import parse_env_headers

from dragoman._version import __version__
from dragoman.core.errors import public_text
from dragoman.core.metrics import Family, Sample
from dragoman.core.options import collector_headers
from dragoman.system.call_times import CallTimes
from dragoman.system.request_context import request_id
from dragoman.system.trace_context import Trace, new_span_id
from dragoman.transports.observation import RequestRecord

log = logging.getLogger("dragoman.tracing")
_EXPORTER_LOG: Final = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
_WARN_EVERY_S: Final = 10.0
# How long the last export may take when the server stops, and how long after that its retries are cancelled.
_CLOSING_S: Final = 2.0
_CANCELLED_S: Final = 0.5
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY"))
# Statuses of gRPC that are errors of the server by OpenTelemetry's conventions.
_SERVER_ERRORS: Final = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
_SCOPE: Final = InstrumentationScope("dragoman", __version__)
_MAX_PATH: Final = 1024
_QUERY: Final = re.compile(r"\?[^\s'\")]*")
Attributes = dict[str, Any]


class Tracer:
    """Exports the spans of requests in a thread.

    Requests never wait for it: those for which the queue has no room, or whose export fails, are dropped and counted.
    Endpoint, headers, TLS, compression and timeout are those of OpenTelemetry's variables unless `endpoint` is given.

    Parameters
    ----------
    endpoint : base URL of the collector, or "".
    scheme : http or https, of the requests.
    """

    def __init__(self, endpoint: str, scheme: str) -> None:
        self._scheme = scheme
        headers = parse_env_headers(collector_headers(), liberal=True)
        self._exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None, headers=headers)
        self._resource = _make_resource()
        self._max_queued = _number("OTEL_BSP_MAX_QUEUE_SIZE", 2048)
        self._max_batch = _number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)
        self._interval_s = _number("OTEL_BSP_SCHEDULE_DELAY", 5000) / 1000
        self._queue: deque[RequestRecord] = deque()
        self._exported = self._dropped = 0
        self._warned_s = -_WARN_EVERY_S
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._filter = _ExporterFilter(self._thread)
        _EXPORTER_LOG.addFilter(self._filter)
        self._thread.start()

    def record(self, record: RequestRecord) -> None:
        queued = len(self._queue)
        if queued >= self._max_queued:
            self._dropped += 1
            return
        self._queue.append(record)
        if queued + 1 == self._max_batch:
            self._wake.set()

    def families(self) -> Iterable[Family]:
        for name, line, value in (
            ("dragoman_traces_exported_total", "Traced requests that were sent to the collector.", self._exported),
            ("dragoman_traces_dropped_total", "Traced requests that could not be sent.", self._dropped),
        ):
            yield Family(name, "counter", line, (Sample(name, {}, value),))

    def close(self) -> None:
        """Export what is queued, for at most 2.5 seconds, and stop."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(_CLOSING_S)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # ends the pause before a retry
        self._thread.join(_CANCELLED_S)
        _EXPORTER_LOG.removeFilter(self._filter)

    # --- in the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            while self._queue:
                self._export([self._queue.popleft() for _ in range(min(self._max_batch, len(self._queue)))])

    def _export(self, records: list[RequestRecord]) -> None:
        clock_s = time.time() - time.monotonic()
        self._filter.reason = "unknown"
        try:
            spans = [span for record in records for span in self._spans(record, clock_s)]
            is_exported = self._exporter.export(spans) is SpanExportResult.SUCCESS
            reason = self._filter.reason
        except BaseException as error:  # spans must never end this thread
            is_exported, reason = False, public_text(error)
        if is_exported:
            self._exported += len(records)
            return
        self._dropped += len(records)
        now_s = time.monotonic()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            log.warning("traces cannot be exported: %s; dropped=%d", _QUERY.sub("", reason), self._dropped)

    def _spans(self, record: RequestRecord, clock_s: float) -> Iterator[ReadableSpan]:
        trace = record.trace
        assert trace is not None, "only traced requests are recorded"
        maker = _SpanMaker(trace, self._resource, clock_s)
        is_error = str(record.status) in _SERVER_ERRORS if record.is_grpc else int(record.status) >= 500
        yield maker.span(
            _name(record),
            (trace.span_id, trace.parent_id),
            (record.started_s, record.ended_s),
            _attributes(record, self._scheme, is_error),
            SpanKind.SERVER,
            Status(StatusCode.ERROR if is_error else StatusCode.UNSET),
        )
        if record.is_rejected:
            return
        call = record.call
        yield maker.child("parse", trace.span_id, record.started_s, call.arrived_s or record.ended_s)
        if not call.arrived_s:  # it was not accepted
            return
        yield from maker.call_spans(call, trace.span_id, _first_chunk(record))
        if call.ended_s and not call.first_chunk_s:  # the chunks of a stream are formatted one by one
            yield maker.child("format", trace.span_id, call.ended_s, record.ended_s)


class _SpanMaker:
    """Makes the spans of one trace. `clock_s` is the time of day when the monotonic clock was 0."""

    def __init__(self, trace: Trace, resource: Resource, clock_s: float) -> None:
        self._trace_id = int(trace.trace_id, 16)
        self._flags = TraceFlags(int(trace.flags, 16))
        self._state = TraceState.from_header([trace.state]) if trace.state else TraceState()
        self._resource = resource
        self._clock_s = clock_s
        self._remote_id = trace.parent_id

    def call_spans(
        self, times: CallTimes, parent_id: str, attributes: Attributes | None = None
    ) -> Iterator[ReadableSpan]:
        """Yield the spans queue, batch and compute of a call that has ended, and those of the calls that it made.

        An answer from a cache has none. queue and compute last as long as in all other channels.
        """
        if not times.started_s:
            return
        begun_s = times.arrived_s + times.queue_s
        if begun_s > times.arrived_s:
            yield self.child("queue", parent_id, times.arrived_s, begun_s)
        if times.batch is not None:
            reason, calls, rows = times.batch
            batch = {"dragoman.batch.reason": reason, "dragoman.batch.calls": calls, "dragoman.batch.rows": rows}
            span_id = new_span_id()
            yield self.span("batch", (span_id, parent_id), (begun_s, max(times.ended_s, times.computed_s)), batch)
            parent_id = span_id
        compute_id = new_span_id()
        yield self.span("compute", (compute_id, parent_id), (begun_s, begun_s + times.compute_s), attributes or {})
        for call in times.nested or ():
            if call.arrived_s and call.ended_s:
                call_id, (name, version) = new_span_id(), call.served_by
                model = {"dragoman.model.name": name, "dragoman.model.version": version}
                yield self.span(f"call {name}", (call_id, compute_id), (call.arrived_s, call.ended_s), model)
                yield from self.call_spans(call, call_id)

    def child(self, name: str, parent_id: str, started_s: float, ended_s: float) -> ReadableSpan:
        return self.span(name, (new_span_id(), parent_id), (started_s, ended_s), {})

    def span(
        self,
        name: str,
        ids: tuple[str, str],
        moments_s: tuple[float, float],
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status = Status(StatusCode.UNSET),  # noqa: B008 - immutable
    ) -> ReadableSpan:
        """Return a span with its own id and that of its parent, on the monotonic clock."""
        own, parent = ids
        start_ns, end_ns = (int((self._clock_s + moment_s) * 1e9) for moment_s in moments_s)
        return ReadableSpan(
            name,
            self._context(own),
            self._context(parent) if parent else None,
            self._resource,
            {key: value for key, value in attributes.items() if value != ""},
            kind=kind,
            status=status,
            start_time=start_ns,
            end_time=max(start_ns, end_ns),
            instrumentation_scope=_SCOPE,
        )

    def _context(self, span_id: str) -> SpanContext:
        return SpanContext(self._trace_id, int(span_id, 16), span_id == self._remote_id, self._flags, self._state)


class _ExporterFilter(logging.Filter):
    """Keeps the log lines of the exporter in our thread as the reason of a warning; there may be many of them."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__()
        self._thread = thread
        self.reason = "unknown"

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread.ident:
            return True
        message = record.getMessage()
        # The text after the cause only says that no retries are left.
        if message.startswith("Transient error") or not self.reason.startswith("Transient error"):
            self.reason = message
        return False


def _name(record: RequestRecord) -> str:
    """Return the name of a request's span: of few different ones, so without the path."""
    if record.is_grpc:
        return record.path.lstrip("/") if record.protocol != "none" else "_OTHER"
    method = record.method if record.method in _METHODS else "HTTP"
    return f"{method} {record.route}" if record.route else method


def _attributes(record: RequestRecord, scheme: str, is_error: bool) -> Attributes:
    """Return the attributes of a request's span: no headers, no query and no content."""
    found: Attributes = {
        "dragoman.request.id": request_id(record.context),
        "dragoman.protocol": record.protocol,
        "dragoman.model.name": record.model,
        "dragoman.model.version": record.version,
    }
    if record.is_grpc:
        found |= {
            "rpc.system": "grpc",
            "rpc.system.name": "grpc",
            "rpc.method": _name(record),
            "rpc.method_original": "" if record.protocol != "none" else record.path[:_MAX_PATH],
            "rpc.response.status_code": record.status,
            "dragoman.request.size": record.received,
            "dragoman.response.size": record.sent,
        }
    else:
        is_known = record.method in _METHODS
        found |= {
            "http.request.method": record.method if is_known else "_OTHER" if record.method else "",
            "http.request.method_original": "" if is_known else record.method,
            "http.route": record.route,
            "url.scheme": scheme,
            "url.path": record.path[:_MAX_PATH],
            "http.response.status_code": record.status or "",
            "http.request.body.size": record.received,
            "http.response.body.size": record.sent,
        }
    return {**found, "error.type": str(record.status)} if is_error else found


def _first_chunk(record: RequestRecord) -> Attributes:
    first_s = record.call.first_chunk_s
    return {"dragoman.time_to_first_chunk_s": first_s - record.started_s} if first_s else {}


def _make_resource() -> Resource:
    """Return the resource of OpenTelemetry's variables; the service is called dragoman unless they name it."""
    found = Resource.create({SERVICE_VERSION: __version__})
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return found if named else found.merge(Resource({SERVICE_NAME: "dragoman"}))


def _number(variable: str, default: int) -> int:
    """Return a positive number from OpenTelemetry's variables; an invalid one is logged and ignored."""
    text = os.environ.get(variable, "").strip()
    if not text or (text.isdecimal() and int(text) > 0):
        return int(text or default)
    log.warning("%s: expected a positive integer, got %r; using %d", variable, text, default)
    return default
