"""Are derivatives right? Against central differences, against each other, and for symmetry, for every pair."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from dragoman.core.errors import DragomanError
from dragoman.core.vector_answers import as_vector, as_vectors
from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors, put
from dragoman.derivatives.scales import own_scales
from dragoman.derivatives.verification import Unconfirmed, confirm_gradient

# The steps of central differences, in units of the magnitude of each component of the point: half a decade each.
STEPS = tuple(10 ** (-1 - k / 2) for k in range(10))
_EPS = float(np.finfo(np.float64).eps)
# Central differences are of order 2; what is measured between steps is at least this where the derivative is right.
_LEAST_ORDER = 1.5


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How large a relative error may be: of differences from the derivative, and of identities between derivatives."""

    differences: float = 1e-6
    identities: float = 1e-9


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check of one output by one or two inputs found, at the point where it was worst.

    error: relative; of a convergence the smallest one, of all steps and of what they are extrapolated to.
    order: of the convergence of central differences; None where they are exact, or none were taken.
    curve: pairs of step and error. refused: what the function said instead of answering. why: what else is wrong.
    """

    check: str
    output: int
    inputs: tuple[int, ...]
    error: float = math.inf
    order: float | None = None
    passed: bool = False
    curve: tuple[tuple[float, float], ...] = ()
    refused: str = ""
    why: str = ""


def check(
    function: VectorFunction, points: Sequence[Vectors], config: Config, seed: int, tolerance: Tolerance
) -> list[Finding]:
    """One finding for each check of each output by each input, or pair of inputs: the worst of the points."""
    found: dict[tuple[str, int, tuple[int, ...]], Finding] = {}
    for at, point in enumerate(points):
        trial = _Trial(function, tuple(point), config, np.random.default_rng((seed, at)), tolerance)
        for finding in trial.findings():
            key = (finding.check, finding.output, finding.inputs)
            if key not in found or _badness(finding) > _badness(found[key]):
                found[key] = finding
    return list(found.values())


def _badness(finding: Finding) -> tuple[bool, float]:
    return not finding.passed, finding.error


class _Trial:
    """The checks of a function at one point, along random directions of length one."""

    def __init__(
        self, function: VectorFunction, point: Vectors, config: Config, rng: np.random.Generator, tolerance: Tolerance
    ) -> None:
        self.function, self.point, self.config, self.tolerance = function, point, config, tolerance
        self.sizes = tuple(function.output_sizes(config))
        self.can = function.sources().keys()
        self._scales = [own_scales(x) for x in point]
        self._directions = [[scale * _direction(rng, len(scale)) for scale in self._scales] for _ in range(2)]
        values = as_vectors(function.evaluate(point, config), self.sizes)
        # Each output element weighs as much as any other, however large it is.
        self._weights = [_direction(rng, len(y)) / np.where(y != 0, np.abs(y), 1.0) for y in values]

    def findings(self) -> Iterator[Finding]:
        first = "apply_jacobian" in self.can, "gradient" in self.can
        places = range(len(self.point))
        for output in range(len(self.sizes)):
            for i in places:
                if first[0]:
                    yield self._told(self._slope, "apply_jacobian", output, i)
                if first[1]:
                    yield self._told(self._pulled, "gradient", output, i)
                if all(first):
                    yield self._told(self._adjoint, "adjoint", output, i)
            if "apply_hessian" in self.can:
                if first[1]:
                    yield from (self._told(self._curved, "apply_hessian", output, i, j) for i in places for j in places)
                yield from (self._told(self._symmetric, "symmetry", output, i, j) for i in places for j in places[i:])

    def _told(self, act: Callable[..., Finding], name: str, output: int, *inputs: int) -> Finding:
        try:
            return act(name, output, *inputs)
        except DragomanError as fault:
            return Finding(name, output, inputs, refused=fault.message)

    # --- the checks ----------------------------------------------------------------------------------------

    def _slope(self, name: str, output: int, i: int) -> Finding:
        """J v against differences of the output along v."""
        vec = self._directions[0][i]
        claimed = self._jacobian(output, i, vec)
        return self._converges(name, output, (i,), lambda at: self._value(output, i, at), vec, claimed)

    def _pulled(self, name: str, output: int, i: int) -> Finding:
        """Jᵀ s at the scale of each of its elements, and <v, Jᵀ s> along v, against differences of <s, output>."""
        vec, sens = self._directions[0][i], self._weights[output]
        gradient = self._gradient(output, i, i, self.point[i], sens)
        claimed = np.atleast_1d(vec @ gradient)

        def weighed(at: Vector) -> Vector:
            return np.atleast_1d(sens @ self._value(output, i, at))

        found = self._converges(name, output, (i,), weighed, vec, claimed)
        try:
            here = self._value(output, i, self.point[i])
            confirm_gradient(lambda at: self._value(output, i, at), self.point[i], here, sens, gradient)
        except Unconfirmed as error:
            return replace(found, passed=False, why=str(error))
        return found

    def _adjoint(self, name: str, output: int, i: int) -> Finding:
        """<J v, s> = <v, Jᵀ s>."""
        sens = self._weights[output]
        pulled = self._gradient(output, i, i, self.point[i], sens)
        vec = self._directions[0][i]
        pushed = self._jacobian(output, i, vec)
        sides = float(pushed @ sens), float(vec @ pulled)
        scale = float(max(np.abs(pushed) @ np.abs(sens), np.abs(vec) @ np.abs(pulled)))
        return self._identity(name, output, (i,), abs(sides[0] - sides[1]), scale)

    def _curved(self, name: str, output: int, i: int, j: int) -> Finding:
        """The Hessian action by inputs i and j against differences of the gradient by i along v of j."""
        vec, sens = self._directions[0][j], self._weights[output]
        scales = self._scales[i]  # so that the elements are comparable with each other
        claimed = scales * self._hessian(output, i, j, sens, vec)

        def gradient(at: Vector) -> Vector:
            return scales * self._gradient(output, i, j, at, sens)

        return self._converges(name, output, (i, j), gradient, vec, claimed, together=True)

    def _symmetric(self, name: str, output: int, i: int, j: int) -> Finding:
        """<u, H_ij v> = <v, H_ji u>."""
        sens, u, v = self._weights[output], self._directions[1][i], self._directions[0][j]
        forth, back = self._hessian(output, i, j, sens, v), self._hessian(output, j, i, sens, u)
        scale = float(max(np.abs(u) @ np.abs(forth), np.abs(v) @ np.abs(back)))
        return self._identity(name, output, (i, j), abs(float(u @ forth) - float(v @ back)), scale)

    # --- how large an error is -----------------------------------------------------------------------------

    def _identity(self, name: str, output: int, inputs: tuple[int, ...], gap: float, scale: float) -> Finding:
        error = gap / scale if scale > 0 else gap
        return Finding(name, output, inputs, error, passed=error <= self.tolerance.identities)

    def _converges(
        self,
        name: str,
        output: int,
        inputs: tuple[int, ...],
        function: Callable[[Vector], Vector],
        vec: Vector,
        claimed: Vector,
        together: bool = False,
    ) -> Finding:
        """The largest error of any element; each is relative to itself, or `together` to rounding of the largest."""
        x = self.point[inputs[-1]]
        sizes = np.abs(function(x))
        # Beside what rounding alone makes of differences, a derivative counts as zero.
        least = _EPS * (np.max(sizes, initial=0.0) if together else sizes) / (STEPS[0] * self.tolerance.differences)
        found = [(function(x + h * vec) - function(x - h * vec)) / (2 * h) for h in STEPS]
        # Two steps together are of order 4, and so come closer before rounding is felt. Source: Richardson.
        ratio = (STEPS[0] / STEPS[1]) ** 2
        finer = [(ratio * fine - coarse) / (ratio - 1) for coarse, fine in pairwise(found)]
        distances = [_distances(each, claimed, least) for each in (*found, *finer)]
        errors = [float(np.max(each, initial=0.0)) for each in distances[: len(STEPS)]]
        error = float(np.max(np.min(distances, axis=0), initial=0.0))
        order = None if errors[0] <= self.tolerance.differences else _order(errors)
        passed = error <= self.tolerance.differences and (order is None or order >= _LEAST_ORDER)
        return Finding(name, output, inputs, error, order, passed, tuple(zip(STEPS, errors, strict=True)))

    # --- the function --------------------------------------------------------------------------------------

    def _value(self, output: int, i: int, at: Vector) -> Vector:
        return as_vectors(self.function.evaluate(put(self.point, i, at), self.config), self.sizes)[output]

    def _jacobian(self, output: int, i: int, vec: Vector) -> Vector:
        answer = self.function.apply_jacobian(output, i, self.point, vec, self.config)
        return as_vector(answer, self.sizes[output], "apply_jacobian")

    def _gradient(self, output: int, i: int, moved: int, at: Vector, sens: Vector) -> Vector:
        answer = self.function.gradient(output, i, put(self.point, moved, at), sens, self.config)
        return as_vector(answer, len(self.point[i]), "gradient")

    def _hessian(self, output: int, i: int, j: int, sens: Vector, vec: Vector) -> Vector:
        answer = self.function.apply_hessian(output, i, j, self.point, sens, vec, self.config)
        return as_vector(answer, len(self.point[i]), "apply_hessian")


def _distances(found: Vector, claimed: Vector, least: Vector) -> Vector:
    """Of each element, relative to the larger of both; not a number counts as wrong."""
    with np.errstate(invalid="ignore", divide="ignore"):
        gap = np.abs(found - claimed)
        error = gap / np.maximum(np.maximum(np.abs(found), np.abs(claimed)), least)
    return np.where(gap == 0, 0.0, np.where(np.isfinite(error), error, math.inf))


def _order(errors: Sequence[float]) -> float:
    """How fast errors fall: the steepest fall within one decade of steps that does not end in rounding errors."""
    least = 10 * max(min(errors), 1e-300)
    falls = [math.log10(a / b) for a, b in zip(errors, errors[2:], strict=False) if b > 0 and math.isfinite(a)]
    clear = [fall for fall, b in zip(falls, errors[2:], strict=False) if b > least]
    found = max(clear, default=0.0)
    return found if found >= _LEAST_ORDER else max(falls, default=0.0)


def _direction(rng: np.random.Generator, size: int) -> Vector:
    found: Any = rng.normal(size=size)
    return np.asarray(found / (np.linalg.norm(found) or 1.0))
