"""Numbers that carry their gradient, their change along a direction, and the change of their gradient along it."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from dragoman.core.vectors import Vector
from dragoman.derivatives.analytic_array import NotAnalytic

# The first and second derivative of a function of one number, given the number and the function's value there.
Slopes = Callable[[float, float], tuple[float, float]]


def _slopes_of_tan(x: float, y: float) -> tuple[float, float]:
    return 1 + y * y, 2 * y * (1 + y * y)


def _slopes_of_log(base: float) -> Slopes:
    return lambda x, y: (1 / (x * base), -1 / (x * x * base))


_FUNCTIONS: Mapping[str, tuple[Callable[[float], Any], Slopes]] = {
    "exp": (np.exp, lambda x, y: (y, y)),
    "exp2": (np.exp2, lambda x, y: (y * math.log(2), y * math.log(2) ** 2)),
    "expm1": (np.expm1, lambda x, y: (y + 1, y + 1)),
    "log": (np.log, _slopes_of_log(1.0)),
    "log2": (np.log2, _slopes_of_log(math.log(2))),
    "log10": (np.log10, _slopes_of_log(math.log(10))),
    "log1p": (np.log1p, lambda x, y: (1 / (1 + x), -1 / (1 + x) ** 2)),
    "sqrt": (np.sqrt, lambda x, y: (0.5 / y, -0.25 / (y * x))),
    "sin": (np.sin, lambda x, y: (np.cos(x), -y)),
    "cos": (np.cos, lambda x, y: (-np.sin(x), -y)),
    "tan": (np.tan, _slopes_of_tan),
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


class Budget:
    """How many operations an evaluation may still take."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class Dual:
    """A number, its `slope` by each number of a vector, its `change` along a direction; `bend` is the slope's change.

    Arrays of NumPy hold such numbers as objects, and its functions call the methods below, which follow the rules of
    sum, product and chain to second order. What is not smooth raises NotAnalytic, and so do more operations than
    `budget` has left, which all numbers of one evaluation share.
    """

    __slots__ = ("bend", "budget", "change", "slope", "value")

    def __init__(self, value: float, slope: Vector, change: float, bend: Vector, budget: "Budget") -> None:
        self.value, self.slope, self.change, self.bend, self.budget = value, slope, change, bend, budget
        budget.left -= 1
        if budget.left < 0:
            raise NotAnalytic("it takes too many operations on single numbers")

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Dual):
            value, change = self.value + other.value, self.change + other.change
            return Dual(value, self.slope + other.slope, change, self.bend + other.bend, self.budget)
        if (number := _number(other)) is None:
            return NotImplemented
        return Dual(self.value + number, self.slope, self.change, self.bend, self.budget)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Dual):
            a, b = self, other
            bend = a.value * b.bend + b.value * a.bend + a.change * b.slope + b.change * a.slope
            change = a.value * b.change + b.value * a.change
            return Dual(a.value * b.value, a.value * b.slope + b.value * a.slope, change, bend, a.budget)
        if (number := _number(other)) is None:
            return NotImplemented
        return Dual(self.value * number, self.slope * number, self.change * number, self.bend * number, self.budget)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> "Dual":
        return Dual(-self.value, -self.slope, -self.change, -self.bend, self.budget)

    def __pos__(self) -> "Dual":
        return self

    def __sub__(self, other: Any) -> Any:
        return self + (-other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, Dual):
            return self * other.reciprocal()
        number = _number(other)
        return NotImplemented if number is None else self * (1 / number)

    def __rtruediv__(self, other: Any) -> Any:
        return self.reciprocal() * other

    def __pow__(self, other: Any) -> Any:
        if isinstance(other, Dual):
            return (other * self.applied("log")).applied("exp")
        number = _number(other)
        return NotImplemented if number is None else self.power(number)

    def __rpow__(self, other: Any) -> Any:
        number = _number(other)
        return NotImplemented if number is None else (self * float(np.log(number))).applied("exp")

    def power(self, n: float) -> "Dual":
        x = self.value
        first = n * x ** (n - 1) if n != 0 else 0.0
        second = n * (n - 1) * x ** (n - 2) if n not in (0, 1) else 0.0
        return self._chained(x**n, first, second)

    def reciprocal(self) -> "Dual":
        y = 1 / self.value
        return self._chained(y, -y * y, 2 * y * y * y)

    def applied(self, name: str) -> "Dual":
        """A function of NumPy by its name."""
        function, slopes = _FUNCTIONS[name]
        value = function(self.value)
        return self._chained(value, *slopes(self.value, value))

    def _chained(self, value: float, first: float, second: float) -> "Dual":
        bend = first * self.bend + second * self.change * self.slope
        return Dual(value, first * self.slope, first * self.change, bend, self.budget)

    def _refused(self, *_: Any) -> NoReturn:
        raise NotAnalytic("it compares numbers, casts them or takes an absolute value")

    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __abs__ = __float__ = __int__ = __index__ = _refused
    __eq__ = __ne__ = _refused
    __hash__ = None  # type: ignore[assignment]
    conjugate = __floor__ = __ceil__ = __round__ = __mod__ = __floordiv__ = _refused


def _method(name: str) -> Callable[[Dual], Dual]:
    return lambda number: number.applied(name)


for _name in _FUNCTIONS:  # NumPy asks objects for methods of these names
    setattr(Dual, _name, _method(_name))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float | np.floating | np.integer) else None


def duals(x: Vector, slopes: bool, vec: Vector | None, size: int, budget: Budget) -> Any:
    """The numbers of a vector: with their own unit slopes of `size`, or none; and changing along vec, or not."""
    made = np.empty(len(x), dtype=object)
    nothing = np.zeros(size)
    for i, value in enumerate(x):
        slope = nothing
        if slopes:
            slope = np.zeros(size)
            slope[i] = 1.0
        # NumPy's own floats, which become infinite where Python's raise.
        made[i] = Dual(np.float64(value), slope, 0.0 if vec is None else float(vec[i]), nothing, budget)
    return made
