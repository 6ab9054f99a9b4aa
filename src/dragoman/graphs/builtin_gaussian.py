"""The logarithm of a Gaussian density: priors, and likelihoods of data."""

import math
from typing import Any

import numpy as np

from dragoman.core.errors import InvalidInput
from dragoman.core.vectors import Config, Vector, Vectors
from dragoman.graphs.builtin_base import BuiltInNode, parse_integer, parse_numbers
from dragoman.graphs.sizes import Size


class Gaussian(BuiltInNode):
    """log N(x; mean, cov) = -½ (x - mean)ᵀ cov⁻¹ (x - mean) - ½ log det(2π cov), a vector of one number.

    mean: a number for all elements, or a vector. cov: the variance of all, a vector of variances, or a matrix that is
    symmetric and positive definite. dim: the size of x, where neither tells it. Raises InvalidInput where they do not
    fit. (Source: the density of the multivariate normal distribution.)
    """

    known_outputs = (1,)

    def __init__(self, mean: Any = 0.0, cov: Any = 1.0, dim: Size = None) -> None:
        self._mean = parse_numbers(mean, "mean")
        self._cov = parse_numbers(cov, "cov", max_axes=2)
        told = {"mean": self._mean, "cov": self._cov}
        sizes = {name: v.shape[0] for name, v in told.items() if v.ndim} | (
            {} if dim is None else {"dim": parse_integer(dim, "dim")}
        )
        if len({*sizes.values()}) > 1:
            listed = ", ".join(f"{name} of {size}" for name, size in sizes.items())
            raise InvalidInput(f"expected one size, got {listed}")
        self.known_inputs = (next(iter(sizes.values()), None),)
        if self._cov.ndim == 2:
            self._precision, self._log_det = _inverted(self._cov)
        else:
            if not (self._cov > 0).all():
                raise InvalidInput(f"cov: expected variances above 0, got {self._cov.min()}")
            self._precision, self._log_det = 1 / self._cov, float(np.log(self._cov).sum())

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        away = inputs[0] - self._mean
        count = away.shape[-1]
        log_det = self._log_det * (count if self._cov.ndim == 0 else 1)
        square = np.sum(away * self._weighted(away), axis=-1, keepdims=True)
        return -0.5 * (square + log_det + count * math.log(2 * math.pi))

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return -sens[0] * self._weighted(inputs[0] - self._mean)

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return -np.dot(self._weighted(inputs[0] - self._mean), vec)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        return -sens[0] * self._weighted(vec)

    def _weighted(self, x: Vector) -> Any:
        """cov⁻¹ x, for a vector or for each row of a matrix."""
        return x @ self._precision if self._cov.ndim == 2 else x * self._precision


def likelihood(data: Any = None, cov: Any = 1.0, mean: Any = None) -> Gaussian:
    """log N(data; x, cov): how likely data are that were predicted as x. `data` may be called `mean`."""
    if (data is None) == (mean is None):
        raise InvalidInput("data: expected the vector that was measured, once")
    return Gaussian(data if data is not None else mean, cov)


def _inverted(cov: Vector) -> tuple[Vector, float]:
    """The inverse of a covariance matrix, and the logarithm of its determinant."""
    if cov.shape[0] != cov.shape[1] or not np.allclose(cov, cov.T, rtol=1e-10, atol=1e-12 * np.abs(cov).max()):
        raise InvalidInput(f"cov: expected a symmetric matrix, got one of shape {list(cov.shape)}")
    try:
        lower = np.linalg.cholesky(cov)
    except np.linalg.LinAlgError as fault:
        raise InvalidInput("cov: expected a positive definite matrix, got one that is not") from fault
    inverse = np.linalg.inv(lower)
    return inverse.T @ inverse, 2 * float(np.log(np.diag(lower)).sum())
