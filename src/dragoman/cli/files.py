"""Files that the user names."""

import os
from pathlib import Path

from dragoman.core.errors import InvalidInput


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Read a file. Raises InvalidInput naming it if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        name = os.fspath(path)
        # curl and HTTPie mark the name of a file so.
        without = f"; did you mean {name[1:]}, without @?" if name[:1] == "@" and Path(name[1:]).is_file() else ""
        raise InvalidInput(f"'{name}' cannot be read: {error.strerror}{without}") from error


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file. Raises InvalidInput naming it if it cannot be written."""
    try:
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InvalidInput(f"'{os.fspath(path)}' cannot be written: {error.strerror}") from error
