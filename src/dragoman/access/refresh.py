"""Keep keys up to date: watch their files, and read the URL of a JWKS regularly."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from dragoman.access.control import AccessControl
from dragoman.system.file_watch import FileWatcher


class AccessRefresher:
    """Runs from `start` to `stop` in the tasks of one event loop. It watches other files, say certificates, as well."""

    def __init__(self, access: AccessControl | None) -> None:
        self._tokens = None if access is None else access.tokens
        self._watcher = FileWatcher()
        self._refreshing: asyncio.Task[None] | None = None
        if access is not None:
            self.add(access.files, access.reload)

    def add(self, files: Sequence[Path], reload: Callable[[], None]) -> None:
        self._watcher.add(files, reload)

    def start(self) -> None:
        self._watcher.start()
        if self._tokens is not None and self._tokens.is_remote:
            self._refreshing = asyncio.get_running_loop().create_task(self._tokens.refresh())

    def reload(self) -> None:
        """Read all files now, and the URL soon."""
        self._watcher.reload()
        if self._tokens is not None and self._tokens.is_remote:
            self._tokens.reload()

    async def stop(self) -> None:
        await self._watcher.stop()
        refreshing, self._refreshing = self._refreshing, None
        if refreshing is not None:
            refreshing.cancel()
            await asyncio.wait({refreshing})
