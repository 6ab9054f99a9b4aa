"""The schedule policy of a model: priorities, limits of its queue, and the parameters of requests that concern them."""

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeVar

from dragoman.core.callers import Caller
from dragoman.core.calls import Request
from dragoman.core.errors import InvalidInput, Overloaded
from dragoman.core.fair_share import has_place
from dragoman.core.options import Option
from dragoman.core.tensor import Parameters

# Parameters of a request: its priority, and its timeout in microseconds, an unsigned 64-bit number.
PRIORITY, TIMEOUT = "priority", "timeout"
_MAX_US = 1 << 64
# As a deadline a shorter timeout has no effect: no response arrives that soon. It comes from clients that mean seconds,
# for a server with another meaning of the parameter; some send 30 with every request.
MIN_DEADLINE_S = 0.001


def requested_timeout_s(parameters: Parameters) -> float:
    """Return the parameter `timeout` of a request in seconds; 0 without one. Raises InvalidInput."""
    timeout_us = parameters.get(TIMEOUT, 0)
    if isinstance(timeout_us, bool) or not isinstance(timeout_us, int) or not 0 <= timeout_us < _MAX_US:
        shown = str(timeout_us)[:32] if isinstance(timeout_us, int | float) else repr(timeout_us)
        raise InvalidInput(f"parameter 'timeout': expected a number of microseconds below 2^64, got {shown}")
    return timeout_us / 1e6


def requested_deadline_s(parameters: Parameters, deadline_s: float | None, now_s: float) -> float | None:
    """Return the earlier of a deadline and that of the parameter `timeout` of a request, as of `time.monotonic`.

    Raises InvalidInput for an invalid timeout.
    """
    timeout_s = requested_timeout_s(parameters)
    if timeout_s < MIN_DEADLINE_S:
        return deadline_s
    return now_s + timeout_s if deadline_s is None else min(deadline_s, now_s + timeout_s)


def check_priority(parameters: Parameters) -> None:
    """Raise InvalidInput if the parameter `priority` of a request is not a number from 0."""
    priority = parameters.get(PRIORITY, 0)
    if isinstance(priority, bool) or not isinstance(priority, int) or priority < 0:
        raise InvalidInput(f"Unable to parse 'priority': invalid value, expected value >= 0., got {priority!r:.32}")


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """Limits of the requests that wait."""

    max_queue_size: Annotated[
        int, Option("requests of a level that may wait; further ones get 503; 0: no limit", minimum=0)
    ] = 0
    timeout_s: Annotated[float, Option("seconds that a request may wait; 0: no limit", minimum=0)] = 0.0
    timeout_action: Annotated[
        Literal["reject", "delay"],
        Option("a request that has waited for timeout_s gets 503, or waits behind the others of its level"),
    ] = "reject"
    allow_timeout_override: Annotated[bool, Option("the parameter `timeout` of a request may shorten timeout_s")] = (
        False
    )

    def wait_s(self, parameters: Parameters) -> float:
        """Return how long a request with these parameters may wait in seconds; 0 for no limit."""
        requested_s = requested_timeout_s(parameters) if self.allow_timeout_override and self.timeout_s else 0.0
        return min(requested_s or self.timeout_s, self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(QueueLimits):
    """Order and limits of the queue of a model: the table `[model.schedule]`.

    Requests that stream their responses do not wait in it.
    """

    priority_levels: Annotated[
        int, Option("levels of the request parameter `priority`; 1 is served first", minimum=1, maximum=100)
    ] = 1
    default_priority: Annotated[
        int, Option("level of requests without a valid priority; 0: the middle one", minimum=0, maximum=100)
    ] = 0
    levels: Annotated[
        Mapping[str, Mapping[str, Any]],
        Option("limits of single levels, instead of all four above, such as levels.2 = { max_queue_size = 10 }"),
    ] = field(default_factory=dict)

    def level(self, priority: object) -> int:
        """Return the level for the priority of a request."""
        if isinstance(priority, int) and not isinstance(priority, bool) and 1 <= priority <= self.priority_levels:
            return priority
        return min(self.default_priority, self.priority_levels) or (self.priority_levels + 1) // 2

    def level_of(self, priority: object, caller: Caller) -> int:
        """Return the level for the priority of a caller's request: none before the first one of the class of its key.

        That is level 1 of `high`, the middle one of `normal`, and the last one of `low`.
        """
        first = {"normal": (self.priority_levels + 1) // 2, "low": self.priority_levels}.get(caller.priority, 1)
        return max(first, self.level(priority))

    def limits(self, level: int) -> QueueLimits:
        """Return the limits of a level."""
        own = self.levels.get(str(level)) if self.levels else None
        return self if own is None else QueueLimits(**own)


# Level, whether the request has waited too long, and its number in the order of arrival.
Order = tuple[int, bool, int]


class Queued(Protocol):
    """A request that waits."""

    order: Order

    @property
    def request(self) -> Request[Any]: ...


Q = TypeVar("Q", bound=Queued)


class QueuePolicy:
    """Order and limits of the requests that wait for a model, for each kind of batcher. Not for several threads."""

    def __init__(self, options: ScheduleOptions) -> None:
        self._options = options
        self._numbers = itertools.count()

    def put(self, queue: deque[Q], entry: Q, parameters: Parameters, waiting: Iterable[Q]) -> float:
        """Insert a request with these parameters into a queue; return the seconds until `expire`, 0 for no limit.

        `waiting` are the requests of all queues of the model. Raises Overloaded if too many of its level wait, or
        of its owner, and InvalidInput for an invalid timeout.
        """
        caller = entry.request.caller
        level = self._options.level_of(parameters.get(PRIORITY), caller)
        limits = self._options.limits(level)
        wait_s = limits.wait_s(parameters)
        if limits.max_queue_size:
            owners = [each.request.caller.owner for each in waiting if each.order[0] == level]
            if len(owners) >= limits.max_queue_size:
                raise Overloaded("Exceeds maximum queue size")
            if caller.owner and not has_place(owners.count(caller.owner), len(owners), limits.max_queue_size):
                raise Overloaded(f"Exceeds the part of key '{caller.name}' in the queue")
        entry.order = level, False, next(self._numbers)
        self._insert(queue, entry)
        return wait_s

    def expire(self, queue: deque[Q], entry: Q) -> Overloaded | None:
        """Return the error for a request that has waited too long, which is removed; None if it waits behind others."""
        level, _, number = entry.order
        queue.remove(entry)
        if self._options.limits(level).timeout_action == "reject":
            return Overloaded("Request timeout expired")
        entry.order = level, True, number
        self._insert(queue, entry)
        return None

    @staticmethod
    def _insert(queue: deque[Q], entry: Q) -> None:
        queue.insert(bisect.bisect(queue, entry.order, key=lambda other: other.order), entry)
