"""Log lines of this process for a collector, with the ids of their requests."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from dragoman.core.metrics import Family
from dragoman.system.request_context import log_fields
from dragoman_telemetry.sending import SendQueue, log

_MAX_CHARACTERS: Final = 1 << 16  # of a message, and of a traceback
_SEVERITIES: Final = (
    (logging.CRITICAL, SeverityNumber.FATAL),
    (logging.ERROR, SeverityNumber.ERROR),
    (logging.WARNING, SeverityNumber.WARN),
    (logging.INFO, SeverityNumber.INFO),
    (logging.NOTSET, SeverityNumber.DEBUG),
)
# Loggers of the exporters: a line about a failed export would cause the next export.
_OWN: Final = (log.name, "opentelemetry", "urllib3", "grpc")


class LogExport(logging.Handler):
    """A handler of the root logger, until it is closed."""

    def __init__(self, exporter: Any, resource: Resource) -> None:
        super().__init__()
        self._resource = resource
        self._formatter = logging.Formatter()
        self._queue = SendQueue("logs", exporter, self._convert, "OTEL_BLRP", "Log lines")
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(_OWN):
            return
        try:
            self._queue.put((record, record.getMessage()[:_MAX_CHARACTERS], log_fields()))
        except Exception:
            self.handleError(record)

    def families(self) -> Iterable[Family]:
        """Return the numbers of lines that were exported and dropped."""
        return self._queue.families()

    def close(self) -> None:
        """Export what is queued, for at most 2.5 seconds, and stop."""
        logging.getLogger().removeHandler(self)
        self._queue.close()
        super().close()

    def _convert(self, lines: list[tuple[logging.LogRecord, str, dict[str, str]]]) -> Sequence[ReadableLogRecord]:
        return [
            ReadableLogRecord(self._record(record, message, fields), self._resource, InstrumentationScope(record.name))
            for record, message, fields in lines
        ]

    def _record(self, record: logging.LogRecord, message: str, fields: dict[str, str]) -> LogRecord:
        attributes = {"dragoman.request.id": fields.get("request_id", "")}
        if record.exc_info and record.exc_info[0] is not None:
            trace = self._formatter.formatException(record.exc_info)
            attributes |= {
                "exception.type": record.exc_info[0].__qualname__,
                "exception.message": str(record.exc_info[1])[:_MAX_CHARACTERS],
                "exception.stacktrace": trace[-_MAX_CHARACTERS:],
            }
        nanoseconds = int(record.created * 1e9)
        return LogRecord(
            timestamp=nanoseconds,
            observed_timestamp=nanoseconds,
            context=_span_context(fields),
            severity_text=record.levelname,
            severity_number=next(number for level, number in _SEVERITIES if record.levelno >= level),
            body=message,
            attributes={name: value for name, value in attributes.items() if value},
        )


def _span_context(fields: dict[str, str]) -> Context:
    """Return the context of a traced request, an empty one of another: that of a batch has several."""
    trace_id, span_id = fields.get("trace_id", ""), fields.get("span_id", "")
    if len(trace_id) != 32 or len(span_id) != 16:
        return set_span_in_context(NonRecordingSpan(SpanContext(0, 0, False)), Context())
    span = SpanContext(int(trace_id, 16), int(span_id, 16), False, TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(span), Context())
