"""The meter: usage by key, model and day, kept in the state store, and the budgets of keys with limits of tokens.

A call is counted when it ends, with what it has used, also if it failed or its client left. All is counted in the
engine's process: other server processes send what they have counted (`UsageCounts`). Changed rows are passed to the
store together, `_SAVE_S` after the first change, so a server that is killed loses that much at most.

A budget is a token bucket for each minute, and the tokens of a day (UTC). A call is admitted while tokens are left. It
may use more than that, and so may others that run at the same time; the debt is paid back before the next is admitted,
so that the average holds. Without reservations, a call whose `max_tokens` is large and not used hinders none.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from operator import itemgetter

import msgspec

from dragoman.core.callers import Caller
from dragoman.core.errors import RateLimited
from dragoman.core.state_store import StateTable
from dragoman.core.usage import RateLimits, ReadUsage, Usage, UsageRow

TABLE_VERSION = 1
# Days that are kept.
KEEP_DAYS = 400
# Rows that are kept at most, of whom the oldest days are dropped: a model server may see many subjects of tokens.
MAX_ROWS = 200_000
_SAVE_S = 0.1
_DAY_S = 86400.0


class _Row(msgspec.Struct, array_like=True):
    """What calls have used, as in the store, where the key is the day and the model."""

    name: str
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    compute_s: float = 0.0


_Key = tuple[str, str, str]  # day, owner, model


class Meter:
    """A `UsageMeter`. clock: Unix time. monotonic: of the buckets."""

    def __init__(
        self,
        table: StateTable,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table, self._clock, self._monotonic = table, clock, monotonic
        self._rows: dict[_Key, _Row] = {}
        self._changed: set[_Key] = set()
        self._saving: asyncio.TimerHandle | None = None
        self._budgets: dict[str, Budget] = {}
        self._day = ""
        self._day_ends_s = 0.0
        self._used_today: Counter[str] = Counter()  # tokens by owner
        for (owner, key), row in table.read(_Row).items():
            day, _, model = key.partition(" ")
            self._rows[day, owner, model] = row
        self._turn_day()

    def add(self, owner: str, name: str, model: str, usage: Usage) -> None:
        requests, input_tokens, output_tokens, compute_s = usage
        self._begin_day()
        key = self._day, owner, model
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _Row(name)
        row.name = name
        row.requests += requests
        row.compute_s += compute_s
        self._changed.add(key)
        if tokens := input_tokens + output_tokens:
            row.input_tokens += input_tokens
            row.output_tokens += output_tokens
            self._used_today[owner] += tokens
            if (budget := self._budgets.get(owner)) is not None:
                budget.debit(tokens)
        if self._saving is None:
            self._saving = asyncio.get_running_loop().call_later(_SAVE_S, self._save)

    def budget(self, caller: Caller, per_minute: int, per_day: int) -> "Budget":
        budget = self._budgets.get(caller.owner)
        if budget is None:
            budget = self._budgets[caller.owner] = Budget(self, caller, self._monotonic)
        budget.set(per_minute, per_day)
        return budget

    def rows(self, call: ReadUsage) -> tuple[UsageRow, ...]:
        return tuple(
            UsageRow(
                day, owner, row.name, model, Usage(row.requests, row.input_tokens, row.output_tokens, row.compute_s)
            )
            for (day, owner, model), row in sorted(self._rows.items(), key=itemgetter(0))
            if call.first_day <= day <= call.last_day and call.owner in (None, owner)
        )

    def close(self) -> None:
        if self._saving is not None:
            self._saving.cancel()
        self._save()

    def tokens_today(self, owner: str) -> int:
        self._begin_day()
        return self._used_today[owner]

    def rest_of_day_s(self) -> float:
        self._begin_day()
        return self._day_ends_s - self._clock()

    def _begin_day(self) -> None:
        if self._clock() >= self._day_ends_s:
            self._turn_day()

    def _turn_day(self) -> None:
        """Begin a day, and forget the oldest."""
        now_s = self._clock()
        now = datetime.fromtimestamp(now_s, UTC)
        self._day, self._day_ends_s = now.strftime("%Y-%m-%d"), (now_s // _DAY_S + 1) * _DAY_S
        self._used_today = Counter()
        for (day, owner, _), row in self._rows.items():
            if day == self._day:
                self._used_today[owner] += row.input_tokens + row.output_tokens
        oldest = (now - timedelta(days=KEEP_DAYS)).strftime("%Y-%m-%d")
        excess = len(self._rows) - MAX_ROWS
        for number, key in enumerate(sorted(self._rows)):
            if key[0] > oldest and number >= excess:
                break
            del self._rows[key]
            self._changed.discard(key)
            self._table.delete(f"{key[0]} {key[2]}", key[1])

    def _save(self) -> None:
        self._saving = None
        changed, self._changed = self._changed, set()
        for day, owner, model in changed:
            self._table.put(f"{day} {model}", self._rows[day, owner, model], owner)


class Budget:
    """The tokens that an owner may still use, in this minute and on this day."""

    def __init__(self, meter: Meter, caller: Caller, clock: Callable[[], float]) -> None:
        self._meter, self._caller, self._clock = meter, caller, clock
        self._per_minute = self._per_day = 0
        self._left = 0.0  # of the minute; below 0: a debt
        self._updated_s = clock()

    def set(self, per_minute: int, per_day: int) -> None:
        """Set the limits. A new limit of a minute begins with what the last one had left of its tokens."""
        if per_minute != self._per_minute:
            self._refill()
            self._left += per_minute - self._per_minute
            self._per_minute = per_minute
        self._per_day = per_day

    def debit(self, tokens: int) -> None:
        self._refill()
        self._left -= tokens

    def check(self) -> None:
        """Raise RateLimited if no token is left."""
        if self._per_day and self._meter.tokens_today(self._caller.owner) >= self._per_day:
            raise self._error(f"{self._per_day} tokens per day", self._meter.rest_of_day_s())
        self._refill()
        if self._per_minute and self._left < 1.0:
            raise self._error(f"{self._per_minute} tokens per minute", (1.0 - self._left) * 60.0 / self._per_minute)

    def limits(self) -> RateLimits:
        """Return the limit of which fewer tokens are left."""
        self._refill()
        found: list[RateLimits] = []
        if self._per_minute:
            reset_s = (self._per_minute - self._left) * 60.0 / self._per_minute
            left = max(0, int(self._left))
            found.append(RateLimits(tokens=self._per_minute, remaining_tokens=left, reset_tokens_s=reset_s))
        if self._per_day:
            left = max(0, self._per_day - self._meter.tokens_today(self._caller.owner))
            reset_s = self._meter.rest_of_day_s()
            found.append(RateLimits(tokens=self._per_day, remaining_tokens=left, reset_tokens_s=reset_s))
        return min(found, key=lambda each: each.remaining_tokens, default=RateLimits())

    def _error(self, limit: str, wait_s: float) -> RateLimited:
        return RateLimited(f"key '{self._caller.name}' has reached its limit of {limit}", wait_s, self.limits())

    def _refill(self) -> None:
        now_s = self._clock()
        if self._per_minute:
            gained = (now_s - self._updated_s) * self._per_minute / 60.0
            self._left = min(float(self._per_minute), self._left + gained)
        self._updated_s = now_s
