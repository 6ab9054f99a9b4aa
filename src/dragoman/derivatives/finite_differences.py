"""Central finite differences with steps by magnitude, Richardson extrapolation and an error estimate."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dragoman.core.vectors import Ability, Config, Vector, Vectors, as_vector, as_vectors, replace_item
from dragoman.derivatives.derived import (
    DerivedFunction,
    check_evaluations,
    component_scales,
    max_step,
    raised_scales,
    split_by_scale,
    unit_vectors,
)
from dragoman.derivatives.user_function import UserFunction
from dragoman.derivatives.verification import check_finite

_EPS = float(np.finfo(np.float64).eps)
NAME = "finite differences"

# Steps relative to the scale for which truncation (h⁴) and rounding (eps/h, eps/h²) errors are of the same order.
_FIRST_ORDER_STEP, _SECOND_ORDER_STEP = _EPS ** (1 / 5), _EPS ** (1 / 6)
# Other steps are tried if the estimated error exceeds this fraction of the derivative and, for derivatives that may be
# zero, this fraction of the function's value.
_MAX_ERROR, _MAX_VALUE_ERROR = 1e-6, 1e-9
_MAX_MIXED_ERROR = 1e-4
# Shorter steps, relative to the first one, for functions that vary on a smaller length than the components' magnitudes.
_SHORTER_STEPS = (1e-3, 1e-6)


def directional_derivative(function: Callable[[Vector], Vector], x: Vector, vec: Vector) -> tuple[Vector, Vector]:
    """Return J vec of a function of one vector, and an estimate of its error.

    D(h) = (f(x + h u) - f(x - h u)) / 2h at two steps, extrapolate to (4 D(h/2) - D(h)) / 3 (Richardson): four
    evaluations for each group of components that can share a step. If the error estimate is large, other steps are
    tried, and each element is taken from the step with the smallest estimate: up to twelve more evaluations.
    """
    summands = split_by_scale(x, vec)
    if not summands:
        value = function(x)
        return np.zeros(np.shape(value)), np.zeros(np.shape(value))
    results = [_along(function, x, each) for each in summands]
    return np.sum([each[0] for each in results], axis=0), np.sum([each[1] for each in results], axis=0)


def _along(function: Callable[[Vector], Vector], x: Vector, vec: Vector) -> tuple[Vector, Vector]:
    step, raised = max_step(component_scales(x), vec), max_step(raised_scales(x), vec)
    derivative, error, size = _extrapolate(function, x, vec, _FIRST_ORDER_STEP * step)
    for other in (raised, *(fraction * step for fraction in _SHORTER_STEPS)):
        if (error <= _MAX_ERROR * np.abs(derivative) + _MAX_VALUE_ERROR * size / raised).all():
            break
        if other == step:
            continue
        other_derivative, other_error, _ = _extrapolate(function, x, vec, _FIRST_ORDER_STEP * other)
        better = other_error < error
        derivative, error = np.where(better, other_derivative, derivative), np.where(better, other_error, error)
    return derivative, error


def _extrapolate(
    function: Callable[[Vector], Vector], x: Vector, vec: Vector, h: float
) -> tuple[Vector, Vector, Vector]:
    """Return the derivative along `vec`, an estimate of its error, and the magnitude of the function's values."""
    steps = (h, h / 2)
    values = [(np.asarray(function(x + k * vec)), np.asarray(function(x - k * vec))) for k in steps]
    coarse, fine = ((above - below) / (2 * k) for (above, below), k in zip(values, steps, strict=True))
    derivative, size = (4 * fine - coarse) / 3, np.abs(values[1][0])
    error = np.abs(derivative - fine) + _EPS * size / h
    return derivative, np.where(np.isnan(error), np.inf, error), size


def mixed_derivative(function: Callable[[Vector, Vector], float], x: Vector, y: Vector, u: Vector, v: Vector) -> float:
    """Return d²f(s u, t v)/ds dt at s = t = 0, extrapolated as above; eight evaluations.

    f is a function of the displacements of x and y, whose components determine the steps. If the error estimate is
    large, larger steps are tried: eight more evaluations.
    """

    def quotient(h: float, k: float) -> tuple[float, float]:
        values = [function(s * u, t * v) for s, t in ((h, k), (h, -k), (-h, k), (-h, -k))]
        size = max(map(abs, values))
        return (values[0] - values[1] - values[2] + values[3]) / (4 * h * k), _EPS * size / (h * k)

    def extrapolate(h: float, k: float) -> tuple[float, float]:
        (coarse, _), (fine, rounding) = quotient(h, k), quotient(h / 2, k / 2)
        return (4 * fine - coarse) / 3, abs(fine - coarse) / 3 + rounding

    if not (u.any() and v.any()):
        return 0.0
    steps, larger = (
        (_SECOND_ORDER_STEP * max_step(scales(x), u), _SECOND_ORDER_STEP * max_step(scales(y), v))
        for scales in (component_scales, raised_scales)
    )
    derivative, error = extrapolate(*steps)
    if larger != steps and not error <= _MAX_MIXED_ERROR * abs(derivative):
        other_derivative, other_error = extrapolate(*larger)
        derivative = other_derivative if other_error < error else derivative
    return derivative


class FiniteDifferences(DerivedFunction):
    """Derivatives of any function from its values; `notes` reports their cost and estimated error.

    A Hessian action is differences of the gradient if the user has written one, else of the function.
    """

    def __init__(self, function: UserFunction) -> None:
        super().__init__(function)
        self._function, self._max_evaluations = function, function.options.max_evaluations

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        self._check_finite(output, inputs, config)
        return directional_derivative(self._of_input(output, input, inputs, config), inputs[input], vec)[0]

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        x = inputs[input]
        check_evaluations(4 * len(x), self._max_evaluations, "Gradient", NAME)
        self._check_finite(output, inputs, config, sens)
        function = self._of_input(output, input, inputs, config)
        used = sens != 0  # other elements may be infinite
        with np.errstate(invalid="ignore"):
            columns = (directional_derivative(function, x, unit)[0] for unit in unit_vectors(len(x)))
            return np.array([sens[used] @ column[used] for column in columns])

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        x, y = inputs[input1], inputs[input2]
        self._check_finite(output, inputs, config, sens)
        if "gradient" in self._function.sources():

            def gradient(y: Vector) -> Vector:
                result = self._function.gradient(output, input1, replace_item(inputs, input2, y), sens, config)
                return as_vector(result, len(x), "gradient")

            return directional_derivative(gradient, y, vec)[0]
        used = sens != 0

        def weighted_output(s: Vector, t: Vector) -> float:
            moved = replace_item(replace_item(inputs, input1, x + s), input2, (x + s if input1 == input2 else y) + t)
            return float(sens[used] @ self._outputs(moved, config)[output][used])

        check_evaluations(8 * len(x), self._max_evaluations, "ApplyHessian", NAME)
        summands, units = split_by_scale(y, vec), unit_vectors(len(x))
        rows = (sum(mixed_derivative(weighted_output, x, y, unit, each) for each in summands) for unit in units)
        return np.fromiter(rows, np.float64, len(x))

    def sources(self) -> Mapping[Ability, str]:
        return {"gradient": NAME, "apply_jacobian": NAME, "apply_hessian": NAME}

    def notes(self) -> Mapping[str, Any]:
        """Return the evaluations per call, and the estimated relative error at the sample point."""
        evaluations = {
            "apply_jacobian": "5",
            "gradient": "1 + 4 per input element",
            "apply_hessian": "1 + 8 per element of input1",
        }
        if "gradient" in self._function.sources():
            evaluations = {"apply_hessian": "1, and 4 gradients"}
        notes: dict[str, Any] = {"evaluations": evaluations}
        if self._function.options.evaluate_at_load:
            notes["relative_error"] = self._relative_error({})
        return {NAME: notes}

    def _relative_error(self, config: Config) -> float:
        """Return the largest estimated error of J v relative to J v, with v of ones, over all inputs."""
        inputs, worst = self._function.sample_point(config), 0.0
        for i, x in enumerate(inputs):

            def values(x: Vector, i: int = i) -> Vector:
                return np.concatenate([np.zeros(0), *self._outputs(replace_item(inputs, i, x), config)])

            derivative, error = directional_derivative(values, x, np.ones(len(x)))
            largest = float(np.max(np.abs(derivative), initial=0.0))
            worst = max(worst, float(np.max(error, initial=0.0)) / largest) if largest else worst
        return worst

    def _check_finite(self, output: int, inputs: Vectors, config: Config, sens: Vector | None = None) -> None:
        check_finite(self._outputs(inputs, config)[output], output, inputs, sens)

    def _of_input(self, output: int, index: int, inputs: Vectors, config: Config) -> Callable[[Vector], Vector]:
        return lambda x: self._outputs(replace_item(inputs, index, x), config)[output]

    def _outputs(self, inputs: Vectors, config: Config) -> tuple[Vector, ...]:
        return as_vectors(self.base.evaluate(inputs, config), self.output_sizes(config))
