"""The complex step: J v = Im F(x + i h v) / h, exact for analytic functions written in NumPy."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dragoman.core.errors import DragomanError, InvalidOutput, ModelFailed
from dragoman.core.vector_answers import as_vectors, parts
from dragoman.core.vectors import Ability, Config, Vector, Vectors, put
from dragoman.derivatives.analytic_array import NotAnalytic, watched
from dragoman.derivatives.derived import Of, OfGradient, check_evaluations, units
from dragoman.derivatives.finite_differences import derivative
from dragoman.derivatives.framework import only
from dragoman.derivatives.scales import own_scales, reach
from dragoman.derivatives.user_function import Authored
from dragoman.derivatives.verification import Unconfirmed, confirm_directional

# The step, in units of the magnitude of the components: h² is nothing beside any number, and h times a derivative is
# far from the smallest float unless the derivative itself is.
# Source: Squire and Trapp, Using complex variables to estimate derivatives of real functions, SIAM Review 40 (1998).
_STEP = 1e-20
_LEAST_STEP = 1e-200

# How many numbers of points a vectorised function gets in one call.
_NUMBERS = 1 << 20

NAME = "complex step"


class ComplexStep(Of):
    """Derivatives of an analytic function of complex128 arrays: one evaluation for J v, one a number for Jᵀ s, or
    one for all where the function is vectorised.

    What NumPy is asked to do is watched in each call; ModelFailed names an operation that is not analytic. What leaves
    NumPy's dispatch is not seen, so the results have to be `Verified`.

    Its Hessian action, only with `curvature`, is central differences of its gradient.
    """

    def __init__(self, author: Authored, curvature: bool = False) -> None:
        super().__init__(author)
        self._author, self._curvature, self.vectorised = author, curvature, author.vectorised

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return only(self.along(inputs, input, vec, config), output)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        size = len(inputs[input])
        check_evaluations(size, self._author.declared.max_evaluations, "Gradient", NAME)
        if not self.vectorised:
            return np.array([sens @ only(self.along(inputs, input, unit, config), output) for unit in units(size)])
        step = max(1, _NUMBERS // (size or 1))
        spans = (range(start, min(start + step, size)) for start in range(0, size, step))
        found = [self._columns(inputs, output, input, span, config) @ sens for span in spans]
        return np.concatenate([np.zeros(0), *found])

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        def gradient(at: Vector) -> Any:
            return self.gradient(output, input1, put(inputs, input2, at), sens, config)

        return derivative(gradient, inputs[input2], vec)[0]

    def sources(self) -> Mapping[Ability, str]:
        found: dict[Ability, str] = {"gradient": NAME, "apply_jacobian": NAME}
        return found | {"apply_hessian": f"finite differences of {NAME}"} if self._curvature else found

    def check(self, config: Config) -> None:
        """ModelFailed where the function is not analytic at the author's point, saying why.

        Costs one complex evaluation and two real ones for each input vector.
        """
        author, sizes = self._author, self.output_sizes(config)
        here = np.concatenate([np.zeros(0), *author.trial(config)])
        for index, x in enumerate(author.point(config)):

            def values(at: Vector, index: int = index) -> Vector:
                found = as_vectors(author.evaluate(put(author.point(config), index, at), config), sizes)
                return np.concatenate([np.zeros(0), *found])

            def slopes(vec: Vector, index: int = index) -> Vector:
                return np.concatenate([np.zeros(0), *self.along(author.point(config), index, vec, config)])

            check_analytic(values, slopes, x, here, author.name)

    def along(self, inputs: Vectors, index: int, vec: Vector, config: Config) -> tuple[Vector, ...]:
        """The derivatives of all outputs by one input, along `vec`."""
        found = _moved(lambda *x: self._author.evaluate(x, config), inputs, index, vec, self._author.name)
        sizes = self.output_sizes(config)
        if tuple(map(len, found)) != tuple(sizes):
            raise InvalidOutput(f"expected output vectors of {list(sizes)} numbers, got {[*map(len, found)]}")
        return found

    def _columns(self, inputs: Vectors, output: int, index: int, span: range, config: Config) -> Vector:
        """The derivatives of an output by some numbers of an input, a row each, by one call for all."""
        rows = len(span)
        points = [np.repeat(x[None], rows, axis=0) for x in inputs]
        steps = np.maximum(_STEP * own_scales(inputs[index])[span.start : span.stop], _LEAST_STEP)
        moved = points[index].astype(np.complex128)
        moved[np.arange(rows), span] += 1j * steps
        points[index] = watched(moved)
        sizes = self.output_sizes(config)
        answer = self._watching(lambda: self._author.evaluate(points, config))
        several = isinstance(answer, tuple | list) and len(answer) == len(sizes)
        found = _array(answer[output] if several else answer)
        if found.size != rows * sizes[output]:
            shape = [rows, sizes[output]]
            raise InvalidOutput(f"output {output}: expected shape {shape} for {rows} points, got {list(found.shape)}")
        return np.asarray(np.imag(found.reshape(rows, sizes[output])) / steps[:, None])

    def _watching(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except NotAnalytic as fault:
            raise _no_complex_step(self._author.name, str(fault)) from fault


class AnalyticGradient(OfGradient):
    """The Hessian action as the complex step of the gradient that the author has written, where that is analytic."""

    def __init__(self, author: Authored) -> None:
        what = f"gradient of {author.name}"
        super().__init__(author, lambda f, given, i, vec: _moved(f, given, i, vec, what)[0], NAME)
        self._author = author

    def check(self, config: Config) -> None:
        """ModelFailed where the gradient is not analytic at the author's point, saying why."""
        author, point = self._author, self._author.point(config)
        for output, size in enumerate(author.output_sizes(config)):
            for first in range(len(point)):
                for second in range(len(point)):
                    self._check_pair(output, first, second, np.ones(size), config)

    def _check_pair(self, output: int, first: int, second: int, sens: Vector, config: Config) -> None:
        author, point = self._author, self._author.point(config)
        size = len(point[first])

        def gradient(at: Vector) -> Vector:
            found = author.gradient(output, first, put(point, second, at), sens, config)
            return as_vectors((found,), (size,))[0]

        def slopes(vec: Vector) -> Any:
            return self.apply_hessian(output, first, second, point, sens, vec, config)

        x = point[second]
        check_analytic(gradient, slopes, x, gradient(x), f"gradient of {author.name}")


def check_analytic(
    values: Callable[[Vector], Vector], slopes: Callable[[Vector], Vector], x: Vector, here: Vector, name: str
) -> None:
    """ModelFailed unless the complex step's `slopes` and central differences of `values` agree at x."""
    if not np.isfinite(here).all():
        raise _no_complex_step(name, "it is not finite where it was tried; name another point, at=[...]")
    vec = np.cos(1.0 + np.arange(len(x))) * own_scales(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", np.exceptions.ComplexWarning)
        found = slopes(vec)
    try:
        confirm_directional(values, x, here, vec, found)
    except Unconfirmed as error:
        raise _no_complex_step(name, str(error)) from error


def _moved(function: Callable[..., Any], arguments: Vectors, index: int, vec: Vector, name: str) -> tuple[Vector, ...]:
    """The derivatives of every output, each a vector."""
    step = max(_STEP * reach(own_scales(arguments[index]), vec), _LEAST_STEP)
    at = watched(arguments[index] + 1j * (step * vec))
    try:
        answer = function(*arguments[:index], at, *arguments[index + 1 :])
    except NotAnalytic as fault:
        raise _no_complex_step(name, str(fault)) from fault
    except DragomanError:
        raise
    except Exception as error:  # compiled libraries raise errors of every kind for complex numbers
        raise _no_complex_step(name, f"with complex numbers it raises {type(error).__name__}: {error}") from error
    return tuple(np.atleast_1d(np.imag(_array(each))) / step for each in parts(answer))


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
