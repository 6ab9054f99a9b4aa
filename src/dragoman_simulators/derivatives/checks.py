"""Check derivatives against central differences, each other, and for symmetry."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from dragoman.core.errors import DragomanError
from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors, as_vector, as_vectors, replace_item
from dragoman_simulators.derivatives.derived import component_scales
from dragoman_simulators.derivatives.verification import NotConfirmedError, confirm_gradient

# Steps of central differences relative to the magnitude of each component of the point, half a decade apart.
STEPS = tuple(10 ** (-1 - k / 2) for k in range(10))
_EPS = float(np.finfo(np.float64).eps)
# Central differences are of order 2; a measured order for a correct derivative is at least this.
_MIN_ORDER = 1.5
# With a larger tolerance derivatives are approximations of a function that may be noisy: differences of a noisy
# function do not converge, and elements below this share of the largest one are not compared at their own scale.
_EXACT = 1e-3
_NEGLIGIBLE = 0.1


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Maximum relative errors: of differences from a derivative, and of identities between derivatives."""

    differences: float = 1e-6
    identities: float = 1e-9

    @property
    def is_approximate(self) -> bool:
        """Whether approximations pass, such as finite differences."""
        return self.differences > _EXACT


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check of one output by one or two inputs, at the point with the largest error.

    Parameters
    ----------
    error : relative error; for differences the smallest one over all steps and their extrapolations.
    order : order of convergence of central differences; None if they are exact or not used.
    curve : pairs of step and error.
    rejection : the error message of a function that raised an error instead.
    reason : of a failure other than the error.
    """

    check: str
    output: int
    inputs: tuple[int, ...]
    error: float = math.inf
    order: float | None = None
    passed: bool = False
    curve: tuple[tuple[float, float], ...] = ()
    rejection: str = ""
    reason: str = ""


def run_checks(
    function: VectorFunction, points: Iterable[Vectors], config: Config, seed: int, tolerance: Tolerance
) -> list[CheckResult]:
    """Return one result for each check of each output by each input or pair of inputs: the worst of all points."""
    worst: dict[tuple[str, int, tuple[int, ...]], CheckResult] = {}
    for i, point in enumerate(points):
        checks = _PointChecks(function, tuple(point), config, np.random.default_rng((seed, i)), tolerance)
        for result in checks.results():
            key = (result.check, result.output, result.inputs)
            if key not in worst or _badness(result) > _badness(worst[key]):
                worst[key] = result
    return list(worst.values())


def _badness(result: CheckResult) -> tuple[bool, float]:
    return not result.passed, result.error


class _PointChecks:
    """The checks of a function at one point, along random directions of length one."""

    def __init__(
        self, function: VectorFunction, point: Vectors, config: Config, rng: np.random.Generator, tolerance: Tolerance
    ) -> None:
        self.function, self.point, self.config, self.tolerance = function, point, config, tolerance
        self.sizes = tuple(function.output_sizes(config))
        self.abilities = function.sources().keys()
        self._scales = [component_scales(x) for x in point]
        self._directions = [[scale * _direction(rng, len(scale)) for scale in self._scales] for _ in range(2)]
        values = as_vectors(function.evaluate(point, config), self.sizes)
        # Each output element has the same weight, whatever its magnitude.
        self._weights = [_direction(rng, len(y)) / np.where(y != 0, np.abs(y), 1.0) for y in values]

    def results(self) -> Iterator[CheckResult]:
        has_jacobian, has_gradient = "apply_jacobian" in self.abilities, "gradient" in self.abilities
        inputs = range(len(self.point))
        for output in range(len(self.sizes)):
            for i in inputs:
                if has_jacobian:
                    yield self._run(self._check_jacobian, "apply_jacobian", output, i)
                if has_gradient:
                    yield self._run(self._check_gradient, "gradient", output, i)
                if has_jacobian and has_gradient:
                    yield self._run(self._check_adjoint, "adjoint", output, i)
            if "apply_hessian" in self.abilities:
                if has_gradient:
                    for i in inputs:
                        yield from (self._run(self._check_hessian, "apply_hessian", output, i, j) for j in inputs)
                for i in inputs:
                    yield from (self._run(self._check_symmetry, "symmetry", output, i, j) for j in inputs[i:])

    def _run(self, check: Callable[..., CheckResult], name: str, output: int, *inputs: int) -> CheckResult:
        try:
            return check(name, output, *inputs)
        except DragomanError as error:
            return CheckResult(name, output, inputs, rejection=error.message)

    # --- checks --------------------------------------------------------------------------------------------

    def _check_jacobian(self, name: str, output: int, i: int) -> CheckResult:
        """Compare J v with differences of the output along v."""
        vec = self._directions[0][i]
        claimed = self._jacobian(output, i, vec)
        return self._check_convergence(name, output, (i,), lambda x: self._value(output, i, x), vec, claimed)

    def _check_gradient(self, name: str, output: int, i: int) -> CheckResult:
        """Compare <v, Jᵀ s> with differences of <s, output> along v, and each element of Jᵀ s at its own scale."""
        vec, sens = self._directions[0][i], self._weights[output]
        gradient = self._gradient(output, i, i, self.point[i], sens)
        claimed = np.atleast_1d(vec @ gradient)

        def weighted_output(x: Vector) -> Vector:
            return np.atleast_1d(sens @ self._value(output, i, x))

        result = self._check_convergence(name, output, (i,), weighted_output, vec, claimed)
        if self.tolerance.is_approximate:
            return result
        try:
            value = self._value(output, i, self.point[i])
            confirm_gradient(lambda x: self._value(output, i, x), self.point[i], value, sens, gradient)
        except NotConfirmedError as error:
            return replace(result, passed=False, reason=str(error))
        return result

    def _check_adjoint(self, name: str, output: int, i: int) -> CheckResult:
        """Check that <J v, s> = <v, Jᵀ s>."""
        vec, sens = self._directions[0][i], self._weights[output]
        gradient = self._gradient(output, i, i, self.point[i], sens)
        jacobian = self._jacobian(output, i, vec)
        scale = float(max(np.abs(jacobian) @ np.abs(sens), np.abs(vec) @ np.abs(gradient)))
        gap = abs(float(jacobian @ sens) - float(vec @ gradient))
        return self._check_identity(name, output, (i,), gap, scale)

    def _check_hessian(self, name: str, output: int, i: int, j: int) -> CheckResult:
        """Compare the Hessian action by inputs i and j with differences of the gradient by i along v of j."""
        vec, sens = self._directions[0][j], self._weights[output]
        scales = self._scales[i]  # makes the elements comparable
        claimed = scales * self._hessian(output, i, j, sens, vec)

        def gradient(x: Vector) -> Vector:
            return scales * self._gradient(output, i, j, x, sens)

        return self._check_convergence(name, output, (i, j), gradient, vec, claimed, joint_rounding=True)

    def _check_symmetry(self, name: str, output: int, i: int, j: int) -> CheckResult:
        """Check that <u, H_ij v> = <v, H_ji u>."""
        sens, u, v = self._weights[output], self._directions[1][i], self._directions[0][j]
        forward, backward = self._hessian(output, i, j, sens, v), self._hessian(output, j, i, sens, u)
        scale = float(max(np.abs(u) @ np.abs(forward), np.abs(v) @ np.abs(backward)))
        return self._check_identity(name, output, (i, j), abs(float(u @ forward) - float(v @ backward)), scale)

    # --- errors --------------------------------------------------------------------------------------------

    def _check_identity(self, name: str, output: int, inputs: tuple[int, ...], gap: float, scale: float) -> CheckResult:
        error = gap / scale if scale > 0 else gap
        return CheckResult(name, output, inputs, error, passed=error <= self.tolerance.identities)

    def _check_convergence(
        self,
        name: str,
        output: int,
        inputs: tuple[int, ...],
        function: Callable[[Vector], Vector],
        vec: Vector,
        claimed: Vector,
        joint_rounding: bool = False,
    ) -> CheckResult:
        """Return the largest relative error of all elements.

        Elements below the rounding errors of differences count as zero: each by the function's own element or, with
        `joint_rounding`, by the largest one.
        """
        x = self.point[inputs[-1]]
        sizes = np.abs(function(x))
        rounding = _EPS * (np.max(sizes, initial=0.0) if joint_rounding else sizes)
        least = rounding / (STEPS[0] * self.tolerance.differences)
        if self.tolerance.is_approximate:
            least = np.maximum(least, _NEGLIGIBLE * np.max(np.abs(claimed), initial=0.0))
        differences = [(function(x + h * vec) - function(x - h * vec)) / (2 * h) for h in STEPS]
        # Richardson extrapolation of two steps is of order 4 and so more exact before rounding errors dominate.
        ratio = (STEPS[0] / STEPS[1]) ** 2
        extrapolated = [(ratio * fine - coarse) / (ratio - 1) for coarse, fine in pairwise(differences)]
        distances = [_relative_errors(each, claimed, least) for each in (*differences, *extrapolated)]
        errors = [float(np.max(each, initial=0.0)) for each in distances[: len(STEPS)]]
        # The least error of noisy differences may be a coincidence: those are taken that agree best with each other.
        best = _settled(differences) if self.tolerance.is_approximate else np.argmin(distances, axis=0)
        found = np.take_along_axis(np.array(distances), best[None], axis=0)
        error = float(np.max(found, initial=0.0))
        order = None if errors[0] <= self.tolerance.differences else _order(errors)
        converges = self.tolerance.is_approximate or order is None or order >= _MIN_ORDER
        passed = error <= self.tolerance.differences and converges
        return CheckResult(name, output, inputs, error, order, passed, tuple(zip(STEPS, errors, strict=True)))

    # --- the function --------------------------------------------------------------------------------------

    def _value(self, output: int, i: int, x: Vector) -> Vector:
        return as_vectors(self.function.evaluate(replace_item(self.point, i, x), self.config), self.sizes)[output]

    def _jacobian(self, output: int, i: int, vec: Vector) -> Vector:
        result = self.function.apply_jacobian(output, i, self.point, vec, self.config)
        return as_vector(result, self.sizes[output], "apply_jacobian")

    def _gradient(self, output: int, i: int, moved: int, x: Vector, sens: Vector) -> Vector:
        """Return the gradient by input i where input `moved` is x."""
        result = self.function.gradient(output, i, replace_item(self.point, moved, x), sens, self.config)
        return as_vector(result, len(self.point[i]), "gradient")

    def _hessian(self, output: int, i: int, j: int, sens: Vector, vec: Vector) -> Vector:
        result = self.function.apply_hessian(output, i, j, self.point, sens, vec, self.config)
        return as_vector(result, len(self.point[i]), "apply_hessian")


def _relative_errors(found: Vector, claimed: Vector, least: Vector) -> Vector:
    """Return the error of each element relative to the larger of both; infinity for NaN."""
    with np.errstate(invalid="ignore", divide="ignore"):
        gap = np.abs(found - claimed)
        error = gap / np.maximum(np.maximum(np.abs(found), np.abs(claimed)), least)
    return np.where(gap == 0, 0.0, np.where(np.isfinite(error), error, math.inf))


def _settled(differences: Sequence[Vector]) -> Any:
    """Return for each element the position of the first of the three consecutive differences that agree best."""
    gaps = [_relative_errors(coarse, fine, np.zeros(len(fine))) for coarse, fine in pairwise(differences)]
    # Zeros in succession may be a step below the function's resolution: they agree no better than any others.
    known = [
        np.where((coarse == 0) & (fine == 0), 2.0, g)
        for (coarse, fine), g in zip(pairwise(differences), gaps, strict=True)
    ]
    return np.argmin([np.maximum(a, b) for a, b in pairwise(known)], axis=0)


def _order(errors: Sequence[float]) -> float:
    """Return the steepest decrease of errors within one decade of steps that does not end in rounding errors."""
    least = 10 * max(min(errors), 1e-300)
    orders = [math.log10(a / b) for a, b in zip(errors, errors[2:], strict=False) if b > 0 and math.isfinite(a)]
    undisturbed = [order for order, b in zip(orders, errors[2:], strict=False) if b > least]
    result = max(undisturbed, default=0.0)
    return result if result >= _MIN_ORDER else max(orders, default=0.0)


def _direction(rng: np.random.Generator, size: int) -> Vector:
    direction: Any = rng.normal(size=size)
    return np.asarray(direction / (np.linalg.norm(direction) or 1.0))
