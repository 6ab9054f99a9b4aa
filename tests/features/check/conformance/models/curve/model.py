"""A function of two numbers with all derivatives."""

import numpy as np
from numpy.typing import NDArray

import dragoman


@dragoman.vector_function(inputs={"x": 2}, outputs={"y": 2})
def curve(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([x[0] ** 2 + x[1], x[0] * x[1]])
