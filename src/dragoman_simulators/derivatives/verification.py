"""Compare derivatives with central differences of the function at the point of a call.

The function is evaluated along a line x + t d, where d moves each component by its own magnitude. Two evaluations
confirm nearly every correct derivative, at a step for which the rounding errors of the values are small beside the
derivative: ±1e-5 in double precision. `_BothSides` decides that usual case by few operations, which halves the time of
a Gradient of four numbers; it confirms nothing that the rules of `_confirm` would not, which are for all other cases.
There `measure` finds the slope and its error with a
few more steps, and the derivative is confirmed only if it agrees within that error and the error is small.

A derivative whose contribution to the function's value is below about 1e-13 of that value, for a relative change of 1
in the inputs, cannot be distinguished from rounding errors and is accepted.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dragoman.core.errors import InvalidOutput
from dragoman.core.vector_binding import is_finite, require_finite
from dragoman.core.vectors import Vector, Vectors
from dragoman_simulators.derivatives.derived import SMALL_FRACTION, component_scales, max_step, raised_scales, reach
from dragoman_simulators.derivatives.differences import (
    LARGEST_STEP,
    ROUNDING_ERROR,
    SLOPE_OF_NOISE,
    CentralDifference,
    Mask,
    Measurement,
    PointFunction,
    Values,
    evaluate_or_nan,
    has_single_precision,
    measure,
    step_for_noise,
)

# Tolerance relative to the sum of the absolute values of the terms of a derivative, at small steps and at large ones:
# truncation errors of a smooth function grow with the square of the step.
_TOLERANCE, _TRUNCATION, _MAX_TRUNCATION = 1e-6, 10.0, 5e-3
# The first step is the smallest one, between these bounds, at which rounding errors are below this fraction of the
# terms.
_SHORTEST_STEP, _LONGEST_STEP, _ROUNDING_OF_TERMS = 1e-5, 0.05, 1e-3
# A comparison says something about elements whose terms exceed its rounding errors by the inverse of this.
_INFORMATIVE = 1e-2
# A function whose slope changes by more than this fraction within the first step may have a kink.
_KINK_CURVATURE = 1e-2
_KINK_STEP_RATIO, _MAX_SHORTER_STEPS = 30.0, 6
# Components are compared again without the others if their term is below this multiple of the tolerance.
_WEAK_TERM = 100.0
_MAX_ROUNDS = 4
# A measured slope decides if its error is below this fraction of the derivative, or below this fraction of the value if
# both are zero within that error.
_DECISIVE, _FLAT, _ZERO = 2.5e-3, 1e-6, 1e-3
# The same for errors that are due to noise, beside all terms and for a change of the inputs by their magnitudes.
_NOISY_DECISIVE, _NOISY_FLAT = 1e-2, 1e-5
_SMALL_STEP = 1e-3
_ERRORS = 4.0  # a derivative agrees with a measured slope within this many of its errors
# Errors by noise above this fraction of the terms make a function noisy; changes above this multiple of it are visible.
_NOISE, _VISIBLE = 1e-5, 30.0
# Relative tolerance for noisy functions and for components that move by this multiple of their magnitude.
_NOISY_TOLERANCE, _RAISED_FACTOR = 5e-3, 1e3
# Components of a steep function move by at least this fraction of their magnitude, far above rounding errors.
_MIN_MOVE = 1e-5
# The wrong element of a gradient is searched by this number of halvings.
_MAX_HALVINGS = 6


class NotConfirmedError(Exception):
    """Differences contradict a derivative or do not settle; the message says which."""


def check_finite(value: Vector, output: int, inputs: Vectors, sens: Vector | None = None) -> None:
    """Raise InvalidInput or InvalidOutput unless a point, and the function's value there, are finite.

    Elements of the value with a weight of zero in `sens` are ignored.
    """
    for i, x in enumerate(inputs):
        require_finite(x, f"input[{i}]")
    if is_finite(value):
        return
    wrong = ~np.isfinite(value) if sens is None else ~np.isfinite(value) & (sens != 0)
    if wrong.any():
        k = int(np.argmax(wrong))
        raise InvalidOutput(f"output {output}: element {k} is {value[k]} at this point, so it has no derivative there")


def confirm_directional(
    values: Values, x: Vector, value: Vector, vec: Vector, derivative: Vector, noise: float = 0.0
) -> None:
    """Raise NotConfirmedError unless `derivative` is that of `values` along `vec`, each element at its own scale.

    Parameters
    ----------
    value : the function's value at x.
    vec : one of the results of `split_by_scale`.
    noise : relative noise of the values, if it is known to be above rounding errors.
    """
    _require_finite_derivative(derivative, "derivative")
    slopes, magnitudes = np.abs(derivative), np.abs(value)
    magnitude, steepest = float(magnitudes.max(initial=0.0)), float(slopes.max(initial=0.0))
    step = max_step(component_scales(x), vec)
    if steepest * step > magnitude > 0:  # the function varies on a smaller length than the components' magnitudes
        step = max(magnitude / steepest, _MIN_MOVE * step)
    terms = step * slopes
    if not noise and _is_precise(terms, magnitudes).all():
        values = _BothSides(values, x, value)
        if values.confirm_elements(step * vec, step * derivative, terms):
            return
    function = PointFunction(values, x, value, noise=noise)
    relative = np.divide(terms, function.magnitude, out=np.zeros(len(terms)), where=function.magnitude > 0)
    all_terms = np.maximum(terms, function.magnitude * np.max(relative, initial=0.0))
    _confirm(function, _Claim(step * vec, step * derivative, terms, all_terms, step, reach=reach(x, step * vec)))
    raised = max_step(raised_scales(x), vec)
    if raised >= _RAISED_FACTOR * step and (np.abs(step * derivative) < function.rounding / _LONGEST_STEP).any():
        terms = raised * np.abs(derivative)
        _confirm(function, _Claim(raised * vec, raised * derivative, terms, terms, raised, raised=True))


def confirm_gradient(
    values: Values, x: Vector, value: Vector, sens: Vector, gradient: Vector, noise: float = 0.0
) -> None:
    """Raise NotConfirmedError unless `gradient` is that of sens · values, each element at its own scale.

    First all components move together. Those with a contribution too small to be visible beside the others move again
    without them, and those small enough to be rounding errors of zero move by a larger step too.
    """
    _require_finite_derivative(gradient, "gradient")
    if np.count_nonzero(sens) < len(sens):
        used, outputs = sens != 0, values
        values, value, sens = lambda x: outputs(x)[used], value[used], sens[used]
    scales, (pattern, moved) = component_scales(x), _sign_pattern(len(x))
    terms, magnitude = np.abs(gradient) * scales, float(np.abs(sens).dot(np.abs(value)))
    if terms.max(initial=0.0) > magnitude > 0:
        steep = terms > magnitude
        scales[steep] = np.maximum(magnitude / np.abs(gradient[steep]), _MIN_MOVE * np.abs(x[steep]))
        terms = np.abs(gradient) * scales
    moves, terms = scales * pattern, terms * moved
    if not noise and np.count_nonzero(x) == len(x):
        values = _BothSides(values, x, value)
        if _confirm_usual_gradient(values, sens, gradient, moves, terms, magnitude):
            return
    function = PointFunction(values, x, value, sens, noise)
    raised = raised_scales(x)
    invisible = np.zeros(len(x), bool)
    for group in (x != 0, x == 0):  # the scale of a zero is a guess
        invisible |= _confirm_group(function, gradient, moves, group)
    invisible &= raised >= _RAISED_FACTOR * scales
    if invisible.any():
        _confirm_components(function, gradient, np.where(invisible, raised * pattern, 0.0), raised=True)


def _require_finite_derivative(derivative: Vector, name: str) -> None:
    if not is_finite(derivative):
        k = int(np.argmin(np.isfinite(derivative)))
        raise NotConfirmedError(f"element {k} of the {name} is {derivative[k]} where the function is finite")


# --- the usual case: one comparison at the shortest step -----------------------------------------------------


def _is_precise(terms: Any, magnitude: Any) -> Any:
    """Return whether the first step is the shortest one, see `_first_steps`."""
    return ROUNDING_ERROR * magnitude < _ROUNDING_OF_TERMS * _SHORTEST_STEP * terms


def _agrees(derivative: Any, terms: Any, magnitude: Any, above: Any, below: Any, center: Any) -> Any:
    """Return whether values at the shortest step confirm a derivative: close, and without a kink, as in `_confirm`.

    All are numbers, or arrays with an element for each output.
    """
    slope = (above - below) / (2 * _SHORTEST_STEP)
    curvature = abs(above + below - 2 * center) / (2 * _SHORTEST_STEP)
    tolerance = _tolerance(_SHORTEST_STEP) * terms + ROUNDING_ERROR * magnitude / _SHORTEST_STEP
    return (abs(derivative - slope) <= tolerance) & (curvature <= _KINK_CURVATURE * terms)


class _BothSides:
    """The values of a function at the shortest step on both sides of x, which are compared with a derivative.

    Called as a function it evaluates at any point, and returns these values again, so that no point is evaluated twice.
    """

    def __init__(self, values: Values, x: Vector, value: Vector) -> None:
        self._values, self._x, self._value = values, x, value
        self._results: dict[bytes, Vector] = {}

    def confirm_elements(self, direction: Vector, derivative: Vector, terms: Vector) -> bool:
        """Return whether values along a direction confirm the derivative of each element."""
        with np.errstate(all="ignore"):
            if has_single_precision(self._value):
                return False
            above, below = self._evaluate(direction)
            return bool(_agrees(derivative, terms, np.abs(self._value), above, below, self._value).all())

    def confirm_sum(self, direction: Vector, sens: Vector, derivative: float, terms: float, magnitude: float) -> bool:
        """Return whether values along a direction confirm the derivative of sens · values."""
        with np.errstate(all="ignore"):
            if has_single_precision(self._value):
                return False
            above, below, center = np.array((*self._evaluate(direction), self._value)).dot(sens).tolist()
            return bool(_agrees(derivative, terms, magnitude, above, below, center))

    def _evaluate(self, direction: Vector) -> list[Vector]:
        moved = _SHORTEST_STEP * direction
        points = (self._x + moved, self._x - moved)
        keys = [point.tobytes() for point in points]  # before the function can change them
        results = [evaluate_or_nan(self._values, point, len(self._value)) for point in points]
        self._results.update(zip(keys, results, strict=True))
        return results

    def __call__(self, x: Vector) -> Vector:
        result = self._results.pop(x.tobytes(), None)
        return self._values(x) if result is None else result


def _confirm_usual_gradient(
    values: _BothSides, sens: Vector, gradient: Vector, moves: Vector, terms: Vector, magnitude: float
) -> bool:
    """Confirm components together, then those whose terms are too small to be visible beside the others, and so on.

    Return whether all are confirmed.
    """
    for _ in range(_MAX_ROUNDS):
        total = float(terms.sum())
        if not _is_precise(total, magnitude):
            return False
        if not values.confirm_sum(moves, sens, float(gradient.dot(moves)), total, magnitude):
            return False
        visible = _visible_terms(total, ROUNDING_ERROR * magnitude, _SHORTEST_STEP)
        is_weak = (terms < visible) & (moves != 0)
        count = np.count_nonzero(is_weak)
        if not count:
            return True
        if count == np.count_nonzero(moves):
            return False
        moves, terms = np.where(is_weak, moves, 0.0), np.where(is_weak, terms, 0.0)
    return False


# --- all other cases -----------------------------------------------------------------------------------------


def _confirm_group(function: PointFunction, gradient: Vector, moves: Vector, group: Mask) -> Mask:
    """Confirm some components of a gradient; return those whose contribution is below rounding errors."""
    remaining = group.copy()
    for _ in range(_MAX_ROUNDS):
        if not remaining.any():
            break
        direction = np.where(remaining, moves, 0.0)
        terms = np.abs(gradient * direction)
        step = _first_steps(function.rounding, np.atleast_1d(terms.sum()))[0]
        _confirm_components(function, gradient, direction)
        visible = _visible_terms(float(terms.sum()), float(function.rounding[0]), step)
        measured = remaining & (terms > 0) & (terms >= visible)
        remaining &= ~measured
        if not measured.any():
            break
    return remaining


def _visible_terms(total: float, rounding: float, step: float) -> float:
    """Return the smallest term that is visible beside `total`, the sum of all."""
    return max(_WEAK_TERM * _tolerance(step) * total, rounding / step)


def _confirm_components(function: PointFunction, gradient: Vector, direction: Vector, raised: bool = False) -> None:
    """Compare along a direction; an error names the component that contributes most to it."""
    terms = np.atleast_1d(np.abs(gradient * direction).sum())
    all_terms = np.abs(gradient * function.x).sum()
    if not function.x[direction != 0].any():  # zeros move by a fraction of the other components
        all_terms = SMALL_FRACTION * all_terms
    claim = _Claim(
        direction,
        np.atleast_1d(gradient @ direction),
        terms,
        np.maximum(terms, all_terms),
        gradient=gradient,
        raised=raised,
        reach=1.0 if raised else reach(function.x, direction),
    )
    _confirm(function, claim)


@dataclass(frozen=True, slots=True)
class _Claim:
    """A derivative along a direction, to be compared with central differences.

    Parameters
    ----------
    terms : sums of the absolute values of the terms of each element.
    all_terms : the same of the whole gradient, or of the element whose value changes most: noise that is small beside
        them may hide single terms.
    unit : length of the direction, by which numbers in messages are divided.
    gradient : of which the derivative is the sum of terms.
    raised : components move by more than their own magnitude.
    reach : the step by which typical components move by their magnitudes.
    """

    direction: Vector
    derivative: Vector
    terms: Vector
    all_terms: Vector
    unit: float = 1.0
    gradient: Vector | None = None
    raised: bool = False
    reach: float = 1.0

    def element_name(self, index: int) -> str:
        moved = np.flatnonzero(self.direction)
        if self.gradient is not None and len(moved) == 1:
            return f"element {moved[0]} of the gradient"
        return f"element {index} of the derivative" if len(self.derivative) > 1 else "the derivative"


def _confirm(function: PointFunction, claim: _Claim) -> None:
    """Compare all elements at one step, and those whose rounding errors are too large there at a larger one.

    Elements that disagree are measured.
    """
    longest = _LONGEST_STEP * (claim.reach if function.noise.any() else 1.0)
    steps = _first_steps(function.rounding, claim.terms, longest)
    remaining = np.ones(len(steps), bool)
    for step in (float(np.min(steps, initial=longest)), float(np.max(steps, initial=0.0))):
        if not remaining.any():
            return
        difference = function.central_difference(claim.direction, step)
        scale = np.fmax(claim.terms, np.abs(difference.slope))
        is_close = np.abs(claim.derivative - difference.slope) <= _tolerance(step) * scale + difference.rounding
        is_smooth = difference.curvature <= max(_KINK_CURVATURE, step) * scale + difference.rounding
        is_informative = difference.rounding <= _INFORMATIVE * claim.terms
        if step >= longest:  # rounding errors may be smaller than their bound
            is_informative |= claim.terms <= difference.rounding
            is_close &= is_informative
        rough = remaining & is_close & is_informative & ~is_smooth
        if rough.any() and not (remaining & ~is_close).any():
            is_close &= ~_vary_below(function, claim, step, difference, rough)
        if (remaining & ~is_close).any():
            _compare_measured(function, claim, remaining & ~(is_close & is_informative), step, difference.slope)
            return
        remaining &= ~is_informative


def _first_steps(rounding: Vector, terms: Vector, longest: float = _LONGEST_STEP) -> Vector:
    """Return for each element the smallest step at which rounding errors are small beside its terms."""
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = rounding / (_ROUNDING_OF_TERMS * terms)
    return np.clip(np.where(terms > 0, steps, np.inf), _SHORTEST_STEP, longest)


def _tolerance(step: float) -> float:
    return _TOLERANCE + min(_TRUNCATION * step * step, _MAX_TRUNCATION)


def _compare_measured(
    function: PointFunction, claim: _Claim, selected: Mask, first_step: float, first_slope: Vector
) -> None:
    """Raise NotConfirmedError unless the measured slopes agree with the derivative.

    The first difference shows the noise of the function too: it would be the error of that difference if the derivative
    is right, and is what remains of it beside the measured slope.
    """
    per_slope = 2**0.5 * first_step if first_step <= _SMALL_STEP else 0.0  # at larger steps it is truncation

    # An element may be zero but for rounding errors of larger numbers, such as the others.
    magnitude = np.maximum(function.magnitude, _ZERO * np.max(function.magnitude, initial=0.0))

    def is_decided(slope: Vector, error: Vector, curvature: Vector, variation: Vector = magnitude) -> Mask:
        size = np.maximum(np.abs(claim.derivative), np.abs(slope))
        flat = ((size <= _ERRORS * error) & (error <= _FLAT * variation)) | (error <= function.rounding)
        # Where the slope contradicts the derivative, the function may be steep on a smaller length.
        is_close = np.abs(claim.derivative - slope) <= _ERRORS * error
        terms = np.where(is_close, claim.terms, 0.0)
        scale = np.maximum(np.maximum(np.abs(slope), terms), np.where(np.isfinite(curvature), curvature, 0.0))
        return ~selected | flat | (error <= _DECISIVE * scale)

    with np.errstate(invalid="ignore"):
        variation = np.fmax(claim.terms, np.abs(first_slope))[selected]
        variation = np.where(variation > 0, variation, function.magnitude[selected])
        noise = np.fmax(function.rounding, per_slope * np.abs(first_slope - claim.derivative))[selected]
        start = step_for_noise(noise, variation, order=3)
        largest = LARGEST_STEP * (claim.reach if function.noise.any() else 1.0)
        found = measure(function, claim.direction, is_decided, start, _LONGEST_STEP if claim.raised else largest)
        variation = np.where(magnitude > 0, magnitude, found.change / found.steps[0])
        noise = np.nan_to_num(per_slope * np.abs(first_slope - found.slope))
        noise = np.maximum(np.where(found.best_steps > first_step, noise, 0.0), found.noise)
        error = np.maximum(found.error, SLOPE_OF_NOISE * np.maximum(noise, function.noise) / found.best_steps)
        decided = is_decided(found.slope, error, found.curvature, variation)
        function.noise = np.maximum(function.noise, np.where(decided, noise, 0.0))
        noise_error = SLOPE_OF_NOISE * function.noise / found.best_steps
        negligible = np.maximum(_NOISY_DECISIVE * claim.all_terms, _NOISY_FLAT * function.magnitude / claim.reach)
        decided |= (function.noise > 0) & (error <= negligible)
        scale = np.maximum(np.maximum(np.abs(claim.derivative), np.abs(found.slope)), claim.terms)
        relative = np.where(claim.raised | (noise_error > _NOISE * scale), _NOISY_TOLERANCE, _TOLERANCE)
        tolerance = np.maximum(relative * scale, _ERRORS * error)
        agrees = np.abs(claim.derivative - found.slope) <= tolerance
    # A slope as at larger steps would be visible where the function is constant.
    is_visible = found.steps[-1] * np.abs(found.slope) > _VISIBLE * function.noise
    wrong = selected & ~(decided & agrees) & ~(found.constant & (claim.derivative == 0) & is_visible)
    if claim.raised:  # the function may vary on a smaller scale
        wrong &= decided
    if wrong.any():
        _reject(function, claim, found, int(np.argmax(wrong)), bool(decided[np.argmax(wrong)]))


def _reject(function: PointFunction, claim: _Claim, found: Measurement, k: int, is_decided: bool) -> None:
    if not np.isfinite(found.error[k]):
        raise NotConfirmedError(
            "the function has no finite value on both sides of this point, so no difference can be taken"
        )
    if found.kink[k] and not is_decided:
        raise _kink_error(claim, k)
    if not is_decided:
        raise NotConfirmedError(
            f"differences with steps from {found.steps[0]:.0e} to {found.steps[-1]:.0e} of the inputs' magnitude do "
            f"not settle on a number for {claim.element_name(k)}: the function is noisy, or has a kink or a jump at "
            "this point"
        )
    claimed, slope, unit, name = claim.derivative[k], found.slope[k], claim.unit, claim.element_name(k)
    if claim.gradient is not None:
        claimed, slope, unit, name = _wrong_element(function, claim, found)
    error = abs(found.error[k] / unit)
    slope = slope / unit
    digits = int(np.clip(np.log10(max(abs(slope), 1e-300) / max(error, 1e-300)), 2, 9))
    raise NotConfirmedError(
        f"{name} is {claimed / unit + 0.0:.9g} where central differences give {slope:.{digits}g}, "
        f"with an error of about {error:.1g}"
    )


def _wrong_element(function: PointFunction, claim: _Claim, found: Measurement) -> tuple[float, float, float, str]:
    """Return claim, difference, length and name of the element of a gradient that contributes most to an error.

    Halves the components, two evaluations each; if too many remain, names the range.
    """
    gradient, step = claim.gradient, float(found.best_steps[0])
    assert gradient is not None
    moved = np.flatnonzero(claim.direction)
    error = float(found.slope[0] - claim.derivative[0])
    slope = float(found.slope[0])
    for _ in range(_MAX_HALVINGS):
        if len(moved) == 1:
            break
        half = moved[: (len(moved) + 1) // 2]
        direction = np.zeros_like(claim.direction)
        direction[half] = claim.direction[half]
        half_slope = float(function.central_difference(direction, step).slope[0])
        half_error = half_slope - float(gradient @ direction)
        if abs(half_error) >= abs(error - half_error):
            moved, error, slope = half, half_error, half_slope
        else:
            moved, error, slope = moved[len(half) :], error - half_error, slope - half_slope
    direction = np.zeros_like(claim.direction)
    direction[moved] = claim.direction[moved]
    if len(moved) == 1:
        unit, name = float(direction[moved[0]]), f"element {moved[0]} of the gradient"
    else:
        unit, name = 1.0, f"a combination of the elements {moved[0]} to {moved[-1]} of the gradient"
    return float(gradient @ direction), slope, unit, name


def _vary_below(function: PointFunction, claim: _Claim, step: float, first: CentralDifference, selected: Mask) -> Mask:
    """Return which elements vary on a smaller length than the step, so that a difference there says nothing.

    Half the difference between the slopes of both sides is proportional to the step for a smooth function. At a kink it
    is the same at all steps: raises NotConfirmedError.
    """
    # The function may vary on a smaller scale than the guess for a zero.
    is_guess = claim.raised or not function.x[claim.direction != 0].any()
    smaller, kink, varies = step, selected.copy(), np.zeros(len(selected), bool)
    is_measured = np.zeros(len(selected), bool)
    for _ in range(_MAX_SHORTER_STEPS if is_guess else 1):
        smaller /= _KINK_STEP_RATIO
        difference = function.central_difference(claim.direction, smaller)
        can_measure = difference.rounding <= 0.1 * first.curvature
        is_measured |= can_measure
        ratio, limit = np.ones(len(selected)), np.sqrt(_KINK_STEP_RATIO)
        np.divide(difference.curvature, first.curvature, out=ratio, where=first.curvature > 0)
        varies |= kink & can_measure & (ratio >= limit)
        kink &= ~can_measure | ((ratio > 1 / limit) & (ratio < limit))
        if not (kink & can_measure).any():
            break
    if kink.any():
        larger = min(step * _KINK_STEP_RATIO, LARGEST_STEP)
        difference = function.central_difference(claim.direction, larger)
        kink &= is_measured | (step * _KINK_STEP_RATIO <= LARGEST_STEP)
        kink &= ~(difference.curvature > np.sqrt(larger / step) * first.curvature)
    if kink.any():
        raise _kink_error(claim, int(np.argmax(kink)))
    return varies


def _kink_error(claim: _Claim, k: int) -> NotConfirmedError:
    return NotConfirmedError(
        f"the function has a kink at or next to this point, which shows in {claim.element_name(k)}"
    )


@lru_cache(maxsize=8)
def _sign_pattern(size: int) -> tuple[Vector, Vector]:
    """Return numbers of both signs between 0.5 and 1 without a period, so that errors of components do not cancel.

    Also returns their magnitudes.
    """
    indices = np.arange(1, size + 1)
    signs = np.where(np.modf(indices * np.sqrt(2.0))[0] < 0.5, -1.0, 1.0)
    magnitudes = 0.5 + 0.5 * np.modf(indices * 0.6180339887498949)[0]
    return np.asarray(signs * magnitudes), magnitudes
