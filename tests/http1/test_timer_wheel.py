"""One timer checks the timeouts of any number of connections."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.transports.timer_wheel import TimerWheel


class Clock:
    """An event loop that knows only its timers; tests advance its time."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.timers: list[tuple[float, Callable[[], Any]]] = []
        self.timers_set = 0

    def time(self) -> float:
        return self.now_s

    def call_later(self, after_s: float, function: Callable[[], Any], **_: Any) -> Any:
        self.timers_set += 1
        self.timers.append((self.now_s + after_s, function))
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.timers and min(self.timers)[0] <= end_s:
            first = min(self.timers, key=lambda timer: timer[0])
            self.timers.remove(first)
            self.now_s = first[0]
            first[1]()
        self.now_s = end_s


class TimedConnection:
    def __init__(self, clock: Clock, deadline_s: float, again_s: float = 0.0) -> None:
        self.slot = 0
        self.clock = clock
        self.deadline_s = deadline_s
        self.interval_s = again_s
        self.checks_s: list[float] = []
        self.expired_s = 0.0

    def check_timeouts(self, now_s: float) -> float:
        self.checks_s.append(now_s)
        if now_s < self.deadline_s:
            return self.deadline_s
        self.expired_s = now_s
        return now_s + self.interval_s if self.interval_s else 0.0


def make_wheel(clock: Clock, shortest_s: float = 8.0) -> TimerWheel:
    loop: Any = clock
    return TimerWheel(loop, shortest_s)  # it ticks every second if the shortest timeout is 8 s


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.01, 300), min_size=1, max_size=30), st.floats(0.04, 100))
def test_timeouts_are_checked_in_time_and_not_before(timeouts_s: list[float], shortest_s: float) -> None:
    clock = Clock()
    timers = make_wheel(clock, shortest_s)
    connections = [TimedConnection(clock, clock.now_s + timeout_s) for timeout_s in timeouts_s]
    for connection in connections:
        timers.watch(connection, connection.deadline_s)
    clock.advance(400)
    tick_s = min(1.0, max(0.005, shortest_s / 8))
    for connection in connections:
        assert 0 <= connection.expired_s - connection.deadline_s <= 2 * tick_s + 1e-6
        assert len(connection.checks_s) == 1
    assert not clock.timers


def test_a_later_deadline_costs_nothing() -> None:
    clock = Clock()
    timers = make_wheel(clock)
    connection = TimedConnection(clock, clock.now_s + 10)
    timers.watch(connection, connection.deadline_s)
    for _ in range(1000):
        connection.deadline_s += 0.1
        timers.watch(connection, connection.deadline_s)
    clock.advance(10.5)
    assert connection.expired_s == 0
    clock.advance(101)
    assert connection.expired_s == pytest.approx(connection.deadline_s, abs=2)
    assert len(connection.checks_s) <= 3


def test_an_earlier_deadline_applies() -> None:
    clock = Clock()
    timers = make_wheel(clock)
    connection = TimedConnection(clock, clock.now_s + 75)
    timers.watch(connection, connection.deadline_s)
    connection.deadline_s = clock.now_s + 3
    timers.watch(connection, connection.deadline_s)
    clock.advance(5)
    assert connection.expired_s
    assert len(connection.checks_s) == 1


def test_one_timer_for_all_connections_and_none_without() -> None:
    clock = Clock()
    timers = make_wheel(clock)
    connections = [TimedConnection(clock, clock.now_s + 20) for _ in range(1000)]
    for connection in connections:
        timers.watch(connection, connection.deadline_s)
    clock.advance(5)
    assert clock.timers_set <= 7
    assert len(clock.timers) == 1
    for connection in connections:
        timers.forget(connection)
    clock.advance(2)
    assert not clock.timers
    timers.watch(connections[0], clock.now_s + 1)
    assert len(clock.timers) == 1
    timers.close()
    assert not clock.timers


def test_an_exception_does_not_affect_other_connections(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TimedConnection):
        def check_timeouts(self, now_s: float) -> float:
            raise RuntimeError("oh")

    clock = Clock()
    timers = make_wheel(clock)
    broken, connection = Broken(clock, clock.now_s + 1), TimedConnection(clock, clock.now_s + 1, again_s=2)
    for each in (broken, connection):
        timers.watch(each, each.deadline_s)
    clock.advance(30)
    assert len(connection.checks_s) > 5  # checked at the interval that it returned
    assert "cannot check the timeouts" in caplog.text


async def test_a_real_event_loop() -> None:
    timers = TimerWheel(asyncio.get_running_loop(), 0.0)
    called = asyncio.Event()

    class Once:
        slot = 0

        def check_timeouts(self, now_s: float) -> float:
            called.set()
            return 0.0

    timers.watch(Once(), asyncio.get_running_loop().time() + 0.01)
    await asyncio.wait_for(called.wait(), 60)
