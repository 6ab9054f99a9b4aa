"""Derivatives that follow exactly from others: by unit vectors, from a gradient, of a linear function; combinations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.core.errors import NotSupported
from dragoman.core.vectors import ABILITIES, Ability, Config, Vector, VectorFunction, Vectors, as_vector, as_vectors

# Forward-mode derivative of function(*arguments) by the argument at an index, applied to a vector.
JacobianVectorProduct = Callable[[Callable[..., Any], Vectors, int, Vector], Any]


class DerivedFunction(VectorFunction):
    """Base of functions that add abilities to `base` and keep its sizes and names."""

    def __init__(self, base: VectorFunction) -> None:
        self.base = base
        self.input_names, self.output_names = base.input_names, base.output_names

    def input_sizes(self, config: Config) -> Sequence[int]:
        return self.base.input_sizes(config)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return self.base.output_sizes(config)


class CombinedFunction(VectorFunction):
    """Take each ability from the first of several functions that has it; sizes and names come from the first."""

    def __init__(self, first: VectorFunction, *others: VectorFunction) -> None:
        self._functions = (first, *others)
        self.input_names, self.output_names = first.input_names, first.output_names
        self.input_sizes, self.output_sizes = first.input_sizes, first.output_sizes  # type: ignore[method-assign]
        self._sources: dict[Ability, str] = {}
        for ability in ABILITIES:
            function = next((each for each in self._functions if ability in each.sources()), None)
            if function is not None:
                self._sources[ability] = function.sources()[ability]
                setattr(self, ability, getattr(function, ability))  # calls need no further indirection
                if ability == "evaluate":
                    self.vectorised = function.vectorised

    def sources(self) -> Mapping[Ability, str]:
        return self._sources

    def notes(self) -> Mapping[str, Any]:
        used = {*self._sources.values()}
        return {k: v for each in self._functions if used & {*each.sources().values()} for k, v in each.notes().items()}

    def close(self) -> None:
        for each in self._functions:
            each.close()


class UnitVectorProducts(DerivedFunction):
    """Jᵀ s from one J e_i for each element of the input, or J v from one Jᵀ e_i for each element of the output.

    Raises NotSupported if that takes more than `max_evaluations` calls.
    """

    def __init__(self, base: VectorFunction, max_evaluations: int) -> None:
        super().__init__(base)
        self._max_evaluations = max_evaluations

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        size, act = len(inputs[input]), self.base.apply_jacobian
        check_evaluations(size, self._max_evaluations, "Gradient", "apply_jacobian")
        return [_dot(sens, act(output, input, inputs, unit, config), "apply_jacobian") for unit in unit_vectors(size)]

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        size, act = self.output_sizes(config)[output], self.base.gradient
        check_evaluations(size, self._max_evaluations, "ApplyJacobian", "gradient")
        return [_dot(vec, act(output, input, inputs, unit, config), "gradient") for unit in unit_vectors(size)]

    def sources(self) -> Mapping[Ability, str]:
        known = self.base.sources()
        match "gradient" in known, "apply_jacobian" in known:
            case True, False:
                return {"apply_jacobian": f"gradient ({known['gradient']})"}
            case False, True:
                return {"gradient": f"apply_jacobian ({known['apply_jacobian']})"}
        return {}


class GradientHessian(DerivedFunction):
    """The Hessian action as the derivative, by `jvp` of the method `name`, of the gradient that the user wrote."""

    def __init__(self, base: VectorFunction, jvp: JacobianVectorProduct, name: str) -> None:
        super().__init__(base)
        self._jvp, self._name = jvp, name

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        def gradient(*arguments: Any) -> Any:
            return self.base.gradient(output, input1, arguments[:-1], arguments[-1], config)

        return self._jvp(gradient, (*inputs, sens), input2, vec)

    def sources(self) -> Mapping[Ability, str]:
        return {"apply_hessian": f"{self._name} of gradient (author)"}


class LinearDerivatives(DerivedFunction):
    """Derivatives of F(x) = A x + b: J v = F(v) - F(0), and second derivatives of zero."""

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        origin = [np.zeros(len(x)) for x in inputs]
        direction = [*origin[:input], vec, *origin[input + 1 :]]
        sizes = self.output_sizes(config)
        end, start = (as_vectors(self.base.evaluate(x, config), sizes)[output] for x in (direction, origin))
        return end - start

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        return np.zeros(len(inputs[input1]))

    def sources(self) -> Mapping[Ability, str]:
        return {"apply_jacobian": "linear", "apply_hessian": "linear"}


def check_evaluations(count: int, limit: int, verb: str, source: str) -> None:
    """Raise NotSupported if a derivative takes more evaluations of the function than `max_evaluations`."""
    if count > limit:
        raise NotSupported(
            f"{verb} by {source} takes {count} evaluations of the function; expected at most {limit} "
            "(max_evaluations); provide gradient=, or write the function in JAX or PyTorch"
        )


def unit_vectors(size: int) -> Iterator[Vector]:
    """Yield the rows of the identity matrix without allocating it."""
    for i in range(size):
        unit = np.zeros(size)
        unit[i] = 1.0
        yield unit


def _dot(weights: Vector, result: Any, name: str) -> float:
    return float(weights @ as_vector(result, len(weights), name))
