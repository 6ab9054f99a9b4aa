"""Dual numbers of second order: numbers with their gradient, and the derivatives of both along a direction."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from dragoman.core.vectors import Vector
from dragoman.derivatives.analytic_array import NotAnalyticError

# First and second derivative of a function of one number, given the number and the function's value.
FirstAndSecond = Callable[[float, float], tuple[float, float]]


def _derivatives_of_tan(x: float, y: float) -> tuple[float, float]:
    return 1 + y * y, 2 * y * (1 + y * y)


def _derivatives_of_log(base: float) -> FirstAndSecond:
    return lambda x, y: (1 / (x * base), -1 / (x * x * base))


_FUNCTIONS: Mapping[str, tuple[Callable[[float], Any], FirstAndSecond]] = {
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
        function, derivatives = _FUNCTIONS[name]
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


for _name in _FUNCTIONS:  # NumPy calls methods of these names on objects
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
