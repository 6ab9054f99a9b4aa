"""Hessian actions of NumPy functions by dual numbers: exact, one evaluation each, for short vectors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.core.errors import InvalidOutput, ModelFailed
from dragoman.core.vectors import Ability, Config, Vector, Vectors, as_vectors, replace_item, split_outputs
from dragoman.derivatives.analytic_array import NotAnalyticError
from dragoman.derivatives.complex_step import ComplexStep
from dragoman.derivatives.derived import DerivedFunction
from dragoman.derivatives.dual_number import DualNumber, OperationBudget, dual_vector
from dragoman.derivatives.finite_differences import directional_derivative
from dragoman.derivatives.scales import component_scales
from dragoman.derivatives.user_function import UserFunction
from dragoman.derivatives.verification import check_finite

NAME = "dual numbers"

# Each number carries two vectors of the input's length and is computed in Python.
_MAX_LENGTH = 256
_MAX_OPERATIONS = 100_000  # about a second
# Relative tolerances at the sample point of the gradient and the Hessian action.
_GRADIENT_TOLERANCE, _HESSIAN_TOLERANCE = 1e-9, 1e-6
# Tolerances of the value: relative to its terms, and absolute.
_VALUE_TOLERANCE, _VALUE_ROUNDING = 1e-9, 1e-12


class DualHessian(DerivedFunction):
    """Hessian actions by evaluation on `DualNumber`.

    In each call the value of the dual numbers is compared with the function's. Raises ModelFailed if the function
    cannot be evaluated on dual numbers, and InvalidOutput if its value is not finite.
    """

    def __init__(self, function: UserFunction, complex_step: ComplexStep) -> None:
        super().__init__(function)
        self._function, self._complex_step = function, complex_step

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        value = as_vectors(self._function.evaluate(inputs, config), self.output_sizes(config))[output]
        check_finite(value, output, inputs, sens)
        result = self._evaluate(inputs, input1, input2, vec, config)[output]
        if len(result) != len(sens):
            raise InvalidOutput(f"output {output}: expected {len(sens)} numbers, got {len(result)}")
        used = sens != 0
        elements = [element for element, weight in zip(result, sens, strict=True) if weight]
        self._check_values(elements, value[used], component_scales(inputs[input1]))
        products = (
            weight * element.gradient_tangent
            for weight, element in zip(sens[used], elements, strict=True)
            if isinstance(element, DualNumber)
        )
        return sum(products, np.zeros(len(inputs[input1])))

    def sources(self) -> Mapping[Ability, str]:
        return {"apply_hessian": NAME}

    def check(self, config: Config) -> None:
        """Raise ModelFailed if the function cannot be evaluated on dual numbers at the sample point.

        Takes one evaluation with dual numbers and at least five complex ones for each input vector.
        """
        point = self._function.sample_point(config)
        if max(map(len, point), default=0) > _MAX_LENGTH:
            raise self._not_applicable(f"it has vectors of more than {_MAX_LENGTH} numbers")
        try:
            for index in range(len(point)):
                self._check_input(point, index, config)
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise self._not_applicable(f"{type(error).__name__}: {error}") from error

    def _evaluate(self, inputs: Vectors, input1: int, input2: int, vec: Vector, config: Config) -> list[Sequence[Any]]:
        """Return the numbers of each output, with gradients by `input1` and tangents along vec of `input2`."""
        size = len(inputs[input1])
        arguments: list[Any] = list(inputs)
        budget = OperationBudget(_MAX_OPERATIONS)
        arguments[input1] = dual_vector(inputs[input1], True, vec if input1 == input2 else None, size, budget)
        if input1 != input2:
            arguments[input2] = dual_vector(inputs[input2], False, vec, size, budget)
        try:
            with np.errstate(all="ignore"):  # evaluation on floats has warned already
                result = self._function.evaluate(arguments, config)
        except NotAnalyticError as error:
            raise self._not_applicable(str(error)) from error
        return [_elements(each) for each in split_outputs(result)]

    def _check_input(self, point: Vectors, index: int, config: Config) -> None:
        x = point[index]
        u, vec = np.cos(2.0 + np.arange(len(x))), np.cos(1.0 + np.arange(len(x))) * component_scales(x)
        elements = [each for output in self._evaluate(point, index, index, vec, config) for each in output]

        def slope(x: Vector) -> Vector:
            derivatives = self._complex_step.directional_derivatives(replace_item(point, index, x), index, u, config)
            return np.concatenate([np.zeros(0), *derivatives])

        value = np.concatenate(self._function.sample_outputs(config))
        zeros = np.zeros(len(x))
        self._compare([_component(each, "value") for each in elements], value, _VALUE_TOLERANCE, "value")
        gradient = [u @ _component(each, "gradient", zeros) for each in elements]
        self._compare(gradient, slope(x), _GRADIENT_TOLERANCE, "gradient")
        hessian = [u @ _component(each, "gradient_tangent", zeros) for each in elements]
        self._compare(hessian, directional_derivative(slope, x, vec)[0], _HESSIAN_TOLERANCE, "Hessian action")

    def _compare(self, result: Any, expected: Vector, tolerance: float, name: str) -> None:
        gap = np.abs(np.asarray(result, np.float64) - expected)
        if not (gap <= tolerance * np.maximum(np.abs(expected), np.max(np.abs(expected), initial=1.0))).all():
            raise self._not_applicable(f"their {name} differs by {np.max(gap):.3g} from the expected one")

    def _check_values(self, elements: Sequence[Any], expected: Vector, scales: Vector) -> None:
        """Compare values up to rounding errors of their terms."""
        terms = np.array([np.abs(_component(each, "gradient", 0 * scales)) @ scales for each in elements])
        gap = np.abs(np.array([_component(each, "value") for each in elements], np.float64) - expected)
        if not (gap <= _VALUE_TOLERANCE * (np.abs(expected) + terms) + _VALUE_ROUNDING).all():
            raise self._not_applicable(f"their value differs by {np.max(gap):.3g} from the expected one")

    def _not_applicable(self, reason: str) -> ModelFailed:
        return ModelFailed(f"'{self._function.name}' cannot be evaluated on dual numbers: {reason}")


def _elements(output: Any) -> Sequence[Any]:
    return [output] if isinstance(output, DualNumber) else np.asarray(output, dtype=object).reshape(-1).tolist()


def _component(element: Any, name: str, default: Vector | None = None) -> Any:
    """Return an attribute of a dual number; of a constant, the constant, or `default` if given."""
    if isinstance(element, DualNumber):
        return getattr(element, name)
    return float(element) if default is None else default
