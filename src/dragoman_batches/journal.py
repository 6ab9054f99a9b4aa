"""The journal of a batch: one result a line, in the order of the input, appended to a file.

It is the progress of the batch: as many lines as it has are answered. So a line is answered exactly once in it however
often the server is killed: results that are not in it yet are computed again. A last line that was cut off is removed.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from dragoman.core.errors import DragomanError
from dragoman_batches.files import storage_error

_CHUNK = 1 << 20
# Inside a string of JSON the quotation marks would be escaped.
_STATUS = re.compile(rb'"response":\{"status_code":(\d+)|"result":\{"type":"(\w+)"')


def outcome(record: bytes) -> Literal["succeeded", "failed", "unsent"]:
    """Return whether the request of a line of results, in either API, succeeded, or was not sent at all."""
    found = _STATUS.search(record)
    if found is None or found[2] in (b"expired", b"canceled"):
        return "unsent"
    return "succeeded" if (int(found[1]) < 400 if found[1] else found[2] == b"succeeded") else "failed"


class Journal:
    """A journal in a file, which is created if it does not exist. Opening it blocks for a look at all lines.

    lines: how many it has. succeeded, failed: of those, see `outcome`. Raises StorageFull or ServerError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = self.succeeded = self.failed = 0
        self._size = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._recover()
        except OSError as error:
            raise storage_error(error) from error

    def _recover(self) -> None:
        with self.path.open("rb") as file:
            for record in file:
                if not record.endswith(b"\n") or not _is_json(record):
                    break
                self._count(record)
        os.ftruncate(self._file, self._size)
        os.lseek(self._file, self._size, os.SEEK_SET)

    def append(self, records: Iterable[bytes]) -> None:
        """Write lines. It blocks. Raises StorageFull or ServerError; none of them is written then."""
        records = [*records]
        data = memoryview(b"".join(records))
        try:
            while len(data):
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise self._reset(error) from error
        for record in records:
            self._count(record)

    def _reset(self, error: OSError) -> DragomanError:
        """Remove what was written of lines that do not fit."""
        os.ftruncate(self._file, self._size)
        os.lseek(self._file, self._size, os.SEEK_SET)
        return storage_error(error)

    def _count(self, record: bytes) -> None:
        self._size += len(record)
        self.lines += 1
        found = outcome(record)
        self.succeeded += found == "succeeded"
        self.failed += found == "failed"

    def sync(self) -> None:
        """Wait until all is on disk. It blocks. Raises StorageFull or ServerError."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise storage_error(error) from error

    def close(self) -> None:
        os.close(self._file)


def _is_json(record: bytes) -> bool:
    try:
        msgspec.json.decode(record, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def publish(journal: Path, target: Path) -> tuple[int, str]:
    """Make a journal a file under another name, without a copy; return its size and SHA-256. It blocks."""
    size, digest = 0, hashlib.sha256()
    with journal.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    target.unlink(missing_ok=True)
    os.link(journal, target)
    return size, digest.hexdigest()


def select(journal: Path, *, succeeded: bool) -> Iterable[bytes]:
    """Yield the lines of requests that succeeded, or of those that failed."""
    with journal.open("rb") as file:
        for record in file:
            if (outcome(record) == "succeeded") == succeeded:
                yield record
