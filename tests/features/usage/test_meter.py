"""The meter: days, budgets of tokens, and what outlives a restart."""

from pathlib import Path

import pytest

from dragoman.core.callers import Caller
from dragoman.core.errors import RateLimited
from dragoman.core.state_store import StateStore
from dragoman.core.usage import RateLimits, ReadUsage, Usage
from dragoman_usage.meter import KEEP_DAYS, Meter

ANN, BOB = Caller("key:ann", "ann"), Caller("key:bob", "bob")
ALL_DAYS = ReadUsage("0000-00-00", "9999-12-31")
NOON_S = 1_800_014_400.0  # 2027-01-15 12:00 UTC


class Clock:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def meter_of(store: StateStore, clock: Clock | None = None) -> Meter:
    clock = clock or Clock(NOON_S)
    return Meter(store.table("usage"), clock, clock)


async def test_usage_adds_up_by_day_key_and_model() -> None:
    clock = Clock(NOON_S)
    meter = meter_of(StateStore(), clock)
    for _ in range(3):
        meter.add("key:ann", "ann", "llm", Usage(1, 10, 5, 0.25))
    meter.add("key:ann", "ann", "iris", Usage(1, 0, 0, 0.5))
    meter.add("key:bob", "bob", "llm", Usage(1, 1, 1, 0.125))
    clock.now_s += 86400
    meter.add("key:ann", "ann", "llm", Usage(1, 7, 0, 0.0))
    rows = [(row.day, row.name, row.model, row.usage) for row in meter.rows(ALL_DAYS)]
    assert rows == [
        ("2027-01-15", "ann", "iris", Usage(1, 0, 0, 0.5)),
        ("2027-01-15", "ann", "llm", Usage(3, 30, 15, 0.75)),
        ("2027-01-15", "bob", "llm", Usage(1, 1, 1, 0.125)),
        ("2027-01-16", "ann", "llm", Usage(1, 7, 0, 0.0)),
    ]
    (own,) = meter.rows(ReadUsage("2027-01-15", "2027-01-15", "key:bob"))
    assert own.usage[1:3] == (1, 1)
    meter.close()


async def test_usage_and_the_limit_of_a_day_outlive_a_restart(tmp_path: Path) -> None:
    store = StateStore(str(tmp_path))
    meter = meter_of(store)
    meter.add("key:ann", "ann", "my llm", Usage(2, 60, 39, 1.5))
    meter.close()
    store.close()

    store, clock = StateStore(str(tmp_path)), Clock(NOON_S)
    meter = meter_of(store, clock)
    budget = meter.budget(ANN, 0, 100)
    budget.check()
    meter.add("key:ann", "ann", "my llm", Usage(1, 1, 0, 0.0))
    with pytest.raises(RateLimited, match="key 'ann' has reached its limit of 100 tokens per day") as caught:
        budget.check()
    assert caught.value.retry_after_s == 43200.0
    assert caught.value.limits == RateLimits(tokens=100, remaining_tokens=0, reset_tokens_s=43200.0)
    clock.now_s += 43200
    budget.check()
    (row,) = meter.rows(ALL_DAYS)
    assert (row.name, row.model, row.usage) == ("ann", "my llm", Usage(3, 61, 39, 1.5))
    meter.close()
    store.close()


async def test_tokens_of_a_minute_flow_back_and_debts_are_paid() -> None:
    clock = Clock(NOON_S)
    meter = meter_of(StateStore(), clock)
    budget = meter.budget(ANN, 600, 0)  # 10 a second
    assert budget.limits() == RateLimits(tokens=600, remaining_tokens=600)
    meter.add("key:ann", "ann", "llm", Usage(1, 500, 50, 0.0))
    budget.check()
    assert budget.limits() == RateLimits(tokens=600, remaining_tokens=50, reset_tokens_s=55.0)
    meter.add("key:ann", "ann", "llm", Usage(1, 0, 149, 0.0))  # 99 more than were left
    with pytest.raises(RateLimited, match="600 tokens per minute") as caught:
        budget.check()
    assert caught.value.retry_after_s == 10.0
    meter.budget(BOB, 600, 0).check()
    clock.now_s += 9.9
    with pytest.raises(RateLimited):
        budget.check()
    clock.now_s += 0.1
    budget.check()
    assert meter.budget(ANN, 600, 0) is budget, "each call of a key has the same budget"
    clock.now_s += 3600
    assert budget.limits().remaining_tokens == 600, "no more than those of a minute gather"
    meter.budget(ANN, 60, 0)
    assert budget.limits() == RateLimits(tokens=60, remaining_tokens=60)
    meter.close()


async def test_the_limit_with_less_left_is_reported() -> None:
    meter = meter_of(StateStore())
    budget = meter.budget(ANN, 100, 1000)
    assert budget.limits().tokens == 100
    for _ in range(2):
        meter.add("key:ann", "ann", "llm", Usage(1, 475, 0, 0.0))
    assert budget.limits() == RateLimits(tokens=100, remaining_tokens=0, reset_tokens_s=570.0)
    meter.close()


async def test_old_days_are_forgotten(tmp_path: Path) -> None:
    store, clock = StateStore(str(tmp_path)), Clock(NOON_S)
    meter = meter_of(store, clock)
    meter.add("key:ann", "ann", "llm", Usage(1))
    meter.close()
    clock.now_s += KEEP_DAYS * 86400
    meter.add("key:ann", "ann", "llm", Usage(1))
    assert len(meter.rows(ALL_DAYS)) == 1
    meter.close()
    store.close()
    store = StateStore(str(tmp_path))
    assert len(store.table("usage").read()) == 1
    store.close()
