"""Files that are replaced as a whole, and temporary folders."""

import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# A folder that is younger may not be locked yet.
_YOUNG_S = 60.0


@contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """Create a folder for the time of the block, and remove those with the same prefix whose processes were killed.

    A process holds a lock on its folder. Raises OSError if no folder can be written.
    """
    folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    for other in Path(folder.name).parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if time.time() - other.stat().st_mtime > _YOUNG_S and (descriptor := _lock(other)) >= 0:
                os.close(descriptor)
                shutil.rmtree(other)
    with folder as name:
        descriptor = _lock(Path(name))
        try:
            yield name
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def _lock(folder: Path) -> int:
    """Return the descriptor of a folder that this process alone has locked, -1 if it cannot be locked."""
    if sys.platform == "win32":
        return -1
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


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
