"""The models that the benchmarks serve."""

import numpy as np
from numpy.typing import NDArray

import dragoman


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


def doubled(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """A small model as people write it, with every setting at its default."""
    return 2 * x
