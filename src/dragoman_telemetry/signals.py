"""Starts what is exported: traces, metrics and logs."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from dragoman.core.metrics import Family
from dragoman.system.trace_context import Sampler
from dragoman.transports.observation import RequestRecord, Telemetry
from dragoman_telemetry.sending import SendQueue, make_exporter, make_resource
from dragoman_telemetry.spans import spans_of


class Tracer:
    """A request log that exports the spans of the requests that it gets. scheme: http or https."""

    def __init__(self, exporter: Any, resource: Resource, scheme: str) -> None:
        self._resource, self._scheme = resource, scheme
        self._queue = SendQueue("traces", exporter, self._convert, "OTEL_BSP", "Traced requests")
        self.close = self._queue.close

    def record(self, record: RequestRecord) -> None:
        self._queue.put(record)

    def families(self) -> Iterable[Family]:
        return self._queue.families()

    def _convert(self, records: list[RequestRecord]) -> Sequence[ReadableSpan]:
        clock_s = time.time() - time.monotonic()
        return [span for record in records for span in spans_of(record, self._resource, self._scheme, clock_s)]


def start(protocols: Mapping[str, str], endpoint: str, scheme: str, sampler: Sampler | None) -> Telemetry:
    """Start to export each signal by its protocol. endpoint: of the collector, "" for those of the variables.

    Raises ModuleNotFoundError if the package of an exporter is missing.
    """
    exporters = {signal: make_exporter(signal, protocol, endpoint) for signal, protocol in protocols.items()}
    resource = make_resource()
    traces = metrics = logs = None
    if "traces" in exporters:
        traces = Tracer(exporters["traces"], resource, scheme)
    if "metrics" in exporters:
        from dragoman_telemetry.metrics import RequestMetrics

        metrics = RequestMetrics(exporters["metrics"], resource, scheme)
    if "logs" in exporters:
        from dragoman_telemetry.logs import LogExport

        # Of several servers in a process, one exports the log lines, which are those of all.
        if not any(isinstance(handler, LogExport) for handler in logging.getLogger().handlers):
            logs = LogExport(exporters["logs"], resource)
    return Telemetry(traces, sampler, metrics, logs)
