"""The access log: one line for each request, written by a thread."""

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final

from dragoman.core.errors import InvalidInput
from dragoman.core.metrics import Family, Sample
from dragoman.system.request_context import request_id
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
        self._format: Callable[[_Record], str] = _as_json if style == "json" else _as_text
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
                    e.wall_s,
                    e.context,
                    e.protocol,
                    e.method,
                    e.path,
                    e.model,
                    e.version,
                    e.status,
                    e.received,
                    e.sent,
                    e.queue_s,
                    e.engine_s,
                    e.total_s,
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
        data = "".join([self._format(each) for each in exchanges]).encode(errors="replace")
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


def _fields(record: _Record) -> dict[str, Any]:
    wall_s, context, protocol, method, path, model, version, status, received, sent, queue_s, engine_s, total_s = record
    milliseconds = int(wall_s * 1000)
    return {
        "time": f"{_moment(milliseconds // 1000)}.{milliseconds % 1000:03d}Z",
        "request_id": request_id(context),
        "protocol": protocol,
        "method": method,
        "path": path,
        "model": model,
        "version": version,
        "status": status,
        "received_bytes": received,
        "sent_bytes": sent,
        "queue_ms": round(queue_s * 1e3, 3),
        "compute_ms": round(max(0.0, engine_s - queue_s) * 1e3, 3),
        "total_ms": round(total_s * 1e3, 3),
    }


@lru_cache(maxsize=2)
def _moment(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _as_json(record: _Record) -> str:
    return json.dumps(_fields(record)) + "\n"


@lru_cache(maxsize=1024)
def _quote(text: str) -> str:
    return json.dumps(text)


def _as_text(record: _Record) -> str:
    # JSON's escapes keep a path with line breaks or quotation marks within its line and its quotation marks.
    fields = _fields(record).items()
    return " ".join([f"{name}={_quote(v) if type(v) is str else v}" for name, v in fields]) + "\n"
