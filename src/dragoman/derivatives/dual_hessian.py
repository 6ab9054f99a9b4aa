"""Hessian actions of functions written in NumPy by dual numbers: exact, one evaluation each, for short vectors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.core.errors import InvalidOutput, ModelFailed
from dragoman.core.vector_answers import as_vectors, parts
from dragoman.core.vectors import Ability, Config, Vector, Vectors, put
from dragoman.derivatives.analytic_array import NotAnalytic
from dragoman.derivatives.complex_step import ComplexStep
from dragoman.derivatives.derived import Of
from dragoman.derivatives.dual_number import Budget, Dual, duals
from dragoman.derivatives.finite_differences import derivative
from dragoman.derivatives.scales import own_scales
from dragoman.derivatives.user_function import Authored
from dragoman.derivatives.verification import check_finite

NAME = "dual numbers"

# Every number carries two vectors as long as an input, in Python: beyond this it would be slow.
_LONGEST = 256
# About a second, in Python.
_OPERATIONS = 100_000
_CLOSE = 1e-6
# How far rounding may take the value of dual numbers from the function's: relative to its terms, and at least.
_SAME, _ROUNDING = 1e-9, 1e-12


class DualNumbers(Of):
    """Hessian actions through `Dual` numbers, which refuse to be compared or made real numbers.

    In each call the numbers' value has to be the function's. Raises ModelFailed where the function does not let them
    through, saying why, and InvalidOutput where its value is not finite.
    """

    def __init__(self, author: Authored, exact: ComplexStep) -> None:
        super().__init__(author)
        self._author, self._exact = author, exact

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        here = as_vectors(self._author.evaluate(inputs, config), self.output_sizes(config))[output]
        check_finite(here, output, inputs, sens)
        found = self._followed(inputs, input1, input2, vec, config)[output]
        if len(found) != len(sens):
            raise InvalidOutput(f"output {output}: expected {len(sens)} numbers, got {len(found)}")
        used = sens != 0
        found = [each for each, weight in zip(found, sens, strict=True) if weight]
        self._check_values(found, here[used], own_scales(inputs[input1]))
        bends = (weight * each.bend for weight, each in zip(sens[used], found, strict=True) if isinstance(each, Dual))
        return sum(bends, np.zeros(len(inputs[input1])))

    def sources(self) -> Mapping[Ability, str]:
        return {"apply_hessian": NAME}

    def _followed(self, inputs: Vectors, first: int, second: int, vec: Vector, config: Config) -> list[Sequence[Any]]:
        """The numbers of every output, with slopes by input `first` and changes along vec of input `second`."""
        size = len(inputs[first])
        given: list[Any] = list(inputs)
        budget = Budget(_OPERATIONS)
        given[first] = duals(inputs[first], True, vec if first == second else None, size, budget)
        if first != second:
            given[second] = duals(inputs[second], False, vec, size, budget)
        try:
            with np.errstate(all="ignore"):  # the function itself has warned already
                answer = self._author.evaluate(given, config)
        except NotAnalytic as fault:
            raise self._refused(str(fault)) from fault
        return [_flat(each) for each in parts(answer)]

    def check(self, config: Config) -> None:
        """ModelFailed where dual numbers do not come through the function at the author's point, saying why.

        Costs one evaluation with dual numbers and at least five with complex ones for each input vector.
        """
        point = self._author.point(config)
        if max(map(len, point), default=0) > _LONGEST:
            raise self._refused(f"it has vectors of more than {_LONGEST} numbers")
        try:
            for index in range(len(point)):
                self._check_input(point, index, config)
        except (TypeError, ValueError, AttributeError, ArithmeticError) as fault:
            raise self._refused(f"{type(fault).__name__}: {fault}") from fault

    def _check_input(self, point: Vectors, index: int, config: Config) -> None:
        x = point[index]
        u, vec = np.cos(2.0 + np.arange(len(x))), np.cos(1.0 + np.arange(len(x))) * own_scales(x)
        found = [each for output in self._followed(point, index, index, vec, config) for each in output]

        def slope(at: Vector) -> Vector:
            return np.concatenate([np.zeros(0), *self._exact.along(put(point, index, at), index, u, config)])

        self._compare(
            [_part(each, "value") for each in found], np.concatenate(self._author.trial(config)), _SAME, "value"
        )
        self._compare([u @ _part(each, "slope", u) for each in found], slope(x), 1e-9, "gradient")
        bends = [u @ _part(each, "bend", u) for each in found]
        self._compare(bends, derivative(slope, x, vec)[0], _CLOSE, "Hessian action")

    def _compare(self, found: Any, wanted: Vector, relative: float, what: str) -> None:
        gap = np.abs(np.asarray(found, np.float64) - wanted)
        if not (gap <= relative * np.maximum(np.abs(wanted), np.max(np.abs(wanted), initial=1.0))).all():
            raise self._refused(f"their {what} differs by {np.max(gap):.3g} from what it is")

    def _check_values(self, found: Sequence[Any], here: Vector, scales: Vector) -> None:
        """The numbers follow the function: their values are its own, up to rounding of the terms that they are of."""
        terms = np.array([np.abs(_part(each, "slope", scales)) @ scales for each in found])
        gap = np.abs(np.array([_part(each, "value") for each in found], np.float64) - here)
        if not (gap <= _SAME * (np.abs(here) + terms) + _ROUNDING).all():
            raise self._refused(f"their value differs by {np.max(gap):.3g} from what it is")

    def _refused(self, why: str) -> ModelFailed:
        return ModelFailed(f"dual numbers do not come through '{self._author.name}': {why}")


def _flat(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, Dual) else np.asarray(value, dtype=object).reshape(-1).tolist()


def _part(number: Any, name: str, like: Vector | None = None) -> Any:
    """A part of a number; of one that depends on nothing, itself, or zeros like a vector."""
    if isinstance(number, Dual):
        return getattr(number, name)
    return float(number) if like is None else np.zeros(len(like))
