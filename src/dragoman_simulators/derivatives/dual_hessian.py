"""Hessian actions of NumPy functions by dual numbers: exact, one evaluation each, for short vectors."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from dragoman.core.errors import InvalidOutput, ModelFailed
from dragoman.core.vectors import Ability, Config, Vector, Vectors, as_vectors, replace_item, split_outputs
from dragoman_simulators.derivatives.complex_step import ComplexStep, NotAnalyticError
from dragoman_simulators.derivatives.derived import DerivedFunction, component_scales
from dragoman_simulators.derivatives.finite_differences import directional_derivative
from dragoman_simulators.derivatives.user_function import UserFunction
from dragoman_simulators.derivatives.verification import check_finite

# First and second derivative of a function of one number, given the number and the function's value.
FirstAndSecond = Callable[[float, float], tuple[float, float]]


def _derivatives_of_tan(x: float, y: float) -> tuple[float, float]:
    return 1 + y * y, 2 * y * (1 + y * y)


def _derivatives_of_log(base: float) -> FirstAndSecond:
    return lambda x, y: (1 / (x * base), -1 / (x * x * base))


FUNCTIONS: Mapping[str, tuple[Callable[[float], Any], FirstAndSecond]] = {
    "exp": (np.exp, lambda x, y: (y, y)),
    "exp2": (np.exp2, lambda x, y: (y * math.log(2), y * math.log(2) ** 2)),
    "expm1": (np.expm1, lambda x, y: (y + 1, y + 1)),
    "log": (np.log, _derivatives_of_log(1.0)),
    "log2": (np.log2, _derivatives_of_log(math.log(2))),
    "log10": (np.log10, _derivatives_of_log(math.log(10))),
    "log1p": (np.log1p, lambda x, y: (1 / (1 + x), -1 / (1 + x) ** 2)),
    "sqrt": (np.sqrt, lambda x, y: (0.5 / y, -0.25 / (y * x))),
    "sin": (np.sin, lambda x, y: (np.cos(x), -y)),
    "cos": (np.cos, lambda x, y: (-np.sin(x), -y)),
    "tan": (np.tan, _derivatives_of_tan),
    "sinh": (np.sinh, lambda x, y: (np.cosh(x), y)),
    "cosh": (np.cosh, lambda x, y: (np.sinh(x), y)),
    "tanh": (np.tanh, lambda x, y: (1 - y * y, -2 * y * (1 - y * y))),
    "arcsin": (np.arcsin, lambda x, y: ((1 - x * x) ** -0.5, x * (1 - x * x) ** -1.5)),
    "arccos": (np.arccos, lambda x, y: (-((1 - x * x) ** -0.5), -x * (1 - x * x) ** -1.5)),
    "arctan": (np.arctan, lambda x, y: (1 / (1 + x * x), -2 * x / (1 + x * x) ** 2)),
    "arcsinh": (np.arcsinh, lambda x, y: ((1 + x * x) ** -0.5, -x * (1 + x * x) ** -1.5)),
    "arccosh": (np.arccosh, lambda x, y: ((x * x - 1) ** -0.5, -x * (x * x - 1) ** -1.5)),
    "arctanh": (np.arctanh, lambda x, y: (1 / (1 - x * x), 2 * x / (1 - x * x) ** 2)),
}


class OperationBudget:
    """The number of operations that an evaluation may still take."""

    __slots__ = ("remaining",)

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining


class DualNumber:
    """A number with its derivatives, which arithmetic and functions of NumPy propagate to second order.

    Arrays of NumPy hold such numbers as objects, and its functions call the methods below. Operations that are not
    smooth raise NotAnalyticError, and so does an exhausted budget, which all numbers of one evaluation share.

    Parameters
    ----------
    gradient : derivatives by each element of a vector.
    tangent : derivative along a direction.
    gradient_tangent : derivative of `gradient` along the direction.
    """

    __slots__ = ("budget", "gradient", "gradient_tangent", "tangent", "value")

    def __init__(
        self, value: float, gradient: Vector, tangent: float, gradient_tangent: Vector, budget: OperationBudget
    ) -> None:
        self.value, self.gradient, self.tangent = value, gradient, tangent
        self.gradient_tangent, self.budget = gradient_tangent, budget
        budget.remaining -= 1
        if budget.remaining < 0:
            raise NotAnalyticError("it takes too many operations on single numbers")

    def __add__(self, other: Any) -> Any:
        if isinstance(other, DualNumber):
            return DualNumber(
                self.value + other.value,
                self.gradient + other.gradient,
                self.tangent + other.tangent,
                self.gradient_tangent + other.gradient_tangent,
                self.budget,
            )
        if (number := _as_float(other)) is None:
            return NotImplemented
        return DualNumber(self.value + number, self.gradient, self.tangent, self.gradient_tangent, self.budget)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, DualNumber):
            a, b = self, other
            mixed = a.value * b.gradient_tangent + b.value * a.gradient_tangent
            mixed = mixed + a.tangent * b.gradient + b.tangent * a.gradient
            return DualNumber(
                a.value * b.value,
                a.value * b.gradient + b.value * a.gradient,
                a.value * b.tangent + b.value * a.tangent,
                mixed,
                a.budget,
            )
        if (number := _as_float(other)) is None:
            return NotImplemented
        return DualNumber(
            self.value * number,
            self.gradient * number,
            self.tangent * number,
            self.gradient_tangent * number,
            self.budget,
        )

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> "DualNumber":
        return DualNumber(-self.value, -self.gradient, -self.tangent, -self.gradient_tangent, self.budget)

    def __pos__(self) -> "DualNumber":
        return self

    def __sub__(self, other: Any) -> Any:
        return self + (-other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, DualNumber):
            return self * other.reciprocal()
        number = _as_float(other)
        return NotImplemented if number is None else self * (1 / number)

    def __rtruediv__(self, other: Any) -> Any:
        return self.reciprocal() * other

    def __pow__(self, other: Any) -> Any:
        if isinstance(other, DualNumber):
            return (other * self.apply("log")).apply("exp")
        number = _as_float(other)
        return NotImplemented if number is None else self.power(number)

    def __rpow__(self, other: Any) -> Any:
        number = _as_float(other)
        return NotImplemented if number is None else (self * float(np.log(number))).apply("exp")

    def power(self, n: float) -> "DualNumber":
        x = self.value
        first = n * x ** (n - 1) if n != 0 else 0.0
        second = n * (n - 1) * x ** (n - 2) if n not in (0, 1) else 0.0
        return self._chain(x**n, first, second)

    def reciprocal(self) -> "DualNumber":
        y = 1 / self.value
        return self._chain(y, -y * y, 2 * y * y * y)

    def apply(self, name: str) -> "DualNumber":
        """Return the result of a function of NumPy, given by name."""
        function, derivatives = FUNCTIONS[name]
        value = function(self.value)
        return self._chain(value, *derivatives(self.value, value))

    def _chain(self, value: float, first: float, second: float) -> "DualNumber":
        """Return a function of this number from its value and derivatives (chain rule)."""
        gradient_tangent = first * self.gradient_tangent + second * self.tangent * self.gradient
        return DualNumber(value, first * self.gradient, first * self.tangent, gradient_tangent, self.budget)

    def _reject(self, *_: Any) -> NoReturn:
        raise NotAnalyticError("it compares numbers, casts them or takes an absolute value")

    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __abs__ = __float__ = __int__ = __index__ = _reject
    __eq__ = __ne__ = _reject
    __hash__ = None  # type: ignore[assignment]
    conjugate = __floor__ = __ceil__ = __round__ = __mod__ = __floordiv__ = _reject


def _method(name: str) -> Callable[[DualNumber], DualNumber]:
    return lambda number: number.apply(name)


for _name in FUNCTIONS:  # NumPy calls methods of these names on objects
    setattr(DualNumber, _name, _method(_name))


def _as_float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float | np.floating | np.integer) else None


def dual_vector(x: Vector, with_gradient: bool, vec: Vector | None, size: int, budget: OperationBudget) -> Any:
    """Return a vector as dual numbers with gradients of `size` elements.

    Gradients are unit vectors or, without `with_gradient`, zero; tangents are the elements of `vec`, or zero.
    """
    result = np.empty(len(x), dtype=object)
    zeros = np.zeros(size)
    for i, value in enumerate(x):
        gradient = zeros
        if with_gradient:
            gradient = np.zeros(size)
            gradient[i] = 1.0
        # np.float64 overflows to infinity where float raises.
        result[i] = DualNumber(np.float64(value), gradient, 0.0 if vec is None else float(vec[i]), zeros, budget)
    return result


NAME = "dual numbers"

# Each number carries two vectors of the input's length and is computed in Python.
_MAX_LENGTH = 256
_MAX_OPERATIONS = 100_000  # about a second
# Relative tolerances at the sample point of the gradient and the Hessian action.
_GRADIENT_TOLERANCE, _HESSIAN_TOLERANCE = 1e-9, 1e-6
_STEP = 1e-4  # of the differences of the gradient
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
        self._compare(
            hessian,
            directional_derivative(slope, x, slope(x), vec, step=_STEP)[0].value,
            _HESSIAN_TOLERANCE,
            "Hessian action",
        )

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
