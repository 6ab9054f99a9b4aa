"""A timer wheel: one timer for the timeouts of all connections of a server."""

import asyncio
import logging
import math
from typing import Protocol

log = logging.getLogger("dragoman.http")

# How finely time is cut: the shortest patience has so many ticks, but a tick is at least and at most so long.
_TICKS = 8
_LEAST_S, _MOST_S = 0.005, 1.0


class Timed(Protocol):
    """Something whose time may be over. `slot` is the wheel's to write; 0 at first."""

    slot: int

    def overdue(self, now_s: float) -> float:
        """Act where its time is over; gives when to look again, on the loop's clock, 0 for never."""


class TimerWheel:
    """Looks at each watched thing once its time may be over, a tick later at most.

    A thing stands in one slot. That its time moves on, as it does with each request, costs nothing: it says so when
    it is looked at. Only where its time is nearer than its slot does it have to be watched anew. The wheel does not
    turn while it is empty.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, shortest_s: float) -> None:
        self._loop = loop
        self._tick_s = min(_MOST_S, max(_LEAST_S, shortest_s / _TICKS))
        self._slots: dict[int, set[Timed]] = {}
        self._at = 0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, timed: Timed, due_s: float) -> None:
        """Look at it at `due_s`, on the loop's clock, unless that happens earlier anyway."""
        slot = math.ceil(due_s / self._tick_s)
        if timed.slot:
            if timed.slot <= slot:
                return
            self.forget(timed)
        if self._timer is None:
            self._at = int(self._loop.time() / self._tick_s)
            self._timer = self._loop.call_later(self._tick_s, self._turn)
        timed.slot = slot = max(slot, self._at + 1)
        self._slots.setdefault(slot, set()).add(timed)

    def forget(self, timed: Timed) -> None:
        found = self._slots.get(timed.slot)
        if found is not None:
            found.discard(timed)
            if not found:
                del self._slots[timed.slot]
        timed.slot = 0

    def _turn(self) -> None:
        now_s = self._loop.time()
        upto = int(now_s / self._tick_s)
        while self._at < upto and self._slots:
            self._at += 1
            for timed in self._slots.pop(self._at, ()):
                timed.slot = 0
                self._look(timed, now_s)
        self._at = upto
        self._timer = self._loop.call_later(self._tick_s, self._turn) if self._slots else None

    def _look(self, timed: Timed, now_s: float) -> None:
        try:
            again_s = timed.overdue(now_s)
        except Exception:
            log.exception("a connection could not be looked after")
        else:
            if again_s and not timed.slot:
                self.watch(timed, again_s)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._slots.clear()
