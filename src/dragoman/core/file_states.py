"""The files of a model version as they are on disk, to find out whether they have changed."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from dragoman.core.spec import FileState

# Further files of a model file: the weights that ONNX keeps outside of it.
COMPANIONS = (".data", "_data")


def file_states(*paths: Path) -> tuple[FileState, ...]:
    """Return the state of each file at or below the paths, in order of their names.

    Links are followed. Hidden files are left out, as they are when models are searched, and so are models below a
    model's folder.
    """
    files = {file for path in paths for file in model_files(path)}
    states = []
    for file in sorted(files):
        try:
            stat = file.stat()
        except OSError:  # it was removed meanwhile
            continue
        states.append((str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(states)


def model_files(path: Path, on_error: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Yield the files at or below a path; a model file itself also if it does not exist.

    on_error: called for each folder that cannot be read.
    """
    if not path.is_dir():
        yield path
        yield from (path.with_name(path.name + suffix) for suffix in COMPANIONS)
        return
    yield from files_below(path, on_error, lambda folder, names: folder != str(path) and "model-settings.json" in names)


def files_below(
    path: Path,
    on_error: Callable[[OSError], None] | None = None,
    is_left_out: Callable[[str, list[str]], bool] = lambda _folder, _names: False,
) -> Iterator[Path]:
    """Yield the files below a folder: links are followed, hidden files and `__pycache__` are left out.

    is_left_out: returns whether a folder with these files is left out, with all below it.
    """
    seen = set()  # folders, since links may form a loop
    for folder, subfolders, names in os.walk(path, onerror=on_error, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen or is_left_out(folder, names):
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = [name for name in subfolders if not _is_ignored(name)]
        yield from (Path(folder, name) for name in names if not _is_ignored(name))


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"
