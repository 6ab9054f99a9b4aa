"""Exporters of OTLP over HTTP or gRPC, and the thread that sends through one of them."""

import importlib
import logging
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.util.re import parse_env_headers

from dragoman._version import __version__
from dragoman.core.errors import public_text
from dragoman.core.metrics import Family, Sample
from dragoman.core.options import collector_headers

log = logging.getLogger("dragoman.tracing")
SCOPE: Final = InstrumentationScope("dragoman", __version__)
_WARN_EVERY_S: Final = 10.0
# How long the last export may take when the server stops, and how long after that its retries are cancelled.
_CLOSING_S: Final = 2.0
_CANCELLED_S: Final = 0.5
_QUERY: Final = re.compile(r"\?[^\s'\")]*")
_EXPORTERS: Final = {
    "traces": ("trace_exporter", "OTLPSpanExporter"),
    "metrics": ("metric_exporter", "OTLPMetricExporter"),
    "logs": ("_log_exporter", "OTLPLogExporter"),
}
Batch = tuple[Any, int]  # what an exporter takes, and the number of requests or log lines in it


def make_exporter(signal: str, protocol: str, endpoint: str) -> Any:
    """Return the exporter of a signal: traces, metrics or logs. protocol: http/protobuf or grpc.

    Endpoint, headers, TLS, compression and timeout are those of OpenTelemetry's variables, for this signal or for all,
    unless `endpoint` is given, the URL of the collector. Raises ModuleNotFoundError if its package is missing.
    """
    is_grpc = protocol == "grpc"
    module, name = _EXPORTERS[signal]
    package = f"opentelemetry.exporter.otlp.proto.{'grpc' if is_grpc else 'http'}"
    path = "" if is_grpc else f"/v1/{signal}"
    return getattr(importlib.import_module(f"{package}.{module}"), name)(
        f"{endpoint.rstrip('/')}{path}" if endpoint else None,
        headers=dict(parse_env_headers(collector_headers(signal), liberal=True)),
    )


class HashedResource(Resource):
    """A resource that is hashed once: the encoders hash it for each span and log line, as JSON."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def make_resource() -> Resource:
    """Return the resource of OpenTelemetry's variables. Unless they say otherwise the service is called dragoman, and
    each process is an instance of it: metrics of two processes are not the same time series.
    """
    found = Resource.create({SERVICE_VERSION: __version__})
    attributes = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not (os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in attributes):
        found = found.merge(Resource({SERVICE_NAME: "dragoman"}))
    if "service.instance.id=" not in attributes:
        found = found.merge(Resource({SERVICE_INSTANCE_ID: secrets.token_hex(16)}))
    return HashedResource(found)


def positive_number(variable: str, default: int) -> int:
    """Return a positive number from OpenTelemetry's variables; an invalid one is logged and ignored."""
    text = os.environ.get(variable, "").strip()
    if not text or (text.isdecimal() and int(text) > 0):
        return int(text or default)
    log.warning("%s: expected a positive integer, got %r; using %d", variable, text, default)
    return default


class Sender:
    """Exports in a thread. Requests never wait for it: what cannot be sent is dropped and counted.

    Parameters
    ----------
    signal : traces, metrics or logs.
    exporter : of OpenTelemetry.
    take : yields the batches that are to be sent now; it runs in the thread.
    interval_s : seconds between two exports.
    counted : what is counted, for the metrics `dragoman_<signal>_exported_total` and `..._dropped_total`.
    """

    def __init__(
        self, signal: str, exporter: Any, take: Callable[[], Iterable[Batch]], interval_s: float, counted: str
    ) -> None:
        self._signal, self._exporter, self._take, self._interval_s = signal, exporter, take, interval_s
        self._counted = counted
        self._exported = self._dropped = 0
        self._warned_s = -_WARN_EVERY_S
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"otlp-{signal}", daemon=True)
        self._filter = _ExporterFilter(self._thread)
        self._loggers = [*_loggers_of(exporter)]
        for logger in self._loggers:
            logger.addFilter(self._filter)
        self._thread.start()

    def wake(self) -> None:
        """Export now."""
        self._wake.set()

    def drop(self, count: int = 1) -> None:
        """Count what cannot be sent."""
        self._dropped += count

    def families(self) -> Iterable[Family]:
        for name, line, value in (
            (f"dragoman_{self._signal}_exported_total", f"{self._counted} sent to the collector.", self._exported),
            (f"dragoman_{self._signal}_dropped_total", f"{self._counted} that could not be sent.", self._dropped),
        ):
            yield Family(name, "counter", line, (Sample(name, {}, value),))

    def close(self) -> None:
        """Export what is left, for at most 2.5 seconds, and stop."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(_CLOSING_S)
        self._exporter.shutdown()  # ends the pause before a retry
        self._thread.join(_CANCELLED_S)
        for logger in self._loggers:
            logger.removeFilter(self._filter)

    # --- in the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            self._send_all()

    def _send_all(self) -> None:
        try:
            for data, count in self._take():
                self._export(data, count)
        except BaseException as error:  # what is exported must never end this thread
            self._warn(public_text(error))

    def _export(self, data: Any, count: int) -> None:
        self._filter.reason = "unknown"
        try:
            is_exported = self._exporter.export(data).name == "SUCCESS"
            reason = self._filter.reason
        except BaseException as error:
            is_exported, reason = False, public_text(error)
        if is_exported:
            self._exported += count
            return
        self._dropped += count
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            log.warning("%s cannot be exported: %s; dropped=%d", self._signal, _QUERY.sub("", reason), self._dropped)


class SendQueue:
    """A bounded queue of items in front of a `Sender`.

    Its size, the size of batches and the time between exports are those of OpenTelemetry's variables with this prefix:
    OTEL_BSP for traces, OTEL_BLRP for logs. `convert` makes what the exporter takes of a batch, in the thread.
    """

    def __init__(
        self, signal: str, exporter: Any, convert: Callable[[list[Any]], Sequence[Any]], prefix: str, counted: str
    ) -> None:
        self._convert = convert
        self._max_queued = positive_number(f"{prefix}_MAX_QUEUE_SIZE", 2048)
        self._max_batch = positive_number(f"{prefix}_MAX_EXPORT_BATCH_SIZE", 512)
        default_ms = 5000 if prefix == "OTEL_BSP" else 1000
        interval_s = positive_number(f"{prefix}_SCHEDULE_DELAY", default_ms) / 1000
        self._queue: deque[Any] = deque()
        self._sender = Sender(signal, exporter, self._take, interval_s, counted)
        self.families, self.close = self._sender.families, self._sender.close

    def put(self, item: Any) -> None:
        """Add an item; it is dropped if the queue is full."""
        queued = len(self._queue)
        if queued >= self._max_queued:
            self._sender.drop()
            return
        self._queue.append(item)
        if queued + 1 == self._max_batch:
            self._sender.wake()

    def _take(self) -> Iterator[Batch]:
        while self._queue:
            items = [self._queue.popleft() for _ in range(min(self._max_batch, len(self._queue)))]
            try:
                converted = self._convert(items)
            except BaseException:
                self._sender.drop(len(items))
                raise
            yield converted, len(items)


def _loggers_of(exporter: Any) -> Iterator[logging.Logger]:
    """Yield the loggers to which an exporter may write."""
    module = type(exporter).__module__
    names = {module, module.rpartition(".")[0] + ".exporter", module.rpartition(".")[0] + "._common"}
    return map(logging.getLogger, names)


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
