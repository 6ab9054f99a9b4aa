"""A timer wheel: one timer for the timeouts of all connections of a server."""

import asyncio
import logging
import math
from typing import Protocol

from dragoman.system.request_context import variables_of

log = logging.getLogger("dragoman.http")

# Ticks of the shortest timeout, and the shortest and longest tick.
_TICKS = 8
_MIN_TICK_S, _MAX_TICK_S = 0.005, 1.0


class Timed(Protocol):
    """Something with timeouts. The wheel writes `slot`; it is 0 at first."""

    slot: int

    def check_timeouts(self, now_s: float) -> float:
        """Act on timeouts that have passed; return when to check again, on the loop's clock, 0 for never."""


class TimerWheel:
    """Calls `check_timeouts` of each watched object when a timeout may have passed, at most a tick late.

    An object is in one slot. Postponing its deadline, as each request does, costs nothing: it returns the later one
    when it is checked. Only an earlier deadline needs another `watch`. There is no timer while the wheel is empty.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, shortest_s: float) -> None:
        self._loop = loop
        self._tick_s = min(_MAX_TICK_S, max(_MIN_TICK_S, shortest_s / _TICKS))
        self._slots: dict[int, set[Timed]] = {}
        self._at = 0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, timed: Timed, deadline_s: float) -> None:
        """Check `timed` at `deadline_s`, on the loop's clock, unless it is checked earlier anyway."""
        slot = math.ceil(deadline_s / self._tick_s)
        if timed.slot:
            if timed.slot <= slot:
                return
            self.forget(timed)
        if self._timer is None:
            self._at = int(self._loop.time() / self._tick_s)
            self._timer = self._loop.call_later(self._tick_s, self._turn, context=variables_of(()))
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
        until = int(now_s / self._tick_s)
        while self._at < until and self._slots:
            self._at += 1
            for timed in self._slots.pop(self._at, ()):
                timed.slot = 0
                self._check(timed, now_s)
        self._at = until
        self._timer = self._loop.call_later(self._tick_s, self._turn, context=variables_of(())) if self._slots else None

    def _check(self, timed: Timed, now_s: float) -> None:
        try:
            again_s = timed.check_timeouts(now_s)
        except Exception:
            log.exception("cannot check the timeouts of a connection")
        else:
            if again_s and not timed.slot:
                self.watch(timed, again_s)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._slots.clear()
