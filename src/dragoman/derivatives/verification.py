"""Compare derivatives with central differences of the function itself, at the point of the call.

The comparison is along a line x + t d, where d moves each component by its own magnitude. Two evaluations, at
t = ±1e-5, confirm nearly every derivative that is right. Only where they do not, a ladder of steps from 0.1 to 1e-12
decides, with an error estimate for each component of the result.

A derivative whose contribution to the function's value is below about 1e-9 of that value for a relative change of 1 in
the inputs cannot be told from rounding errors, and is accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dragoman.core.errors import DragomanError, InvalidOutput
from dragoman.core.vector_binding import require_finite
from dragoman.core.vectors import Vector, Vectors
from dragoman.derivatives.scales import own_scales, raised_scales, reach

Values = Callable[[Vector], Vector]
Mask = npt.NDArray[np.bool_]

# How far a derivative may be from differences, relative to the sum of the absolute values of its terms.
CLOSE = 1e-6
_FIRST = 1e-5
_LADDER = tuple(10.0**-k for k in range(1, 13))
_LONG_LADDER = tuple(10.0**-k for k in range(1, 25))
# Rounding errors of a function's value, in units of that value.
_ROUNDING = 8 * float(np.finfo(np.float64).eps)
# Where a function bends more than this, relative to its slope, within the first step, it may have a kink.
_BEND = 1e-2
# Components whose term is below this fraction of the sum of all terms are confirmed separately.
_WEAK = 1e-4
_ROUNDS = 4
# Up to so many components are compared each alone where their comparison together fails.
_SEPARATE = 256
# Differences settle where three steps agree to this fraction of the derivative.
_SETTLED = 1e-2
# Differences whose error is larger than this, relative to the derivative, decide nothing.
_DECISIVE = 1e-3
_FLAT = 1e-8
# How much larger than the magnitude of a component its raised scale must be to try that as well.
_TINY = 1e3
# Where a function is steep, components move by less than their magnitude, but never so little that rounding stops them.
_LEAST_MOVE = 1e-5


class Unconfirmed(Exception):
    """Differences contradict a derivative, or do not settle; the message says which."""


@dataclass(frozen=True, slots=True)
class _Quotient:
    """Central differences with one step: slopes, how far the middle is from the line, and rounding errors of both."""

    slope: Vector
    bend: Vector
    noise: Vector


class _Line:
    """A function along x + t d; `sens` combines its results into one number, None leaves them as they are."""

    def __init__(self, values: Values, x: Vector, here: Vector, sens: Vector | None) -> None:
        self._values, self.x, self._here, self._sens = values, x, here, sens
        self.size = float(np.max(self._magnitudes(np.abs(here)), initial=0.0))

    def quotient(self, direction: Vector, step: float) -> _Quotient:
        """NaN where the function cannot be evaluated on both sides."""
        with np.errstate(all="ignore"):
            try:
                above, below = (self._values(self.x + t * direction) for t in (step, -step))
            except (DragomanError, ArithmeticError, ValueError, TypeError, LookupError, AssertionError, RuntimeError):
                nothing = self._combined(np.full(len(self._here), np.nan))
                return _Quotient(nothing, nothing, nothing)
            slope = _or_nan(self._combined((above - below) / (2 * step)))
            bend = _or_nan(np.abs(self._combined(above - 2 * self._here + below)) / (2 * step))
            largest = np.maximum(np.maximum(np.abs(above), np.abs(below)), np.abs(self._here))
            noise = _ROUNDING * (self._magnitudes(largest) + np.abs(slope) + 2 * bend) / step
            return _Quotient(slope, bend, noise)

    def _combined(self, vector: Vector) -> Vector:
        return vector if self._sens is None else np.atleast_1d(self._sens @ vector)

    def _magnitudes(self, sizes: Vector) -> Vector:
        return sizes if self._sens is None else np.atleast_1d(np.abs(self._sens) @ sizes)


def confirm_directional(values: Values, x: Vector, here: Vector, vec: Vector, derivative: Vector) -> None:
    """Raise Unconfirmed unless `derivative` is that of `values` along `vec`, each component at its own scale.

    `vec` is one of those that `by_scale` gives; `here` is the function's value at x.
    """
    line = _Line(values, x, here, None)
    step = reach(own_scales(x), vec)
    steepest = float(np.max(np.abs(derivative), initial=0.0))
    if steepest * step > line.size > 0:  # the function varies faster than by the magnitudes of the components
        step = max(line.size / steepest, _LEAST_MOVE * step)
    noise = _confirm(line, _Claim(step * vec, step * derivative, step * np.abs(derivative), step))
    raised = reach(raised_scales(x), vec)
    if raised >= _TINY * step and (np.abs(step * derivative) < noise).any():
        claim = _Claim(raised * vec, raised * derivative, raised * np.abs(derivative), raised, raised=True)
        _confirm(line, claim)


def confirm_gradient(values: Values, x: Vector, here: Vector, sens: Vector, gradient: Vector) -> None:
    """Raise Unconfirmed unless `gradient` is that of sens · values, each component at its own scale.

    All components move together first. Those that contribute too little to be seen beside the others move again
    without these, and those whose magnitude is small enough to be a rounding error of zero by a larger step too.
    Where a comparison of several fails, each is compared alone.
    """
    used = sens != 0
    line = _Line(lambda at: values(at)[used], x, here[used], sens[used])
    scales, raised, pattern = own_scales(x), raised_scales(x), _pattern(len(x))
    steep = np.abs(gradient) * scales > line.size
    if line.size > 0 and steep.any():
        scales[steep] = np.maximum(line.size / np.abs(gradient[steep]), _LEAST_MOVE * np.abs(x[steep]))
    tiny = np.zeros(len(x), bool)
    for group in (x != 0, x == 0):  # how far a zero may be moved is only a guess
        tiny |= _confirm_group(line, gradient, scales * pattern, group)
    tiny &= raised >= _TINY * scales
    if tiny.any():
        _confirm_components(line, gradient, np.where(tiny, raised * pattern, 0.0), raised=True)


def _confirm_group(line: _Line, gradient: Vector, moves: Vector, group: Mask) -> Mask:
    """Confirm some components of a gradient; return those whose contribution is below rounding errors."""
    left = group.copy()
    for _ in range(_ROUNDS):
        if not left.any():
            break
        direction = np.where(left, moves, 0.0)
        terms = np.abs(gradient * direction)
        noise = _confirm_components(line, gradient, direction)
        measured = left & (terms > 0) & (terms >= max(_WEAK * float(terms.sum()), noise))
        left &= ~measured
        if not measured.any():
            break
    return left


def _confirm_components(line: _Line, gradient: Vector, direction: Vector, raised: bool = False) -> float:
    """Compare along a direction, and where that fails along each component; return the rounding error."""
    terms, moved = np.abs(gradient * direction), np.flatnonzero(direction)
    along = _Claim(direction, np.atleast_1d(gradient @ direction), np.atleast_1d(terms.sum()), 1.0, "", raised)
    try:
        return float(_confirm(line, along)[0])
    except Unconfirmed:
        if len(moved) > _SEPARATE:
            raise
    noise = 0.0
    for j in moved:
        alone = np.where(np.arange(len(direction)) == j, direction, 0.0)
        claimed = np.atleast_1d(gradient[j] * direction[j])
        what = f"element {j} of the gradient"
        noise = max(
            noise, float(_confirm(line, _Claim(alone, claimed, np.abs(claimed), direction[j], what, raised))[0])
        )
    return noise


def check_finite(here: Vector, output: int, inputs: Vectors, sens: Vector | None = None) -> None:
    """Raise InvalidInput or InvalidOutput unless a point, and the function's value there, are finite."""
    for i, x in enumerate(inputs):
        require_finite(x, f"input[{i}]")
    wrong = ~np.isfinite(here) if sens is None else ~np.isfinite(here) & (sens != 0)
    if wrong.any():
        k = int(np.argmax(wrong))
        raise InvalidOutput(f"output {output}: element {k} is {here[k]} at this point, so it has no derivative there")


@dataclass(frozen=True, slots=True)
class _Claim:
    """A derivative along a direction, with the sums of the absolute values of its terms.

    unit: of the direction, for messages. what: names a single result, else it is an element of several.
    raised: components move by more than their own magnitude.
    """

    direction: Vector
    derivative: Vector
    terms: Vector
    unit: float
    what: str = ""
    raised: bool = False

    def guessed(self, x: Vector) -> bool:
        """Whether how far the components may be moved is a guess."""
        return self.raised or not x[self.direction != 0].any()

    def ladder(self, x: Vector) -> tuple[float, ...]:
        return _LONG_LADDER if self.guessed(x) else _LADDER

    def named(self, place: int) -> str:
        return self.what or (f"element {place} of the derivative" if len(self.derivative) > 1 else "the derivative")


def _confirm(line: _Line, claim: _Claim) -> Vector:
    """Compare at the first step, and where that does not agree at all steps; return its rounding errors."""
    first = line.quotient(claim.direction, _FIRST)
    scale = np.maximum(claim.terms, np.abs(first.slope))
    close = np.abs(claim.derivative - first.slope) <= CLOSE * scale + first.noise
    smooth = first.bend <= _BEND * scale + first.noise
    if not close.all():
        _climb(line, claim, ~close)
    if not (smooth | ~close).all():
        _check_kink(line, claim, first, close & ~smooth)
    return first.noise


def _climb(line: _Line, claim: _Claim, which: Mask) -> None:
    """Raise Unconfirmed unless differences over many steps settle on what is claimed.

    How far a zero may be moved is a guess. If differences settle on no number there, the derivative is accepted,
    unless the function is constant, or not continuous.
    """
    guessed, ladder = claim.guessed(line.x), claim.ladder(line.x)
    found = [line.quotient(claim.direction, step) for step in ladder]
    slopes, estimate, error, settled = _settle(found, which)
    if np.isnan(slopes).all() and not claim.raised:
        raise Unconfirmed("the function has no finite value on both sides of this point, so no difference can be taken")
    # How much the function changes counts too: its value may be 0, as at the minimum of a sum of squares.
    moves = np.array([2 * step * np.abs(each.slope[which]) for step, each in zip(ladder, found, strict=True)])
    value_size = np.maximum(line.size, np.nanmax(np.where(np.isfinite(moves), moves, 0.0), axis=0))
    wanted = claim.derivative[which]
    size = np.maximum(np.abs(wanted), np.abs(estimate))
    bends = np.array([each.bend[which] for each in found[:2]])  # near an optimum the slope is small beside them
    scale = np.maximum(np.maximum(size, claim.terms[which]), np.max(np.where(np.isfinite(bends), bends, 0.0), axis=0))
    agrees = np.abs(wanted - estimate) <= (_SETTLED if claim.raised else CLOSE) * scale + 4 * error
    flat = (size <= 4 * error) & (error <= 10 * _FLAT * value_size)
    decided = (error <= _DECISIVE * scale) | flat
    wrong = ~(decided & agrees)
    if guessed:
        wrong &= decided & settled
        if not claim.raised:
            changes = 2 * ladder[-1] * np.abs(slopes[-1])  # of a continuous function nothing but rounding
            constant = (slopes == 0).all(axis=0) & (np.abs(wanted) > CLOSE * line.size)
            wrong |= constant | ~(changes <= _FLAT * value_size)
    if not wrong.any():
        return
    k = int(np.argmax(wrong))
    name = claim.named(int(np.flatnonzero(which)[k]))
    if not decided[k]:
        raise Unconfirmed(
            f"differences with steps from {ladder[0]:.0e} to {ladder[-1]:.0e} of the inputs' magnitude do not settle "
            f"on a number for {name}: the function is noisy, or has a kink or a jump at this point"
        )
    told = [number / claim.unit for number in (wanted[k], estimate[k])]
    raise Unconfirmed(
        f"{name} is {told[0]:.9g} where central differences give {told[1]:.9g}, "
        f"with an error of about {abs(error[k] / claim.unit):.1g}"
    )


def _settle(found: list[_Quotient], which: Mask) -> tuple[Vector, Vector, Vector, Mask]:
    """Return slopes at all steps but the first, the best of each column, its error, and whether slopes settle there."""
    slopes = np.array([each.slope[which] for each in found[1:]])
    errors = np.array([(np.abs(fine.slope - coarse.slope) + fine.noise)[which] for coarse, fine in pairwise(found)])
    errors[np.isnan(errors)] = np.inf
    for finer in (1, 2):  # where errors are noise, they grow tenfold from step to step; one may be small by chance
        errors[:-finer] = np.maximum(errors[:-finer], 0.1**finer * errors[finer:])
    settled = _finest_run(errors <= _SETTLED * np.abs(slopes))
    chosen = np.argmin(np.where(settled | ~settled.any(axis=0), errors, np.inf), axis=0)
    columns = np.arange(slopes.shape[1])
    return slopes, slopes[chosen, columns], errors[chosen, columns], np.asarray(settled.any(axis=0))


def _finest_run(settled: Mask) -> Mask:
    """In each column the last run of at least two true entries."""
    found, active, done = (np.zeros_like(settled), *(np.zeros(settled.shape[1], bool) for _ in range(2)))
    for k in reversed(range(len(settled))):
        before = settled[k - 1] if k else np.zeros_like(active)
        active = settled[k] & (active | (before & ~done))
        done |= active
        found[k] = active
    return found


def _check_kink(line: _Line, claim: _Claim, first: _Quotient, which: Mask) -> None:
    """Raise Unconfirmed where the slopes of both sides differ by as much with larger and with all smaller steps."""
    kink, seen = which & (line.quotient(claim.direction, 100 * _FIRST).bend < 3 * first.bend), 0 * first.bend
    for step in (each for each in claim.ladder(line.x) if each < _FIRST):
        if not kink.any():
            return
        found = line.quotient(claim.direction, step)
        same = (found.bend > 0.3 * first.bend) & (found.bend < 3 * first.bend)
        measured = found.noise <= 0.1 * first.bend
        kink &= same | ~measured
        seen += measured
    kink &= seen >= 3
    if kink.any():
        name = claim.named(int(np.argmax(kink)))
        raise Unconfirmed(f"the function has a kink at or next to this point, which shows in {name}")


def _or_nan(vector: Vector) -> Vector:
    """Replace infinities by NaN, whose arithmetic raises no warnings."""
    return np.where(np.isfinite(vector), vector, np.nan)


def _pattern(size: int) -> Vector:
    """Numbers of both signs between 0.5 and 1 without a period: errors of several components do not cancel."""
    places = np.arange(1, size + 1)
    signs = np.where(np.modf(places * np.sqrt(2.0))[0] < 0.5, -1.0, 1.0)
    return np.asarray(signs * (0.5 + 0.5 * np.modf(places * 0.6180339887498949)[0]))
