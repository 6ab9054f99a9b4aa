"""The schedule policy of a model: priorities, and limits of its queue."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dragoman.core.options import Option


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Order and limits of the queue of a model: the table `[model.schedule]`.

    Requests that stream their responses do not wait in it.
    """

    priority_levels: Annotated[
        int, Option("levels of the request parameter `priority`; 1 is served first", least=1, most=100)
    ] = 1
    default_priority: Annotated[
        int, Option("level of requests without a valid priority; 0: the middle one", least=0, most=100)
    ] = 0
    max_queue_size: Annotated[
        int, Option("requests of a level that may wait; further ones get 503; 0: no limit", least=0)
    ] = 0
    timeout_s: Annotated[float, Option("seconds that a request may wait; 0: no limit", least=0)] = 0.0
    timeout_action: Annotated[
        Literal["reject", "delay"],
        Option("a request that has waited for timeout_s gets 503, or waits behind the others of its level"),
    ] = "reject"

    def level(self, priority: object) -> int:
        """Return the level for the priority of a request."""
        if isinstance(priority, int) and not isinstance(priority, bool) and 1 <= priority <= self.priority_levels:
            return priority
        return min(self.default_priority, self.priority_levels) or (self.priority_levels + 1) // 2
