"""Finite differences: derivatives of any function from its values, with steps and errors by its noise."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dragoman.core.errors import ModelFailed
from dragoman.core.vectors import Ability, Config, Estimate, Vector, Vectors, as_vector, as_vectors, replace_item
from dragoman_simulators.derivatives.derived import (
    DIFFERENCES,
    EVALUATIONS,
    CostlyDerivatives,
    check_evaluations,
    component_scales,
    max_step,
    raised_scales,
    reach,
    split_by_scale,
    unit_vectors,
)
from dragoman_simulators.derivatives.differences import (
    EPS,
    LARGEST_STEP,
    MAX_SAMPLES,
    PointFunction,
    Values,
    measure,
    relative_rounding,
    step_for_noise,
)
from dragoman_simulators.derivatives.user_function import UserFunction
from dragoman_simulators.derivatives.verification import check_finite

NAME = DIFFERENCES

# Other steps are tried if the estimated error exceeds this fraction of the derivative and, for derivatives that may be
# zero, this fraction of the function's value.
_MAX_ERROR, _MAX_VALUE_ERROR = 1e-6, 1e-10
_MAX_MIXED_ERROR, _MAX_MIXED_VALUE_ERROR = 1e-4, 1e-8
# A derivative with a larger error, relative to itself, is rejected, unless the error is negligible: below this fraction
# of the largest term of the same result, or of the function's value, for a change of the input by its own magnitude.
# A kink is no noise: beside the value it is never negligible.
_MAX_REPORTED_ERROR = 0.1
_NEGLIGIBLE_TERM, _NEGLIGIBLE_VALUE = 1e-3, 1e-4
# Steps of mixed differences: the first by noise^(1/6), for which truncation (h⁴) and noise (1/h²) errors are of the
# same order, then larger ones.
_LARGER_MIXED_STEPS = (0.03, LARGEST_STEP)


def directional_derivative(
    values: Values, x: Vector, value: Vector, vec: Vector, noise: float = 0.0, step: float = 0.0
) -> tuple[Estimate, Any]:
    """Return J vec of a function of one vector, `value` at x, and which of its elements have a kink there.

    Four evaluations for each group of components that can share a step, and up to sixteen more for functions with noise
    or with kinks, or that vary on a smaller length than the magnitudes of the components.

    Parameters
    ----------
    noise : relative noise of the values, if it is known to be above rounding errors.
    step : relative step, instead of one by the noise.
    """
    slopes = _Slopes(PointFunction(values, x, value, noise=noise), step)
    return slopes.along(vec), slopes.kink


class _Slopes:
    """Slopes of a function at a point. The noise found along one direction determines the first step along the next.

    kink: which elements had a kink along the last direction.
    """

    def __init__(self, function: PointFunction, step: float) -> None:
        self._function, self._step = function, step
        self.noise = function.rounding
        self.kink = np.zeros(len(function.magnitude), bool)

    def along(self, vec: Vector) -> Estimate:
        result = Estimate(np.zeros(len(self.kink)), np.zeros(len(self.kink)))
        self.kink = np.zeros(len(self.kink), bool)
        for summand in split_by_scale(self._function.x, vec):
            part = self._along(summand)
            result = Estimate(result.value + part.value, result.error + part.error)
        return result

    def _along(self, vec: Vector) -> Estimate:
        function = self._function
        unit, raised = max_step(component_scales(function.x), vec), max_step(raised_scales(function.x), vec)
        limit = _MAX_VALUE_ERROR * function.magnitude * min(1.0, unit / raised)

        def is_enough(slope: Vector, error: Vector, curvature: Vector) -> Any:
            return error <= _MAX_ERROR * (np.abs(slope) + curvature) + limit

        measured = measure(
            function,
            unit * vec,
            is_enough,
            self._step or step_for_noise(self.noise, function.magnitude),
            self._step or LARGEST_STEP * max(reach(function.x, unit * vec), raised / unit),
            1 if self._step else MAX_SAMPLES,
        )
        self.noise = np.maximum(self.noise, measured.noise)
        self.kink |= measured.kink & (measured.error > _MAX_REPORTED_ERROR * np.abs(measured.slope))
        return Estimate(measured.slope / unit, measured.error / unit)


class _MixedDifferences:
    """Second derivatives d²f(s u, t v)/ds dt at s = t = 0 of a function of the displacements of two vectors x and y.

    Parameters
    ----------
    value : f(0, 0).
    noise : absolute noise of the values.
    step : relative step, instead of one by the noise.
    """

    def __init__(
        self,
        function: Callable[[Vector, Vector], float],
        x: Vector,
        y: Vector,
        value: float,
        noise: float,
        step: float = 0.0,
    ) -> None:
        self._function, self._x, self._y, self._value, self._noise = function, x, y, value, noise
        first = min(max(noise / (abs(value) or 1.0), EPS) ** (1 / 6), LARGEST_STEP)
        self._steps = (step,) if step else (first, *(each for each in _LARGER_MIXED_STEPS if each > 2 * first))

    def along(self, u: Vector, v: Vector) -> tuple[float, float]:
        """Return the derivative along u and v and its error; eight evaluations for each step that is tried."""
        if not (u.any() and v.any()):
            return 0.0, 0.0
        unit, raised = (
            np.array([max_step(scales(self._x), u), max_step(scales(self._y), v)])
            for scales in (component_scales, raised_scales)
        )
        steps = [step * unit for step in self._steps]
        if (raised != unit).any() and len(steps) > 1:
            steps.insert(1, self._steps[0] * raised)
        result, error, noise, has_changed = 0.0, np.inf, 0.0, False
        for h, k in steps:
            difference, difference_error, changed = self._extrapolate(h * u, k * v)
            noise = max(noise, difference_error)  # errors at a smaller step are at least as large at this one
            has_changed |= changed
            if changed and noise / (h * k) < error:
                result, error = difference / (h * k), noise / (h * k)
            if error <= _MAX_MIXED_ERROR * abs(result) + _MAX_MIXED_VALUE_ERROR * abs(self._value) / raised.prod():
                break
        return (result, error) if has_changed else (0.0, 0.0)

    def _extrapolate(self, u: Vector, v: Vector) -> tuple[float, float, bool]:
        """Return the second difference for displacements by u and v, its error, and whether the function changes."""
        outer, inner = ([self._function(s * f * u, t * f * v) for s, t in _CORNERS] for f in (1.0, 0.5))
        coarse, fine = ((a - b - c + d) / 4 for a, b, c, d in (outer, inner))
        fine *= 4
        result = (4 * fine - coarse) / 3
        error = 4 * abs(fine - coarse) / 3 + 8 * self._noise
        changed = any(each != self._value for each in (*outer, *inner))
        return (result, error, changed) if np.isfinite(error) else (0.0, np.inf, True)


_CORNERS = ((1, 1), (1, -1), (-1, 1), (-1, -1))


class FiniteDifferences(CostlyDerivatives):
    """Derivatives of any function from its values, as `Estimate`; `notes` reports their cost.

    A Hessian action is differences of the gradient if the user has written one, else of the function. Raises
    ModelFailed if the estimated error of an element exceeds a tenth of it and is not negligible.
    """

    def __init__(self, function: UserFunction) -> None:
        super().__init__(function)
        self._function, options = function, function.options
        self._max_evaluations, self._noise, self._step = options.max_evaluations, options.noise, options.step

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        x, value = inputs[input], self._finite_value(output, inputs, config)
        function = self._of_input(output, input, inputs, config)
        result, kink = directional_derivative(function, x, value, vec, self._noise, self._step)
        reach = result.error * max_step(component_scales(x), vec)
        limit = np.where(kink, 0.0, _NEGLIGIBLE_VALUE * np.abs(value))
        check_estimate("ApplyJacobian", self._function.name, NAME, result, reach, limit)
        return result

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        x = inputs[input]
        self.check_cost("gradient", len(x), len(sens))
        value, used = self._finite_value(output, inputs, config, sens), sens != 0
        values = self._of_input(output, input, inputs, config)
        function = PointFunction(lambda x: values(x)[used], x, value[used], noise=self._noise)  # others may be infinite
        slopes, weights = _Slopes(function, self._step), sens[used]
        columns, kinks = list[Estimate](), list[bool]()
        for unit in unit_vectors(len(x)):
            columns.append(slopes.along(unit))
            kinks.append(bool(slopes.kink.any()))
            if len(columns) == 1 < len(x) and not function.resolved.all():
                function.resolve_constants(np.where(x != 0, x, component_scales(x)))
        result = Estimate(
            np.array([weights @ each.value for each in columns]),
            np.array([np.abs(weights) @ each.error for each in columns]),
        )
        size = float(np.abs(weights) @ np.abs(value[used]))
        check_gradient_estimate("Gradient", self._function.name, NAME, result, x, np.where(kinks, 0.0, size))
        return result

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        x, y = inputs[input1], inputs[input2]
        value = self._finite_value(output, inputs, config, sens)
        if "gradient" in self._function.sources():

            def gradient(y: Vector) -> Vector:
                result = self._function.gradient(output, input1, replace_item(inputs, input2, y), sens, config)
                return as_vector(result, len(x), "gradient")

            slope = gradient(y)
            result, kink = directional_derivative(gradient, y, slope, vec, self._noise, self._step)
            sizes = np.where(kink, 0.0, hessian_size(slope, x, y, vec))
            check_gradient_estimate("ApplyHessian", self._function.name, NAME, result, x, sizes)
            return result
        used = sens != 0
        weights = sens[used]

        def weighted_output(s: Vector, t: Vector) -> float:
            moved = replace_item(replace_item(inputs, input1, x + s), input2, (x + s if input1 == input2 else y) + t)
            return float(weights @ self._outputs(moved, config)[output][used])

        self.check_cost("apply_hessian", len(x), len(sens))
        size = float(np.abs(weights) @ np.abs(value[used]))
        relative = np.maximum(relative_rounding(value[used]), self._noise)
        noise = float(np.abs(weights) @ (relative * np.abs(value[used])))
        differences = _MixedDifferences(weighted_output, x, y, float(weights @ value[used]), noise, self._step)
        summands = split_by_scale(y, vec)
        rows = [[differences.along(unit, each) for each in summands] for unit in unit_vectors(len(x))]
        result = Estimate(*(np.array([sum(each[k] for each in row) for row in rows], np.float64) for k in (0, 1)))
        size /= max_step(component_scales(y), vec) or 1.0
        check_gradient_estimate("ApplyHessian", self._function.name, NAME, result, x, size)
        return result

    def check_cost(self, ability: Ability, input_size: int, output_size: int) -> None:
        if ability == "gradient":
            check_evaluations(EVALUATIONS * input_size, self._max_evaluations, "Gradient", NAME)
        elif ability == "apply_hessian" and "gradient" not in self._function.sources():
            check_evaluations(2 * EVALUATIONS * input_size, self._max_evaluations, "ApplyHessian", NAME)

    def all_sources(self) -> Mapping[Ability, str]:
        return {"gradient": NAME, "apply_jacobian": NAME, "apply_hessian": NAME}

    def notes(self) -> Mapping[str, Any]:
        """Return the evaluations per call, and the estimated relative error at the sample point."""
        evaluations = {
            "apply_jacobian": "5",
            "gradient": "1 + 4 per input element",
            "apply_hessian": "1 + 8 per element of input1",
        }
        if "gradient" in self._function.sources():
            evaluations = {"apply_hessian": "1, and 5 gradients"}
        notes: dict[str, Any] = {"evaluations": evaluations}
        if self._function.options.evaluate_at_load:
            notes["relative_error"] = self._relative_error({})
        return {NAME: notes}

    def _relative_error(self, config: Config) -> float:
        """Return the largest estimated error of J v relative to J v, with v of ones, over all inputs."""
        inputs, worst = self._function.sample_point(config), 0.0
        value = np.concatenate([np.zeros(0), *self._function.sample_outputs(config)])
        for i, x in enumerate(inputs):

            def values(x: Vector, i: int = i) -> Vector:
                return np.concatenate([np.zeros(0), *self._outputs(replace_item(inputs, i, x), config)])

            result, _ = directional_derivative(values, x, value, np.ones(len(x)), self._noise, self._step)
            largest = float(np.max(np.abs(result.value), initial=0.0))
            worst = max(worst, float(np.max(result.error, initial=0.0)) / largest) if largest else worst
        return worst

    def _finite_value(self, output: int, inputs: Vectors, config: Config, sens: Vector | None = None) -> Vector:
        value = self._outputs(inputs, config)[output]
        check_finite(value, output, inputs, sens)
        return np.array(value)

    def _of_input(self, output: int, index: int, inputs: Vectors, config: Config) -> Callable[[Vector], Vector]:
        return lambda x: self._outputs(replace_item(inputs, index, x), config)[output]

    def _outputs(self, inputs: Vectors, config: Config) -> tuple[Vector, ...]:
        return as_vectors(self.base.evaluate(inputs, config), self.output_sizes(config))


def check_gradient_estimate(
    verb: str, function: str, method: str, result: Estimate, x: Vector, size: float | Vector
) -> None:
    """Check a result with one element for each component of x as `check_estimate` does.

    `size`: magnitude of the function's value beside which errors may be negligible, or one for each component.
    """
    scales = _check_scales(x)
    largest = np.max(np.abs(np.nan_to_num(result.value)) * scales, initial=0.0)
    limit = np.maximum(_NEGLIGIBLE_TERM * float(largest), _NEGLIGIBLE_VALUE * np.full(len(x), size))
    check_estimate(verb, function, method, result, result.error * scales, limit)


def hessian_size(slope: Vector, x: Vector, y: Vector, vec: Vector) -> float:
    """Return the magnitude of a gradient by x for `check_gradient_estimate` of its derivative by y along vec."""
    terms = np.max(np.abs(slope) * _check_scales(x), initial=0.0)
    return float(terms) / (max_step(component_scales(y), vec) or 1.0)


def _check_scales(x: Vector) -> Vector:
    """Return the magnitude of each component; for a zero, the largest magnitude, or 1 if all are zero."""
    magnitudes = np.abs(x)
    return np.where(magnitudes > 0, magnitudes, float(np.max(magnitudes, initial=0.0)) or 1.0)


def check_estimate(verb: str, function: str, method: str, result: Estimate, reach: Vector, negligible: Vector) -> None:
    """Raise ModelFailed, naming the element, if an error exceeds a tenth of it and its `reach` is not negligible."""
    with np.errstate(invalid="ignore"):
        is_known = (result.error <= _MAX_REPORTED_ERROR * np.abs(result.value)) | (reach <= negligible)
    if is_known.all():
        return
    k, what = int(np.argmin(is_known)), f"{verb} of '{function}' by {method}"
    if not np.isfinite(result.error[k]):
        raise ModelFailed(f"{what}: the function has no finite value on both sides of this point")
    raise ModelFailed(
        f"{what}: element {k} is {result.value[k]:.6g} with an estimated error of {result.error[k]:.1g}: the "
        "function is too noisy at this point, or has a kink or a jump; reduce its noise (tolerances of solvers, "
        "printed digits), set noise= or step=, or provide gradient="
    )
