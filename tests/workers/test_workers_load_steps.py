"""Steps of loading reach the server from threads and worker processes, and never disturb calls."""

import threading
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dragoman import plugins
from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.model import Model
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.system.coroutines import complete
from dragoman.system.load_steps import LoadStep, observe_steps, report_step
from workers.workers_harness import PLACEMENTS


class Mixes(Model):
    def load(self) -> None:
        report_step("mixing", 7)

    def infer(self, call: Infer) -> Inference:
        return Inference({"y": call.inputs["x"]})


class ReportsForever(Mixes):
    """A thread that it starts reports steps while calls are computed."""

    def load(self) -> None:
        self.closed = threading.Event()
        self.thread = threading.Thread(target=copy_context().run, args=(self.report,))
        self.thread.start()

    def report(self) -> None:
        while not self.closed.is_set():
            report_step("mixing" * 1000)

    async def close(self) -> None:
        self.closed.set()
        self.thread.join()


def spec_of(model: str) -> ModelSpec:
    files = (("/model.bin", 1, 2_000_000, 1), ("/other.bin", 2, 500_000, 1))
    return ModelSpec(name="m", runtime=f"{__file__}:{model}", files=files)


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_steps_are_observed(placement: str) -> None:
    steps: list[LoadStep] = []
    pool: Any = plugins.find("pools", placement)(spec_of("Mixes"), lambda: None)
    with observe_steps(steps.append):
        await pool.start()
    await pool.close()
    first = [LoadStep("starting a process to read the model")] if placement == "process" else []
    assert steps == [*first, LoadStep("reading"), LoadStep("loading", 2_500_000), LoadStep("mixing", 7)]


async def test_a_process_in_which_a_model_stays() -> None:
    steps: list[LoadStep] = []
    pool: Any = plugins.find("pools", "process")(replace(spec_of("Mixes"), placement="process"), lambda: None)
    with observe_steps(steps.append):
        await pool.start()
    await pool.close()
    assert steps[0] == LoadStep("starting a process")


async def test_no_steps_are_sent_once_the_model_is_loaded() -> None:
    """The socket belongs to the responses then: a step between two parts of one would damage it."""
    steps: list[LoadStep] = []
    pool: Any = plugins.find("pools", "process")(spec_of("ReportsForever"), lambda: None)
    with observe_steps(steps.append):
        await pool.start()
    try:
        count = len(steps)
        request = Request(Infer({"x": Tensor.of(np.arange(4_000.0))}, (), {}), "m", "", "id")
        for _ in range(20):
            response = await complete(pool.call(request))
            assert response.outputs["y"].data[-1] == 3_999
        assert len(steps) == count
    finally:
        await pool.close()
