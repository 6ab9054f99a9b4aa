"""The access log: one line for each request, written by a thread."""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Set
from functools import lru_cache
from typing import Any, Final, NamedTuple

from dragoman.core.errors import InvalidInput
from dragoman.core.metrics import Family, Sample
from dragoman.system.request_context import PREFIX, values
from dragoman.transports.observation import PROBE, SCRAPE, RequestRecord

log = logging.getLogger("dragoman.access_log")
_STANDARD_OUTPUT: Final = "-"
_MAX_QUEUED: Final = 20_000
_INTERVAL_S: Final = 0.2
_WARN_EVERY_S: Final = 10.0
# Lines that are written at once; between them other threads run.
_MAX_WRITTEN: Final = 1000


class AccessLog:
    """Writes a line for each request to a file, "-" for standard output.

    Requests never wait for it: lines that cannot be written, or for which the queue has no room, are dropped and
    counted. A file that was moved or deleted, as by logrotate, is opened again.

    skip: kinds and paths of requests without a line; those that the transport rejects have one.

    Raises InvalidInput if the file cannot be opened, or for anything else to skip.
    """

    def __init__(self, path: str, style: str, skip: Set[str] = frozenset()) -> None:
        unknown = next((each for each in skip if not each.startswith("/") and each not in (PROBE, SCRAPE)), None)
        if unknown is not None:
            expected = f"a list of {PROBE}, {SCRAPE} and paths that begin with a slash"
            raise InvalidInput(f"setting 'access_log_skip': expected {expected}, got {unknown!r}")
        self._skip = skip
        self._has_skipped_paths = any(each.startswith("/") for each in skip)
        self._path = path
        self._formatter = _LineFormatter(_JSON if style == "json" else _TEXT)
        self._queue: list[RequestRecord] = []
        self._lines = self._dropped = 0
        self._warned_s = -_WARN_EVERY_S
        self._is_closed = threading.Event()
        self._file = -1
        self._is_cut = False  # the file ends within a line, because the disk was full
        try:
            self._open()
        except OSError as error:
            raise InvalidInput(f"setting 'access_log': cannot open '{path}': {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def record(self, record: RequestRecord) -> None:
        if (record.kind or self._has_skipped_paths) and self._skips(record):
            return
        if len(self._queue) < _MAX_QUEUED:
            self._queue.append(record)
        else:
            self._dropped += 1

    def _skips(self, record: RequestRecord) -> bool:
        return not record.is_rejected and (record.kind in self._skip or record.path in self._skip)

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
        """Write what is queued now; each step on the queue is one that no other thread interrupts."""
        left = len(self._queue)
        while left > 0:
            requests = self._queue[: min(left, _MAX_WRITTEN)]
            del self._queue[: len(requests)]
            left -= len(requests)
            self._write(requests)

    def _write(self, requests: list[RequestRecord]) -> None:
        lines = self._formatter.format(requests, time.time() - time.monotonic()).encode(errors="replace")
        data, begin, written = lines, 0, 0
        try:
            self._reopen_if_moved()
            if self._is_cut:
                data, begin = b"\n" + lines, 1
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            now_s = time.monotonic()
            if now_s - self._warned_s >= _WARN_EVERY_S:
                self._warned_s = now_s
                dropped = self._dropped + len(requests) - data.count(b"\n", begin, written)
                log.warning("access log cannot be written: %s; dropped=%d", error.strerror, dropped)
        if written:
            self._is_cut = not data.endswith(b"\n", 0, written)
        whole = data.count(b"\n", begin, written)
        self._lines += whole
        self._dropped += len(requests) - whole

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
            before, self._is_cut = self._file, False
            self._open()  # first: without a file of its own, the number could soon be that of a connection
            os.close(before)


class _Style(NamedTuple):
    """How a line is formatted: the whole, a field in it, and what separates fields."""

    line: str
    field: str
    separator: str


# Filling in a string takes a third of the time of `json.dumps` for the whole line. Numbers look the same in both.
_JSON: Final = _Style(
    '{"time": "%sZ", %s, %s, "received_bytes": %s, "sent_bytes": %s, "queue_ms": %s, "compute_ms": %s, '
    '"total_ms": %s}\n',
    '"%s": %s',
    ", ",
)
# JSON's escapes keep a path with line breaks or quotation marks within its line and its quotation marks.
_TEXT: Final = _Style(
    'time="%sZ" %s %s received_bytes=%s sent_bytes=%s queue_ms=%s compute_ms=%s total_ms=%s\n',
    "%s=%s",
    " ",
)
_SUBJECT: Final = (
    "protocol", "method", "path", "model", "version", "status", "client", "key", "user_agent", "http_version",
)  # fmt: skip
# Subjects of lines that are cached, and the longest one, so that clients cannot fill the memory with them.
_MAX_CACHED: Final = 1024
_MAX_CACHED_TEXT: Final = 512
# Times in milliseconds by microseconds. To format such a number takes five times as long.
_MAX_TABLE: Final = 5000
_TIMES: Final = tuple(str(microseconds / 1000) for microseconds in range(_MAX_TABLE))


class _LineFormatter:
    """Formats the lines of requests."""

    def __init__(self, style: _Style) -> None:
        self._style = style
        # The line of a request with a generated id, of which only the number differs.
        generated_id = style.field % ("request_id", f'"{PREFIX.decode()}%s"')
        self._generated = style.line % ("%s", generated_id, *["%s"] * 6)
        self._subjects: dict[tuple[Any, ...], str] = {}

    def format(self, requests: list[RequestRecord], clock_s: float) -> str:
        """Return a line for each request. `clock_s` is the time of day when the monotonic clock was 0."""
        lines: list[str] = []
        add, find_subject, last, moment = lines.append, self._subjects.get, -1, ""
        for record in requests:
            context, call, started_s, ended_s = record.context, record.call, record.started_s, record.ended_s
            milliseconds = int((clock_s + started_s) * 1000)
            if milliseconds != last:
                last, moment = milliseconds, f"{_format_second(milliseconds // 1000)}.{milliseconds % 1000:03d}"
            line, ids = self._generated, str(context)
            if type(context) is not int:
                line, ids = self._style.line, self._format(("request_id", "trace_id"), values(context)[:2])
            subject = (
                record.path, record.client, record.user_agent, call.served_by, record.status, record.protocol,
                record.method, record.key, record.named_model, record.named_version, record.http_version,
            )  # fmt: skip
            # The properties `queue_s` and `compute_s` of what was computed within the call: without calling a function.
            queue, computed_s = 0, call.computed_s
            if not call.started_s <= computed_s <= call.ended_s or call.started_s != call.arrived_s:
                queue, compute = int(call.queue_s * 1e6), int(call.compute_s * 1e6)
            else:
                compute = int((computed_s - call.started_s) * 1e6)
            total = int((ended_s - started_s) * 1e6)
            add(
                line
                % (
                    moment,
                    ids,
                    find_subject(subject) or self._format_subject(subject, record),
                    record.received,
                    record.sent,
                    _TIMES[queue] if queue < _MAX_TABLE else queue / 1000,
                    _TIMES[compute] if compute < _MAX_TABLE else compute / 1000,
                    _TIMES[total] if total < _MAX_TABLE else total / 1000,
                )
            )
        return "".join(lines)

    def _format_subject(self, subject: tuple[Any, ...], record: RequestRecord) -> str:
        text = self._format(_SUBJECT, tuple(getattr(record, name) for name in _SUBJECT))
        if len(text) <= _MAX_CACHED_TEXT:
            if len(self._subjects) >= _MAX_CACHED:
                self._subjects.clear()
            self._subjects[subject] = text
        return text

    def _format(self, names: tuple[str, ...], found: tuple[str | int, ...]) -> str:
        field = self._style.field
        return self._style.separator.join([field % (n, json.dumps(v)) for n, v in zip(names, found, strict=False)])


@lru_cache(maxsize=2)
def _format_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
