"""Nodes that treat each element alone: functions of one number, and products."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dragoman.core.errors import InvalidInput
from dragoman.core.vectors import Config, Vector, Vectors
from dragoman.graphs.builtin_base import SameSize, parse_integer, parse_size
from dragoman.graphs.sizes import Size

_Array = npt.NDArray[np.float64]
_Pointwise = Callable[[_Array], Any]


# A function, its first and its second derivative.
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
    """y = f(x), element by element. Where f is not defined, y is NaN or infinite."""

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
    """The product of all inputs but some."""
    found: Any = np.ones(inputs[0].shape)
    for i, x in enumerate(inputs):
        if i not in without:
            found = found * x
    return found
