"""The files of models that a server sends to its workers, in a folder that the workers of a machine share."""

import fcntl
import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

import msgspec

from dragoman.core.errors import ModelFailed
from dragoman.core.spec import FileContent, ModelSpec
from dragoman.workers.file_contents import file_part, is_intact

# Yields the numbers of files and their bytes, block by block in the order of the numbers. Raises ModelFailed.
Download = Callable[[Sequence[int]], Iterable[tuple[int, bytes]]]

DEFAULT_CACHE_BYTES = 64 << 30

# What follows the name of a model: its folder while it is incomplete, its list of files, and its locks.
_PARTIAL, _LIST, _BUILD, _USE = ".part", ".list", ".build", ".use"
# The lock while a model gets room.
_ROOM = ".room"
_EXCLUSIVE_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dragoman" / "models"


class FileCache:
    """Keeps each model in a folder named by the hash of its files, which appears once all of its files are there.

    - Workers that need the same model wait for the one that downloads it.
    - Files are verified each time they are used. Damaged ones are replaced, and files of other models are reused.
    - Before a download, unused models are removed, least recently used first, until all models, including those that
      are
    downloaded, take at most `max_bytes`.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._uses: list[ExitStack] = []  # of models that this process uses

    def localize(self, spec: ModelSpec, download: Download) -> ModelSpec:
        """Return the spec with paths of this machine, after the download of missing files. Raises ModelFailed."""
        places = [place for place in (spec.uri, spec.runtime) if file_part(place)]
        files = tuple(file._replace(path=_relative(places, file.path)) for file in spec.contents)
        name = hashlib.sha256(msgspec.msgpack.encode(files)).hexdigest()
        local = {place: self._local(name, places, place) for place in places}
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (stat := self._folder.stat()).st_uid != os.getuid() or stat.st_mode & 0o022:
                raise ModelFailed(f"the cache '{self._folder}' can be written by other users: expected mode 0700")
            with self._lock(name, _BUILD), ExitStack() as use:
                use.enter_context(self._lock(name, _USE, fcntl.LOCK_SH))
                self._complete(name, files, download)
                os.utime(self._folder / name)
                self._uses.append(use.pop_all())
        except (OSError, ModelFailed) as error:
            reason = error.message if isinstance(error, ModelFailed) else f"{error}"
            raise ModelFailed(f"no copy of its files on worker host '{socket.gethostname()}': {reason}") from error
        return replace(
            spec, uri=local.get(spec.uri, spec.uri), runtime=local.get(spec.runtime, spec.runtime), contents=()
        )

    def close(self) -> None:
        """Release the models that this process uses; they may be removed then."""
        for use in self._uses:
            use.close()
        self._uses.clear()

    def _local(self, name: str, places: Sequence[str], place: str) -> str:
        file = file_part(place)
        return f"{self._folder / name / _relative(places, file)}{place[len(file) :]}"

    def _complete(self, name: str, files: Sequence[FileContent], download: Download) -> None:
        """Make the files of a model that are missing or damaged. The others stay, since workers may use them."""
        folder, part = self._folder / name, self._folder / (name + _PARTIAL)
        missing = [number for number, file in enumerate(files) if not is_intact(folder / file.path, file)]
        if not missing and folder.is_dir():
            return
        shutil.rmtree(part, ignore_errors=True)
        try:
            self._reserve(name, files)
            self._build(part, files, missing, download)
            if folder.is_dir():
                for number in missing:
                    path = files[number].path
                    (folder / path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    (part / path).replace(folder / path)
            else:
                part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            if not folder.is_dir():
                (self._folder / (name + _LIST)).unlink(missing_ok=True)

    def _build(self, folder: Path, files: Sequence[FileContent], wanted: Sequence[int], download: Download) -> None:
        """Make files in a new folder: those of other models are linked, the others are downloaded."""
        copies = self._copies()
        missing: list[int] = []
        for number in wanted:
            path = folder / files[number].path
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _link(path, files[number], copies):
                missing.append(number)
        with _FileWriter(folder, files) as writer:
            for number, block in download(missing) if missing else ():
                writer.write(number, block)
        for number in missing:
            path = folder / files[number].path
            if not files[number].size:
                path.touch()
            if not is_intact(path, files[number]):
                raise ModelFailed(f"its file '{path.name}' has changed while it was sent")
            path.chmod(0o500 if files[number].is_executable else 0o400)

    def _copies(self) -> dict[tuple[str, bool], list[Path]]:
        """Return the files of the cache by their hashes and whether they are executable: links share that."""
        copies: dict[tuple[str, bool], list[Path]] = {}
        for name, files in self._models():
            for file in files:
                copies.setdefault((file.digest, file.is_executable), []).append(self._folder / name / file.path)
        return copies

    def _models(self) -> Iterator[tuple[str, list[FileContent]]]:
        """Yield name and files of each model of the cache, also while it is downloaded, least recently used first."""
        for name in sorted((path.stem for path in self._folder.glob(f"*{_LIST}")), key=self._used_s):
            with suppress(OSError, ValueError, msgspec.DecodeError):
                content = (self._folder / (name + _LIST)).read_bytes()
                yield name, msgspec.msgpack.decode(content, type=list[FileContent])

    def _used_s(self, name: str) -> float:
        """Return when a model was last used, 0 if it is not complete."""
        try:
            return (self._folder / name).stat().st_mtime
        except OSError:
            return 0.0

    def _reserve(self, name: str, files: Sequence[FileContent]) -> None:
        """Make room for a model, which counts from then on. Raises ModelFailed if there is none."""
        with self._lock("cache", _ROOM):
            self._make_room(name, sum(file.size for file in files))
            (self._folder / (name + _PARTIAL)).mkdir(mode=0o700)
            (self._folder / (name + _LIST)).write_bytes(msgspec.msgpack.encode(files))

    def _make_room(self, name: str, size: int) -> None:
        """Remove other models until this one has room. Raises ModelFailed if it has none."""
        expected = f"it has {size} bytes: expected at most {self._max_bytes} in the cache (--cache-gib)"
        if size > self._max_bytes:
            raise ModelFailed(expected)
        for part in [*self._folder.glob(f"*{_PARTIAL}")]:  # of workers that were killed
            self._remove_unused(part.stem)
        sizes = {other: sum(file.size for file in files) for other, files in self._models() if other != name}
        for other in [*sizes]:
            if sum(sizes.values()) + size > self._max_bytes and self._remove_unused(other):
                del sizes[other]
        if (used := sum(sizes.values())) + size > self._max_bytes:
            raise ModelFailed(f"{expected}, of which other models that are in use have {used}")

    def _remove_unused(self, name: str) -> bool:
        """Remove a model unless a worker uses or downloads it; return whether it was removed."""
        try:
            with self._lock(name, _BUILD, _EXCLUSIVE_NOW), self._lock(name, _USE, _EXCLUSIVE_NOW):
                for suffix in ("", _PARTIAL):
                    shutil.rmtree(self._folder / (name + suffix), ignore_errors=True)
                (self._folder / (name + _LIST)).unlink(missing_ok=True)
        except BlockingIOError:
            return False
        return True

    def _lock(self, name: str, suffix: str, mode: int = fcntl.LOCK_EX) -> "_Lock":
        return _Lock(self._folder / (name + suffix), mode)


def _link(path: Path, file: FileContent, copies: Mapping[tuple[str, bool], Sequence[Path]]) -> bool:
    """Take a file from another model of the cache; return whether one has it, unchanged."""
    for copy in copies.get((file.digest, file.is_executable), ()):
        with suppress(OSError):  # it is removed just now
            os.link(copy, path)
            if is_intact(path, file):
                return True
            path.unlink()
    return False


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
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def write(self, number: int, block: bytes) -> None:
        if number != self._number:
            self.__exit__()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self._folder / self._files[number].path, flags, 0o600)
            self._number = number
        rest = memoryview(block)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


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


def _relative(places: Sequence[str], path: str) -> str:
    """Return where a file of the server is in the folder of its model. Raises ModelFailed if that is outside."""
    for number, place in enumerate(places):
        root = PurePosixPath(file_part(place)).parent
        if PurePosixPath(path).is_relative_to(root):
            parts = PurePosixPath(path).relative_to(root).parts
            if parts and ".." not in parts:
                return "/".join((str(number), *parts))
    raise ModelFailed(f"its file '{PurePosixPath(path).name}' is outside of its folder")
