"""Finite differences: central, with a step by the scale of the numbers, and one extrapolation that tells the error."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dragoman.core.vector_answers import as_vectors
from dragoman.core.vectors import Ability, Config, Vector, Vectors, put
from dragoman.derivatives.authored import Authored
from dragoman.derivatives.exact import Of, units

_EPS = float(np.finfo(np.float64).eps)
# Steps in units of the scale where what is cut off (h⁴) and what is rounded (eps/h, eps/h²) are about as large.
_FIRST, _SECOND = _EPS ** (1 / 5), _EPS ** (1 / 6)


def derivative(function: Callable[[Vector], Vector], x: Vector, vec: Vector) -> tuple[Vector, Vector]:
    """J vec of a function of one vector, and an estimate of its error; four evaluations.

    D(h) = (f(x + h u) - f(x - h u)) / 2h at two steps, (4 D(h/2) - D(h)) / 3 (Richardson's extrapolation).
    """
    size, unit = _unit(vec)
    h = _step(x, unit, _FIRST)
    coarse, fine = ((function(x + k * unit) - function(x - k * unit)) / (2 * k) for k in (h, h / 2))
    return _extrapolated(coarse, fine, size)


def mixed(function: Callable[[Vector, Vector], float], x: Vector, y: Vector, u: Vector, v: Vector) -> float:
    """The derivative of f(s u, t v) by s and t, at zero; eight evaluations, extrapolated as above.

    f is a function of what is added to x and to y, by whose numbers the steps are scaled.
    """
    (a, u), (b, v) = _unit(u), _unit(v)
    h, k = _step(x, u, _SECOND), _step(y, v, _SECOND)

    def quotient(h: float, k: float) -> float:
        corners = (s * t * function(s * h * u, t * k * v) for s in (1, -1) for t in (1, -1))
        return sum(corners) / (4 * h * k)

    return a * b * (4 * quotient(h / 2, k / 2) - quotient(h, k)) / 3


def _extrapolated(coarse: Vector, fine: Vector, size: float) -> tuple[Vector, Vector]:
    found = (4 * fine - coarse) / 3
    return size * found, size * np.abs(found - fine)


def _unit(vec: Vector) -> tuple[float, Vector]:
    size = float(np.max(np.abs(vec), initial=0.0))
    return (size, vec / size) if size > 0 else (0.0, vec)


def _step(x: Vector, unit: Vector, share: float) -> float:
    """A step that moves no number by more than `share` of its scale: its own size, or a thousandth of the largest."""
    largest = float(np.max(np.abs(x), initial=0.0)) or 1.0
    moved = np.abs(unit) > 0
    if not moved.any():
        return share * largest
    return share * float(np.min(np.maximum(np.abs(x), 1e-3 * largest)[moved] / np.abs(unit)[moved]))


class Differences(Of):
    """Derivatives of any function by its values; `notes` tells what they cost and how exact they were at a point.

    A Hessian action is differences of the gradient where the author has written one, else of the function.
    """

    def __init__(self, author: Authored) -> None:
        super().__init__(author)
        self._author = author

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return derivative(self._moved(output, input, inputs, config), inputs[input], vec)[0]

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        function, x = self._moved(output, input, inputs, config), inputs[input]
        return np.array([sens @ derivative(function, x, unit)[0] for unit in units(len(x))])

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        x, y = inputs[input1], inputs[input2]
        if "gradient" in self._author.sources():

            def gradient(at: Vector) -> Vector:
                found = self._author.gradient(output, input1, put(inputs, input2, at), sens, config)
                return np.asarray(found, np.float64)

            return derivative(gradient, y, vec)[0]

        def weighed(s: Vector, t: Vector) -> float:
            moved = put(put(inputs, input1, x + s), input2, (x + s if input1 == input2 else y) + t)
            return float(sens @ self._values(moved, config)[output])

        return np.array([mixed(weighed, x, y, unit, vec) for unit in units(len(x))])

    def sources(self) -> Mapping[Ability, str]:
        return {
            "gradient": "finite differences",
            "apply_jacobian": "finite differences",
            "apply_hessian": "finite differences",
        }

    def notes(self) -> Mapping[str, Any]:
        """The evaluations that a call takes, and the relative error, as estimated, at the author's point."""
        told = {"apply_jacobian": "4", "gradient": "4 a number of the input", "apply_hessian": "8 a number of input1"}
        if "gradient" in self._author.sources():
            told = {"apply_hessian": "4 gradients"}
        return {"finite differences": {"evaluations": told, "relative_error": self._error({})}}

    def _error(self, config: Config) -> float:
        """The largest estimate of the error of J v, in units of J v, with v of ones, of any output by any input."""
        inputs, worst = self._author.point(config), 0.0
        for i, x in enumerate(inputs):
            for output in range(len(self.output_sizes(config))):
                found, error = derivative(self._moved(output, i, inputs, config), x, np.ones(len(x)))
                largest = float(np.max(np.abs(found), initial=0.0))
                worst = max(worst, float(np.max(error, initial=0.0)) / largest) if largest else worst
        return worst

    def _moved(self, output: int, index: int, inputs: Vectors, config: Config) -> Callable[[Vector], Vector]:
        return lambda at: self._values(put(inputs, index, at), config)[output]

    def _values(self, inputs: Vectors, config: Config) -> tuple[Vector, ...]:
        return as_vectors(self.base.evaluate(inputs, config), self.output_sizes(config))
