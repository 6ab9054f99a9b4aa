"""Content hashes of a model's files, and the files themselves, for workers on other machines."""

import asyncio
import functools
import hashlib
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from dragoman.core.errors import ModelFailed
from dragoman.core.file_states import model_files
from dragoman.core.spec import FileContent, ModelSpec
from dragoman.workers.channel import Channel
from dragoman.workers.frames import FrameKind, encode

# Larger files are compared by their size and by blocks of 1 MiB at equal distances, the first and the last included.
_MAX_HASHED_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
# Further files of a folder are not compared. A model with more cannot be sent.
_MAX_FILES = 10_000


def file_contents(spec: ModelSpec) -> tuple[FileContent, ...]:
    """Return the files that a model is loaded from, with sizes and hashes, without those that cannot be read.

    Raises ModelFailed if they are to be sent and there are none, too many, or some that cannot be read. Blocks: use it
    in a thread. Hashes are remembered until a file's inode, size or time of modification changes.
    """
    is_sent = spec.launch is not None and spec.launch.sends_files
    failed = f"failed to load '{spec.name}', placement.files 'send': "
    unreadable: dict[str, OSError] = {}  # by path
    places = [Path(file) for place in (spec.uri, spec.runtime) if (file := file_part(place))]
    files = {file for place in places for file in model_files(place, lambda e: unreadable.update({e.filename: e}))}
    if is_sent and len(files) > _MAX_FILES:
        raise ModelFailed(f"{failed}expected at most {_MAX_FILES} files, got {len(files)}")
    contents = []
    for path in sorted(files)[:_MAX_FILES]:
        try:
            content = _content(path, is_whole=is_sent)
        except OSError as error:
            unreadable[str(path)] = error
            continue
        if content is not None:
            contents.append(content)
    if is_sent and unreadable:
        file, reason = next(iter(unreadable.items()))
        raise ModelFailed(f"{failed}'{Path(file).name}' cannot be read ({reason.strerror})")
    if is_sent and not contents:
        raise ModelFailed(f"{failed}expected a model in files")
    return tuple(contents)


async def send_files(channel: Channel, contents: Sequence[FileContent], wanted: object) -> None:
    """Send the files with the numbers that a worker wants, as frames FILE with bytes or the reason why there are none.

    Other numbers, and values of other types, end it.
    """
    if not isinstance(wanted, list) or not all(type(number) is int for number in wanted):
        return
    for number in dict.fromkeys(wanted):
        if not 0 <= number < len(contents):
            return
        path, rest = contents[number].path, contents[number].size
        try:
            with await asyncio.to_thread(open, path, "rb") as file:
                while rest and not channel.closed and (block := await asyncio.to_thread(file.read, _BLOCK_BYTES)):
                    channel.send(encode(FrameKind.FILE, number, block[:rest]))
                    rest -= len(block[:rest])
                    await channel.drain()
            reason = "has become shorter" if rest else ""
        except OSError as error:
            reason = f"cannot be read by the server ({error.strerror})"
        if reason:
            channel.send(encode(FrameKind.FILE, number, reason))
            return


def check_contents(spec: ModelSpec) -> None:
    """Raise ModelFailed if a file of the model is not the same on this machine as on the server."""
    for file in spec.contents:
        path = Path(file.path)
        difference = _difference(path, file.size, file.digest)
        if difference:
            raise ModelFailed(
                f"failed to load '{spec.name}', its file '{path.name}' {difference} on worker host "
                f"'{socket.gethostname()}': expected the same file as on the server; copy the model again"
            )


def _difference(path: Path, size: int, digest: str) -> str:
    """Return how a file differs from one with this size and hash, "" if it does not."""
    try:
        if (actual_size := path.stat().st_size) != size:
            return f"has {actual_size} bytes instead of {size}"
        return "" if _digest(path, size) == digest else "has other content"
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def is_intact(path: Path, content: FileContent) -> bool:
    """Return whether a file has this size and this hash of all of it."""
    try:
        return path.stat().st_size == content.size and _digest(path, content.size, is_whole=True) == content.digest
    except OSError:
        return False


def file_part(place: str) -> str:
    """Return the file or folder of a uri or runtime, "" if it is the name of a runtime or module."""
    file = place.rpartition(":")[0] if ".py:" in place else place
    return file if os.path.isabs(file) else ""


def _content(path: Path, *, is_whole: bool) -> FileContent | None:
    """Return size and hash of a file, None if it does not exist or is not a regular file. Raises OSError."""
    try:
        status = path.stat()
    except FileNotFoundError:  # a link to nothing, or a file of weights that only some models have
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    digest = _remembered_digest(str(path), status.st_ino, status.st_size, status.st_mtime_ns, is_whole)
    return FileContent(str(path), status.st_size, digest, bool(status.st_mode & stat.S_IXUSR))


@functools.lru_cache(maxsize=1 << 14)
def _remembered_digest(path: str, _inode: int, size: int, _mtime_ns: int, is_whole: bool) -> str:
    return _digest(Path(path), size, is_whole=is_whole)


def _digest(path: Path, size: int, *, is_whole: bool = False) -> str:
    """Return the hash of a file: of all of it if it is small or `is_whole`, else of blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if is_whole or size <= _MAX_HASHED_BYTES:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
            return digest.hexdigest()
        count = _MAX_HASHED_BYTES // _BLOCK_BYTES
        for number in range(count):
            file.seek(number * (size - _BLOCK_BYTES) // (count - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
