"""The spans of traced requests."""

from collections.abc import Iterator
from typing import Any, Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from dragoman.system.call_times import CallTimes
from dragoman.system.request_context import request_id
from dragoman.system.trace_context import Trace, new_span_id
from dragoman.transports.observation import RequestRecord
from dragoman_telemetry.attributes import (
    gen_ai_attributes,
    is_server_error,
    known_method,
    operation_of,
    split_host,
)
from dragoman_telemetry.sending import SCOPE

_MAX_PATH: Final = 1024
Attributes = dict[str, Any]


def spans_of(record: RequestRecord, resource: Resource, scheme: str, clock_s: float) -> Iterator[ReadableSpan]:
    """Yield the spans of a traced request, its own first. `clock_s` is the time of day when the monotonic clock was 0.

    scheme: http or https.
    """
    trace = record.trace
    assert trace is not None, "only traced requests are recorded"
    maker = _SpanMaker(trace, resource, clock_s)
    is_error = is_server_error(record)
    status = Status(StatusCode.ERROR if is_error else StatusCode.UNSET)
    yield maker.span(
        _name(record),
        (trace.span_id, trace.parent_id),
        (record.started_s, record.ended_s),
        _attributes(record, scheme, is_error),
        SpanKind.SERVER,
        status,
    )
    if record.is_rejected:
        return
    call, parent_id = record.call, trace.span_id
    yield maker.child("parse", parent_id, record.started_s, call.arrived_s or record.ended_s)
    if not call.arrived_s:  # it was not accepted
        return
    if call.tokens is not None:
        parent_id = new_span_id()
        name = f"{operation_of(call.tokens)} {record.model}"
        attributes = gen_ai_attributes(record, call.tokens)
        moments_s = call.arrived_s, max(call.ended_s, call.computed_s)
        yield maker.span(name, (parent_id, trace.span_id), moments_s, attributes, status=status)
    yield from maker.call_spans(call, parent_id, _first_chunk(record))
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
        self._contexts: dict[str, SpanContext] = {}

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
            instrumentation_scope=SCOPE,
        )

    def _context(self, span_id: str) -> SpanContext:
        found = self._contexts.get(span_id)
        if found is None:
            is_remote = span_id == self._remote_id
            found = SpanContext(self._trace_id, int(span_id, 16), is_remote, self._flags, self._state)
            self._contexts[span_id] = found
        return found


def _name(record: RequestRecord) -> str:
    """Return the name of a request's span: of few different ones, so without the path."""
    if record.is_grpc:
        return record.path.lstrip("/") if record.protocol != "none" else "_OTHER"
    method = record.method if known_method(record) != "_OTHER" else "HTTP"
    return f"{method} {record.route}" if record.route else method


def _attributes(record: RequestRecord, scheme: str, is_error: bool) -> Attributes:
    """Return the attributes of a request's span: no query, no content, and no headers but `User-Agent` and `Host`."""
    server_address, server_port = split_host(record.host)
    found: Attributes = {
        "client.address": record.client,
        "server.address": server_address,
        "server.port": server_port,
        "user_agent.original": record.user_agent,
        "network.protocol.name": "http" if record.http_version else "",
        "network.protocol.version": record.http_version,
        "dragoman.key": record.key,
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
        method = known_method(record)
        found |= {
            "http.request.method": method if record.method else "",
            "http.request.method_original": record.method if method == "_OTHER" else "",
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
