"""Refused requests in the audit log: each at once, and floods of equal ones as one line with their number."""

import asyncio

import msgspec

from dragoman.core.audit import log_event
from dragoman.core.errors import DragomanError

# Equal refusals within this time after the first are counted.
INTERVAL_S = 10.0
# So many different ones are distinguished within that time; those of all further callers are counted together.
MAX_KINDS = 200
_OTHERS = "others"


class Refusal(msgspec.Struct, frozen=True):
    """A refused request. `where`: its path, or what it asked for. `key`: the name of its key, if that is known."""

    status: int
    reason: str
    where: str
    key: str
    client: str


class Refusals:
    """Logs the refused requests of one process."""

    def __init__(self) -> None:
        self._counts: dict[Refusal, int] = {}  # of those after the first, while they are counted

    def add(self, error: DragomanError, where: str, key: str, client: str) -> None:
        """Log a refused request, unless an equal one has just been logged."""
        refusal = Refusal(error.status, error.message, where, key, client)
        if refusal not in self._counts and len(self._counts) >= MAX_KINDS:
            refusal = Refusal(error.status, "", "", "", _OTHERS)
        if refusal in self._counts:
            self._counts[refusal] += 1
            return
        _log(refusal)
        loop = asyncio._get_running_loop()  # none in a program that checks keys without a server
        if loop is not None:
            self._wait(refusal, loop)

    def _wait(self, refusal: Refusal, loop: asyncio.AbstractEventLoop) -> None:
        self._counts[refusal] = 0
        loop.call_later(INTERVAL_S, self._end_interval, refusal, loop)

    def _end_interval(self, refusal: Refusal, loop: asyncio.AbstractEventLoop) -> None:
        count = self._counts.pop(refusal)
        if count:
            _log(refusal, count)
            self._wait(refusal, loop)

    def flush(self) -> None:
        """Log the numbers of those that are counted now."""
        for refusal, count in self._counts.items():
            if count:
                _log(refusal, count)
                self._counts[refusal] = 0


def _log(refusal: Refusal, times: int | None = None) -> None:
    """Log a refusal, or that it occurred so many times more."""
    fields = {"status": refusal.status, "reason": refusal.reason or None, "request": refusal.where or None}
    log_event("refused", {**fields, "key": refusal.key, "client": refusal.client, "times": times})
