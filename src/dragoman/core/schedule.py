"""The schedule policy of a model: priorities, and limits of its queue."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dragoman.core.options import Option


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
        Option("limits of single levels, instead of all three above, such as levels.2 = { max_queue_size = 10 }"),
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
