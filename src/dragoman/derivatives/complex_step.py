"""The complex step: J v = Im F(x + i h v) / h, exact for analytic functions written in NumPy."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.core.errors import InvalidOutput, ModelFailed
from dragoman.core.vector_answers import as_vectors, parts
from dragoman.core.vectors import Ability, Config, Vector, Vectors
from dragoman.derivatives.analytic import NotAnalytic, watched
from dragoman.derivatives.authored import Authored
from dragoman.derivatives.differences import derivative
from dragoman.derivatives.exact import Of, OfGradient, units
from dragoman.derivatives.of_config import OfConfig
from dragoman.derivatives.traced import only

# So small that h² is nothing beside any number that is not nearly zero, and far from the smallest float.
# Source: Squire and Trapp, Using complex variables to estimate derivatives of real functions, SIAM Review 40 (1998).
_STEP = 1e-40
# How far from central differences, relative to the largest number, a derivative may be where the function is analytic.
_CLOSE = 1e-6

# How many numbers of points a vectorised function gets in one call.
_NUMBERS = 1 << 20

NAME = "complex step"


class ComplexStep(Of):
    """Derivatives of an analytic function of complex128 arrays: one evaluation for J v, one a number for Jᵀ s, or
    one for all where the function is vectorised.

    Whether it is analytic is checked for each config before the first call, against central differences at a point, and
    in each call by what NumPy is asked to do. Raises ModelFailed, saying what is not analytic.

    Its Hessian action, only with `curvature`, is central differences of its gradient.
    """

    def __init__(self, author: Authored, curvature: bool = False) -> None:
        super().__init__(author)
        self._author, self._curvature, self.vectorised = author, curvature, author.vectorised
        self._checked = OfConfig(self._check)

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        self._checked(config)
        return only(self._along(inputs, input, vec, config), output)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        self._checked(config)
        size = len(inputs[input])
        if not self.vectorised:
            return np.array([sens @ only(self._along(inputs, input, unit, config), output) for unit in units(size)])
        step = max(1, _NUMBERS // (size or 1))
        spans = (range(start, min(start + step, size)) for start in range(0, size, step))
        found = [self._columns(inputs, output, input, span, config) @ sens for span in spans]
        return np.concatenate([np.zeros(0), *found])

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        def gradient(at: Vector) -> Any:
            moved = (*inputs[:input2], at, *inputs[input2 + 1 :])
            return self.gradient(output, input1, moved, sens, config)

        return derivative(gradient, inputs[input2], vec)[0]

    def sources(self) -> Mapping[Ability, str]:
        found: dict[Ability, str] = {"gradient": NAME, "apply_jacobian": NAME}
        return found | {"apply_hessian": f"finite differences of {NAME}"} if self._curvature else found

    def check(self, config: Config) -> None:
        """ModelFailed where the function is not analytic at the author's point, saying why."""
        self._checked(config)

    def _along(self, inputs: Vectors, index: int, vec: Vector, config: Config) -> tuple[Vector, ...]:
        found = _moved(lambda *x: self._author.evaluate(x, config), inputs, index, vec, self._author.name)
        sizes = self.output_sizes(config)
        if tuple(map(len, found)) != tuple(sizes):
            raise InvalidOutput(f"expected output vectors of {list(sizes)} numbers, got {[*map(len, found)]}")
        return found

    def _columns(self, inputs: Vectors, output: int, index: int, span: range, config: Config) -> Vector:
        """The derivatives of an output by some numbers of an input, a row each, by one call for all."""
        rows = len(span)
        points = [np.repeat(x[None], rows, axis=0) for x in inputs]
        moved = points[index].astype(np.complex128)
        moved[np.arange(rows), span] += 1j * _STEP
        points[index] = watched(moved)
        sizes = self.output_sizes(config)
        answer = self._watching(lambda: self._author.evaluate(points, config))
        several = isinstance(answer, tuple | list) and len(answer) == len(sizes)
        found = _array(answer[output] if several else answer)
        if found.size != rows * sizes[output]:
            shape = [rows, sizes[output]]
            raise InvalidOutput(f"output {output}: expected shape {shape} for {rows} points, got {list(found.shape)}")
        return np.asarray(np.imag(found.reshape(rows, sizes[output])) / _STEP)

    def _watching(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except NotAnalytic as fault:
            raise _no_complex_step(self._author.name, str(fault)) from fault

    def _check(self, config: Config) -> bool:
        point, sizes = self._author.point(config), self.output_sizes(config)

        def values(*x: Any) -> Any:
            return self._author.evaluate(x, config)

        for index in range(len(point)):
            check_analytic(values, point, index, sizes, self._author.name)
        return True


class AnalyticGradient(OfGradient):
    """The Hessian action as the complex step of the gradient that the author has written, where that is analytic."""

    def __init__(self, author: Authored) -> None:
        what = f"gradient of {author.name}"
        super().__init__(author, lambda f, given, i, vec: _moved(f, given, i, vec, what)[0], NAME)
        self._author = author

    def check(self, config: Config) -> None:
        """ModelFailed where the gradient is not analytic at the author's point, saying why."""
        author, point = self._author, self._author.point(config)
        sizes = author.output_sizes(config)
        for output, size in enumerate(sizes):
            for first, x in enumerate(point):

                def gradient(*given: Any, output: int = output, first: int = first) -> Any:
                    return author.gradient(output, first, given[:-1], given[-1], config)

                for second in range(len(point)):
                    what = f"gradient of {author.name}"
                    check_analytic(gradient, (*point, np.ones(size)), second, (len(x),), what)


def check_analytic(
    function: Callable[..., Any], arguments: Vectors, index: int, sizes: Sequence[int], name: str
) -> None:
    """ModelFailed unless the complex step and central differences agree on the derivative by one argument."""
    vec = np.cos(1.0 + np.arange(len(arguments[index])))

    def values(at: Vector) -> Vector:
        answer = function(*arguments[:index], at, *arguments[index + 1 :])
        return np.concatenate([*as_vectors(answer, sizes)])

    wanted, error = derivative(values, arguments[index], vec)
    if not np.isfinite(wanted).all():
        raise _no_complex_step(name, "it is not finite where it was tried; name another point, at=[...]")
    with warnings.catch_warnings():
        warnings.simplefilter("error", np.exceptions.ComplexWarning)
        try:
            found = np.concatenate([*_moved(function, arguments, index, vec, name)])
        except (TypeError, ValueError, ArithmeticError, Warning) as fault:
            told = f"with complex numbers it raises {type(fault).__name__}: {fault}"
            raise _no_complex_step(name, told) from fault
    largest = float(np.max(np.abs(wanted), initial=1e-12))
    if (np.abs(found - wanted) <= _CLOSE * largest + 10 * error).all():
        return
    worst = int(np.argmax(np.abs(found - wanted)))
    raise _no_complex_step(
        name,
        f"its complex derivative by vector {index} is {found[worst]:.9g} where central differences give "
        f"{wanted[worst]:.9g} (number {worst} of what it gives)",
    )


def _moved(function: Callable[..., Any], arguments: Vectors, index: int, vec: Vector, name: str) -> tuple[Vector, ...]:
    """The derivatives of every output, each a vector."""
    size = float(np.max(np.abs(vec), initial=0.0)) or 1.0
    at = watched(arguments[index] + 1j * _STEP * (vec / size))
    try:
        answer = function(*arguments[:index], at, *arguments[index + 1 :])
    except NotAnalytic as fault:
        raise _no_complex_step(name, str(fault)) from fault
    return tuple(np.atleast_1d(np.imag(_array(each))) / _STEP * size for each in parts(answer))


def _no_complex_step(name: str, why: str) -> ModelFailed:
    return ModelFailed(
        f"'{name}' is not analytic, so the complex step does not apply: {why}; write it in JAX or PyTorch, or write "
        "its gradient, or ask for finite differences"
    )


def _array(value: Any) -> Any:
    array = np.array([np.asarray(each) for each in value]) if isinstance(value, list) else np.asarray(value)
    if array.dtype.kind not in "fciu":
        raise InvalidOutput(f"expected numbers, got {type(value).__name__} of {array.dtype.name}")
    return array.view(np.ndarray)
