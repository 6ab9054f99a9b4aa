"""Grants: what the holder of a credential may do, and how much of it."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dragoman.core.callers import Caller, Priority
from dragoman.core.errors import RateLimited
from dragoman.core.usage import RateLimits
from dragoman.protocols.wire import Role

ROLES: tuple[Role, ...] = ("infer", "read", "admin")


class CallLimiter:
    """Limits of one key: a token bucket for the rate, and a count of the calls in progress."""

    def __init__(
        self, name: str, calls_per_s: float, max_concurrent: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._clock = clock
        self.set(calls_per_s, max_concurrent)
        self._tokens = self._burst
        self._updated_s = clock()
        self._running = 0

    def set(self, calls_per_s: float, max_concurrent: int) -> None:
        """Change the limits; calls in progress still count."""
        self._calls_per_s, self._max_concurrent = calls_per_s, max_concurrent
        self._burst = max(1.0, calls_per_s)

    def acquire(self) -> "Permit":
        """Count a call, which ends when its permit is released. Raises RateLimited."""
        if self._max_concurrent and self._running >= self._max_concurrent:
            limit = f"{self._max_concurrent} concurrent calls"
            raise RateLimited(f"key '{self._name}' has reached its limit of {limit}", 1.0, self.limits())
        if self._calls_per_s:
            now_s = self._clock()
            self._tokens = min(self._burst, self._tokens + (now_s - self._updated_s) * self._calls_per_s)
            self._updated_s = now_s
            if self._tokens < 1.0:
                wait_s = (1.0 - self._tokens) / self._calls_per_s
                limit = f"{self._calls_per_s:g} calls per second"
                raise RateLimited(f"key '{self._name}' has reached its limit of {limit}", wait_s, self.limits())
            self._tokens -= 1.0
        self._running += 1
        return Permit(self)

    def release(self) -> None:
        self._running -= 1

    def limits(self) -> RateLimits:
        """Return how many calls may begin now."""
        if not self._calls_per_s:
            return RateLimits()
        gained = (self._clock() - self._updated_s) * self._calls_per_s
        left = min(self._burst, self._tokens + gained)
        return RateLimits(int(self._burst), int(left), (self._burst - left) / self._calls_per_s)


class Permit:
    """One call in progress. It ends with `release`, or when the last reference to the call is dropped."""

    __slots__ = ("_limiter",)

    def __init__(self, limiter: CallLimiter) -> None:
        self._limiter: CallLimiter | None = limiter

    def release(self) -> None:
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter.release()

    def __del__(self) -> None:
        self.release()


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Grant:
    """Roles of a caller. `models`: the only models that it may use, or None. `expires_s`: Unix time.

    `calls_per_s`, `max_concurrent` and the tokens limit its calls to models; 0 is no limit. `priority` is its class in
    queues. `owner` owns what its requests leave
    behind: the same one for all its credentials, "" for all callers without a key.
    """

    name: str
    roles: frozenset[str]
    models: frozenset[str] | None = None
    calls_per_s: float = 0.0
    max_concurrent: int = 0
    expires_s: float = math.inf
    owner: str = ""
    tokens_per_minute: int = 0
    tokens_per_day: int = 0
    priority: Priority = ""
    limiter: CallLimiter | None = field(default=None, repr=False)  # made from the limits by default
    is_anonymous: bool = field(init=False, default=False)  # whether its requests need nothing beyond the role

    def __post_init__(self) -> None:
        if self.limiter is None and (self.calls_per_s or self.max_concurrent):
            object.__setattr__(self, "limiter", CallLimiter(self.name, self.calls_per_s, self.max_concurrent))
        is_plain = self.models is None and not self.has_limits and not self.priority
        object.__setattr__(self, "is_anonymous", is_plain and not self.owner)

    @property
    def limits_tokens(self) -> bool:
        return bool(self.tokens_per_minute or self.tokens_per_day)

    @property
    def has_limits(self) -> bool:
        return self.limiter is not None or self.limits_tokens

    def caller(self, address: str = "") -> Caller:
        """Return the caller of requests from a client's address."""
        return Caller(self.owner, self.name, address, self.priority)

    def until(self, expires_s: float) -> "Grant":
        """Return this grant, with the same limits, until a time."""
        if expires_s >= self.expires_s:
            return self
        shorter = copy.copy(self)
        object.__setattr__(shorter, "expires_s", expires_s)
        return shorter

    def in_background(self) -> "Grant":
        """Return this grant with the lowest priority, and with the same limits: calls of both count together."""
        return replace(self, priority="low")

    def is_equivalent(self, other: "Grant | None") -> bool:
        """Return whether another grant allows the same."""
        return other is not None and all(getattr(self, name) == getattr(other, name) for name in _FIELDS)


_FIELDS = (
    "name", "roles", "models", "calls_per_s", "max_concurrent", "expires_s", "owner", "tokens_per_minute",
    "tokens_per_day", "priority",
)  # fmt: skip
EVERYTHING = frozenset(ROLES)
ANONYMOUS = Grant("", EVERYTHING)
