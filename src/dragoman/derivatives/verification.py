"""Compare derivatives with central differences of the function at the point of a call.

The function is evaluated along a line x + t d, where d moves each component by its own magnitude. Two evaluations, at
t = ±1e-5, confirm nearly every correct derivative. Otherwise steps from 0.1 to 1e-12 with an error estimate for each
element of the result decide.

A derivative whose contribution to the function's value is below about 1e-9 of that value, for a relative change of 1 in
the inputs, cannot be distinguished from rounding errors and is accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dragoman.core.errors import DragomanError, InvalidOutput
from dragoman.core.vector_binding import require_finite
from dragoman.core.vectors import Vector, Vectors
from dragoman.derivatives.derived import component_scales, max_step, raised_scales

Values = Callable[[Vector], Vector]
Mask = npt.NDArray[np.bool_]

# Tolerance relative to the sum of the absolute values of the terms of a derivative.
_TOLERANCE = 1e-6
_FIRST_STEP = 1e-5
_STEPS = tuple(10.0**-k for k in range(1, 13))
_STEPS_OF_GUESSED_SCALES = tuple(10.0**-k for k in range(1, 25))
# Rounding errors of a function's value, relative to that value.
_ROUNDING = 8 * float(np.finfo(np.float64).eps)
# A function whose slope changes by more than this fraction within the first step may have a kink.
_KINK_CURVATURE = 1e-2
# Components whose term is below this fraction of the sum of all terms are confirmed separately.
_WEAK_TERM = 1e-4
_MAX_ROUNDS = 4
# Up to this number of components are compared one by one if their joint comparison fails.
_MAX_SEPARATE = 256
# Differences are settled if three steps agree to this fraction of the derivative.
_SETTLED = 1e-2
# Differences with a larger error, relative to the derivative, do not decide.
_DECISIVE = 1e-3
_FLAT = 1e-8
# The raised scale is tried for components whose magnitude it exceeds by this factor.
_RAISED_FACTOR = 1e3
# Components of a steep function move by at least this fraction of their magnitude, far above rounding errors.
_MIN_MOVE = 1e-5


class NotConfirmedError(Exception):
    """Differences contradict a derivative or do not settle; the message says which."""


@dataclass(frozen=True, slots=True)
class _CentralDifference:
    """Central differences with one step.

    Parameters
    ----------
    slope : the derivative, NaN where the function is not finite on both sides.
    curvature : half the difference between the slopes of both sides.
    rounding : rounding errors of both.
    """

    slope: Vector
    curvature: Vector
    rounding: Vector


class _LineFunction:
    """A function along x + t d. `sens` combines its elements into one number; None keeps them."""

    def __init__(self, values: Values, x: Vector, value: Vector, sens: Vector | None) -> None:
        self._values, self.x, self._value, self._sens = values, x, value, sens
        self.magnitude = float(np.max(self._magnitudes(np.abs(value)), initial=0.0))

    def central_difference(self, direction: Vector, step: float) -> _CentralDifference:
        """Evaluate both sides; NaN if one cannot be evaluated."""
        with np.errstate(all="ignore"):
            try:
                above, below = (self._values(self.x + t * direction) for t in (step, -step))
            except (DragomanError, ArithmeticError, ValueError, TypeError, LookupError, AssertionError, RuntimeError):
                nan = self._combine(np.full(len(self._value), np.nan))
                return _CentralDifference(nan, nan, nan)
            slope = _finite_or_nan(self._combine((above - below) / (2 * step)))
            curvature = _finite_or_nan(np.abs(self._combine(above - 2 * self._value + below)) / (2 * step))
            largest = np.maximum(np.maximum(np.abs(above), np.abs(below)), np.abs(self._value))
            rounding = _ROUNDING * (self._magnitudes(largest) + np.abs(slope) + 2 * curvature) / step
            return _CentralDifference(slope, curvature, rounding)

    def _combine(self, vector: Vector) -> Vector:
        return vector if self._sens is None else np.atleast_1d(self._sens @ vector)

    def _magnitudes(self, magnitudes: Vector) -> Vector:
        return magnitudes if self._sens is None else np.atleast_1d(np.abs(self._sens) @ magnitudes)


def check_finite(value: Vector, output: int, inputs: Vectors, sens: Vector | None = None) -> None:
    """Raise InvalidInput or InvalidOutput unless a point, and the function's value there, are finite.

    Elements of the value with a weight of zero in `sens` are ignored.
    """
    for i, x in enumerate(inputs):
        require_finite(x, f"input[{i}]")
    wrong = ~np.isfinite(value) if sens is None else ~np.isfinite(value) & (sens != 0)
    if wrong.any():
        k = int(np.argmax(wrong))
        raise InvalidOutput(f"output {output}: element {k} is {value[k]} at this point, so it has no derivative there")


def confirm_directional(values: Values, x: Vector, value: Vector, vec: Vector, derivative: Vector) -> None:
    """Raise NotConfirmedError unless `derivative` is that of `values` along `vec`, each element at its own scale.

    `vec` is one of the results of `split_by_scale`; `value` is the function's value at x.
    """
    line = _LineFunction(values, x, value, None)
    step = max_step(component_scales(x), vec)
    steepest = float(np.max(np.abs(derivative), initial=0.0))
    if steepest * step > line.magnitude > 0:  # the function varies on a smaller length than the components' magnitudes
        step = max(line.magnitude / steepest, _MIN_MOVE * step)
    rounding = _confirm(line, _Comparison(step * vec, step * derivative, step * np.abs(derivative), step))
    raised = max_step(raised_scales(x), vec)
    if raised >= _RAISED_FACTOR * step and (np.abs(step * derivative) < rounding).any():
        comparison = _Comparison(raised * vec, raised * derivative, raised * np.abs(derivative), raised, raised=True)
        _confirm(line, comparison)


def confirm_gradient(values: Values, x: Vector, value: Vector, sens: Vector, gradient: Vector) -> None:
    """Raise NotConfirmedError unless `gradient` is that of sens · values, each element at its own scale.

    First all components move together. Those with a contribution too small to be visible beside the others move again
    without them, and those small enough to be rounding errors of zero move by a larger step too. If a joint comparison
    fails, each component is compared alone.
    """
    used = sens != 0
    line = _LineFunction(lambda x: values(x)[used], x, value[used], sens[used])
    scales, raised, pattern = component_scales(x), raised_scales(x), _sign_pattern(len(x))
    steep = np.abs(gradient) * scales > line.magnitude
    if line.magnitude > 0 and steep.any():
        scales[steep] = np.maximum(line.magnitude / np.abs(gradient[steep]), _MIN_MOVE * np.abs(x[steep]))
    invisible = np.zeros(len(x), bool)
    for group in (x != 0, x == 0):  # the scale of a zero is a guess
        invisible |= _confirm_group(line, gradient, scales * pattern, group)
    invisible &= raised >= _RAISED_FACTOR * scales
    if invisible.any():
        _confirm_components(line, gradient, np.where(invisible, raised * pattern, 0.0), raised=True)


def _confirm_group(line: _LineFunction, gradient: Vector, moves: Vector, group: Mask) -> Mask:
    """Confirm some components of a gradient; return those whose contribution is below rounding errors."""
    remaining = group.copy()
    for _ in range(_MAX_ROUNDS):
        if not remaining.any():
            break
        direction = np.where(remaining, moves, 0.0)
        terms = np.abs(gradient * direction)
        rounding = _confirm_components(line, gradient, direction)
        measured = remaining & (terms > 0) & (terms >= max(_WEAK_TERM * float(terms.sum()), rounding))
        remaining &= ~measured
        if not measured.any():
            break
    return remaining


def _confirm_components(line: _LineFunction, gradient: Vector, direction: Vector, raised: bool = False) -> float:
    """Compare along a direction and, if that fails, along each component; return the rounding error."""
    terms, moved = np.abs(gradient * direction), np.flatnonzero(direction)
    joint = _Comparison(direction, np.atleast_1d(gradient @ direction), np.atleast_1d(terms.sum()), 1.0, "", raised)
    try:
        return float(_confirm(line, joint)[0])
    except NotConfirmedError:
        if len(moved) > _MAX_SEPARATE:
            raise
    rounding = 0.0
    for j in moved:
        component = np.where(np.arange(len(direction)) == j, direction, 0.0)
        derivative = np.atleast_1d(gradient[j] * direction[j])
        name = f"element {j} of the gradient"
        comparison = _Comparison(component, derivative, np.abs(derivative), direction[j], name, raised)
        rounding = max(rounding, float(_confirm(line, comparison)[0]))
    return rounding


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A derivative along a direction, to be compared with central differences.

    Parameters
    ----------
    terms : sums of the absolute values of the terms of each element.
    unit : length of the direction, by which numbers in messages are divided.
    name : of a single result; by default elements are numbered.
    raised : components move by more than their own magnitude.
    """

    direction: Vector
    derivative: Vector
    terms: Vector
    unit: float
    name: str = ""
    raised: bool = False

    def has_guessed_scale(self, x: Vector) -> bool:
        return self.raised or not x[self.direction != 0].any()

    def steps(self, x: Vector) -> tuple[float, ...]:
        return _STEPS_OF_GUESSED_SCALES if self.has_guessed_scale(x) else _STEPS

    def element_name(self, index: int) -> str:
        return self.name or (f"element {index} of the derivative" if len(self.derivative) > 1 else "the derivative")


def _confirm(line: _LineFunction, comparison: _Comparison) -> Vector:
    """Compare at the first step and, if that fails, at all steps; return the rounding errors of the first."""
    first = line.central_difference(comparison.direction, _FIRST_STEP)
    scale = np.maximum(comparison.terms, np.abs(first.slope))
    close = np.abs(comparison.derivative - first.slope) <= _TOLERANCE * scale + first.rounding
    smooth = first.curvature <= _KINK_CURVATURE * scale + first.rounding
    if not close.all():
        _compare_all_steps(line, comparison, ~close)
    if not (smooth | ~close).all():
        _check_kink(line, comparison, first, close & ~smooth)
    return first.rounding


def _compare_all_steps(line: _LineFunction, comparison: _Comparison, selected: Mask) -> None:
    """Raise NotConfirmedError unless differences over many steps settle on the claimed derivative.

    The scale of a zero is a guess. If differences do not settle there, the derivative is accepted, unless the function
    is constant or not continuous.
    """
    guessed, steps = comparison.has_guessed_scale(line.x), comparison.steps(line.x)
    differences = [line.central_difference(comparison.direction, step) for step in steps]
    slopes, estimate, error, settled = _settle(differences, selected)
    if np.isnan(slopes).all() and not comparison.raised:
        raise NotConfirmedError(
            "the function has no finite value on both sides of this point, so no difference can be taken"
        )
    # Changes of the function count too: its value may be 0, as at the minimum of a sum of squares.
    changes = np.array([2 * step * np.abs(each.slope[selected]) for step, each in zip(steps, differences, strict=True)])
    value_scale = np.maximum(line.magnitude, np.max(np.nan_to_num(changes), axis=0))
    claimed = comparison.derivative[selected]
    size = np.maximum(np.abs(claimed), np.abs(estimate))
    # Near an optimum the slope is small beside the curvature.
    curvatures = np.array([each.curvature[selected] for each in differences[:2]])
    scale = np.maximum(np.maximum(size, comparison.terms[selected]), np.max(np.nan_to_num(curvatures), axis=0))
    agrees = np.abs(claimed - estimate) <= (_SETTLED if comparison.raised else _TOLERANCE) * scale + 4 * error
    flat = (size <= 4 * error) & (error <= 10 * _FLAT * value_scale)
    decided = (error <= _DECISIVE * scale) | flat
    wrong = ~(decided & agrees)
    if guessed:
        wrong &= decided & settled
        if not comparison.raised:
            continuous = 2 * steps[-1] * np.abs(slopes[-1]) <= _FLAT * value_scale
            constant = (slopes == 0).all(axis=0) & (np.abs(claimed) > _TOLERANCE * line.magnitude)
            wrong |= constant | ~continuous
    if not wrong.any():
        return
    k = int(np.argmax(wrong))
    name = comparison.element_name(int(np.flatnonzero(selected)[k]))
    if not decided[k]:
        raise NotConfirmedError(
            f"differences with steps from {steps[0]:.0e} to {steps[-1]:.0e} of the inputs' magnitude do not settle "
            f"on a number for {name}: the function is noisy, or has a kink or a jump at this point"
        )
    unit = comparison.unit
    raise NotConfirmedError(
        f"{name} is {claimed[k] / unit:.9g} where central differences give {estimate[k] / unit:.9g}, "
        f"with an error of about {abs(error[k] / unit):.1g}"
    )


def _settle(differences: list[_CentralDifference], selected: Mask) -> tuple[Vector, Vector, Vector, Mask]:
    """Return the slopes at all steps but the first, and for each column the best, its error, and if slopes settle."""
    slopes = np.array([each.slope[selected] for each in differences[1:]])
    errors = np.array(
        [(np.abs(fine.slope - coarse.slope) + fine.rounding)[selected] for coarse, fine in pairwise(differences)]
    )
    errors[np.isnan(errors)] = np.inf
    for finer in (1, 2):  # errors that are noise grow tenfold from step to step; one of them may be small by chance
        errors[:-finer] = np.maximum(errors[:-finer], 0.1**finer * errors[finer:])
    settled = _finest_run(errors <= _SETTLED * np.abs(slopes))
    chosen = np.argmin(np.where(settled | ~settled.any(axis=0), errors, np.inf), axis=0)
    columns = np.arange(slopes.shape[1])
    return slopes, slopes[chosen, columns], errors[chosen, columns], np.asarray(settled.any(axis=0))


def _finest_run(settled: Mask) -> Mask:
    """Return the last run of at least two true entries in each column."""
    result, active, finished = (np.zeros_like(settled), *(np.zeros(settled.shape[1], bool) for _ in range(2)))
    for k in reversed(range(len(settled))):
        previous = settled[k - 1] if k else np.zeros_like(active)
        active = settled[k] & (active | (previous & ~finished))
        finished |= active
        result[k] = active
    return result


def _check_kink(line: _LineFunction, comparison: _Comparison, first: _CentralDifference, selected: Mask) -> None:
    """Raise NotConfirmedError if the slopes of both sides differ by as much at all smaller steps as at the first."""
    larger = line.central_difference(comparison.direction, 100 * _FIRST_STEP)
    kink, measurements = selected & (larger.curvature < 3 * first.curvature), 0 * first.curvature
    for step in (each for each in comparison.steps(line.x) if each < _FIRST_STEP):
        if not kink.any():
            return
        smaller = line.central_difference(comparison.direction, step)
        same = (smaller.curvature > 0.3 * first.curvature) & (smaller.curvature < 3 * first.curvature)
        measured = smaller.rounding <= 0.1 * first.curvature
        kink &= same | ~measured
        measurements += measured
    kink &= measurements >= 3
    if kink.any():
        name = comparison.element_name(int(np.argmax(kink)))
        raise NotConfirmedError(f"the function has a kink at or next to this point, which shows in {name}")


def _finite_or_nan(vector: Vector) -> Vector:
    """Replace infinities by NaN, whose arithmetic raises no warnings."""
    return np.where(np.isfinite(vector), vector, np.nan)


def _sign_pattern(size: int) -> Vector:
    """Return numbers of both signs between 0.5 and 1 without a period, so that errors of components do not cancel."""
    indices = np.arange(1, size + 1)
    signs = np.where(np.modf(indices * np.sqrt(2.0))[0] < 0.5, -1.0, 1.0)
    return np.asarray(signs * (0.5 + 0.5 * np.modf(indices * 0.6180339887498949)[0]))
