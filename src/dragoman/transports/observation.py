"""The record of a request, and what receives it once the response has ended: request logs and traces.

A request has a record only if a log or a trace is on: `Application` and gRPC calls ask `Observation.begin` for it, set
the call of a model that the request makes, and pass it to `Observation.end`. When the call was computed is in
`record.call`, which engine and worker stamp.
"""

from collections.abc import Awaitable, Iterable, Mapping
from time import monotonic
from typing import Any, Protocol

import msgspec

from dragoman.core.calls import Request
from dragoman.core.metrics import Family
from dragoman.protocols.wire import OWN_PAGES, Buffer, Headers, HttpResponse
from dragoman.system.call_times import CallTimes
from dragoman.system.request_context import Context, request_id
from dragoman.system.trace_context import PARENT, Sampler, Trace
from dragoman.system.trace_settings import TraceSettings
from dragoman.transports.response_writer import ForwardingWriter, ResponseWriter

_MAX_NAME = 256  # characters; a body may name a model with a text of many MB, and records are kept
_NO_CALL = CallTimes()  # of requests that make none
# Kinds of requests that machines repeat.
PROBE, SCRAPE = "probes", "scrapes"
_METRICS = "metrics"  # the protocol


class RequestRecord(msgspec.Struct, gc=False):
    """A request and its response. Moments are on the monotonic clock, 0 if unknown; sizes are those of bodies.

    protocol: name of the protocol, "none" if no endpoint has seen the request.
    route: pattern of the path.
    client: address of the client, or of the proxy in front of the server; "" if it is not known.
    key: name of the key, or subject of the token, by which the request was authorized.
    user_agent: what the client says that it is.
    http_version: 1.0, 1.1 or 2; "" for other protocols.
    host: host and port by which the client has named this server; only of a traced request.
    kind: PROBE, SCRAPE or "".
    model, version: of the call, or as the client has named them if it was rejected.
    call: the times of the last call of the engine.
    status: that of HTTP or the name of gRPC's; 0 if the client has disconnected before the response.
    is_rejected: no endpoint has seen it.
    """

    started_s: float
    context: Context
    protocol: str
    method: str
    path: str
    route: str
    received: int
    client: str
    key: str
    user_agent: str
    http_version: str
    call: CallTimes
    trace: Trace | None = None
    host: str = ""
    kind: str = ""
    is_grpc: bool = False
    named_model: str = ""
    named_version: str = ""
    status: int | str = 0
    sent: int = 0
    ended_s: float = 0.0
    is_rejected: bool = False

    def set_call(self, request: Request[Any]) -> None:
        """Record which call the request makes; of several, the last one counts."""
        self.call = request.times
        model, version = request.model, request.version
        self.named_model = model if len(model) <= _MAX_NAME else model[:_MAX_NAME]
        self.named_version = version if len(version) <= _MAX_NAME else version[:_MAX_NAME]

    @property
    def model(self) -> str:
        return self.call.served_by[0] or self.named_model

    @property
    def version(self) -> str:
        return self.call.served_by[1] or self.named_version


class RequestLog(Protocol):
    """Receives the record of each request once its response has ended."""

    def record(self, record: RequestRecord) -> None: ...

    def families(self) -> Iterable[Family]: ...

    def close(self) -> None: ...


class Exporter(Protocol):
    """Exports something other than records of requests, such as log lines."""

    def families(self) -> Iterable[Family]: ...

    def close(self) -> None: ...


class Telemetry(msgspec.Struct, frozen=True):
    """What a feature exports; entry points of the group `dragoman.telemetry` return it for the settings.

    traces: gets the records of the requests that the sampler draws.
    metrics: gets those of all requests.
    logs: exports log lines.
    """

    traces: RequestLog | None = None
    sampler: Sampler | None = None
    metrics: RequestLog | None = None
    logs: Exporter | None = None


class Observation:
    """What is observed of the requests of a server: all by a request log, those that are sampled by a tracer.

    records_all: whether there is a request log.
    """

    def __init__(
        self,
        request_log: RequestLog | None,
        telemetry: Telemetry | None = None,
        settings: TraceSettings | None = None,
    ) -> None:
        telemetry = telemetry or Telemetry()
        self._request_log = request_log
        self.records_all = request_log is not None
        self._sampler = sampler = telemetry.sampler
        self._settings = settings or TraceSettings()
        if sampler is not None:
            self._settings.attach(sampler)
        self._tracer = telemetry.traces
        self._log = (lambda _record: None) if request_log is None else request_log.record
        observers = (request_log, telemetry.traces, telemetry.logs)
        self._observers: list[Exporter] = [observer for observer in observers if observer is not None]

    def ignores(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request is observed by nothing, and count it for the sampler: cheaper than `begin`."""
        sampler = self._sampler
        if self._request_log is not None or (sampler is not None and (sampler.countdown <= 1 or PARENT in headers)):
            return False
        if sampler is not None:
            sampler.countdown -= 1
        return True

    def begin(
        self,
        context: Context,
        protocol: str,
        method: str,
        path: str,
        headers: Mapping[str, str],
        route: str = "",
        received: int = 0,
        client: str = "",
        key: str = "",
        http_version: str = "",
        host: str = "",
        is_health: bool = False,
    ) -> RequestRecord | None:
        """Return the record of a request, None if it is not observed. Its context has the ids of its trace.

        host: by which the client has named the server; by default as its header `host` says.
        """
        sampler, trace = self._sampler, None
        if sampler is not None:
            sampler.countdown -= 1
            if sampler.countdown <= 0 or PARENT in headers:
                trace = sampler.trace(headers, is_health or protocol == OWN_PAGES)
            if trace is not None:
                context = (request_id(context), trace.trace_id, trace.span_id, trace.flags, trace.state)
                host = (host or headers.get("host", ""))[:_MAX_NAME]
        if trace is None:
            if self._request_log is None:
                return None
            host = ""
        agent = headers.get("user-agent", "")
        if len(agent) > _MAX_NAME:
            agent = agent[:_MAX_NAME]
        return RequestRecord(
            monotonic(), context, protocol, method, path, route, received, client, key, agent, http_version,
            _NO_CALL, trace, host, PROBE if is_health else SCRAPE if protocol == _METRICS else "",
        )  # fmt: skip

    def end(self, record: RequestRecord, status: int | str, sent: int) -> None:
        """Pass on the record of a request whose response has ended."""
        record.status, record.sent, record.ended_s = status, sent, monotonic()
        self._log(record)
        trace, tracer = record.trace, self._tracer
        if trace is not None and trace.is_sampled and tracer is not None and self._settings.keeps(record.model, trace):
            tracer.record(record)

    def families(self) -> Iterable[Family]:
        return [family for observer in self._observers for family in observer.families()]

    def close(self) -> None:
        """Write and export what is left, within seconds."""
        for observer in self._observers:
            observer.close()


class RecordingWriter(ForwardingWriter):
    """Records status and size of a response."""

    def __init__(self, writer: ResponseWriter, record: RequestRecord) -> None:
        super().__init__(writer)
        self._record = record

    async def send(self, response: HttpResponse) -> None:
        self._record.status = response.status
        self._record.sent += sum(map(len, response.body))
        await super().send(response)

    async def start(self, status: int, headers: Headers) -> None:
        self._record.status = status
        await super().start(status, headers)

    def write(self, chunk: Buffer) -> Awaitable[None] | None:
        self._record.sent += len(chunk)
        return super().write(chunk)

    async def end(self, chunk: Buffer) -> None:
        self._record.sent += len(chunk)
        await super().end(chunk)
