"""Random stiffness along a beam: its logarithm is a Brownian motion, given by its first modes.

log E(x) = log 10 + sum_k m_k √2 sin((k - ½) π x) / ((k - ½) π), k = 1, 2, ...: the Karhunen-Loève expansion of a
Brownian motion on [0, 1]; the m_k are independent and standard normal.
"""

import numpy as np
from numpy.typing import NDArray

import dragoman

Array = NDArray[np.float64]

NODES, MODES = 31, 4
FREQUENCIES = (np.arange(1, MODES + 1) - 0.5) * np.pi
SHAPES = np.sqrt(2) * np.sin(np.outer(np.linspace(0, 1, NODES), FREQUENCIES)) / FREQUENCIES


def stiffness(m: Array) -> Array:
    found: Array = 10 * np.exp(SHAPES @ m)
    return found


def gradient(m: Array, sens: Array) -> Array:
    found: Array = SHAPES.T @ (stiffness(m) * sens)
    return found


def apply_jacobian(m: Array, vec: Array) -> Array:
    found: Array = stiffness(m) * (SHAPES @ vec)
    return found


def apply_hessian(m: Array, sens: Array, vec: Array) -> Array:
    found: Array = SHAPES.T @ (stiffness(m) * sens * (SHAPES @ vec))
    return found


@dragoman.vector_function(
    inputs={"m": MODES},
    outputs={"modulus": NODES},
    gradient=gradient,
    apply_jacobian=apply_jacobian,
    apply_hessian=apply_hessian,
)
def field(m: Array) -> Array:
    return stiffness(m)
