"""Functions that a framework differentiates: what those of JAX and of PyTorch have in common."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from dragoman.core.errors import InvalidOutput
from dragoman.core.vectors import ABILITIES, Ability, Config, Vector, VectorFunction, Vectors
from dragoman.derivatives.config_cache import OfConfig
from dragoman.derivatives.user_function import Authored


class Traced(VectorFunction):
    """Sizes and names of a function whose every ability comes from one framework."""

    source = ""

    def __init__(self, author: Authored) -> None:
        self.author = author
        self._tried = OfConfig(lambda config: author.tried_outputs(self.evaluate, config))
        self.input_names, self.output_names = author.input_names, author.output_names

    def input_sizes(self, config: Config) -> Sequence[int]:
        return self.author.input_sizes(config)

    def output_sizes(self, config: Config) -> Sequence[int]:
        declared = self.author.declared_outputs(config)
        return self._tried(config) if declared is None else declared

    def sources(self) -> Mapping[Ability, str]:
        return {ability: self.source for ability in ABILITIES if ability != "evaluate"} | {"evaluate": "author"}

    def notes(self) -> Mapping[str, Any]:
        return self.author.notes()


class Lifted(VectorFunction):
    """The derivatives that the author has written, called with a framework's own arrays, within a context of it."""

    def __init__(
        self, function: Traced, lift: Callable[[Vector], Any], around: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._sizes, self._author, self._lift, self._around = function, function.author, lift, around
        self.input_names, self.output_names = function.input_names, function.output_names

    def input_sizes(self, config: Config) -> Sequence[int]:
        return self._sizes.input_sizes(config)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return self._sizes.output_sizes(config)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        with self._around():
            return self._author.gradient(output, input, self._lifted(inputs), self._lift(sens), config)

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        with self._around():
            return self._author.apply_jacobian(output, input, self._lifted(inputs), self._lift(vec), config)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        with self._around():
            x, s, v = self._lifted(inputs), self._lift(sens), self._lift(vec)
            return self._author.apply_hessian(output, input1, input2, x, s, v, config)

    def sources(self) -> Mapping[Ability, str]:
        return {ability: source for ability, source in self._author.sources().items() if ability != "evaluate"}

    def _lifted(self, inputs: Vectors) -> Vectors:
        return tuple(map(self._lift, inputs))


def only(found: Sequence[Any], output: int) -> Any:
    """One of the outputs; InvalidOutput where the function gives fewer."""
    if output >= len(found):
        raise InvalidOutput(f"expected at least {output + 1} output vectors, got {len(found)}")
    return found[output]
