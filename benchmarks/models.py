"""The models that the benchmarks serve."""

import asyncio
import time
from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray

import dragoman
from dragoman.core.spec import Placement


class Identity(dragoman.Model):
    """Gives a table of numbers back as it came: what is left is the cost of the server."""

    inputs = (dragoman.TensorSpec("INPUT0", dragoman.FP32, (-1, -1)),)
    outputs = (dragoman.TensorSpec("OUTPUT0", dragoman.FP32, (-1, -1)),)
    placement = "inline"

    def infer(self, call: dragoman.Infer) -> dragoman.Tensor:
        return call.inputs["INPUT0"]


class IdentityImage(Identity):
    """The same for images."""

    inputs = (dragoman.TensorSpec("INPUT0", dragoman.FP32, (-1, 3, 224, 224)),)
    outputs = (dragoman.TensorSpec("OUTPUT0", dragoman.FP32, (-1, 3, 224, 224)),)


class Pieces(dragoman.Model):
    """A stream of two hundred small pieces, as a text comes token by token; each takes a turn of the event loop."""

    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (1,)),)
    placement = "inline"

    async def infer(self, call: dragoman.Infer) -> AsyncIterator[dict[str, dragoman.Tensor]]:
        for _ in range(200):
            await asyncio.sleep(0)
            yield {"y": call.inputs["x"]}


def doubled(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """A small model as people write it, with every setting at its default."""
    return 2 * x


class Batched(dragoman.Model):
    """A model on a device of its own: so long for a batch, and a little for each row of it."""

    inputs = (dragoman.TensorSpec("INPUT0", dragoman.FP32, (-1, 16)),)
    outputs = (dragoman.TensorSpec("OUTPUT0", dragoman.FP32, (-1, 16)),)
    batched = True
    placement = "thread"

    def infer(self, call: dragoman.Infer) -> NDArray[np.float32]:
        rows = call.inputs["INPUT0"].data
        time.sleep(0.001 + 0.00002 * len(rows))
        return rows.copy()


class Numbers(dragoman.Model):
    """Gives numbers back as they came, however many."""

    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP32, (-1,)),)
    placement: Placement = "inline"

    def infer(self, call: dragoman.Infer) -> dragoman.Tensor:
        return call.inputs["x"]


class NumbersInThread(Numbers):
    placement = "thread"


class NumbersInProcess(Numbers):
    placement = "process"
