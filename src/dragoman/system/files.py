"""Files that are replaced as a whole, and temporary folders."""

import os
import shutil
import stat
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_PREFIX = "dragoman-tmp-"
# A folder that is younger may not be locked yet.
_YOUNG_S = 60.0


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """A folder that `cleanup`, or the end of the block, deletes. Its process holds a lock on it.

    path: without symbolic links. Raises OSError if no folder can be written.
    """

    def __init__(self, name: str) -> None:
        super().__init__(prefix=f"{_PREFIX}{name}-", ignore_cleanup_errors=True)
        self.path = Path(self.name).resolve()
        self._descriptor = lock_folder(self.path)

    def cleanup(self) -> None:
        super().cleanup()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def remove_abandoned_folders() -> None:
    """Delete the temporary folders of processes that were killed: nobody holds the lock."""
    with suppress(OSError):  # there may be no folder for temporary files
        for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            if time.time() - folder.stat().st_mtime > _YOUNG_S and (descriptor := lock_folder(folder)) >= 0:
                os.close(descriptor)
                shutil.rmtree(folder, ignore_errors=True)


def lock_folder(folder: Path) -> int:
    """Return the descriptor of a folder that this process alone has locked, -1 if it cannot be locked."""
    if sys.platform == "win32":
        return -1
    import fcntl

    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # of another user, or removed meanwhile
        return -1
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
