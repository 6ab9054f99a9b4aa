"""Slopes of a function along a line by central differences, with errors that include the function's noise.

The noise of a function is what its values change by irregularly: rounding errors, printed digits, tolerances of
solvers, random numbers. It is estimated from differences of third and fourth order, as in ECNoise: those of a smooth
function vanish with the step, those of noise do not. Sources: Moré and Wild, Estimating computational noise, SIAM J.
Sci. Comput. 33 (2011); steps by noise: Moré and Wild, Estimating derivatives of noisy simulations, ACM Trans. Math.
Softw. 38 (2012).

A step at which no value changed says nothing about the slope. If a slope has settled at a large step, a smaller step
that contradicts it resolves noise, such as the grid of single precision.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dragoman.core.errors import DragomanError
from dragoman.core.vectors import Vector

Values = Callable[[Vector], Vector]
Mask = npt.NDArray[np.bool_]
IsEnough = Callable[[Vector, Vector, Vector], Mask]

EPS = float(np.finfo(np.float64).eps)
_EPS_SINGLE = float(np.finfo(np.float32).eps)
# Rounding errors of a function's value, in units in the last place of its precision: a bound for most functions, and
# the standard deviation where only the result is rounded.
_ROUNDING, _LEAST_ROUNDING = 8.0, 0.3
ROUNDING_ERROR = _ROUNDING * EPS  # of a value in double precision, relative to it
# Values of single precision with at most this number of significant bits, such as 0.5, may be exact in any precision.
_SHORT_BITS = 16

# The largest and smallest displacement, relative to the magnitude of the components.
LARGEST_STEP, SMALLEST_STEP, _SMALL_STEP = 0.2, 1e-9, 1e-3
# Values at five points are taken at each step; after the first step at most this number of further ones is tried.
MAX_SAMPLES = 5
# A slope has settled if its error is below this fraction of it.
_SETTLED = 0.05
# Differences of fourth order above this fraction of those of third order do not decay: the function is not smooth.
_FLAT = 0.3
# The inner points of a sample, relative to the outer ones: no ratio of small integers, so that values on a grid, such
# as printed digits, do not lie on a line by chance.
_INNER = (5**0.5 - 1) / 2
# Standard deviations for noise of standard deviation 1: of the differences of third and fourth order that are used,
# (f(1) - f(-1)) / 2 - (f(r) - f(-r)) / 2r and (f(1) + f(-1)) / 2 - f(0) - (f(r) + f(-r) - 2 f(0)) / 2r², and of the
# extrapolated slope.
_THIRD_OF_NOISE = (0.5 + 0.5 / _INNER**2) ** 0.5
_FOURTH_OF_NOISE = (0.5 + 0.5 / _INNER**4 + (1 / _INNER**2 - 1) ** 2) ** 0.5
SLOPE_OF_NOISE = (0.5 * (_INNER**-2 + _INNER**4)) ** 0.5 / (1 - _INNER**2)
_SHORTER = 1 / 30
# A step that resolves functions that vary on a millionth of the components' magnitudes, and at which the change of the
# function is above rounding errors by this factor.
_FINE_STEP, _FINE_NOISE = 1e-7, 1e3
# A slope in spite of noise is not improved further if its error is below this fraction of it.
_NOISY = 1e-3
# Errors within this factor at steps that differ by far are those of a kink; those of noise grow as the step shrinks.
_KINK_RATIO = 3.0

_EVALUATION_ERRORS = (
    *(DragomanError, ArithmeticError, ValueError, TypeError, LookupError, AssertionError, RuntimeError),
)


def relative_rounding(value: Vector) -> Vector:
    """Return the relative rounding error of each element of a function's value, by the precision that it shows."""
    return np.where(_is_long_single(value), _ROUNDING * _EPS_SINGLE, _ROUNDING * EPS)


def _is_long_single(value: Vector) -> Mask:
    """Return which elements have been rounded to single precision.

    These are numbers of single precision, and not short ones such as 0.5, which may be exact in any precision.
    """
    with np.errstate(all="ignore"):
        mantissa = np.frexp(value)[0] * 2.0**_SHORT_BITS
    is_long, single = mantissa != np.floor(mantissa), _is_single(value)
    return np.asarray(single & (is_long | bool(single.all() and is_long.any())))


def evaluate_or_nan(values: Values, x: Vector, size: int) -> Vector:
    """Return a copy of the function's value, which the function may return again; NaN if it cannot be evaluated."""
    try:
        return np.array(values(x))
    except _EVALUATION_ERRORS:
        return np.full(size, np.nan)


def has_single_precision(value: Vector) -> bool:
    """Return whether an element of a finite value has been rounded to single precision; within `np.errstate`."""
    return bool(np.count_nonzero(value.astype(np.float32) == value)) and bool(_is_long_single(value).any())


def _is_single(value: Vector) -> Mask:
    with np.errstate(all="ignore"):
        return np.asarray((value.astype(np.float32) == value) | ~np.isfinite(value))


@dataclass(frozen=True, slots=True)
class CentralDifference:
    """Differences of the values at two points, on both sides of x.

    Parameters
    ----------
    slope : NaN where the function is not finite on both sides.
    curvature : half the difference between the slopes of both sides.
    rounding : rounding errors of both.
    changed : a value differs from the one at x.
    """

    slope: Vector
    curvature: Vector
    rounding: Vector
    changed: Mask


@dataclass(frozen=True, slots=True)
class Sample:
    """Slopes from the values at ±h and ±h/2.

    Parameters
    ----------
    step : h.
    slope : extrapolated from both differences (Richardson).
    error : estimate of its error; infinite where the function is not finite.
    curvature : half the difference between the slopes of both sides.
    noise : of the values, an upper bound for smooth functions.
    noisy : the noise is above the bound of rounding errors.
    least_noise : rounding errors of the result alone.
    change : the largest change of the function.
    changed : a value differs from the one at x.
    flat : differences do not decay with their order, because of noise, a kink, or variation on a smaller length.
    """

    step: float
    slope: Vector
    error: Vector
    curvature: Vector
    noise: Vector
    noisy: Mask
    least_noise: Vector
    change: Vector
    changed: Mask
    flat: Mask


class PointFunction:
    """A function of one vector near x. `sens` combines its elements into one number; None keeps them.

    Parameters
    ----------
    value : the function's value at x.
    noise : relative noise of the values, if it is known to be above rounding errors.
    """

    def __init__(
        self, values: Values, x: Vector, value: Vector, sens: Vector | None = None, noise: float = 0.0
    ) -> None:
        self._values, self.x, self._sens = values, x, sens
        self._value = np.array(value)  # the function may return the same array again
        self._single, self._known_noise = _is_long_single(self._value), noise
        self.magnitude = self._magnitudes(np.abs(self._value))
        self._center = self._combine(self._value)
        self.noise = np.zeros(len(self.magnitude))
        self._set_precision()
        # Elements whose values are known to change with small steps, or not at all.
        self.resolved = np.zeros(len(self.magnitude), bool)

    def _set_precision(self) -> None:
        """Set `rounding`, a bound of rounding errors, and `noise`, those known to be above those of float64."""
        self._relative = np.maximum(_ROUNDING * np.where(self._single, _EPS_SINGLE, EPS), self._known_noise)
        self.rounding = self._magnitudes(self._relative * np.abs(self._value))
        is_coarse = self._relative > _ROUNDING * EPS
        self.noise = self._magnitudes(np.where(is_coarse, self._relative * np.abs(self._value), 0.0)) / _ROUNDING

    def central_difference(self, direction: Vector, t: float) -> CentralDifference:
        above, below = self._at(direction, t), self._at(direction, -t)
        with np.errstate(all="ignore"):
            slope = (self._combine(above) - self._combine(below)) / (2 * t)
            curvature = np.abs(self._combine(above - 2 * self._value + below)) / (2 * t)
            largest = np.maximum(np.maximum(np.abs(above), np.abs(below)), np.abs(self._value))
            rounding = (self._magnitudes(self._relative * largest) + self._position_rounding(slope, curvature)) / t
            changed = (self._combine(above) != self._center) | (self._combine(below) != self._center)
        return CentralDifference(_finite_or_nan(slope), _finite_or_nan(curvature), rounding, changed)

    def sample(self, direction: Vector, h: float) -> Sample:
        raw = [self._at(direction, t * h) for t in (-1.0, -_INNER, _INNER, 1.0)]
        with np.errstate(all="ignore"):
            far_below, below, above, far_above = map(self._combine, raw)
            coarse, fine = (far_above - far_below) / (2 * h), (above - below) / (2 * _INNER * h)
            slope = (fine - _INNER**2 * coarse) / (1 - _INNER**2)
            third = np.abs(coarse - fine) * h / _THIRD_OF_NOISE
            even = (far_above + far_below) / 2 - self._center - (above + below - 2 * self._center) / (2 * _INNER**2)
            fourth = np.abs(even) / _FOURTH_OF_NOISE
            largest = np.max(np.abs([*raw, self._value]), axis=0)
            curvature = np.abs(far_above - 2 * self._center + far_below) / (2 * h)
            rounding = self._magnitudes(self._relative * largest) + self._position_rounding(slope, curvature)
            irregular, least = np.maximum(third, fourth), _LEAST_ROUNDING / _ROUNDING * rounding
            error = np.abs(slope - fine) + SLOPE_OF_NOISE * np.maximum(irregular, least) / h
            change = np.max(np.abs(np.array([far_below, below, above, far_above]) - self._center), axis=0)
        finite = np.isfinite(slope) & np.isfinite(error)
        return Sample(
            h,
            np.where(finite, slope, np.nan),
            np.where(finite, error, np.inf),
            np.where(finite, curvature, np.inf),
            np.where(finite, np.maximum(irregular, least), np.inf),
            irregular > rounding,
            least,
            np.where(finite, change, np.inf),
            ~(finite & (change == 0)),
            (fourth > _FLAT * third) & finite,
        )

    def resolve(self, sample: Sample) -> None:
        """Note elements that a small step changes: their slope is zero along directions that do not change them."""
        if sample.step <= _SMALL_STEP:
            self.resolved |= sample.changed & (sample.error <= _SETTLED * np.abs(sample.slope))

    def resolve_constants(self, direction: Vector) -> None:
        """Note the elements that a large step along a direction does not change; two evaluations."""
        self.resolved |= ~self.central_difference(direction, LARGEST_STEP).changed

    def _at(self, direction: Vector, t: float) -> Vector:
        """Return the function's value at a displacement; NaN if it cannot be evaluated there."""
        with np.errstate(all="ignore"):
            value = evaluate_or_nan(self._values, self.x + t * direction, len(self._value))
        if self._single.any() and not _is_single(value)[self._single].all():  # the value at x was one by chance
            self._single &= _is_single(value)
            self._set_precision()
        return value

    def _combine(self, vector: Vector) -> Vector:
        return vector if self._sens is None else np.atleast_1d(self._sens @ vector)

    def _magnitudes(self, magnitudes: Vector) -> Vector:
        return magnitudes if self._sens is None else np.atleast_1d(np.abs(self._sens) @ magnitudes)

    def _position_rounding(self, slope: Vector, curvature: Vector) -> Vector:
        """Return the effect of rounding errors of the moved components."""
        return _ROUNDING * EPS * (np.abs(slope) + 2 * curvature)


@dataclass(frozen=True, slots=True)
class Measurement:
    """A slope by differences at several steps.

    Parameters
    ----------
    error : estimate of its error; infinite if nothing is known.
    curvature : half the difference between the slopes of both sides at that step.
    noise : of the function's values, where the slope has settled in spite of it, otherwise 0.
    change : the largest change of the function.
    constant : the function does not change at small steps, and has no slope at larger ones.
    kink : the error is the same at all steps.
    steps : the steps that were tried.
    best_steps : the step of each element.
    """

    slope: Vector
    error: Vector
    curvature: Vector
    noise: Vector
    change: Vector
    constant: Mask
    kink: Mask
    steps: tuple[float, ...]
    best_steps: Vector


def measure(
    function: PointFunction,
    direction: Vector,
    is_enough: IsEnough,
    start: float = 0.0,
    largest: float = LARGEST_STEP,
    most: int = MAX_SAMPLES,
) -> Measurement:
    """Return the slope of each element along a direction, four evaluations for each of at most `most` steps.

    Parameters
    ----------
    is_enough : returns whether a slope, its error and the curvature suffice, for each element.
    start : the first step; by default the one for the rounding errors of the values.
    largest : the largest step.
    """
    start = start or step_for_noise(function.rounding, function.magnitude)
    samples = [function.sample(direction, min(start, largest))]
    while True:
        table = _Table(samples)
        result = table.measurement()
        unfinished = ~is_enough(result.slope, result.error, result.curvature)
        function.resolve(samples[-1])
        has_changed = table.changed.any(axis=0)
        if samples[0].step < largest:
            unfinished |= ~has_changed & ~(function.resolved & has_changed.any())
        step = 0.0
        for k in np.flatnonzero(unfinished):
            step = step or table.next_step(int(k), float(function.magnitude[k]), largest)
        if not step or len(samples) >= most:
            return result
        samples = sorted([*samples, function.sample(direction, step)], key=lambda each: -each.step)


def step_for_noise(noise: Vector | float, variation: Vector | float, order: int = 4) -> float:
    """Return the step at which errors by noise, noise/h, are of the order of truncation errors.

    These are between h², which can be estimated, and h⁴, which remain after extrapolation. The median of all elements
    decides.

    Parameters
    ----------
    variation : change of the function for a displacement of 1.
    order : 4, or 3 for the smallest estimated error.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.atleast_1d(noise / np.maximum(variation, noise))
    relative = relative[np.isfinite(relative) & (relative > 0)]
    return math.pow(float(np.clip(np.median(relative) if relative.size else _ROUNDING * EPS, EPS, 1.0)), 1 / order)


class _Table:
    """Samples from the largest to the smallest step (rows), for each element (columns).

    Parameters
    ----------
    errors : at each step, including the noise that shows at smaller steps.
    settled : the error is a small part of the slope.
    best : the sample with the smallest error that does not contradict the largest step that has settled.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.steps = [each.step for each in samples]
        self.slopes, self.changed = np.array([s.slope for s in samples]), np.array([s.changed for s in samples])
        self.flat = np.array([each.flat for each in samples])
        self.errors = _errors_with_noise(samples)
        with np.errstate(invalid="ignore"):
            self.settled = self.changed & (self.errors <= _SETTLED * np.abs(self.slopes))
        self._columns, self._rows = np.arange(self.slopes.shape[1]), np.arange(len(samples))[:, None]
        self.best = self._best()

    def _best(self) -> npt.NDArray[np.intp]:
        coarsest = np.argmax(self.settled, axis=0)
        slope, error = self.slopes[coarsest, self._columns], self.errors[coarsest, self._columns]
        with np.errstate(invalid="ignore"):
            agrees = np.abs(self.slopes - slope) <= 2 * (self.errors + error)
        usable = self.changed & ((agrees & (self._rows >= coarsest)) | ~self.settled.any(axis=0))
        usable[0] |= ~self.changed.any(axis=0)  # the element does not depend on the input
        return np.asarray(np.argmin(np.where(usable, self.errors, np.inf), axis=0))

    def measurement(self) -> Measurement:
        best, columns, samples = self.best, self._columns, self.samples
        has_settled, has_changed = self.settled.any(axis=0), self.changed.any(axis=0)
        noises = np.array([np.where(each.flat & each.changed & each.noisy, each.noise, 0.0) for each in samples])
        return Measurement(
            self.slopes[best, columns],
            self.errors[best, columns],
            np.array([each.curvature for each in samples])[best, columns],
            np.max(np.where((self._rows >= best) & has_settled, noises, 0.0), axis=0),
            np.max([each.change for each in samples], axis=0),
            has_changed & ~self.changed[-1] & ~has_settled,
            np.array([self._is_kink(int(k)) for k in columns], np.bool_),
            tuple(self.steps),
            np.array(self.steps)[best],
        )

    def next_step(self, k: int, magnitude: float, largest: float) -> float:
        """Return the step of the next sample for element k, 0 if none would help.

        Larger steps reduce errors by noise, smaller ones reduce truncation errors; between two steps lies the best one.
        """
        steps, best, is_settled = self.steps, int(self.best[k]), bool(self.settled[:, k].any())
        step, slope, error = steps[best], abs(float(self.slopes[best, k])), float(self.errors[best, k])
        if not self.changed[:, k].any():
            return largest if steps[0] < largest else 0.0
        if not np.isfinite(error):
            return steps[-1] * _SHORTER if steps[-1] > SMALLEST_STEP else 0.0
        larger, smaller = steps[best - 1] if best else 0.0, steps[best + 1] if best + 1 < len(steps) else 0.0
        is_flat = bool(self.flat[best, k])
        is_noisy, is_truncated = is_flat or bool(smaller), not is_flat or bool(larger)
        if larger and smaller and error <= _NOISY * slope:
            return 0.0
        if is_noisy and not larger and step < largest:
            noise = float(self.samples[best].noise[k])
            variation = max(slope, min(max(magnitude, noise), slope + 2 * noise / step))
            longer = step_for_noise(noise, variation)
            if longer > 3 * step or not is_settled:
                return min(max(longer, 10 * step), largest)
        if error <= slope:
            if is_flat and larger > 10 * step:
                return math.sqrt(larger * step)
            if is_truncated and smaller and step > 10 * smaller:
                return math.sqrt(step * smaller)
        if is_truncated and not smaller and step > SMALLEST_STEP:
            return step * _SHORTER
        last = self.samples[-1]
        fine = max(_FINE_STEP, _FINE_NOISE * float(last.least_noise[k] * last.step / max(last.change[k], 1e-300)))
        return fine if not is_settled and steps[-1] > 10 * fine else 0.0

    def _is_kink(self, k: int) -> bool:
        """Return whether errors are the same at two steps that differ by far."""
        if self.steps[0] < 100 * self.steps[-1]:
            return False
        first, last = self.samples[0].error[k], self.samples[-1].error[k]
        return bool(max(first, last) <= _KINK_RATIO * min(first, last))


def _errors_with_noise(samples: Sequence[Sample]) -> Vector:
    errors, noise = [], np.zeros(len(samples[0].slope))
    for each in reversed(samples):
        errors.append(np.maximum(each.error, SLOPE_OF_NOISE * noise / each.step))
        noise = np.maximum(noise, np.where(each.flat & each.changed, each.noise, 0.0))
    return np.array(errors[::-1])


def _finite_or_nan(vector: Vector) -> Vector:
    """Replace infinities by NaN, whose arithmetic raises no warnings."""
    return np.where(np.isfinite(vector), vector, np.nan)
