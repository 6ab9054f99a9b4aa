"""Files that the user names for the output of a command."""

import os
from pathlib import Path

from dragoman.core.errors import InvalidInput


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file. Raises InvalidInput naming it if it cannot be written."""
    try:
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InvalidInput(f"'{os.fspath(path)}' cannot be written: {error.strerror}") from error
