"""The audit log in a file: append-only JSON lines, each with the hash of the line before it.

One process writes: that of the engine, to which the others of `--processes` send their lines. A line is written at
once, before the change that it describes is answered; it then outlives the server, though not a power failure of the
next seconds. Lines that cannot be written wait, in their order, and each attempt continues where the last one ended,
also within a line: so the file has no gap, and no line twice.

`prev` is the SHA-256 of the line before, without its line break, also of the last line of the file before a rotation;
"" begins a chain. A pipe or a device, and `-`, the standard output, have no chain: others may write there too.

| state | `problem` | a change with `is_required` |
|---|---|---|
| writable | "" | is made once a line with the outcome `begun` is written |
| failing, say because the disk is full: lines wait, and are tried again each second | the reason | is rejected |
| full: too many lines wait; further ones are lost, and counted | the reason | is rejected |
"""

import errno
import hashlib
import json
import logging
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from dragoman.core.audit import AuditWriter
from dragoman.core.errors import InvalidInput, NotReady
from dragoman.core.metrics import Family, Kind, Sample

log = logging.getLogger("dragoman.audit_file")

_STANDARD_OUTPUT: Final = "-"
MAX_WAITING: Final = 10_000  # lines
RETRY_S: Final = 1.0
_WARN_EVERY_S: Final = 60.0
LOCK_WAIT_S: Final = 5.0  # for a server that is stopping
_LOCK_INTERVAL_S: Final = 0.05
_TAIL_BYTES: Final = 1 << 20  # more than the longest line


class AuditFile(AuditWriter):
    """Appends to a file, or with "-" to the standard output. A file that was moved away is opened anew.

    is_required: changes are rejected while their line cannot be written. Raises InvalidInput if the file cannot be
    opened, or another server writes it.
    """

    def __init__(self, path: str, *, is_required: bool = False) -> None:
        super().__init__()
        self.problem = ""
        self._path = path
        self._is_required = is_required
        self._guard: Any = self.lock  # of every handler: models log from their threads
        self._waiting: deque[Mapping[str, object]] = deque()
        self._rest = b""  # of the first line that waits, if it was written in part
        self._last = ""  # hash of the last line that is complete
        self._file, self._has_chain = -1, False
        self._retry: threading.Timer | None = None
        self._warned_s = -_WARN_EVERY_S
        self._lines = self._lost = 0
        try:
            self._open(LOCK_WAIT_S)
        except OSError as error:
            raise InvalidInput(f"setting 'audit_log': cannot open '{path}': {error.strerror}") from error

    def write(self, line: Mapping[str, object]) -> None:
        with self._guard:
            if self._waiting:
                self._write_waiting()
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(line)
            else:
                self._lost += 1
            self._write_waiting()

    def admit(self, line: Mapping[str, object]) -> None:
        if not self._is_required:
            return
        with self._guard:
            self._write_waiting()
            if not self.problem:
                self.write(line)
            if self.problem:
                raise NotReady(f"changes are rejected: {self.problem}", RETRY_S)

    def families(self) -> Iterable[Family]:
        table: tuple[tuple[str, Kind, str, float], ...] = (
            ("lines_total", "counter", "Lines written to the audit log.", self._lines),
            ("lost_total", "counter", "Lines that could not be kept for the audit log.", self._lost),
            ("waiting", "gauge", "Lines that wait to be written to the audit log.", len(self._waiting)),
            ("writable", "gauge", "1 if the audit log can be written.", not self.problem),
        )
        for name, kind, text, value in table:
            full = f"dragoman_audit_log_{name}"
            yield Family(full, kind, text, (Sample(full, {}, value),))

    def close(self) -> None:
        """Write what waits, and stop. What cannot be written now is lost, which is logged."""
        super().close()
        with self._guard:
            if self._file < 0:
                return
            self._write_waiting()
            if self._retry is not None:
                self._retry.cancel()
            if self._waiting:
                log.error("lines of the audit log are lost: lines=%d reason=%s", len(self._waiting), self.problem)
            if self._path != _STANDARD_OUTPUT:
                os.close(self._file)
            self._file = -1

    # --- the file ------------------------------------------------------------------------------------------------

    def _write_waiting(self) -> None:
        if self._file < 0:
            self._lost += len(self._waiting)
            self._waiting.clear()
            return
        try:
            self._reopen_if_moved()
            while self._waiting:
                sealed = self._seal(self._waiting[0])
                self._put(self._rest or sealed)
                self._last = hashlib.sha256(sealed[:-1]).hexdigest()
                self._waiting.popleft()
                self._lines += 1
        except OSError as error:
            self._fail(error)
        else:
            if self.problem:
                log.warning("the audit log is written again: file=%s", self._path)
            self.problem = ""

    def _seal(self, line: Mapping[str, object]) -> bytes:
        """Return a line with the hash of the one before. JSON's escapes keep it one line of ASCII."""
        sealed = {**line, "prev": self._last} if self._has_chain else line
        return json.dumps(sealed, default=str).encode() + b"\n"

    def _put(self, data: bytes) -> None:
        """Write bytes. Raises OSError; `_rest` is then what is left of them, if some were written."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        finally:
            self._rest = data[written:] if written or self._rest else b""

    def _fail(self, error: OSError) -> None:
        self.problem = f"the audit log cannot be written: {error.strerror}"
        now_s = time.monotonic()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            log.error("%s: file=%s waiting=%d", self.problem, self._path, len(self._waiting))
        if self._retry is None:
            self._retry = threading.Timer(RETRY_S, self._try_again)
            self._retry.daemon = True
            self._retry.start()

    def _try_again(self) -> None:
        with self._guard:
            self._retry = None
            if self._file >= 0:
                self._write_waiting()

    def _open(self, wait_s: float = 0.0) -> None:
        """Open the file. It keeps the hash of the last line if the file is empty. Raises OSError."""
        if self._path == _STANDARD_OUTPUT:
            self._file = sys.__stdout__.fileno() if sys.__stdout__ is not None else 1
            return
        # Read as well, for the hash of the last line.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        file = os.open(self._path, flags, 0o640)
        try:
            status = os.fstat(file)
            if has_chain := stat.S_ISREG(status.st_mode):
                _lock(file, wait_s)
            size = os.fstat(file).st_size
            if has_chain and size:
                os.lseek(file, max(0, size - _TAIL_BYTES), os.SEEK_SET)
                tail = os.read(file, _TAIL_BYTES)
                if not tail.endswith(b"\n"):  # the server that wrote it has ended while the disk was full
                    os.write(file, b"\n")
                    tail += b"\n"
                self._last = hashlib.sha256(tail[:-1].rpartition(b"\n")[2]).hexdigest()
        except BaseException:
            os.close(file)
            raise
        self._file, self._has_chain, self._rest = file, has_chain, b""

    def _reopen_if_moved(self) -> None:
        """Open the file anew if another program has moved or removed it, as logrotate does; the chain goes on.

        A line that was begun in the old file is written again in the new one.
        """
        if not self._has_chain:
            return
        before = self._file
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(before)):
                return
        self._open()  # first: without a file of its own, the number could soon be that of a connection
        os.close(before)


def _lock(file: int, wait_s: float) -> None:
    """Raise OSError if another process writes the file: two chains would break each other."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    end_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # POSIX allows both
            if time.monotonic() >= end_s:
                raise OSError(errno.EBUSY, "another server writes it") from error
            time.sleep(_LOCK_INTERVAL_S)
        else:
            return
