"""Usage by key and model, limits of tokens, and the hook for what counts them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import msgspec

from dragoman.core.callers import Caller
from dragoman.core.calls import ServerCall
from dragoman.core.state_store import StateTable

# The entry point of the meter: dragoman.usage, meter.
HOOK = "usage", "meter"


class Usage(NamedTuple):
    """What calls have used. compute_s: seconds that models worked on them, their part of a batch by rows."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    compute_s: float = 0.0

    def plus(self, other: Self) -> "Usage":
        return Usage(
            self.requests + other.requests,
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.compute_s + other.compute_s,
        )


class UsageCounts:
    """Usage since the last `take`, by owner, name of the key, and model: of a process that does not store it."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], Usage] = {}

    def add(self, owner: str, name: str, model: str, usage: Usage) -> None:
        key = owner, name, model
        before = self._counts.get(key)
        self._counts[key] = usage if before is None else before.plus(usage)

    def take(self) -> Mapping[tuple[str, str, str], Usage]:
        counts, self._counts = self._counts, {}
        return counts


class UsageRow(msgspec.Struct, frozen=True):
    """The usage of a key in a day, by model. day: as in 2026-11-28, UTC."""

    day: str
    owner: str
    name: str
    model: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class ReadUsage(ServerCall[tuple[UsageRow, ...]]):
    """Return the usage from one day to another, both included, of one owner or, with None, of all."""

    first_day: str
    last_day: str
    owner: str | None = None


class RateLimits(msgspec.Struct, frozen=True):
    """Limits of a key, what is left of them, and the seconds until all is; None: no such limit."""

    requests: int | None = None
    remaining_requests: int = 0
    reset_requests_s: float = 0.0
    tokens: int | None = None
    remaining_tokens: int = 0
    reset_tokens_s: float = 0.0


class TokenBudget(Protocol):
    """The tokens that a key may still use."""

    def check(self) -> None:
        """Raise RateLimited if none are left."""

    def limits(self) -> RateLimits: ...


class UsageMeter(Protocol):
    """Counts what keys use, on the engine's event loop. The entry point is a function of the `StateTable`."""

    def add(self, owner: str, name: str, model: str, usage: Usage) -> None: ...

    def budget(self, caller: Caller, per_minute: int, per_day: int) -> TokenBudget:
        """Return the budget of an owner with these limits, 0 for none: the same one for each of its calls."""

    def rows(self, call: ReadUsage) -> tuple[UsageRow, ...]: ...

    def close(self) -> None:
        """Pass everything to the table."""


class MakeMeter(Protocol):
    def __call__(self, table: StateTable) -> UsageMeter: ...
