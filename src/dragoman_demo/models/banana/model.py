"""A density with two parameters, to sample from."""

import numpy as np
from numpy.typing import NDArray

import dragoman

Array = NDArray[np.float64]


def gradient(x: Array, *, bend: float = 0.5) -> Array:
    away = x[1] - bend * (x[0] ** 2 - 4)
    return np.array([2 * bend * x[0] * away - x[0] / 4, -away])


@dragoman.vector_function(inputs={"x": 2}, outputs={"log_density": 1}, gradient=gradient, at=[[0, 0]], vectorised=True)
def banana(x: Array, *, bend: float = 0.5) -> Array:
    """Log density in the shape of a banana, with its gradient."""
    away = x[..., 1:] - bend * (x[..., :1] ** 2 - 4)
    return np.asarray(-(x[..., :1] ** 2) / 8 - away**2 / 2)
