"""Files that are replaced as a whole."""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write a file in one step: it has the old or the new text after a crash at any moment.

    It keeps its mode; a new one is readable by its owner only. Of a symbolic link, the file that it leads to is
    replaced. Raises OSError.
    """
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600
    target = path.resolve()
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(target)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
