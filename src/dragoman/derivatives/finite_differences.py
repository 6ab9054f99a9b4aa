"""Finite differences: central, with a step by the magnitude of each component, and an extrapolation with its error."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dragoman.core.vector_answers import as_vectors
from dragoman.core.vectors import Ability, Config, Vector, Vectors, put
from dragoman.derivatives.derived import Of, check_evaluations, units
from dragoman.derivatives.scales import by_scale, own_scales, raised_scales, reach
from dragoman.derivatives.user_function import Authored
from dragoman.derivatives.verification import check_finite

_EPS = float(np.finfo(np.float64).eps)
NAME = "finite differences"

# Steps in units of the scale where what is cut off (h⁴) and what is rounded (eps/h, eps/h²) are about as large.
_FIRST, _SECOND = _EPS ** (1 / 5), _EPS ** (1 / 6)
# An error estimate above this, relative to the derivative, is worth another step; or above _ROUNDED relative to the
# function's value, for a derivative that may be zero.
_GOOD, _ROUNDED = 1e-6, 1e-9
# The other steps, in units of the first: for functions that vary faster than by the magnitude of a component.
_SHORTER = (1e-3, 1e-6)


def derivative(function: Callable[[Vector], Vector], x: Vector, vec: Vector) -> tuple[Vector, Vector]:
    """J vec of a function of one vector, and an estimate of its error.

    D(h) = (f(x + h u) - f(x - h u)) / 2h at two steps, (4 D(h/2) - D(h)) / 3 (Richardson's extrapolation): four
    evaluations, for each group of components that one step suits. Where the error estimate is large, other steps are
    tried, and each element is taken from the one with the smallest estimate: up to twelve evaluations more.
    """
    parts = by_scale(x, vec)
    if not parts:
        there = function(x)
        return np.zeros(np.shape(there)), np.zeros(np.shape(there))
    found = [_along(function, x, part) for part in parts]
    return np.sum([each[0] for each in found], axis=0), np.sum([each[1] for each in found], axis=0)


def _along(function: Callable[[Vector], Vector], x: Vector, vec: Vector) -> tuple[Vector, Vector]:
    step, raised = reach(own_scales(x), vec), reach(raised_scales(x), vec)
    found, error, size = _extrapolated(function, x, vec, _FIRST * step)
    for other in (raised, *(share * step for share in _SHORTER)):
        if (error <= _GOOD * np.abs(found) + _ROUNDED * size / raised).all():
            break
        if other == step:
            continue
        again, its_error, _ = _extrapolated(function, x, vec, _FIRST * other)
        better = its_error < error
        found, error = np.where(better, again, found), np.where(better, its_error, error)
    return found, error


def _extrapolated(
    function: Callable[[Vector], Vector], x: Vector, vec: Vector, h: float
) -> tuple[Vector, Vector, Vector]:
    """The derivative along `vec`, an estimate of its error, and the size of the function's values."""
    steps = (h, h / 2)
    values = [(np.asarray(function(x + k * vec)), np.asarray(function(x - k * vec))) for k in steps]
    coarse, fine = ((above - below) / (2 * k) for (above, below), k in zip(values, steps, strict=True))
    found, size = (4 * fine - coarse) / 3, np.abs(values[1][0])
    error = np.abs(found - fine) + _EPS * size / h
    return found, np.where(np.isnan(error), np.inf, error), size


def mixed(function: Callable[[Vector, Vector], float], x: Vector, y: Vector, u: Vector, v: Vector) -> float:
    """The derivative of f(s u, t v) by s and t, at zero; eight evaluations, extrapolated as above.

    f is a function of what is added to x and to y, by whose components the steps are scaled. Where the error estimate
    is large, larger steps are tried: eight evaluations more.
    """

    def quotient(h: float, k: float) -> tuple[float, float]:
        values = [function(s * u, t * v) for s, t in ((h, k), (h, -k), (-h, k), (-h, -k))]
        size = max(map(abs, values))
        return (values[0] - values[1] - values[2] + values[3]) / (4 * h * k), _EPS * size / (h * k)

    def extrapolated(h: float, k: float) -> tuple[float, float]:
        (coarse, _), (fine, rounding) = quotient(h, k), quotient(h / 2, k / 2)
        return (4 * fine - coarse) / 3, abs(fine - coarse) / 3 + rounding

    if not (u.any() and v.any()):
        return 0.0
    steps = _SECOND * reach(own_scales(x), u), _SECOND * reach(own_scales(y), v)
    larger = _SECOND * reach(raised_scales(x), u), _SECOND * reach(raised_scales(y), v)
    found, error = extrapolated(*steps)
    if larger != steps and not error <= 1e-4 * abs(found):
        again, its_error = extrapolated(*larger)
        found = again if its_error < error else found
    return found


class Differences(Of):
    """Derivatives of any function by its values; `notes` tells what they cost and how exact they were at a point.

    A Hessian action is differences of the gradient where the author has written one, else of the function.
    """

    def __init__(self, author: Authored) -> None:
        super().__init__(author)
        self._author, self._limit = author, author.declared.max_evaluations

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        self._check_finite(output, inputs, config)
        return derivative(self._moved(output, input, inputs, config), inputs[input], vec)[0]

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        check_evaluations(4 * len(inputs[input]), self._limit, "Gradient", NAME)
        self._check_finite(output, inputs, config, sens)
        function, x = self._moved(output, input, inputs, config), inputs[input]
        used = sens != 0  # an element that is not finite and not asked for changes nothing
        with np.errstate(invalid="ignore"):
            return np.array([sens[used] @ derivative(function, x, unit)[0][used] for unit in units(len(x))])

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        x, y = inputs[input1], inputs[input2]
        self._check_finite(output, inputs, config, sens)
        if "gradient" in self._author.sources():

            def gradient(at: Vector) -> Vector:
                found = self._author.gradient(output, input1, put(inputs, input2, at), sens, config)
                return np.asarray(found, np.float64)

            return derivative(gradient, y, vec)[0]

        def weighed(s: Vector, t: Vector) -> float:
            moved = put(put(inputs, input1, x + s), input2, (x + s if input1 == input2 else y) + t)
            used = sens != 0
            return float(sens[used] @ self._values(moved, config)[output][used])

        check_evaluations(8 * len(x), self._limit, "ApplyHessian", NAME)
        parts = by_scale(y, vec)
        return np.array([sum(mixed(weighed, x, y, unit, part) for part in parts) for unit in units(len(x))], np.float64)

    def sources(self) -> Mapping[Ability, str]:
        return {"gradient": NAME, "apply_jacobian": NAME, "apply_hessian": NAME}

    def notes(self) -> Mapping[str, Any]:
        """The evaluations that a call takes, and the relative error, as estimated, at the author's point."""
        told = {
            "apply_jacobian": "5",
            "gradient": "1 + 4 per input element",
            "apply_hessian": "1 + 8 per element of input1",
        }
        if "gradient" in self._author.sources():
            told = {"apply_hessian": "1, and 4 gradients"}
        found: dict[str, Any] = {"evaluations": told}
        if self._author.declared.evaluate_at_load:
            found["relative_error"] = self._error({})
        return {NAME: found}

    def _error(self, config: Config) -> float:
        """The largest estimate of the error of J v, in units of J v, with v of ones, of any output by any input."""
        inputs, worst = self._author.point(config), 0.0
        for i, x in enumerate(inputs):

            def values(at: Vector, i: int = i) -> Vector:
                return np.concatenate([np.zeros(0), *self._values(put(inputs, i, at), config)])

            found, error = derivative(values, x, np.ones(len(x)))
            largest = float(np.max(np.abs(found), initial=0.0))
            worst = max(worst, float(np.max(error, initial=0.0)) / largest) if largest else worst
        return worst

    def _check_finite(self, output: int, inputs: Vectors, config: Config, sens: Vector | None = None) -> None:
        check_finite(self._values(inputs, config)[output], output, inputs, sens)

    def _moved(self, output: int, index: int, inputs: Vectors, config: Config) -> Callable[[Vector], Vector]:
        return lambda at: self._values(put(inputs, index, at), config)[output]

    def _values(self, inputs: Vectors, config: Config) -> tuple[Vector, ...]:
        return as_vectors(self.base.evaluate(inputs, config), self.output_sizes(config))
