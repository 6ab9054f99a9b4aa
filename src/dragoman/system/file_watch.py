"""Watch files by polling and reload what depends on them."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

log = logging.getLogger("dragoman.server")

_INTERVAL_S = 1.0
_Signature = tuple[tuple[int, int, int], ...]


class FileWatcher:
    """Calls functions when their files change.

    It compares inode, size and time of modification, and follows links: a Kubernetes Secret is a link that is
    replaced. A file that disappears is a change too.
    """

    def __init__(self) -> None:
        self._watched: list[tuple[Sequence[Path], Callable[[], None]]] = []
        self._signatures: list[_Signature] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, files: Sequence[Path], reload: Callable[[], None]) -> None:
        if files:
            self._watched.append((files, reload))
            self._signatures.append(_signature(files))

    def start(self) -> None:
        """Watch from now on, in a task of the running event loop."""
        if self._watched and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def reload(self) -> None:
        """Call all functions, whether or not their files have changed."""
        for number, (files, reload) in enumerate(self._watched):
            self._signatures[number] = _signature(files)
            _call(reload)

    def check(self) -> None:
        """Call the functions whose files have changed."""
        for number, (files, reload) in enumerate(self._watched):
            signature = _signature(files)
            if signature != self._signatures[number]:
                self._signatures[number] = signature
                _call(reload)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self.check()


def _call(reload: Callable[[], None]) -> None:
    try:
        reload()
    except Exception:
        log.exception("reloading files failed")


def _signature(files: Sequence[Path]) -> _Signature:
    return tuple(map(_file_signature, files))


def _file_signature(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
