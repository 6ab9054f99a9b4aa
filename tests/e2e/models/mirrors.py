"""Models that return where, and in which batch, a call was computed."""

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dragoman import BYTES, FP64, INT64, Infer, Inference, Model, Tensor, TensorSpec
from dragoman.core.calls import Generate
from dragoman.core.spec import Placement
from dragoman.core.text import Generation, Text


class Mirror(Model):
    """Return the inputs and the process id."""

    placement: Placement = "inline"

    def infer(self, call: Infer) -> Inference:
        frozen = gc.get_freeze_count() > 10_000
        return Inference(call.inputs, {**call.parameters, "pid": os.getpid(), "frozen": frozen})


class Apart(Mirror):
    """The same in a worker process."""

    placement = "process"


class Flat(Model):
    """Return twice a vector; a raw body is sufficient."""

    inputs = (TensorSpec("x", FP64, (-1,)),)
    outputs = (TensorSpec("y", FP64, (-1,)),)
    placement = "inline"

    def infer(self, call: Infer) -> Any:
        return 2 * call.inputs["x"].data


class Pair(Flat):
    """Return twice a vector of known size, also over UM-Bridge."""

    inputs = (TensorSpec("x", FP64, (2,)),)
    outputs = (TensorSpec("y", FP64, (2,)),)


class Together(Model):
    """Return the number of rows in the batch. A negative number waits for the file `TEST_GATE`."""

    inputs = (TensorSpec("x", FP64, (-1, 1)),)
    outputs = (TensorSpec("rows", INT64, (-1,)),)
    batched = True
    placement = "thread"

    def infer(self, call: Infer) -> Any:
        x = call.inputs["x"].data
        if (x < 0).any():
            _wait()
        return np.full(len(x), len(x))


class Gate(Model):
    """Create the file `begun` in a folder; return once the file `go` exists."""

    inputs = (TensorSpec("x", BYTES, (1,)),)
    outputs = (TensorSpec("y", FP64, (1,)),)
    placement: Placement = "thread"

    def infer(self, call: Infer) -> Any:
        folder = Path(call.inputs["x"].data[0].decode())
        (folder / "begun").touch()
        while not (folder / "go").exists():
            time.sleep(0.005)
        return np.ones(1)


class GateApart(Gate):
    """The same in a worker process."""

    placement = "process"


class Counts(Model):
    """Yield the numbers below n."""

    inputs = (TensorSpec("n", INT64, (1,)),)
    outputs = (TensorSpec("i", INT64, (1,)),)
    placement = "inline"

    def infer(self, call: Infer) -> Iterator[Any]:
        for i in range(int(call.inputs["n"].data[0])):
            yield {"i": Tensor.of(np.array([i]))}


class Speaker(Model):
    """Yield the words of the prompt. At `!wait` it waits; the file `TEST_GATE`.left shows that the call was
    cancelled."""

    placement = "inline"

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        text = str(call.prompts[0]).split(" ")
        if not call.stream:
            yield _text("", " ".join(text), len(text))
            return
        for count, word in enumerate(text, 1):
            if word == "!wait":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    Path(os.environ["TEST_GATE"] + ".left").touch()
                    raise
            complete = " ".join(text) if count == len(text) else ""
            yield _text(word if count == 1 else f" {word}", complete, count)


def _text(part: str, whole: str, count: int) -> Generation:
    end: dict[str, Any] = {"finish": "eos_token", "whole": whole} if whole else {}
    return Generation((Text(0, 0, part or whole, (), count, **end),))


def _wait() -> None:
    gate = Path(os.environ["TEST_GATE"])
    Path(f"{gate}.begun").touch()
    while not gate.exists():
        time.sleep(0.005)
