"""When the garbage of unloaded models is collected: each collection stops the event loop."""

import asyncio
import gc
import itertools
import sys
import time
from collections.abc import Callable, Set
from functools import partial
from types import ModuleType

import pytest

from dragoman.system import process
from dragoman.system.process import collect_regularly

DELAY_S = 2.0


class Clock:
    """A clock that only `asyncio.sleep` and garbage collections advance; one of all generations takes `full_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, full_s: float) -> None:
        self.now_s = 100.0
        self.full_s = full_s
        self.full_collections: list[float] = []
        self.changes: list[str] = []  # of the objects that are exempt
        self._sleep = asyncio.sleep
        monkeypatch.setattr(asyncio, "sleep", self.sleep)
        monkeypatch.setattr(gc, "collect", self.collect)
        monkeypatch.setattr(process, "_frozen_modules", 0)
        monkeypatch.setattr(process, "_has_exempt_models", False)
        for name in ("freeze", "unfreeze"):
            monkeypatch.setattr(gc, name, partial(self.changes.append, name))
        for name in ("monotonic", "thread_time"):
            monkeypatch.setattr(time, name, lambda: self.now_s)

    async def sleep(self, delay_s: float) -> None:
        self.now_s += delay_s
        await self._sleep(0)

    def collect(self, generation: int) -> None:
        if generation == 2:
            self.full_collections.append(self.now_s)
            self.changes.append("collect")
            self.now_s += self.full_s

    def run(self, find_models: Callable[[], Set[object]], seconds: float) -> list[float]:
        """Return after how many seconds all garbage was collected."""
        start_s = self.now_s

        async def until_end() -> None:
            collecting = asyncio.ensure_future(collect_regularly(find_models, DELAY_S))
            while self.now_s < start_s + seconds:
                await self._sleep(0)
            collecting.cancel()

        asyncio.run(until_end())
        return [each - start_s for each in self.full_collections]


def test_once_after_a_model_was_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, full_s=0.001)
    (after_s,) = clock.run(lambda: {"a", "b"} if clock.now_s < 110 else {"a"}, 55)
    assert 12 <= after_s <= 13
    assert clock.changes == ["collect"]  # not of the modules: no model was exempted with them


def test_not_while_models_are_only_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, full_s=0.001)
    assert clock.run(lambda: set(range(int(clock.now_s))), 55) == []


def test_once_in_a_minute_without_unloading(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, full_s=0.001)
    at_s = clock.run(lambda: {"a"}, 200)
    assert [round(each / 10) for each in at_s] == [6, 12, 18]
    assert clock.changes == ["collect"] * 3  # without what is exempt


@pytest.mark.parametrize(("full_s", "least", "most"), [(0.001, 1, 4), (0.02, 20, 22)])
def test_rarely_if_each_takes_long(monkeypatch: pytest.MonkeyPatch, full_s: float, least: float, most: float) -> None:
    """A model is loaded again each second. Full collections continue, and take a thousandth of the time at most."""
    clock = Clock(monkeypatch, full_s)
    at_s = clock.run(lambda: {int(clock.now_s)}, 100)
    assert 2 <= at_s[0] <= 4
    assert all(least <= after - before <= most for before, after in itertools.pairwise(at_s))
    assert len(at_s) >= 4


def test_a_framework_that_a_load_imports_is_exempted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, full_s=0.001)
    modules = dict(sys.modules)
    monkeypatch.setattr(sys, "modules", modules)
    process.freeze_imports()  # not in a process that is not ours
    for name, value in (("set_threshold", lambda *_: None), ("enable", lambda: None)):
        monkeypatch.setattr(gc, name, value)
    process.collect_rarely()
    process.freeze_imports()
    assert clock.changes == ["freeze"]
    modules |= {f"framework.{i}": ModuleType(f"framework.{i}") for i in range(400)}
    process.freeze_imports()
    process.freeze_imports()
    assert clock.changes == ["freeze"] * 2

    clock.run(lambda: {"a", "b"} if clock.now_s < 110 else {"a"}, 55)
    assert clock.changes[2:] == ["unfreeze", "collect", "freeze"]  # the model may have been exempted, too
