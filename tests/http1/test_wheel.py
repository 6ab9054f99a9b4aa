"""One timer looks after any number of connections, each in time."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.transports.timer_wheel import TimerWheel


class Clock:
    """An event loop that knows only its timers; time passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.timers: list[tuple[float, Callable[[], Any]]] = []
        self.set = 0

    def time(self) -> float:
        return self.now_s

    def call_later(self, after_s: float, function: Callable[[], Any]) -> Any:
        self.set += 1
        self.timers.append((self.now_s + after_s, function))
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def pass_s(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.timers and min(self.timers)[0] <= end_s:
            first = min(self.timers, key=lambda timer: timer[0])
            self.timers.remove(first)
            self.now_s = first[0]
            first[1]()
        self.now_s = end_s


class Thing:
    def __init__(self, clock: Clock, deadline_s: float, again_s: float = 0.0) -> None:
        self.slot = 0
        self.clock = clock
        self.deadline_s = deadline_s
        self.again_s = again_s
        self.looked: list[float] = []
        self.acted_s = 0.0

    def check_timeouts(self, now_s: float) -> float:
        self.looked.append(now_s)
        if now_s < self.deadline_s:
            return self.deadline_s
        self.acted_s = now_s
        return now_s + self.again_s if self.again_s else 0.0


def wheel(clock: Clock, shortest_s: float = 8.0) -> TimerWheel:
    loop: Any = clock
    return TimerWheel(loop, shortest_s)  # which ticks each second where the shortest patience is eight


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.01, 300), min_size=1, max_size=30), st.floats(0.04, 100))
def test_each_is_looked_at_in_time_and_not_before(dues: list[float], shortest_s: float) -> None:
    clock = Clock()
    turning = wheel(clock, shortest_s)
    things = [Thing(clock, clock.now_s + due) for due in dues]
    for thing in things:
        turning.watch(thing, thing.deadline_s)
    clock.pass_s(400)
    tick_s = min(1.0, max(0.005, shortest_s / 8))
    for thing in things:
        assert 0 <= thing.acted_s - thing.deadline_s <= 2 * tick_s + 1e-6
        assert len(thing.looked) == 1
    assert not clock.timers


def test_time_that_moves_on_costs_nothing() -> None:
    clock = Clock()
    turning = wheel(clock)
    thing = Thing(clock, clock.now_s + 10)
    turning.watch(thing, thing.deadline_s)
    for _ in range(1000):
        thing.deadline_s += 0.1
        turning.watch(thing, thing.deadline_s)
    clock.pass_s(10.5)
    assert thing.acted_s == 0
    clock.pass_s(101)
    assert thing.acted_s == pytest.approx(thing.deadline_s, abs=2)
    assert len(thing.looked) <= 3


def test_time_that_comes_nearer_is_heeded() -> None:
    clock = Clock()
    turning = wheel(clock)
    thing = Thing(clock, clock.now_s + 75)
    turning.watch(thing, thing.deadline_s)
    thing.deadline_s = clock.now_s + 3
    turning.watch(thing, thing.deadline_s)
    clock.pass_s(5)
    assert thing.acted_s
    assert len(thing.looked) == 1


def test_one_timer_for_all_and_none_for_nobody() -> None:
    clock = Clock()
    turning = wheel(clock)
    things = [Thing(clock, clock.now_s + 20) for _ in range(1000)]
    for thing in things:
        turning.watch(thing, thing.deadline_s)
    clock.pass_s(5)
    assert clock.set <= 7
    assert len(clock.timers) == 1
    for thing in things:
        turning.forget(thing)
    clock.pass_s(2)
    assert not clock.timers
    turning.watch(things[0], clock.now_s + 1)
    assert len(clock.timers) == 1
    turning.close()
    assert not clock.timers


def test_one_that_fails_hurts_no_other(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Thing):
        def check_timeouts(self, now_s: float) -> float:
            raise RuntimeError("oh")

    clock = Clock()
    turning = wheel(clock)
    broken, thing = Broken(clock, clock.now_s + 1), Thing(clock, clock.now_s + 1, again_s=2)
    for each in (broken, thing):
        turning.watch(each, each.deadline_s)
    clock.pass_s(30)
    assert len(thing.looked) > 5  # it asked to be looked at again
    assert "cannot check the timeouts" in caplog.text


async def test_it_turns_on_a_real_loop() -> None:
    turning = TimerWheel(asyncio.get_running_loop(), 0.0)
    acted = asyncio.Event()

    class Once:
        slot = 0

        def check_timeouts(self, now_s: float) -> float:
            acted.set()
            return 0.0

    turning.watch(Once(), asyncio.get_running_loop().time() + 0.01)
    await asyncio.wait_for(acted.wait(), 10)
