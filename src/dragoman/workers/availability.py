"""Follow whether a model in this process can answer calls, and report when that changes."""

import asyncio
from collections.abc import Callable, Sequence

from dragoman.core.model import Model
from dragoman.workers.execute import Executor

# Interval at which a model is asked, in seconds.
_INTERVAL_S = 1.0


class Availability:
    """The availability of a model with one or more copies.

    reason: why no copy can answer, "" while one can. changed: called when it becomes empty or not empty.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.reason = ""
        self._changed = changed
        self._task: asyncio.Task[None] | None = None

    def watch(self, executors: Sequence[Executor]) -> None:
        """Start asking the model, unless it is always available."""
        if any(type(executor.model).unavailable is not Model.unavailable for executor in executors):
            self._task = asyncio.get_running_loop().create_task(self._follow(executors))

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _follow(self, executors: Sequence[Executor]) -> None:
        while True:
            reasons = [executor.unavailable() for executor in executors]
            before, self.reason = self.reason, "" if "" in reasons else reasons[0]
            if bool(before) != bool(self.reason):
                self._changed()
            await asyncio.sleep(_INTERVAL_S)
