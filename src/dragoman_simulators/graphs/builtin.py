"""Built-in nodes: their names, element-wise functions, and Gaussian densities."""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dragoman.core.errors import InvalidInput
from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors
from dragoman_simulators.graphs import builtin_affine as affine
from dragoman_simulators.graphs.builtin_affine import BuiltInNode, SameSize, parse_integer, parse_numbers, parse_size
from dragoman_simulators.graphs.sizes import Size

_Array = npt.NDArray[np.float64]
_Pointwise = Callable[[_Array], Any]


# Each function with its first and second derivative.
FUNCTIONS: Mapping[str, tuple[_Pointwise, _Pointwise, _Pointwise]] = {
    "exp": (np.exp, np.exp, np.exp),
    "log": (np.log, lambda x: 1 / x, lambda x: -1 / x**2),
    "sqrt": (np.sqrt, lambda x: 0.5 / np.sqrt(x), lambda x: -0.25 / (x * np.sqrt(x))),
    "square": (np.square, lambda x: 2 * x, lambda x: np.full_like(x, 2.0)),
    "reciprocal": (np.reciprocal, lambda x: -1 / x**2, lambda x: 2 / x**3),
    "sin": (np.sin, np.cos, lambda x: -np.sin(x)),
    "cos": (np.cos, lambda x: -np.sin(x), lambda x: -np.cos(x)),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2, lambda x: -2 * np.tanh(x) * (1 - np.tanh(x) ** 2)),
}


class Elementwise(SameSize):
    """y = f(x), element by element. Outside the domain of f, y is NaN or infinite."""

    def __init__(self, function: str, dim: Size = None) -> None:
        if function not in FUNCTIONS:
            raise InvalidInput(f"function: expected one of {', '.join(FUNCTIONS)}, got '{function}'")
        self._value, self._slope, self._curvature = FUNCTIONS[function]
        super().__init__(parse_size(dim))

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        with np.errstate(all="ignore"):
            return self._value(inputs[0])

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        with np.errstate(all="ignore"):
            return self._slope(inputs[0]) * sens

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return self.gradient(output, input, inputs, vec, config)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        with np.errstate(all="ignore"):
            return self._curvature(inputs[0]) * sens * vec


class Product(SameSize):
    """y = x_0 x_1 ..., element by element."""

    def __init__(self, n: int = 2, dim: Size = None) -> None:
        super().__init__(parse_size(dim), parse_integer(n, "n"))

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return _product(inputs)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return _product(inputs, input) * sens

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return _product(inputs, input) * vec

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        return np.zeros_like(vec) if input1 == input2 else _product(inputs, input1, input2) * sens * vec


def _product(inputs: Vectors, *without: int) -> Any:
    product: Any = np.ones(inputs[0].shape)
    for i, x in enumerate(inputs):
        if i not in without:
            product = product * x
    return product


class Gaussian(BuiltInNode):
    """log N(x; mean, cov) = -½ (x - mean)ᵀ cov⁻¹ (x - mean) - ½ log det(2π cov), a vector of one number.

    Raises InvalidInput if sizes do not match. (Source: the density of the multivariate normal distribution.)

    Parameters
    ----------
    mean : a number for all elements, or a vector.
    cov : one variance, a vector of variances, or a symmetric positive definite matrix.
    dim : the size of x, if neither `mean` nor `cov` has it.
    """

    known_outputs = (1,)

    def __init__(self, mean: Any = 0.0, cov: Any = 1.0, dim: Size = None) -> None:
        self._mean = parse_numbers(mean, "mean")
        self._cov = parse_numbers(cov, "cov", max_axes=2)
        sizes = {name: v.shape[0] for name, v in (("mean", self._mean), ("cov", self._cov)) if v.ndim}
        if dim is not None:
            sizes["dim"] = parse_integer(dim, "dim")
        if len({*sizes.values()}) > 1:
            got = ", ".join(f"{name} of {size}" for name, size in sizes.items())
            raise InvalidInput(f"expected one size, got {got}")
        self.known_inputs = (next(iter(sizes.values()), None),)
        if self._cov.ndim == 2:
            self._precision, self._log_det = _invert(self._cov)
        else:
            if not (self._cov > 0).all():
                raise InvalidInput(f"cov: expected variances above 0, got {self._cov.min()}")
            self._precision, self._log_det = 1 / self._cov, float(np.log(self._cov).sum())

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        residual = inputs[0] - self._mean
        count = residual.shape[-1]
        log_det = self._log_det * (count if self._cov.ndim == 0 else 1)
        square = np.sum(residual * self._apply_precision(residual), axis=-1, keepdims=True)
        return -0.5 * (square + log_det + count * math.log(2 * math.pi))

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return -sens[0] * self._apply_precision(inputs[0] - self._mean)

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return -np.dot(self._apply_precision(inputs[0] - self._mean), vec)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        return -sens[0] * self._apply_precision(vec)

    def _apply_precision(self, x: Vector) -> Any:
        """Return cov⁻¹ x, of a vector or of each row of a matrix."""
        return x @ self._precision if self._cov.ndim == 2 else x * self._precision


def likelihood(data: Any = None, cov: Any = 1.0, mean: Any = None) -> Gaussian:
    """Return log N(data; x, cov), the log-likelihood of predictions x. `mean` is an alias of `data`."""
    if (data is None) == (mean is None):
        raise InvalidInput("data: expected a vector of measurements")
    return Gaussian(data if data is not None else mean, cov)


def _invert(cov: Vector) -> tuple[Vector, float]:
    """Return the inverse of a covariance matrix and the logarithm of its determinant."""
    if cov.shape[0] != cov.shape[1] or not np.allclose(cov, cov.T, rtol=1e-10, atol=1e-12 * np.abs(cov).max()):
        raise InvalidInput(f"cov: expected a symmetric matrix, got one of shape {list(cov.shape)}")
    try:
        lower = np.linalg.cholesky(cov)
    except np.linalg.LinAlgError as error:
        raise InvalidInput("cov: expected a positive definite matrix, got one that is not") from error
    inverse = np.linalg.inv(lower)
    return inverse.T @ inverse, 2 * float(np.log(np.diag(lower)).sum())


BUILT_IN: Mapping[str, Callable[..., BuiltInNode]] = {
    "identity": affine.Identity,
    "scale": affine.Scale,
    "linear": affine.Linear,
    "sum": affine.Sum,
    "product": Product,
    "concatenate": affine.Concatenate,
    "split": affine.Split,
    "select": affine.Select,
    "constant": affine.Constant,
    "gaussian_logpdf": Gaussian,
    "gaussian_loglik": likelihood,
    **{name: partial(Elementwise, name) for name in FUNCTIONS},
}


def built_in(name: str, options: Mapping[str, Any]) -> VectorFunction:
    """Return a built-in node. Raises InvalidInput if the name or an option is unknown, missing or invalid."""
    make = BUILT_IN.get(name)
    if make is None:
        raise InvalidInput(f"unknown built-in node '{name}': expected one of {', '.join(BUILT_IN)}")
    parameters = inspect.signature(make).parameters
    for option in options:
        if option not in parameters:
            raise InvalidInput(f"unknown option '{option}' of '{name}': expected one of {', '.join(parameters)}")
    for parameter in parameters.values():
        if parameter.default is inspect.Parameter.empty and parameter.name not in options:
            raise InvalidInput(f"missing option '{parameter.name}' of '{name}'")
    return make(**options)
