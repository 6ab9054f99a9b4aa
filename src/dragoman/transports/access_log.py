"""The access log: one line for each request, written by a thread."""

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

from dragoman.core.errors import InvalidInput
from dragoman.core.metrics import Family, Sample
from dragoman.system.request_context import PREFIX, values
from dragoman.transports.observation import Exchange

log = logging.getLogger("dragoman.access_log")
_STANDARD_OUTPUT: Final = "-"
_MAX_QUEUED: Final = 20_000
_INTERVAL_S: Final = 0.2
_WARN_EVERY_S: Final = 10.0
_Record = tuple[Any, ...]


class AccessLog:
    """Writes exchanges to a file, "-" for standard output.

    Requests never wait for it: lines that cannot be written, or for which the queue has no room, are dropped and
    counted. A file that was moved or deleted, as by logrotate, is opened anew.

    Raises InvalidInput if the file cannot be opened.
    """

    def __init__(self, path: str, style: str) -> None:
        self._path = path
        self._style = _JSON if style == "json" else _TEXT
        self._queue: deque[_Record] = deque()
        self._lines = self._dropped = 0
        self._warned_s = -_WARN_EVERY_S
        self._is_closed = threading.Event()
        self._file = -1
        try:
            self._open()
        except OSError as error:
            raise InvalidInput(f"setting 'access_log': cannot open '{path}': {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def record(self, exchange: Exchange) -> None:
        if len(self._queue) < _MAX_QUEUED:
            # A tuple of plain values costs the garbage collector nothing while it waits.
            e = exchange
            self._queue.append(
                (
                    e.started_s,
                    e.context,
                    (e.protocol, e.method, e.path, e.model, e.version, e.status),
                    e.received,
                    e.sent,
                    e.queue_s,
                    e.responded_s - e.engine_s if e.responded_s else 0.0,
                    e.ended_s - e.started_s,
                )
            )
        else:
            self._dropped += 1

    def families(self) -> Iterable[Family]:
        for name, line, value in (
            ("dragoman_access_log_lines_total", "Lines written to the access log.", self._lines),
            ("dragoman_access_log_dropped_total", "Lines that could not be written to the access log.", self._dropped),
        ):
            yield Family(name, "counter", line, (Sample(name, {}, value),))

    def close(self) -> None:
        """Write what is queued and stop."""
        self._is_closed.set()
        self._thread.join(2.0)

    # --- in the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed.wait(_INTERVAL_S):
            self._flush()
        self._flush()
        if self._path != _STANDARD_OUTPUT and self._file >= 0:
            os.close(self._file)

    def _flush(self) -> None:
        exchanges = [self._queue.popleft() for _ in range(len(self._queue))]
        if not exchanges:
            return
        clock_s = time.time() - time.monotonic()
        data = "".join([_format(self._style, each, clock_s) for each in exchanges]).encode(errors="replace")
        try:
            self._reopen_if_moved()
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
            self._lines += len(exchanges)
        except OSError as error:
            self._dropped += len(exchanges)
            now_s = time.monotonic()
            if now_s - self._warned_s >= _WARN_EVERY_S:
                self._warned_s = now_s
                log.warning("access log cannot be written: %s; dropped=%d", error.strerror, self._dropped)

    def _open(self) -> None:
        if self._path == _STANDARD_OUTPUT:
            self._file = sys.__stdout__.fileno() if sys.__stdout__ is not None else 1
        else:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _reopen_if_moved(self) -> None:
        if self._path == _STANDARD_OUTPUT:
            return
        try:
            is_same = os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            is_same = False
        if not is_same:
            before = self._file
            self._open()  # first: without a file of its own, the number could soon be that of a connection
            os.close(before)


class _Style(NamedTuple):
    """How a line is formatted: the whole, a field in it, what separates fields, and the field of a generated id."""

    line: str
    field: str
    separator: str
    generated_id: str


# Filling in a string takes a third of the time of `json.dumps` for the whole line. Numbers look the same in both.
_JSON: Final = _Style(
    '{"time": "%s.%03dZ", %s, %s, "received_bytes": %d, "sent_bytes": %d, "queue_ms": %r, "compute_ms": %r, '
    '"total_ms": %r}\n',
    '"%s": %s',
    ", ",
    f'"request_id": "{PREFIX.decode()}%d"',
)
# JSON's escapes keep a path with line breaks or quotation marks within its line and its quotation marks.
_TEXT: Final = _Style(
    'time="%s.%03dZ" %s %s received_bytes=%d sent_bytes=%d queue_ms=%r compute_ms=%r total_ms=%r\n',
    "%s=%s",
    " ",
    f'request_id="{PREFIX.decode()}%d"',
)
_SUBJECT: Final = ("protocol", "method", "path", "model", "version", "status")
# Longer paths are not cached, so that clients cannot fill the memory with them.
_MAX_CACHED_PATH: Final = 256


def _format(style: _Style, record: _Record, clock_s: float) -> str:
    """Return a line. `clock_s` is the time of day when the monotonic clock was 0."""
    started_s, context, subject, received, sent, queue_s, engine_s, total_s = record
    milliseconds = int((clock_s + started_s) * 1000)
    if type(context) is int:
        ids = style.generated_id % context
    else:
        ids = _format_fields(style, ("request_id", "trace_id"), values(context)[:2])
    format_subject = _format_cached if len(subject[2]) <= _MAX_CACHED_PATH else _format_fields
    return style.line % (
        _format_second(milliseconds // 1000),
        milliseconds % 1000,
        ids,
        format_subject(style, _SUBJECT, subject),
        received,
        sent,
        _milliseconds(queue_s),
        _milliseconds(engine_s - queue_s) if engine_s > queue_s else 0.0,
        _milliseconds(total_s),
    )


def _milliseconds(seconds: float) -> float:
    """Return a time of at least 0 rounded to microseconds; `round` takes three times as long."""
    return int(seconds * 1e6 + 0.5) / 1e3


def _format_fields(style: _Style, names: tuple[str, ...], found: tuple[str | int, ...]) -> str:
    return style.separator.join([style.field % (name, json.dumps(v)) for name, v in zip(names, found, strict=False)])


_format_cached: Final = lru_cache(maxsize=1024)(_format_fields)


@lru_cache(maxsize=2)
def _format_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
