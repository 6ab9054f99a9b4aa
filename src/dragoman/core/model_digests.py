"""Digests of model files: a list of the operator, and the check that a model is loaded from files in it, unchanged.

The list has the format of `sha256sum`. With it (setting `model_digests`) a model is loaded only if every file of its
folder is listed and has the listed content, and no listed file of the folder is missing. A Python file may import what
lies beside it, so that its folder is checked. Hidden files are left out, as they are when models are searched, and
`__pycache__`, which Python then does not read.

The check is made twice: by the server, which reads the list, before any code of the model is imported; and where the
model is loaded, also in workers that start later, before and after it is loaded. Between these two, a file that was
replaced, or written to, has another inode or another time of its last change, which programs cannot set.
"""

import functools
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.file_states import COMPANIONS, files_below
from dragoman.core.spec import ModelSpec

_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_ESCAPED = re.compile(r"\\(.)")
_ESCAPES = {"\\": "\\", "n": "\n", "r": "\r"}
_BLOCK_BYTES = 1 << 20


class _State(NamedTuple):
    """Of a file; no program can change its content and keep all of these."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


class LoadCheck(NamedTuple):
    """The files from which a model is loaded, as they were before."""

    spec: ModelSpec
    states: Mapping[str, _State]

    def confirm(self) -> None:
        """Raise ModelFailed if a file was changed, added or removed since."""
        for file in self.states.keys() ^ {str(file) for _, file in _files_of(self.spec)}:
            raise ModelFailed(f"its file '{Path(file).name}' was added or removed while it was loaded")
        for file, state in self.states.items():
            if _state(os.stat(file)) != state:
                raise ModelFailed(f"its file '{Path(file).name}' was changed while it was loaded")


def read_digests(file: str) -> dict[str, str]:
    """Return the SHA-256 by absolute path in a list; relative paths are those of its folder.

    Raises InvalidInput that names the line.
    """
    try:
        text = Path(file).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise InvalidInput(f"setting 'model_digests': '{file}' cannot be read: {error.strerror or error}") from error
    found: dict[str, str] = {}
    folder = os.path.realpath(os.path.dirname(os.path.abspath(file)))
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.removesuffix("\r"))
        if match is None:
            raise InvalidInput(
                f"setting 'model_digests': '{file}', line {number}: expected a SHA-256 and a path, as sha256sum "
                f"writes them, got {line!r:.100}"
            )
        escaped, digest, name = match.groups()
        name = _ESCAPED.sub(lambda each: _ESCAPES.get(each[1], each[0]), name) if escaped else name
        path = os.path.normpath(os.path.join(folder, name))
        if found.setdefault(path, digest.lower()) != digest.lower():
            raise InvalidInput(f"setting 'model_digests': '{file}', line {number}: another SHA-256 of the same path")
    return found


def write_digests(paths: Iterable[str]) -> Iterator[str]:
    """Yield a line for each file at or below the paths, as `sha256sum` does. Raises InvalidInput."""
    for path in paths:
        root = Path(path).resolve()
        if not root.exists():
            raise InvalidInput(f"'{path}' not found: expected a file or a folder of models")
        for file in sorted(files_below(root)) if root.is_dir() else [root]:
            try:
                digest, _ = _digest(str(file))
            except OSError as error:
                raise InvalidInput(f"'{file}' cannot be read: {error.strerror or error}") from error
            name = str(file)
            escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
            yield f"{'' if escaped == name else chr(92)}{digest}  {escaped}"


def is_listed(file: Path, listed_in: str) -> bool:
    """Return whether code of a Python file may be imported, by the list."""
    try:
        with_digests(ModelSpec(name=file.stem, uri=str(file), model_digests=listed_in))
    except (ModelFailed, InvalidInput):
        return False
    return True


def with_digests(spec: ModelSpec) -> ModelSpec:
    """Return the spec with the digests of its files, if the list has all of them as they are. Raises ModelFailed.

    It reads all files: run it in a thread.
    """
    if not spec.model_digests or spec.target is not None:
        return spec
    try:
        listed = read_digests(spec.model_digests)
    except InvalidInput as error:
        raise ModelFailed(error.message) from error
    if not any(_roots(spec)):
        raise ModelFailed(f"'{spec.uri}' has no files that can be checked: expected a file or folder (model_digests)")
    digests: dict[str, str] = {}
    for name, file in _files_of(spec):
        digests[name] = _check(file, listed.get(str(file)), file.name)
    for root in _roots(spec):
        prefix = f"{root}{os.sep}"
        for path in listed:
            if root.is_dir() and path.startswith(prefix) and not os.path.exists(path):
                raise ModelFailed(f"its file '{os.path.relpath(path, root)}' is in the list of digests, and missing")
    for path, *_ in spec.files:  # settings, labels and requests, wherever they are
        if os.path.exists(path):
            _check(Path(path), listed.get(os.path.abspath(path)), Path(path).name)
    for other in _paths_in(spec.parameters, spec):
        for file in files_below(other) if other.is_dir() else [other]:
            _check(file, listed.get(str(file)), file.name)
    return replace(spec, digests=digests)


def check_folder(path: str, listed_in: str) -> None:
    """Raise ModelFailed unless a file or folder that a model loads later, such as a LoRA adapter, is as listed."""
    with_digests(ModelSpec(name="adapter", uri=os.path.realpath(path), model_digests=listed_in))


def begin_load(spec: ModelSpec) -> LoadCheck | None:
    """Check the files of a model where it is loaded, before; None without digests. Raises ModelFailed.

    From then on this process neither reads nor writes compiled Python files.
    """
    if spec.digests is None:
        return None
    sys.pycache_prefix = os.devnull  # compiled files beside the sources could be others
    states = {}
    for name, file in _files_of(spec):
        _check(file, spec.digests.get(name), file.name)
        states[str(file)] = _digest(str(file))[1]
    return LoadCheck(spec, states)


def _check(file: Path, expected: str | None, name: str) -> str:
    """Return the digest of a file. Raises ModelFailed if it is not the one that is expected."""
    if expected is None:
        raise ModelFailed(f"its file '{name}' is not in the list of digests")
    try:
        digest, _ = _digest(str(file))
    except OSError as error:
        raise ModelFailed(f"its file '{name}' cannot be read: {error.strerror or error}") from error
    if digest != expected:
        raise ModelFailed(f"its file '{name}' differs from the list of digests: SHA-256 {digest}")
    return digest


def _roots(spec: ModelSpec) -> list[Path]:
    """Return the files and folders from which a model is loaded: its own, and that of a runtime beside it."""
    found = []
    for place in (spec.uri, spec.runtime):
        part = place.rpartition(":")[0] if ".py:" in place else place
        if ".py:" in place or os.path.isabs(part):
            path = Path(os.path.abspath(part))
            found.append(path.parent if path.suffix == ".py" else path)
    return found


def _files_of(spec: ModelSpec) -> Iterator[tuple[str, Path]]:
    """Yield the files of a model with names that are the same in copies of its folder."""
    for number, root in enumerate(_roots(spec)):
        if root.is_dir():
            yield from ((f"{number}/{file.relative_to(root)}", file) for file in files_below(root))
            continue
        companions = [root.with_name(root.name + suffix) for suffix in COMPANIONS] + [root.with_suffix(".bin")]
        for file in (root, *(each for each in companions if each.exists() and each != root)):
            yield f"{number}/{file.name}", file


def _paths_in(value: Any, spec: ModelSpec) -> Iterator[Path]:
    """Yield the files and folders outside of a model's folder that its parameters name, such as a draft model."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _paths_in(each, spec)
    elif isinstance(value, str) and "/" in value and "\0" not in value:
        for root in _roots(spec):
            path = Path(os.path.normpath(os.path.join(root if root.is_dir() else root.parent, value)))
            if path.exists() and root not in (path, *path.parents):
                yield path


def _digest(file: str) -> tuple[str, _State]:
    """Return the SHA-256 of a file and its state; remembered until the state changes. Raises OSError."""
    with open(file, "rb") as opened:
        state = _state(os.fstat(opened.fileno()))
    return _remembered(file, state), state


@functools.lru_cache(maxsize=1 << 14)
def _remembered(file: str, state: _State) -> str:
    with open(file, "rb") as opened:
        digest = hashlib.sha256()
        while block := opened.read(_BLOCK_BYTES):
            digest.update(block)
        if _state(os.fstat(opened.fileno())) != state:
            raise ModelFailed(f"its file '{Path(file).name}' was changed while it was read")
    return digest.hexdigest()


def _state(status: os.stat_result) -> _State:
    return _State(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
