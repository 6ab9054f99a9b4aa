"""Files that the user names for the output of a command."""

import os
from pathlib import Path

from dragoman.core.errors import InvalidInput


def check_plot(path: str, *suffixes: str, or_terminal: bool = False) -> None:
    """Raise InvalidInput, before anything is computed, if the value of `--plot` is not a file that can be written."""
    if path == "-" and or_terminal:
        return
    if not path.lower().endswith(suffixes):
        expected = " or ".join(suffixes) + (", or -" if or_terminal else "")
        raise InvalidInput(f"--plot: expected a file {expected}, got '{path}'")
    if not Path(path).parent.is_dir():
        raise InvalidInput(f"--plot: folder '{Path(path).parent}' not found")


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file. Raises InvalidInput naming it if it cannot be written."""
    try:
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InvalidInput(f"'{os.fspath(path)}' cannot be written: {error.strerror}") from error
