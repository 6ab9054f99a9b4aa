"""Derivatives that follow exactly from those that are there: by rows, by columns, of a gradient, of a linear map."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.core.errors import NotSupported
from dragoman.core.vector_answers import as_vector, as_vectors
from dragoman.core.vectors import Ability, Config, Vector, VectorFunction, Vectors

# The derivative of a function of vectors by its argument at an index, applied to a vector: how a framework does it.
Push = Callable[[Callable[..., Any], Vectors, int, Vector], Any]


class Of(VectorFunction):
    """What follows from another function has its sizes and names."""

    def __init__(self, base: VectorFunction) -> None:
        self.base = base
        self.input_names, self.output_names = base.input_names, base.output_names

    def input_sizes(self, config: Config) -> Sequence[int]:
        return self.base.input_sizes(config)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return self.base.output_sizes(config)


class ByUnitVectors(Of):
    """Jᵀ s from one J e_i for each number of the input, or J v from one Jᵀ e_i for each number of the output.

    Raises NotSupported where that takes more calls than `limit`.
    """

    def __init__(self, base: VectorFunction, limit: int) -> None:
        super().__init__(base)
        self._limit = limit

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        size, act = len(inputs[input]), self.base.apply_jacobian
        check_evaluations(size, self._limit, "Gradient", "apply_jacobian")
        return [_dot(sens, act(output, input, inputs, unit, config), "apply_jacobian") for unit in units(size)]

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        size, act = self.output_sizes(config)[output], self.base.gradient
        check_evaluations(size, self._limit, "ApplyJacobian", "gradient")
        return [_dot(vec, act(output, input, inputs, unit, config), "gradient") for unit in units(size)]

    def sources(self) -> Mapping[Ability, str]:
        known = self.base.sources()
        match "gradient" in known, "apply_jacobian" in known:
            case True, False:
                return {"apply_jacobian": f"gradient ({known['gradient']})"}
            case False, True:
                return {"gradient": f"apply_jacobian ({known['apply_jacobian']})"}
        return {}


class OfGradient(Of):
    """The Hessian action as the derivative, by `push`, of the gradient that the author has written."""

    def __init__(self, base: VectorFunction, push: Push, name: str) -> None:
        super().__init__(base)
        self._push, self._name = push, name

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        def gradient(*arguments: Any) -> Any:
            return self.base.gradient(output, input1, arguments[:-1], arguments[-1], config)

        return self._push(gradient, (*inputs, sens), input2, vec)

    def sources(self) -> Mapping[Ability, str]:
        return {"apply_hessian": f"{self._name} of gradient (author)"}


class Linear(Of):
    """F(x) = A x + b, as the author says: J v = F(v) - F(0), and no second derivative."""

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        zeros = [np.zeros(len(x)) for x in inputs]
        moved = [*zeros[:input], vec, *zeros[input + 1 :]]
        sizes = self.output_sizes(config)
        there, here = (as_vectors(self.base.evaluate(x, config), sizes)[output] for x in (moved, zeros))
        return there - here

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        return np.zeros(len(inputs[input1]))

    def sources(self) -> Mapping[Ability, str]:
        return {"apply_jacobian": "linear", "apply_hessian": "linear"}


def check_evaluations(count: int, limit: int, verb: str, source: str) -> None:
    """Raise NotSupported where a derivative takes more evaluations of the function than `max_evaluations`."""
    if count > limit:
        raise NotSupported(
            f"{verb} by {source} takes {count} evaluations of the function; expected at most {limit} "
            "(max_evaluations); provide gradient=, or write the function in JAX or PyTorch"
        )


def units(size: int) -> Iterator[Vector]:
    """The unit vectors, one at a time: of a long vector they are a large matrix."""
    for i in range(size):
        unit = np.zeros(size)
        unit[i] = 1.0
        yield unit


def _dot(weights: Vector, answer: Any, what: str) -> float:
    return float(weights @ as_vector(answer, len(weights), what))
