"""Content hashes of a model's files, and the files themselves, for workers on other machines."""

import asyncio
import functools
import hashlib
import itertools
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from dragoman.core.errors import ModelFailed
from dragoman.core.file_states import model_files
from dragoman.core.spec import FileContent, ModelSpec
from dragoman.workers.channel import Channel
from dragoman.workers.frames import FrameKind, encode

# Larger files are compared by their size and by blocks of 1 MiB at equal distances, the first and the last included.
_MOST_HASHED_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
# Further files of a folder are not compared.
_MOST_FILES = 10_000


def file_contents(spec: ModelSpec) -> tuple[FileContent, ...]:
    """Return the files that a model is loaded from, with sizes and hashes, without those that cannot be read.

    Blocks: use it in a thread. Hashes are remembered until a file's inode, size or time of modification changes.
    """
    contents = []
    is_sent = spec.launch is not None and spec.launch.sends_files
    for path in itertools.islice(_paths(spec), _MOST_FILES):
        try:
            stat = path.stat()
            digest = _remembered_digest(str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, is_sent)
        except OSError:
            continue
        contents.append((str(path), stat.st_size, digest))
    if is_sent and not contents:
        raise ModelFailed(f"failed to load '{spec.name}', placement.files 'send': expected a model in files")
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
        path, size, _ = contents[number]
        left = size
        try:
            with await asyncio.to_thread(open, path, "rb") as file:
                while left and not channel.closed and (block := await asyncio.to_thread(file.read, _BLOCK_BYTES)):
                    channel.send(encode(FrameKind.FILE, number, block[:left]))
                    left -= len(block[:left])
                    await channel.drain()
            reason = "has become shorter" if left else ""
        except OSError as error:
            reason = f"cannot be read by the server ({error.strerror})"
        if reason:
            channel.send(encode(FrameKind.FILE, number, reason))
            return


def check_contents(spec: ModelSpec) -> None:
    """Raise ModelFailed if a file of the model is not the same on this machine as on the server."""
    for path, size, digest in spec.contents:
        difference = _difference(Path(path), size, digest)
        if difference:
            raise ModelFailed(
                f"failed to load '{spec.name}', its file '{Path(path).name}' {difference} on worker host "
                f"'{socket.gethostname()}': expected the same file as on the server; copy the model again"
            )


def _difference(path: Path, size: int, digest: str) -> str:
    """Return how a file differs from one with this size and hash, "" if it does not."""
    try:
        if (found := path.stat().st_size) != size:
            return f"has {found} bytes instead of {size}"
        return "" if _digest(path, size) == digest else "has other content"
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def is_intact(path: Path, size: int, digest: str) -> bool:
    """Return whether a file has this size and this hash of all of it."""
    try:
        return path.stat().st_size == size and _digest(path, size, is_whole=True) == digest
    except OSError:
        return False


def _paths(spec: ModelSpec) -> Iterator[Path]:
    for place in (spec.uri, spec.runtime):
        path = Path(place.rpartition(":")[0] if ".py:" in place else place)
        if place and path.exists():
            yield from sorted({file for file in model_files(path) if file.is_file()})


@functools.lru_cache(maxsize=1 << 14)
def _remembered_digest(path: str, _inode: int, size: int, _mtime_ns: int, is_whole: bool) -> str:
    return _digest(Path(path), size, is_whole=is_whole)


def _digest(path: Path, size: int, *, is_whole: bool = False) -> str:
    """Return the hash of a file: of all of it if it is small or `is_whole`, else of blocks."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        if is_whole or size <= _MOST_HASHED_BYTES:
            while block := file.read(_BLOCK_BYTES):
                found.update(block)
            return found.hexdigest()
        count = _MOST_HASHED_BYTES // _BLOCK_BYTES
        for number in range(count):
            file.seek(number * (size - _BLOCK_BYTES) // (count - 1))
            found.update(file.read(_BLOCK_BYTES))
    return found.hexdigest()
