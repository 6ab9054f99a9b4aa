"""A density shaped as a ring of a given radius: -(|x| - radius)² / width. Gradient and Hessian in closed form.

The density has a kink at the origin, where the first derivatives in opposite directions are equal and opposite. Their
mean, 0, is returned as the gradient there. The second derivatives grow without bound towards the origin, so a Hessian
action at the origin is an error.
"""

import numpy as np
from numpy.typing import NDArray

import dragoman

Array = NDArray[np.float64]


def gradient(x: Array, *, radius: float = 2.6, width: float = 0.033) -> Array:
    r = float(np.linalg.norm(x))
    if r == 0:
        return np.zeros_like(x)
    return -2 * (r - radius) / width * x / r


def hessian(x: Array, *, radius: float = 2.6, width: float = 0.033) -> Array:
    r = float(np.linalg.norm(x))
    if r == 0:
        raise dragoman.errors.InvalidInput(
            "input 'x': expected a point other than the origin, where the ring has no second derivatives"
        )
    outward = np.outer(x, x) / r**2
    return -2 / width * (outward + (1 - radius / r) * (np.eye(2) - outward))


@dragoman.vector_function(
    inputs={"x": 2}, outputs={"log_density": 1}, gradient=gradient, hessian=hessian, vectorised=True
)
def donut(x: Array, *, radius: float = 2.6, width: float = 0.033) -> Array:
    r: Array = np.linalg.norm(x, axis=-1, keepdims=True)
    return -((r - radius) ** 2) / width
