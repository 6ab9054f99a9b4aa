"""Files of keys: their contents in a folder, their rows in the state store.

A content is written under another name and renamed once it is complete, and its row is saved afterwards. So a server
that is killed leaves a content without a row at most, which the next start deletes.
"""

import asyncio
import errno
import hashlib
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from dragoman.core.datatypes import Buffer
from dragoman.core.errors import DragomanError, RateLimited, ServerError
from dragoman.core.state_store import StateTable
from dragoman_batches.errors import ObjectNotFound, StorageFull

TABLE_VERSION = 1
_CHUNK = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What a client waits that has reached a limit: until it, or time, has deleted something.
_RETRY_S = 60.0


class StoredFile(msgspec.Struct, frozen=True):
    """A file as its row has it. number: order of creation. Times are Unix times; expires_s 0: never."""

    id: str
    number: int
    filename: str
    purpose: str
    bytes: int
    sha256: str
    created_s: float
    expires_s: float = 0.0


class FileStore:
    """Files by owner and id. max_files, max_bytes: of each owner."""

    def __init__(
        self,
        table: StateTable,
        folder: Path,
        *,
        max_files: int,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._table, self._folder, self._clock = table, folder, clock
        self._max_files, self._max_bytes = max_files, max_bytes
        self._files: dict[tuple[str, str], StoredFile] = {}
        self._counts: Counter[str] = Counter()  # by owner, with those that are being written
        self._bytes: Counter[str] = Counter()
        self._last_number = 0
        folder.mkdir(mode=0o700, exist_ok=True)
        present = {path.name for path in folder.iterdir()}
        for (owner, file_id), file in sorted(table.read(StoredFile).items(), key=lambda row: row[1].number):
            self._last_number = file.number
            if file_id in present:
                self._add(owner, file)
                present.discard(file_id)
            else:
                table.delete(file_id, owner)
        for name in present:
            (folder / name).unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self._files.values())

    def of(self, owner: str) -> list[StoredFile]:
        """Return the files of an owner, oldest first."""
        self.delete_expired()
        return [file for (each, _), file in self._files.items() if each == owner]

    def find(self, file_id: str, owner: str) -> StoredFile:
        """Raises ObjectNotFound, also for files of others."""
        file = self._files.get((owner, file_id))
        if file is None or self._is_expired(file):
            raise ObjectNotFound(f"no such file: '{file_id[:100]}'")
        return file

    def path(self, file_id: str) -> Path:
        """Return where the content of a file with this id belongs."""
        return self._folder / file_id

    async def add(
        self, owner: str, filename: str, purpose: str, data: Buffer, expires_after_s: int | None
    ) -> StoredFile:
        """Store a file. Raises RateLimited if the owner has as much as it may, StorageFull if the disk is full."""
        self.delete_expired()
        size = len(data)
        if self._counts[owner] >= self._max_files:
            raise RateLimited(f"this key has {self._max_files} files, which is its limit: delete some", _RETRY_S)
        if self._bytes[owner] + size > self._max_bytes:
            raise RateLimited(
                f"the files of this key would have more than {self._max_bytes} bytes together: delete some", _RETRY_S
            )
        file_id = f"file-{secrets.token_hex(12)}"
        self._counts[owner] += 1
        self._bytes[owner] += size
        try:
            writing = asyncio.ensure_future(asyncio.to_thread(write_file, self._folder / file_id, _chunks(data)))
            try:
                _, checksum = await asyncio.shield(writing)
            except asyncio.CancelledError:  # the client is gone; the thread goes on
                writing.add_done_callback(lambda _: self._unlink(file_id))
                raise
        finally:
            self._counts[owner] -= 1
            self._bytes[owner] -= size
        return self.adopt(owner, file_id, filename, purpose, size, checksum, expires_after_s)

    def adopt(
        self,
        owner: str,
        file_id: str,
        filename: str,
        purpose: str,
        size: int,
        checksum: str,
        expires_after_s: int | None,
    ) -> StoredFile:
        """Add a file whose content is in the folder under its id, whatever the limits of its owner are."""
        if (owner, file_id) in self._files:
            self._remove(owner, file_id)
        self._last_number += 1
        now_s = self._clock()
        expires_s = 0.0 if expires_after_s is None else now_s + expires_after_s
        file = StoredFile(file_id, self._last_number, filename, purpose, size, checksum, now_s, expires_s)
        self._add(owner, file)
        self._table.put(file_id, file, owner)
        return file

    async def delete(self, file_id: str, owner: str) -> None:
        self.find(file_id, owner)
        self._remove(owner, file_id)
        await asyncio.to_thread(self._unlink, file_id)

    def delete_expired(self) -> None:
        expired = [key for key, file in self._files.items() if self._is_expired(file)]
        for owner, file_id in expired:
            self._remove(owner, file_id)
            self._unlink(file_id)

    async def saved(self) -> bool:
        return await self._table.flush()

    def _is_expired(self, file: StoredFile) -> bool:
        return 0 < file.expires_s <= self._clock()

    def _add(self, owner: str, file: StoredFile) -> None:
        self._files[owner, file.id] = file
        self._counts[owner] += 1
        self._bytes[owner] += file.bytes

    def _remove(self, owner: str, file_id: str) -> None:
        file = self._files.pop((owner, file_id))
        self._counts[owner] -= 1
        self._bytes[owner] -= file.bytes
        self._table.delete(file_id, owner)

    def _unlink(self, file_id: str) -> None:
        with suppress(OSError):
            (self._folder / file_id).unlink()


def _chunks(data: Buffer) -> Iterator[Buffer]:
    view = memoryview(data)
    for at in range(0, len(view), _CHUNK):
        yield view[at : at + _CHUNK]


def write_file(path: Path, chunks: Iterable[Buffer]) -> tuple[int, str]:
    """Write a file in one step and return its size and SHA-256. It blocks. Raises StorageFull or ServerError."""
    temporary = path.with_name(f"{path.name}.part")
    size, digest = 0, hashlib.sha256()
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise storage_error(error) from error
        raise
    return size, digest.hexdigest()


def storage_error(error: OSError) -> DragomanError:
    """Return the error of a file that cannot be written, without its path."""
    text = f"the file cannot be stored: {error.strerror or error}"
    return StorageFull(text) if error.errno in _FULL else ServerError(text)
