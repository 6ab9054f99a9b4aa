"""A density shaped as a ring of a given radius: -(|x| - radius)² / width. Gradient and Hessian in closed form."""

import numpy as np
from numpy.typing import NDArray

import dragoman

Array = NDArray[np.float64]


def length(x: Array) -> float:
    """|x|; there is no derivative at the origin."""
    found = float(np.linalg.norm(x))
    if found == 0:
        raise dragoman.errors.InvalidInput("input 'x': the ring has no derivative at the origin")
    return found


def gradient(x: Array, *, radius: float = 2.6, width: float = 0.033) -> Array:
    r = length(x)
    return -2 * (r - radius) / width * x / r


def hessian(x: Array, *, radius: float = 2.6, width: float = 0.033) -> Array:
    r = length(x)
    outward = np.outer(x, x) / r**2
    return -2 / width * (outward + (1 - radius / r) * (np.eye(2) - outward))


@dragoman.vector_function(
    inputs={"x": 2}, outputs={"log_density": 1}, gradient=gradient, hessian=hessian, vectorised=True
)
def donut(x: Array, *, radius: float = 2.6, width: float = 0.033) -> Array:
    r: Array = np.linalg.norm(x, axis=-1, keepdims=True)
    return -((r - radius) ** 2) / width
