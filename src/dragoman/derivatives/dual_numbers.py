"""Hessian actions of functions written in NumPy by dual numbers: exact, one evaluation each, for short vectors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.core.errors import InvalidOutput, ModelFailed
from dragoman.core.vector_answers import as_vectors, parts
from dragoman.core.vectors import Ability, Config, Vector, VectorFunction, Vectors
from dragoman.derivatives.analytic import NotAnalytic
from dragoman.derivatives.authored import Authored
from dragoman.derivatives.differences import derivative
from dragoman.derivatives.dual import Budget, Dual, duals
from dragoman.derivatives.exact import Of
from dragoman.derivatives.of_config import OfConfig

NAME = "dual numbers"

# Every number carries two vectors as long as an input, in Python: beyond this it would be slow.
_LONGEST = 256
# About a second, in Python.
_OPERATIONS = 100_000
_CLOSE = 1e-6


class DualNumbers(Of):
    """Hessian actions through `Dual` numbers, of a function whose gradient is known to be exact.

    Each config is checked before its first call: what the numbers give has to be the value, the gradient, and what the
    gradient changes by. Raises ModelFailed where the function does not let them through, saying why.
    """

    def __init__(self, author: Authored, exact: VectorFunction) -> None:
        super().__init__(author)
        self._author, self._exact = author, exact
        self._checked = OfConfig(self._check)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        self._checked(config)
        found = self._followed(inputs, input1, input2, vec, config)[output]
        if len(found) != len(sens):
            raise InvalidOutput(f"output {output}: expected {len(sens)} numbers, got {len(found)}")
        bends = (weight * each.bend for weight, each in zip(sens, found, strict=True) if isinstance(each, Dual))
        return sum(bends, np.zeros(len(inputs[input1])))

    def sources(self) -> Mapping[Ability, str]:
        return {"apply_hessian": NAME}

    def check(self, config: Config) -> None:
        """ModelFailed where dual numbers do not come through the function, saying why."""
        self._checked(config)

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

    def _check(self, config: Config) -> bool:
        point, sizes = self._author.point(config), self.output_sizes(config)
        if max(map(len, point), default=0) > _LONGEST:
            raise self._refused(f"it has vectors of more than {_LONGEST} numbers")
        try:
            values = as_vectors(self._author.evaluate(point, config), sizes)
            for first in range(len(point)):
                for second in range(len(point)):
                    self._check_pair(point, first, second, values, config)
        except (TypeError, ValueError, AttributeError, ArithmeticError) as fault:
            raise self._refused(f"{type(fault).__name__}: {fault}") from fault
        return True

    def _check_pair(self, point: Vectors, first: int, second: int, values: Sequence[Vector], config: Config) -> None:
        u, vec = (np.cos(k + np.arange(len(point[at]))) for k, at in ((2.0, first), (1.0, second)))
        found = self._followed(point, first, second, vec, config)
        for output, wanted in enumerate(values):
            told = found[output]

            def slope(at: Vector, output: int = output) -> Vector:
                moved = (*point[:second], at, *point[second + 1 :])
                return np.asarray(self._exact.apply_jacobian(output, first, moved, u, config), np.float64)

            self._compare([_part(each, "value") for each in told], wanted, 1e-12, "value")
            self._compare([u @ _part(each, "slope", u) for each in told], slope(point[second]), 1e-9, "gradient")
            bends = [u @ _part(each, "bend", u) for each in told]
            self._compare(bends, derivative(slope, point[second], vec)[0], _CLOSE, "Hessian action")

    def _compare(self, found: Any, wanted: Vector, relative: float, what: str) -> None:
        gap = float(np.max(np.abs(np.asarray(found, np.float64) - wanted), initial=0.0))
        if not gap <= relative * max(1.0, float(np.max(np.abs(wanted), initial=0.0))):
            raise self._refused(f"their {what} differs by {gap:.3g} from what it is")

    def _refused(self, why: str) -> ModelFailed:
        return ModelFailed(f"dual numbers do not come through '{self._author.name}': {why}")


def _flat(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, Dual) else np.asarray(value, dtype=object).reshape(-1).tolist()


def _part(number: Any, name: str, like: Vector | None = None) -> Any:
    """A part of a number; of one that depends on nothing, itself, or zeros like a vector."""
    if isinstance(number, Dual):
        return getattr(number, name)
    return float(number) if like is None else np.zeros(len(like))
