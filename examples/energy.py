"""A simulator whose derivatives are computed: `dragoman serve examples/energy.py:energy`."""

import numpy as np
from numpy.typing import NDArray

import dragoman


@dragoman.vector_function(inputs={"x": 2}, outputs={"energy": 1})
def energy(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.atleast_1d(np.sum(x**2) / 2)
