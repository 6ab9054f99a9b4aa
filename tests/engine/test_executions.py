"""Rows and executions of a model, in its statistics and its metrics."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from dragoman import FP64, Infer, Model, TensorSpec, errors
from dragoman.core.calls import Measure, ReadStatistics, Request
from dragoman.engine.counters import MAX_SIZES, Executions
from dragoman.engine.engine import Engine
from dragoman.engine_setup import open_engine


class Positive(Model):
    """Return its rows. Waits for `gate`, and fails on negative numbers."""

    placement = "thread"
    batched = True
    merges = 8
    inputs = (TensorSpec("x", FP64, (-1,)),)
    outputs = (TensorSpec("y", FP64, (-1,)),)
    begun, gate = threading.Event(), threading.Event()

    def infer(self, call: Infer) -> Any:
        self.begun.set()
        assert self.gate.wait(60)
        if (call.inputs["x"].data < 0).any():
            raise errors.InvalidInput("negative")
        return {"y": call.inputs["x"].data}


def begin(engine: Engine, *rows: float) -> asyncio.Future[Any]:
    return asyncio.ensure_future(engine.infer("Positive", {"x": np.array(rows)}))


async def counted(engine: Engine) -> tuple[tuple[int, int, int], tuple[float, float]]:
    """Return successful requests, rows and executions of the statistics, and the last two of the metrics."""
    (found,) = (await engine.call(Request(ReadStatistics(), "Positive"))).answer
    families = {family.name: family for family in (await engine.call(Request(Measure()))).answer}
    rows, executions = (families[f"dragoman_{name}_total"].samples[0].value for name in ("rows", "executions"))
    return (found.succeeded, found.inferences, found.executions), (rows, executions)


async def test_a_batch_that_fails_is_no_execution_and_its_calls_are_one_each() -> None:
    Positive.begun.clear()
    Positive.gate.clear()
    async with open_engine(Positive, trial_s=0) as engine:
        assert await counted(engine) == ((0, 0, 0), (0, 0))
        calls = [begin(engine, 1.0)]
        assert await asyncio.to_thread(Positive.begun.wait, 30)
        calls += [begin(engine, 2.0, 3.0), begin(engine, -1.0), begin(engine, 4.0)]
        await asyncio.sleep(0)
        Positive.gate.set()
        with pytest.raises(errors.InvalidInput, match="negative"):
            await calls.pop(2)
        await asyncio.gather(*calls)
        assert await counted(engine) == ((3, 4, 3), (4, 3))
        await asyncio.gather(begin(engine, 1.0), begin(engine, 1.0))
        (succeeded, rows, executions), metrics = await counted(engine)
        assert (succeeded, rows, metrics) == (5, 6, (rows, executions))


def test_the_numbers_of_rows_that_clients_choose_are_bounded() -> None:
    counted, merged = Executions(), Executions()
    for rows in range(1, 10 * MAX_SIZES + 1):
        counted.count(rows, 0.5)
    counted.count(7, 0.5)
    merged.count(20 * MAX_SIZES, 1.0)
    merged.add(counted)
    for each, before in ((counted, 0), (merged, 1)):
        assert MAX_SIZES < len(each) < MAX_SIZES + 32
        assert each.total == 10 * MAX_SIZES + 1 + before
        assert sum(seconds for _, seconds in each.values()) == 0.5 * (10 * MAX_SIZES + 1) + before
        assert (each[7], each[MAX_SIZES - 1]) == ((2, 1.0), (1, 0.5))
    assert counted[2048] == (1024, 512.0)  # 1025 to 2048
