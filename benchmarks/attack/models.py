"""Models of the server under attack."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import dragoman


def doubled(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return twice the input; called by the well-behaved client, with default settings."""
    return 2 * x


class Rows(dragoman.Model):
    """Return a table of numbers unchanged."""

    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1, -1)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP32, (-1, -1)),)

    def infer(self, call: dragoman.Infer) -> dragoman.Tensor:
        return call.inputs["x"]


class Texts(dragoman.Model):
    """Count strings."""

    inputs = (dragoman.TensorSpec("x", dragoman.BYTES, (-1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.INT64, (1,)),)

    def infer(self, call: dragoman.Infer) -> NDArray[np.int64]:
        return np.array([call.inputs["x"].data.size])


class Pictures(dragoman.Model):
    """Return the sides of pictures."""

    placement = "process"

    def predict(self, picture: list[Image.Image]) -> NDArray[np.int64]:
        return np.array([side for each in picture for side in each.size])


class Total(dragoman.Model):
    """Add the inputs of a sequence."""

    inputs = (dragoman.TensorSpec("x", dragoman.INT64, (1,)),)
    outputs = (dragoman.TensorSpec("total", dragoman.INT64, (1,)),)
    sequences = dragoman.SequenceOptions(idle_s=600)

    def infer(self, call: dragoman.Infer) -> NDArray[np.int64]:
        state = call.sequence.state
        assert state is not None
        state["total"] = state.get("total", 0) + int(call.inputs["x"].data[0])
        return np.array([state["total"]])


class Large(dragoman.Model):
    """Return the requested count of numbers or strings, in rows of one."""

    inputs = (dragoman.TensorSpec("count", dragoman.INT64, (1,)), dragoman.TensorSpec("texts", dragoman.BOOL, (1,)))
    outputs = (dragoman.TensorSpec("y", None, (-1, 1)),)

    def infer(self, call: dragoman.Infer) -> dragoman.Tensor:
        count = int(call.inputs["count"].data[0])
        if call.inputs["texts"].data[0]:
            return dragoman.Tensor.of(np.array([b"%d" % n for n in range(count)], dtype=object).reshape(count, 1))
        return dragoman.Tensor.of(np.sqrt(np.arange(count, dtype=np.float64)).reshape(count, 1))


def _size(config: Mapping[str, Any]) -> list[int]:
    return [int(config.get("n", 4))]


@dragoman.vector_function(inputs=_size, outputs=_size, derivatives=None)
def vector(x: NDArray[np.float64], config: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return twice a vector of `n` numbers, from the config (UM-Bridge)."""
    return 2 * x
