"""One place in a pool of processes: whenever its process dies, another one is started."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from dragoman.core.errors import DragomanError

log = logging.getLogger("dragoman.worker")

# A process that dies is started again after 0.1 s, then 0.2 s, ... ; one that lived this long begins anew.
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 30.0
_PROVEN_S = 10.0
# So many processes in a row that died without an answer, and no more is hoped for.
_HOPELESS = 3


class Kept(Protocol):
    """A process: `gone` is set when it has ended, `answered` tells whether it was of any use, `overdue` whether it was
    killed on purpose."""

    gone: asyncio.Event
    answered: bool
    overdue: bool

    async def start(self) -> object:
        """Start it. Raises DragomanError; nothing is left behind then."""


K = TypeVar("K", bound=Kept)


class Place(Generic[K]):
    """Keeps one process alive. `lost` and `gained` are told of each that dies and comes, `failed` of vain attempts."""

    def __init__(
        self,
        make: Callable[[], K],
        lost: Callable[[K], None],
        gained: Callable[[K], None],
        failed: Callable[[], None],
    ) -> None:
        self._make = make
        self._lost = lost
        self._gained = gained
        self._failed = failed
        self._deaths = 0
        self._unloadable = False
        self._delay_s = _FIRST_DELAY_S

    @property
    def hopeless(self) -> bool:
        """Whether there is no sense in waiting for this place to answer again."""
        return self._unloadable or self._deaths >= _HOPELESS

    async def keep(self, replica: K) -> None:
        """Own the place, for good."""
        while True:
            began_s = time.monotonic()
            await replica.gone.wait()
            if not replica.overdue:  # else we killed it ourselves, which says nothing of the model's health
                self._deaths = 1 if replica.answered else self._deaths + 1
            if replica.overdue or time.monotonic() - began_s > _PROVEN_S:
                self._delay_s = _FIRST_DELAY_S
            self._lost(replica)
            replica = await self._restarted()
            self._gained(replica)

    async def _restarted(self) -> K:
        while True:
            await asyncio.sleep(self._delay_s)
            self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)
            replica = self._make()
            try:
                await replica.start()
            except DragomanError as fault:
                log.error("%s; trying again in %g s", fault.message, self._delay_s)
                self._unloadable = True
                self._failed()
            else:
                self._unloadable = False
                return replica
