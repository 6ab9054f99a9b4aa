"""Changes of models in progress: one at a time for each model."""

import asyncio
import logging
from collections.abc import Coroutine, Iterable

import msgspec

from dragoman.core.errors import InvalidInput, NotReady

log = logging.getLogger("dragoman.engine")


class ModelChange(msgspec.Struct, frozen=True):
    """A load or another change of a model in progress, and the versions that it loads."""

    task: "asyncio.Task[None]"
    versions: frozenset[str]
    is_retry: bool = False  # the model could not be loaded yet; other changes of it have priority

    def cancel(self) -> None:
        """Cancel it, once: a second cancellation would interrupt the closing of models that it has loaded."""
        if not self.task.cancelling():
            self.task.cancel()


class ModelChanges:
    """The changes in progress, by model."""

    def __init__(self) -> None:
        self._changes: dict[str, ModelChange] = {}
        self._closed = False

    def get(self, name: str) -> ModelChange | None:
        return self._changes.get(name)

    def start(
        self, name: str, work: Coroutine[object, object, None], versions: Iterable[str], *, is_retry: bool = False
    ) -> ModelChange:
        """Start a change; a failure is logged."""
        task = asyncio.get_running_loop().create_task(work)
        change = self._changes[name] = ModelChange(task, frozenset(versions), is_retry)

        def on_done(_: "asyncio.Task[None]") -> None:
            if self._changes.get(name) is change:
                del self._changes[name]
            if not task.cancelled():
                error = task.exception()  # the caller may have been cancelled
                if error is not None:
                    log.error("%s", error)

        task.add_done_callback(on_done)
        return change

    async def run(self, name: str, work: Coroutine[object, object, None], versions: Iterable[str]) -> None:
        """Run a change to its end, even if the caller is cancelled."""
        task = self.start(name, work, versions).task
        await asyncio.wait({task})  # does not cancel the task when the caller is cancelled
        if task.cancelled():
            raise InvalidInput(f"failed to load '{name}', it was unloaded meanwhile")
        task.result()

    async def wait(self, name: str) -> None:
        """Wait until no change of this model is in progress. Raises NotReady if the server is shutting down."""
        while (change := self._changes.get(name)) is not None:
            if change.is_retry:
                change.cancel()
            await asyncio.wait({change.task})
        if self._closed:
            raise NotReady("the server is shutting down")

    def close(self) -> "list[asyncio.Task[None]]":
        """Cancel all changes and return their tasks."""
        self._closed = True
        for change in self._changes.values():
            change.cancel()
        return [change.task for change in self._changes.values()]
