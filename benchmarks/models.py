"""The models that the benchmarks serve."""

import asyncio
import time
from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray

import dragoman
from dragoman.core.spec import Placement


class Identity(dragoman.Model):
    """Return the input unchanged, so that only the server is measured."""

    inputs = (dragoman.TensorSpec("INPUT0", dragoman.FP32, (-1, -1)),)
    outputs = (dragoman.TensorSpec("OUTPUT0", dragoman.FP32, (-1, -1)),)
    placement: Placement = "inline"

    def infer(self, call: dragoman.Infer) -> dragoman.Tensor:
        return call.inputs["INPUT0"]


class IdentityImage(Identity):
    """Return an image tensor unchanged."""

    inputs = (dragoman.TensorSpec("INPUT0", dragoman.FP32, (-1, 3, 224, 224)),)
    outputs = (dragoman.TensorSpec("OUTPUT0", dragoman.FP32, (-1, 3, 224, 224)),)


class Chunks(dragoman.Model):
    """Stream two hundred small chunks, like the tokens of a text; each takes one iteration of the event loop."""

    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (1,)),)
    placement = "inline"

    async def infer(self, call: dragoman.Infer) -> AsyncIterator[dict[str, dragoman.Tensor]]:
        for _ in range(200):
            await asyncio.sleep(0)
            yield {"y": call.inputs["x"]}


def doubled(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return twice the input: a small function with default settings."""
    return 2 * x


class Batched(dragoman.Model):
    """A model on its own device (it sleeps): 1 ms per batch and 0.02 ms per row."""

    inputs = (dragoman.TensorSpec("INPUT0", dragoman.FP32, (-1, 16)),)
    outputs = (dragoman.TensorSpec("OUTPUT0", dragoman.FP32, (-1, 16)),)
    batched = True
    placement = "thread"

    def infer(self, call: dragoman.Infer) -> NDArray[np.float32]:
        rows = call.inputs["INPUT0"].data
        time.sleep(0.001 + 0.00002 * len(rows))
        return rows.copy()


class Slow(Identity):
    """Return the input after 50 ms, in a thread."""

    placement = "thread"

    def infer(self, call: dragoman.Infer) -> dragoman.Tensor:
        time.sleep(0.05)
        return call.inputs["INPUT0"]


class Reloaded(Identity):
    """Loaded again beside other models."""


class Numbers(dragoman.Model):
    """Return a vector of any length unchanged."""

    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP32, (-1,)),)
    placement: Placement = "inline"

    def infer(self, call: dragoman.Infer) -> dragoman.Tensor:
        return call.inputs["x"]


class NumbersInThread(Numbers):
    placement = "thread"


class NumbersInProcess(Numbers):
    placement = "process"


class Doubling(dragoman.Model):
    """Return twice the vector, in a worker process."""

    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP32, (-1,)),)
    placement = "process"

    def infer(self, call: dragoman.Infer) -> NDArray[np.float32]:
        doubled: NDArray[np.float32] = call.inputs["x"].data * 2
        return doubled
