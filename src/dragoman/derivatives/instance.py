"""An author's class of functions of vectors, as what derivatives are added to."""

from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.core.vectors import Ability, Config, Vector, VectorFunction, Vectors
from dragoman.derivatives.config_cache import OfConfig
from dragoman.derivatives.user_function import Authored, Declared


class Instance(Authored):
    """A VectorFunction that asks for derivatives by its attribute `derivatives`; its own methods are its author's."""

    def __init__(self, function: VectorFunction) -> None:
        self.function = function
        self.declared = Declared(
            derivatives=function.derivatives,
            vectorised=function.vectorised,
            verify_derivatives=function.verify_derivatives,
            evaluate_at_load=function.evaluate_at_load,
            max_evaluations=function.max_evaluations,
        )
        self.vectorised = function.vectorised
        self.name = type(function).__name__
        self.input_names, self.output_names = function.input_names, function.output_names
        self.written = frozenset(function.sources())
        self._tried = OfConfig(self.output_sizes)
        self.answer = OfConfig(lambda config: self.evaluate(self.point(config), config))

    def input_sizes(self, config: Config) -> tuple[int, ...]:
        return tuple(self.function.input_sizes(config))

    def declared_outputs(self, config: Config) -> tuple[int, ...]:
        return tuple(self.function.output_sizes(config))

    def evaluate(self, inputs: Sequence[Any], config: Config) -> Any:
        return self.function.evaluate(inputs, config)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return self.function.gradient(output, input, inputs, sens, config)

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return self.function.apply_jacobian(output, input, inputs, vec, config)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        return self.function.apply_hessian(output, input1, input2, inputs, sens, vec, config)

    def sources(self) -> Mapping[Ability, str]:
        return self.function.sources()

    def notes(self) -> Mapping[str, Any]:
        return self.function.notes()

    def close(self) -> None:
        self.function.close()
