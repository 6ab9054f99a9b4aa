"""Fair shares of what several owners wait for: virtual counters of service, and places in bounded queues."""

from collections.abc import Mapping
from typing import Final

from dragoman.core.callers import Caller

# One owner leaves a part of the places to others: it may have this many times as many as are free.
_PER_FREE_PLACE = 7
# Counters of owners without requests that are kept at most before those without effect are dropped.
_MAX_IDLE = 1000

# The service of one class of keys in relation to another, while both have requests that wait.
WEIGHTS: Final[Mapping[str, float]] = {"high": 4.0, "normal": 2.0, "": 2.0, "low": 1.0}


class FairShares:
    """Virtual counters of service: of the owners with requests, the one that has been served least is next.

    As in the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, algorithm
    2): an owner whose first request comes is raised to the least counter of the others, so that nothing can be saved up
    while idle; service is divided by the weight of the owner's class. An owner that leaves for a moment keeps its
    counter. All are forgotten when no owner has requests. Not for several threads.

    is_shared: several owners have requests. is_counted: service has to be charged.
    """

    def __init__(self) -> None:
        self._requests: dict[str, int] = {}
        self._weights: dict[str, float] = {}
        self._served: dict[str, float] = {}
        self.is_shared = self.is_counted = False

    def enter(self, caller: Caller) -> None:
        """Add a request of an owner."""
        owner = caller.owner
        count = self._requests.get(owner, 0)
        if not count:
            self._served[owner] = max(self._served.get(owner, 0.0), self._least())
        self._requests[owner] = count + 1
        # Its requests may be of several classes: those of its batches have the lowest one.
        self._weights[owner] = max(WEIGHTS[caller.priority], self._weights[owner] if count else 0.0)
        self._update()

    def leave(self, caller: Caller) -> None:
        """Remove a request of an owner."""
        owner = caller.owner
        self._requests[owner] -= 1
        if self._requests[owner]:
            return
        del self._requests[owner]
        if not self._requests:
            self._served, self._weights = {}, {}
        elif len(self._served) > len(self._requests) + _MAX_IDLE:
            least = self._least()
            self._served = {o: s for o, s in self._served.items() if o in self._requests or s > least}
            self._weights = {o: self._weights[o] for o in self._served}
        self._update()

    def charge(self, owner: str, service: float) -> None:
        """Count service of an owner, in any unit that is the same for all."""
        if owner in self._served:
            self._served[owner] += service / self._weights[owner]

    def served(self, owner: str) -> float:
        """Return the service of an owner so far, divided by its weight."""
        return self._served[owner] if owner in self._served else self._least()

    def weight(self, owner: str) -> float:
        return self._weights.get(owner, WEIGHTS[""])

    def part(self, owner: str) -> float:
        """Return the part of an owner with requests in what all share, from 0 to 1."""
        return self._weights[owner] / sum(self._weights[each] for each in self._requests)

    def _least(self) -> float:
        return min((self._served[owner] for owner in self._requests), default=0.0)

    def _update(self) -> None:
        self.is_shared = len(self._requests) > 1
        self.is_counted = self.is_shared or "" not in self._requests


def has_place(own: int, total: int, limit: int) -> bool:
    """Return whether an owner that has `own` of `total` places in a queue may take one more.

    One owner alone fills 7/8 of them, two 7/15 each, and the last one is for an owner that has none: so others are
    always admitted beside owners that send as much as they can.
    """
    free = limit - total
    return free > 0 and (not own or (free > 1 and own < _PER_FREE_PLACE * free))


def uncontended(limit: int) -> int:
    """Return the number of places that can be taken before `has_place` depends on the owner."""
    return min(limit - 1, -(-_PER_FREE_PLACE * limit // (_PER_FREE_PLACE + 1)))
