"""Ends connections after a time, so that clients that keep theirs reach servers that were added behind a load balancer.

At its age a connection is retired: its next response is the last one, or its client is told to open another one. That
loses no request of a client that heeds it. After the grace what is still in flight is cancelled, and a
client that takes no notice is disconnected.

    stage     entered at                        becomes
    OPEN      the start                         RETIRED after the age
    RETIRED   the age                           CANCELLED after the grace; without one it stays
    CANCELLED the age and the grace             aborted a little later

Ages differ by a tenth, so that clients which connected together do not come back together.
"""

import random
from typing import Protocol

from dragoman.transports.limits import Limits
from dragoman.transports.timer_wheel import TimerWheel

_JITTER = 0.1
# Seconds for a cancelled connection to send its errors.
_CANCEL_S = 2.0
OPEN, RETIRED, CANCELLED = range(3)


class Ending(Protocol):
    """A connection that can be ended in three steps: see `ListenerConnection`."""

    def retire(self) -> None: ...

    def cancel(self) -> None: ...

    def abort(self) -> None: ...


class _Age:
    """The age of one connection."""

    __slots__ = ("_connection", "_due_s", "_grace_s", "_stage", "slot")

    def __init__(self, connection: Ending, due_s: float, grace_s: float) -> None:
        self.slot = 0
        self._connection = connection
        self._due_s = due_s
        self._grace_s = grace_s
        self._stage = OPEN

    def check_timeouts(self, now_s: float) -> float:
        if now_s < self._due_s:
            return self._due_s
        if self._stage == OPEN:
            self._stage = RETIRED
            self._connection.retire()
            self._due_s = now_s + self._grace_s if self._grace_s else 0.0
        elif self._stage == RETIRED:
            self._stage = CANCELLED
            self._connection.cancel()
            self._due_s = now_s + _CANCEL_S
        else:
            self._connection.abort()
            self._due_s = 0.0
        return self._due_s


class ConnectionAges:
    """The ages of the connections of a listener; of none without `max_connection_age_s`."""

    def __init__(self, limits: Limits, wheel: TimerWheel) -> None:
        self._max_s = limits.max_connection_age_s
        self._grace_s = limits.max_connection_age_grace_s
        self._wheel = wheel
        self._ages: dict[Ending, _Age] = {}

    def add(self, connection: Ending, now_s: float) -> None:
        if self._max_s:
            due_s = now_s + self._max_s * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311
            self._ages[connection] = age = _Age(connection, due_s, self._grace_s)
            self._wheel.watch(age, due_s)

    def remove(self, connection: Ending) -> None:
        age = self._ages.pop(connection, None)
        if age is not None:
            self._wheel.forget(age)
