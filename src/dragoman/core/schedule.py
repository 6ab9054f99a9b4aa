"""The schedule policy of a model: priorities, limits of its queue, and the parameters of requests that concern them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dragoman.core.errors import InvalidInput
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
class QueuePolicy:
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
class ScheduleOptions(QueuePolicy):
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

    def policy(self, level: int) -> QueuePolicy:
        """Return the limits of a level."""
        own = self.levels.get(str(level)) if self.levels else None
        return self if own is None else QueuePolicy(**own)
