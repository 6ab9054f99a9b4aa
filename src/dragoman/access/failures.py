"""Failed attempts to authenticate: counted by reason, and limited for each client address."""

import time
from collections import Counter
from collections.abc import Callable

from dragoman.access.addresses import address_group
from dragoman.core.errors import RateLimited
from dragoman.core.metrics import Family, Sample

_METRIC = "dragoman_access_denied_total"
# Reasons for which a request is denied.
MISSING, INVALID, EXPIRED, FORBIDDEN, THROTTLED = "missing", "invalid", "expired", "forbidden", "throttled"
FOREIGN = "foreign_site"
REASONS = (MISSING, INVALID, EXPIRED, FORBIDDEN, THROTTLED, FOREIGN)
# Addresses that are remembered; the oldest are forgotten first.
_MAX_ADDRESSES = 10_000


class FailedAttempts:
    """Allows each address `per_minute` failed attempts a minute, after a burst of as many; 0 is no limit.

    The burst is one attempt at least.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = Counter(dict.fromkeys(REASONS, 0))
        self._per_minute = per_minute
        self._burst = max(1.0, per_minute)
        self._clock = clock
        self._addresses: dict[str, tuple[float, float]] = {}  # attempts left, at this time

    def check(self, address: str) -> None:
        """Raise RateLimited if the address has no attempt left."""
        left, _ = self._tokens_left(address)
        if self._per_minute and left < 1.0:
            self.counts[THROTTLED] += 1
            wait_s = (1.0 - left) * 60.0 / self._per_minute
            raise RateLimited("too many failed attempts to authenticate from this address; retry later", wait_s)

    def add(self, address: str, reason: str) -> None:
        """Count a failed attempt of an address."""
        self.counts[reason] += 1
        if self._per_minute:
            left, now_s = self._tokens_left(address)
            group = address_group(address)
            self._addresses.pop(group, None)
            if len(self._addresses) >= _MAX_ADDRESSES:
                del self._addresses[next(iter(self._addresses))]
            self._addresses[group] = left - 1.0, now_s

    def _tokens_left(self, address: str) -> tuple[float, float]:
        now_s = self._clock()
        left, since_s = self._addresses.get(address_group(address), (self._burst, now_s))
        return min(self._burst, left + (now_s - since_s) * self._per_minute / 60.0), now_s

    def families(self) -> tuple[Family, ...]:
        """Return the metric of denied requests."""
        samples = tuple(Sample(_METRIC, {"reason": reason}, self.counts[reason]) for reason in REASONS)
        return (Family(_METRIC, "counter", "Requests denied by authentication or authorization.", samples),)
