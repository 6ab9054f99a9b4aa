"""A density shaped as a banana: a correlated Gaussian, bent. Gradient and Hessian in closed form.

y = (x1 / a, a x2 + a b (x1² + a²)), log density of N((0, 4), scale [[1, 0.5], [0.5, 1]]) at y.
"""

import numpy as np
from numpy.typing import NDArray

import dragoman

Array = NDArray[np.float64]

MEAN = np.array([0.0, 4.0])
COVARIANCE = np.array([[1.0, 0.5], [0.5, 1.0]])


def bent(x: Array, a: float, b: float) -> Array:
    first, second = x[..., 0], x[..., 1]
    return np.stack([first / a, a * second + a * b * (first**2 + a**2)], axis=-1)


def pulled(x: Array, a: float, b: float, scale: float) -> Array:
    """The gradient of the Gaussian at y, by y."""
    found: Array = (MEAN - bent(x, a, b)) @ np.linalg.inv(scale * COVARIANCE)
    return found


def jacobian_of_bent(x: Array, a: float, b: float) -> Array:
    return np.array([[1 / a, 0.0], [2 * a * b * x[0], a]])


def gradient(x: Array, *, a: float = 2.0, b: float = 0.2, scale: float = 1.0) -> Array:
    return jacobian_of_bent(x, a, b).T @ pulled(x, a, b, scale)


def hessian(x: Array, *, a: float = 2.0, b: float = 0.2, scale: float = 1.0) -> Array:
    slope = jacobian_of_bent(x, a, b)
    bending = np.diag([2 * a * b * pulled(x, a, b, scale)[1], 0.0])
    return bending - slope.T @ np.linalg.inv(scale * COVARIANCE) @ slope


@dragoman.vector_function(
    inputs={"x": 2}, outputs={"log_density": 1}, gradient=gradient, hessian=hessian, vectorised=True
)
def banana(x: Array, *, a: float = 2.0, b: float = 0.2, scale: float = 1.0) -> Array:
    away = bent(x, a, b) - MEAN
    norm = np.log(2 * np.pi) + np.linalg.slogdet(scale * COVARIANCE)[1] / 2
    square = (away @ np.linalg.inv(scale * COVARIANCE) * away).sum(axis=-1, keepdims=True)
    return np.asarray(-square / 2 - norm)
