"""Common base of functions that JAX or PyTorch differentiates."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from dragoman.core.errors import InvalidOutput
from dragoman.core.vectors import ABILITIES, Ability, Config, Vector, VectorFunction, Vectors
from dragoman_simulators.derivatives.user_function import ConfigCache, UserFunction


class FrameworkFunction(VectorFunction):
    """Sizes and names of a user's function that is evaluated and differentiated by a framework, `source`."""

    source: str

    def __init__(self, function: UserFunction) -> None:
        self.function = function
        self._inferred_sizes = ConfigCache(lambda config: function.infer_output_sizes(self.evaluate, config))
        self.input_names, self.output_names = function.input_names, function.output_names

    def input_sizes(self, config: Config) -> Sequence[int]:
        return self.function.input_sizes(config)

    def output_sizes(self, config: Config) -> Sequence[int]:
        declared = self.function.declared_output_sizes(config)
        return self._inferred_sizes(config) if declared is None else declared

    def needs_verification(self, config: Config) -> bool:
        """Return whether derivatives may be wrong because the function can convert arrays to plain numbers."""
        raise NotImplementedError

    def sources(self) -> Mapping[Ability, str]:
        return {ability: self.source for ability in ABILITIES if ability != "evaluate"} | {"evaluate": "author"}

    def notes(self) -> Mapping[str, Any]:
        return self.function.notes()

    def accepts(self, name: str) -> bool:
        return self.function.accepts(name)


class WrittenDerivatives(VectorFunction):
    """The derivatives that the user has written, called with arrays of the framework.

    Parameters
    ----------
    to_framework : converts a NumPy vector to an array of the framework.
    context : entered for each call, such as double precision in JAX.
    """

    def __init__(
        self,
        function: FrameworkFunction,
        to_framework: Callable[[Vector], Any],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._function, self._to_framework, self._context = function.function, to_framework, context
        self.input_names, self.output_names = function.input_names, function.output_names
        self.input_sizes, self.output_sizes = function.input_sizes, function.output_sizes  # type: ignore[method-assign]

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        with self._context():
            return self._function.gradient(output, input, self._convert(inputs), self._to_framework(sens), config)

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        with self._context():
            return self._function.apply_jacobian(output, input, self._convert(inputs), self._to_framework(vec), config)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        with self._context():
            x, s, v = self._convert(inputs), self._to_framework(sens), self._to_framework(vec)
            return self._function.apply_hessian(output, input1, input2, x, s, v, config)

    def sources(self) -> Mapping[Ability, str]:
        return {ability: source for ability, source in self._function.sources().items() if ability != "evaluate"}

    def _convert(self, inputs: Vectors) -> Vectors:
        return tuple(map(self._to_framework, inputs))


def select_output(outputs: Sequence[Any], index: int) -> Any:
    """Return one of the outputs. Raises InvalidOutput if the function returned fewer."""
    if index >= len(outputs):
        raise InvalidOutput(f"expected at least {index + 1} output vectors, got {len(outputs)}")
    return outputs[index]
