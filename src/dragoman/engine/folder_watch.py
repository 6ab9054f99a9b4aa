"""Serve models as they are on disk: compare the disk with the loaded models, and watch it for changes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dragoman.core.errors import InvalidInput, error_text
from dragoman.core.foreign_code import is_interruption
from dragoman.engine.control import ModelControl
from dragoman.engine.repository import ModelOnDisk, Repository
from dragoman.system.threads import call_in_thread

log = logging.getLogger("dragoman.engine")

# The state of each model that has changed on disk; None if it was removed.
Changes = Mapping[str, ModelOnDisk | None]

# A folder, whether folders below it are watched, and its inode.
_Folder = tuple[Path, bool, int]

# The disk is also read without a notification: links to other folders, and most network file systems, send none.
_POLL_INTERVAL_S = 30.0


def check_watch(paths: Sequence[str]) -> None:
    """Raise InvalidInput unless folders can be watched and the paths exist: later, a missing one holds no models."""
    try:
        import watchfiles  # noqa: F401
    except ImportError as error:
        raise InvalidInput("setting 'watch': expected watchfiles; pip install 'dragoman[watch]'") from error
    for path in paths:
        if ":" not in path and not Path(path).exists():
            raise InvalidInput(f"'{path}' not found: expected a model file, a folder of models or module:object")


class FolderSync:
    """Updates the models of a server that have changed on disk."""

    def __init__(self, repository: Repository, control: ModelControl) -> None:
        self._repository = repository
        self._control = control
        self._lock = asyncio.Lock()
        self._error = ""

    async def run(self, seen: Changes | None = None) -> Changes:
        """Start the update of each model that has changed; return the changes that have to wait.

        With `seen`, the changes that a call returned some time ago, only models that have not changed since are
        updated: files that are still being written are left alone.
        """
        async with self._lock:
            try:
                contents = await call_in_thread(self._read)
                self._report("")
                return self._apply(contents, seen)
            except BaseException as error:  # the watch goes on, whatever is in the files
                if is_interruption(error):
                    raise
                self._report(error_text(error), is_expected=isinstance(error, InvalidInput | OSError))
                return {}

    def _apply(self, found: Mapping[str, ModelOnDisk], seen: Changes | None) -> Changes:
        waiting: dict[str, ModelOnDisk | None] = {}
        for name in sorted({*found, *self._control.on_disk}):
            state = found.get(name)
            if state == self._control.on_disk.get(name):
                continue
            is_settled = seen is None or (name in seen and seen[name] == state)
            if is_settled and self._control.can_update(name):
                self._control.update(name, state)
            else:
                waiting[name] = state
        return waiting

    def _read(self) -> dict[str, ModelOnDisk]:
        return {name: source.state() for name, source in self._repository.scan().items()}

    def _report(self, error: str, *, is_expected: bool = True) -> None:
        if error and error != self._error:
            log.error("models are unchanged: the repository cannot be read: %s", error, exc_info=not is_expected)
        self._error = error


class FolderWatch:
    """Calls `sync` when files below some paths have changed, and again while it returns changes that have to wait.

    Calls are at least `quiet_s` seconds apart.
    """

    def __init__(self, paths: Sequence[str], quiet_s: float, sync: Callable[[Changes], Awaitable[Changes]]) -> None:
        self._paths = _watched_paths(paths)
        self._quiet_s = quiet_s
        self._sync = sync
        self._change = asyncio.Event()
        self._watched: list[_Folder] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Watch until cancelled."""
        waiting: Changes = {}
        try:
            while True:
                self._change.clear()
                waiting = await self._sync(waiting)
                await asyncio.sleep(self._quiet_s)
                if not waiting and not await self._restart():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_POLL_INTERVAL_S):
                            await self._change.wait()
        finally:
            await self._stop()

    async def _restart(self) -> bool:
        """Watch the folders that exist now. Return False if these are watched already."""
        folders = await asyncio.to_thread(self._folders)
        if folders == self._watched:
            return False
        await self._stop()
        self._watched = folders
        for is_recursive in (True, False):
            chosen = [folder for folder, recursive, _ in folders if recursive == is_recursive]
            if chosen:
                task = asyncio.get_running_loop().create_task(self._watch(chosen, recursive=is_recursive))
                self._tasks.append(task)
        await asyncio.sleep(0)  # the first step of a task sets up its watch
        return True

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def _folders(self) -> list[_Folder]:
        """Return the folders to watch. A file may be replaced by a new one, so its folder is watched, without others.

        So is the folder of a path that does not exist.
        """
        folders = []
        for path in self._paths:
            folder = path if path.is_dir() else path.parent
            with suppress(OSError):
                folders.append((folder, path.is_dir(), folder.stat().st_ino))
        return folders

    async def _watch(self, folders: Sequence[Path], *, recursive: bool) -> None:
        import watchfiles

        try:
            async for _ in watchfiles.awatch(*folders, recursive=recursive, watch_filter=None, debounce=100, step=50):
                self._change.set()
        except BaseException as error:  # the system's limit of watches is reached, or a folder was removed
            if is_interruption(error):
                raise
            text = error_text(error)
            log.warning("folders are read every %g s only, since watching failed: %s", _POLL_INTERVAL_S, text)


def _watched_paths(paths: Sequence[str]) -> list[Path]:
    """Return the files and folders among the paths of models, which may be `file.py:object` or `module:object`."""
    files = [path.rpartition(":")[0] if ".py:" in path and not Path(path).exists() else path for path in paths]
    return [Path(file) for file in files if ":" not in file or Path(file).exists()]
