"""The files of models that a server sends to its workers, in a folder that the workers of a machine share."""

import fcntl
import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

import msgspec

from dragoman.core.errors import ModelFailed
from dragoman.core.spec import FileContent, ModelSpec
from dragoman.workers.file_contents import is_intact

# Yields the numbers of files and their bytes, block by block in the order of the numbers. Raises ModelFailed.
Download = Callable[[Sequence[int]], Iterable[tuple[int, bytes]]]

DEFAULT_CACHE_BYTES = 64 << 30

# What follows the name of a model: its folder while it is incomplete, its list of files, and its locks.
_PARTIAL, _LIST, _BUILD, _USE = ".part", ".list", ".build", ".use"
_EXCLUSIVE_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dragoman" / "models"


class FileCache:
    """Keeps each model in a folder that is named by the hash of its files and has either all of them or is missing.

    Workers that need the same model wait for the one that downloads it. Files are verified each time that they are
    used, and taken from other models of the folder if those have them. Before a download, models that no worker uses
    are removed, the least recently used first, until all together have at most `max_bytes`.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._uses: list[_Lock] = []  # of models that this process uses

    def localize(self, spec: ModelSpec, download: Download) -> ModelSpec:
        """Return the spec with paths of this machine, after the download of missing files. Raises ModelFailed."""
        places = [place for place in (spec.uri, spec.runtime) if _file_part(place)]
        files = tuple((_relative(places, path), size, digest) for path, size, digest in spec.contents)
        name = hashlib.sha256(msgspec.msgpack.encode(files)).hexdigest()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (found := self._folder.stat()).st_uid != os.getuid() or found.st_mode & 0o022:
                raise ModelFailed(f"the cache '{self._folder}' can be written by other users: expected mode 0700")
            with self._lock(name, _BUILD):
                self._uses.append(self._lock(name, _USE, fcntl.LOCK_SH))
                if not self._is_intact(name, files):
                    self._build(name, files, download)
                os.utime(self._folder / name)
        except (OSError, ModelFailed) as error:
            reason = error.message if isinstance(error, ModelFailed) else f"{error}"
            raise ModelFailed(f"no copy of its files on worker host '{socket.gethostname()}': {reason}") from error
        local = {place: self._local(name, number, place) for number, place in enumerate(places)}
        return replace(
            spec, uri=local.get(spec.uri, spec.uri), runtime=local.get(spec.runtime, spec.runtime), contents=()
        )

    def close(self) -> None:
        """Release the models that this process uses; they may be removed then."""
        for use in self._uses:
            use.__exit__()
        self._uses.clear()

    def _local(self, name: str, number: int, place: str) -> str:
        file = _file_part(place)
        return f"{self._folder / name / str(number) / Path(file).name}{place[len(file) :]}"

    def _is_intact(self, name: str, files: Sequence[FileContent]) -> bool:
        folder = self._folder / name
        return folder.is_dir() and all(is_intact(folder / path, size, digest) for path, size, digest in files)

    def _build(self, name: str, files: Sequence[FileContent], download: Download) -> None:
        self._remove(name)
        self._make_room(sum(size for _, size, _ in files))
        folder = self._folder / (name + _PARTIAL)
        missing: list[int] = []
        for number, (path, size, digest) in enumerate(files):
            (folder / path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._link(folder / path, size, digest):
                missing.append(number)
        with _FileWriter(folder, files) as writer:
            for number, block in download(missing) if missing else ():
                writer.write(number, block)
        for number in missing:
            path, size, digest = files[number]
            if not size:
                (folder / path).touch()
            if not is_intact(folder / path, size, digest):
                raise ModelFailed(f"its file '{PurePosixPath(path).name}' has changed while it was sent")
            (folder / path).chmod(0o400)
        (self._folder / (name + _LIST)).write_bytes(msgspec.msgpack.encode(files))
        folder.rename(self._folder / name)

    def _link(self, path: Path, size: int, digest: str) -> bool:
        """Take a file from another model of the cache; return whether one has it, unchanged."""
        for name, files in self._models():
            for other, _, other_digest in files:
                if other_digest == digest:
                    with suppress(OSError):  # it is removed just now
                        os.link(self._folder / name / other, path)
                        if is_intact(path, size, digest):
                            return True
                        path.unlink()
        return False

    def _models(self) -> Iterator[tuple[str, list[FileContent]]]:
        """Yield name and files of each model of the cache, the least recently used first."""
        names = [path.stem for path in self._folder.glob(f"*{_LIST}") if path.with_suffix("").is_dir()]
        for name in sorted(names, key=lambda name: (self._folder / name).stat().st_mtime):
            with suppress(OSError, ValueError, msgspec.DecodeError):
                content = (self._folder / (name + _LIST)).read_bytes()
                yield name, msgspec.msgpack.decode(content, type=list[FileContent])

    def _make_room(self, size: int) -> None:
        """Remove models until another one of this size has room. Raises ModelFailed if it has none."""
        for part in self._folder.glob(f"*{_PARTIAL}"):  # of workers that were killed
            self._remove_unused(part.stem)
        sizes = {name: sum(size for _, size, _ in files) for name, files in self._models()}
        for name in [*sizes]:
            if sum(sizes.values()) + size > self._max_bytes and self._remove_unused(name):
                del sizes[name]
        if (used := sum(sizes.values())) + size > self._max_bytes:
            raise ModelFailed(
                f"it has {size} bytes: expected at most {self._max_bytes} in the cache (--cache-gib), of which other "
                f"models that are in use have {used}"
            )

    def _remove_unused(self, name: str) -> bool:
        """Remove a model unless a worker uses or downloads it; return whether it was removed."""
        try:
            with self._lock(name, _BUILD, _EXCLUSIVE_NOW), self._lock(name, _USE, _EXCLUSIVE_NOW):
                self._remove(name)
        except BlockingIOError:
            return False
        return True

    def _lock(self, name: str, suffix: str, mode: int = fcntl.LOCK_EX) -> "_Lock":
        return _Lock(self._folder / (name + suffix), mode)

    def _remove(self, name: str) -> None:
        for suffix in ("", _PARTIAL):
            shutil.rmtree(self._folder / (name + suffix), ignore_errors=True)
        (self._folder / (name + _LIST)).unlink(missing_ok=True)


class _FileWriter:
    """Writes the blocks of files, which must not exist, one file after the other."""

    def __init__(self, folder: Path, files: Sequence[FileContent]) -> None:
        self._folder = folder
        self._files = files
        self._number = -1
        self._descriptor = -1

    def __enter__(self) -> "_FileWriter":
        return self

    def __exit__(self, *_error: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def write(self, number: int, block: bytes) -> None:
        if number != self._number:
            self.__exit__()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self._folder / self._files[number][0], flags, 0o600)
            self._number = number
        left = memoryview(block)
        while left:
            left = left[os.write(self._descriptor, left) :]


class _Lock:
    """A lock by a file, until it is closed. Raises BlockingIOError with LOCK_NB if another one holds it."""

    def __init__(self, path: Path, mode: int) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, mode)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> "_Lock":
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._descriptor)


def _file_part(place: str) -> str:
    """Return the file or folder of a uri or runtime on the server, "" if it is a name."""
    file = place.rpartition(":")[0] if ".py:" in place else place
    return file if os.path.isabs(file) else ""


def _relative(places: Sequence[str], path: str) -> str:
    """Return where a file of the server is in the folder of its model. Raises ModelFailed if that is outside."""
    for number, place in enumerate(places):
        root = PurePosixPath(_file_part(place)).parent
        if PurePosixPath(path).is_relative_to(root):
            parts = PurePosixPath(path).relative_to(root).parts
            if parts and ".." not in parts:
                return "/".join((str(number), *parts))
    raise ModelFailed(f"its file '{PurePosixPath(path).name}' is outside of its folder")
