"""Schedule policy: priorities, limit and timeout of a model's queue."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import dragoman
from dragoman import FP64, Infer, Tensor, TensorSpec
from dragoman.core.callers import ANYONE, Caller
from dragoman.core.calls import Request
from dragoman.core.dialect import Dialect
from dragoman.core.errors import InvalidInput, Overloaded
from dragoman.core.fair_share import FairShares, has_place, uncontended
from dragoman.core.schedule import QueueLimits, ScheduleOptions
from dragoman.core.spec import ModelSpec
from dragoman.engine.engine import Engine
from dragoman.engine.model_files import repository_settings
from dragoman.engine.repository import Repository

WAIT_S = 0.02


class Recorder(dragoman.Model):
    """Return the input. `seen` has the inputs in the order of their computation, `gate` holds the model."""

    placement = "thread"
    batched = True
    inputs = (TensorSpec("x", FP64, (-1, 1)),)
    gate = threading.Event()
    seen: list[list[float]] = []  # noqa: RUF012 - shared on purpose
    parameters: list[Any] = []  # noqa: RUF012

    def infer(self, call: Infer) -> Any:
        x = call.inputs["x"].data
        self.seen.append(x.reshape(-1).tolist())
        self.parameters.append(dict(call.parameters))
        if x[0, 0] >= 100:
            time.sleep(0.02)
        if x[0, 0] == 0:
            assert self.gate.wait(60)
        return {"y": x}


class Busy:
    """An engine whose model computes the request 0 until `release`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tasks: list[asyncio.Task[Any]] = []

    async def send(self, x: float, rows: int = 1, caller: Caller = ANYONE, **parameters: Any) -> asyncio.Task[Any]:
        call = Infer({"x": Tensor(np.full((rows, 1), float(x)), FP64)}, parameters=parameters)
        task = asyncio.ensure_future(self.engine.call(Request(call, "Recorder", caller=caller)))
        self.tasks.append(task)
        for _ in range(5):  # until it is queued
            await asyncio.sleep(0)
        return task

    async def release(self) -> list[list[float]]:
        """Compute what is queued; return the batches after the request 0."""
        Recorder.gate.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return Recorder.seen[1:]


async def busy(options: ScheduleOptions | None, **settings: Any) -> AsyncIterator[Busy]:
    Recorder.gate.clear()
    Recorder.seen.clear()
    Recorder.parameters.clear()
    settings = {"max_batch_size": 1, "trial_s": 0, **settings}
    spec = ModelSpec(name="Recorder", target=Recorder, runtime="python", schedule=options, **settings)
    async with Engine(Repository([spec])) as engine:
        found = Busy(engine)
        await found.send(0)
        while not Recorder.seen and not found.tasks[0].done():
            await asyncio.sleep(0.001)
        try:
            yield found
        finally:
            await found.release()


@pytest_asyncio.fixture
async def levels() -> AsyncIterator[Busy]:
    async for found in busy(ScheduleOptions(priority_levels=3)):
        yield found


async def test_level_1_is_served_first_and_levels_by_arrival(levels: Busy) -> None:
    for x, priority in ((1, 3), (2, 0), (3, 1), (4, 7), (5, 3), (6, 2), (7, 1)):
        await levels.send(x, priority=priority)
    assert await levels.release() == [[3.0], [7.0], [2.0], [4.0], [6.0], [1.0], [5.0]]
    assert Recorder.parameters == [{}] * 8  # no model sees the priority


async def test_priorities_in_batches() -> None:
    async for model in busy(ScheduleOptions(priority_levels=2, default_priority=2), max_batch_size=2, batch_linger=0):
        for x, priority in ((1, 2), (2, 2), (3, 1), (4, 0)):
            await model.send(x, priority=priority)
        await model.send(5, priority=1, own="parameter")  # not merged with the others
        assert await model.release() == [[3.0, 1.0], [5.0], [2.0, 4.0]]


ALICE, BOB = Caller("key:alice", "alice"), Caller("key:bob", "bob")


@pytest.mark.parametrize("options", [None, ScheduleOptions()])
async def test_owners_share_the_batches(options: ScheduleOptions | None) -> None:
    async for model in busy(options, max_batch_size=4, batch_linger=0):
        for x in range(1, 7):
            await model.send(x, caller=ALICE)
        await model.send(11, caller=BOB)
        await model.send(12, caller=BOB)
        assert await model.release() == [[1.0, 11.0, 2.0, 12.0], [3.0, 4.0, 5.0, 6.0]]


async def test_owners_share_batches_by_their_weight_and_rows() -> None:
    async for model in busy(None, max_batch_size=6, batch_linger=0):
        for x in range(1, 5):
            await model.send(x, rows=2, caller=replace(ALICE, priority="low"))
        for x in range(11, 19):
            await model.send(x, caller=replace(BOB, priority="high"))
        batches = await model.release()
        assert batches[0] == [1.0, 1.0, 11.0, 12.0, 13.0, 14.0]


async def test_another_owner_has_its_group_first() -> None:
    """Groups that cannot be merged: the second owner comes after one batch of the first."""
    async for model in busy(None, max_batch_size=2, batch_linger=0):
        for x in range(1, 9):
            await model.send(x, caller=ALICE, group=x % 3)
        await model.send(11, caller=BOB, group=7)
        assert [11.0] in (await model.release())[:2]


async def test_owners_share_by_the_time_that_their_calls_take() -> None:
    async for model in busy(None, max_batch_size=2, batch_linger=0):
        for x in range(1, 13):
            await model.send(x, caller=ALICE, group=1)
            await model.send(100 + x, caller=BOB, group=2)  # each takes 20 ms
        batches = [batch[0] >= 100 for batch in await model.release()]
        assert batches[:6].count(True) == 1, "one batch of the slow calls takes as long as all of the others"


@given(st.integers(1, 50), st.data())
def test_an_owner_has_a_place_while_few_are_taken(limit: int, data: st.DataObject) -> None:
    total = data.draw(st.integers(0, limit))
    own = data.draw(st.integers(0, total))
    if total < uncontended(limit):
        assert has_place(own, total, limit)
    if total < limit:
        assert has_place(0, total, limit), "others are always admitted"
    alone = max((n + 1 for n in range(limit) if has_place(n, n, limit)), default=0)
    assert alone >= uncontended(limit)
    assert alone < limit or limit == 1


def test_counters_of_owners() -> None:
    shares = FairShares()
    for caller in (ALICE, BOB):
        shares.enter(caller)
    shares.charge(ALICE.owner, 3.0)
    shares.charge(BOB.owner, 1.0)
    assert shares.served(ALICE.owner) - shares.served(BOB.owner) == 1.0  # each has weight 2
    carol = Caller("key:carol")
    shares.enter(carol)
    assert shares.served(carol.owner) == shares.served(BOB.owner), "nothing is saved up while idle"
    shares.leave(ALICE)
    shares.enter(ALICE)
    assert shares.served(ALICE.owner) == 1.5, "nothing is forgiven by leaving"
    for caller in (ALICE, BOB, carol):
        shares.leave(caller)
    shares.enter(ALICE)
    assert shares.served(ALICE.owner) == 0.0


async def test_a_class_of_keys_has_no_level_before_its_first_one() -> None:
    async for model in busy(ScheduleOptions(priority_levels=3)):
        await model.send(1, priority=1, caller=replace(ALICE, priority="low"))
        await model.send(2, priority=1, caller=replace(ALICE, priority="normal"))
        await model.send(3, priority=3, caller=replace(ALICE, priority="normal"))
        await model.send(4, priority=1, caller=replace(ALICE, priority="high"))
        assert await model.release() == [[4.0], [2.0], [1.0], [3.0]]


async def test_an_owner_leaves_places_in_the_queue_to_others() -> None:
    async for model in busy(ScheduleOptions(max_queue_size=8)):
        for x in range(1, 8):
            await model.send(x, caller=ALICE)
        with pytest.raises(Overloaded, match="part of key 'alice'"):
            await (await model.send(8, caller=ALICE))
        await model.send(11, caller=BOB)
        with pytest.raises(Overloaded, match="maximum queue size"):
            await (await model.send(12, caller=BOB))


async def test_an_owner_leaves_places_of_a_model_to_others() -> None:
    async for model in busy(None, max_batch_size=2, max_queue=5):
        for x in range(1, 4):
            await model.send(x, caller=ALICE)
        with pytest.raises(Overloaded, match="part of key 'alice' in the queue of 5"):
            await (await model.send(4, caller=ALICE))
        accepted = await model.send(11, caller=BOB)
        await model.release()
        assert accepted.exception() is None


async def test_a_cancelled_request_leaves_the_queue(levels: Busy) -> None:
    first = await levels.send(1)
    await levels.send(2)
    first.cancel()
    assert await levels.release() == [[2.0]]


async def test_each_level_has_a_limit() -> None:
    async for model in busy(ScheduleOptions(priority_levels=2, max_queue_size=2)):
        queued = [await model.send(x, priority=1) for x in (1, 2)]
        with pytest.raises(Overloaded, match="Exceeds maximum queue size"):
            await (await model.send(3, priority=1))
        queued.append(await model.send(4, priority=2))
        assert await model.release() == [[1.0], [2.0], [4.0]]
        assert all(task.exception() is None for task in queued)


async def test_a_level_may_have_limits_of_its_own() -> None:
    levels: dict[str, dict[str, Any]] = {"2": {"max_queue_size": 2}, "1": {"timeout_s": WAIT_S}}
    async for model in busy(ScheduleOptions(priority_levels=3, max_queue_size=1, levels=levels)):
        kept = [await model.send(x, priority=priority) for x, priority in ((1, 2), (2, 2), (3, 3))]
        for priority in (2, 3):
            with pytest.raises(Overloaded, match="Exceeds maximum queue size"):
                await (await model.send(4, priority=priority))
        expired = [await model.send(x, priority=1) for x in (5, 6)]
        for task in expired:
            with pytest.raises(Overloaded, match="Request timeout expired"):
                await task
        assert await model.release() == [[1.0], [2.0], [3.0]]
        assert all(task.exception() is None for task in kept)


async def test_the_timeout_of_a_request_may_shorten_that_of_the_queue() -> None:
    options = ScheduleOptions(
        timeout_s=60, allow_timeout_override=True, levels={"2": {"timeout_s": 60}}, priority_levels=2
    )
    async for model in busy(options, dialect=Dialect(timeout="queue")):
        kept = [await model.send(x, priority=2, timeout=30) for x in (1, 2)]  # whose level does not allow it
        kept.append(await model.send(3, timeout=0))
        with pytest.raises(Overloaded, match="Request timeout expired"):
            await (await model.send(4, priority=1, timeout=30))
        assert await model.release() == [[3.0], [1.0], [2.0]]
        assert all(task.exception() is None for task in kept)
        assert Recorder.parameters == [{}] * 4


async def test_a_request_that_waits_too_long_is_rejected() -> None:
    async for model in busy(ScheduleOptions(timeout_s=WAIT_S)):
        with pytest.raises(Overloaded, match="Request timeout expired"):
            await (await model.send(1))
        assert not model.tasks[0].done()  # a running request does not expire
        assert await model.release() == []
        assert model.tasks[0].exception() is None


async def test_a_request_that_waits_too_long_is_delayed() -> None:
    async for model in busy(ScheduleOptions(priority_levels=2, timeout_s=WAIT_S, timeout_action="delay")):
        await model.send(1, priority=1)
        await asyncio.sleep(5 * WAIT_S)
        await model.send(2, priority=2)
        await model.send(3, priority=1)
        assert await model.release() == [[3.0], [1.0], [2.0]]


async def test_calls_that_cannot_be_merged_wait_too() -> None:
    async for model in busy(ScheduleOptions(priority_levels=2), max_batch_size=4):
        await model.send(1, rows=2, priority=2)
        with pytest.raises(InvalidInput, match="batch-size must be <= 4 for 'Recorder'"):
            await (await model.send(1, rows=5))
        headed = Request(Infer({"x": Tensor(np.ones((1, 1)) * 8, FP64)}, parameters={"priority": 1}), "Recorder")
        request = Request(headed.call, "Recorder", metadata={"x-user": "me"})
        model.tasks.append(asyncio.ensure_future(model.engine.call(request)))
        await asyncio.sleep(0.01)
        assert await model.release() == [[8.0], [1.0, 1.0]]


def test_options_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "dragoman.toml"
    file.write_text("[models.m.schedule]\npriority_levels = 4\ntimeout_s = 0.5\ntimeout_action = 'delay'\n")
    options = repository_settings(tmp_path)["m"]["schedule"]
    assert options == ScheduleOptions(priority_levels=4, timeout_s=0.5, timeout_action="delay")
    assert [options.level(priority) for priority in (1, 4, 5, 0, -1, None, True, "1")] == [1, 4, 2, 2, 2, 2, 2, 2]
    file.write_text(
        "[models.m.schedule]\npriority_levels = 2\nlevels.2 = {timeout_action = 'delay', timeout_s = 1.5}\n"
    )
    options = repository_settings(tmp_path)["m"]["schedule"]
    assert options.limits(2) == QueueLimits(timeout_s=1.5, timeout_action="delay")
    assert options.limits(1).timeout_s == 0
    for line, error in (
        ("levels.2 = {}", r"setting 'schedule.levels.2': expected a level from 1 to priority_levels = 1"),
        ("levels.01 = {}", r"setting 'schedule.levels.01': expected a level"),
        ("levels.1 = {size = 1}", r"unknown setting 'schedule.levels.1.size'"),
        ("levels.1 = {timeout_s = -1}", r"\[schedule.levels.1\] setting 'timeout_s'"),
        ("levels.1 = 3", r"setting 'schedule.levels.1': expected a table, got 3"),
        ("priority_levels = 0", r"\[schedule\] setting 'priority_levels'"),
        ("timeout_action = 'drop'", "timeout_action"),
        ("level = 1", "unknown setting 'schedule.level'"),
    ):
        file.write_text(f"[models.m.schedule]\n{line}\n")
        with pytest.raises(InvalidInput, match=error):
            repository_settings(tmp_path)
