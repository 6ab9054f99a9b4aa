"""Neal's funnel: log N(x1; 0, 3²) + log N(x2; 0, exp(x1)).

The gradient is written; its Hessian action follows from it by the complex step, exactly.
"""

import numpy as np
from numpy.typing import NDArray

import dragoman

Array = NDArray[np.float64]


def gradient(x: Array) -> Array:
    inverse = np.exp(-x[0])
    found: Array = np.stack([-x[0] / 9 - 0.5 + x[1] ** 2 * inverse / 2, -x[1] * inverse])
    return found


@dragoman.vector_function(inputs={"x": 2}, outputs={"log_density": 1}, gradient=gradient, vectorised=True)
def funnel(x: Array) -> Array:
    first, second = x[..., :1], x[..., 1:]
    return np.asarray(-(first**2) / 18 - first / 2 - second**2 * np.exp(-first) / 2 - np.log(6 * np.pi))
