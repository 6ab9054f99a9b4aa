"""Calls of a user's function: which parameters are vectors, and which come from the config."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.vectors import Config

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
# Parameters that a function of derivatives may have besides the vectors.
DERIVATIVE_ARGUMENTS = ("output", "input", "input1", "input2", "sens", "vec")


@dataclass(frozen=True, slots=True)
class VectorCallable:
    """A user's function of vectors with its parameters.

    Parameters
    ----------
    vectors : names of the vector parameters, in order.
    variadic : it takes any number of vectors (`*vectors`).
    takes_config : it has a parameter `config` for the whole config.
    takes_entries : it has a parameter `**name` for all entries of the config.
    ignores_config : without options it accepts any config, because its sizes depend on the config.
    options : keyword-only parameters, which are entries of the config; each has a default.
    derivative_arguments : its parameters among `DERIVATIVE_ARGUMENTS`.
    """

    function: Callable[..., Any]
    vectors: tuple[str, ...]
    variadic: bool = False
    takes_config: bool = False
    takes_entries: bool = False
    ignores_config: bool = False
    options: frozenset[str] = frozenset()
    derivative_arguments: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, inputs: Sequence[Any], config: Config, **arguments: Any) -> Any:
        """Call the function. Raises InvalidInput naming a config entry that it has no parameter for."""
        used = {name: value for name, value in arguments.items() if name in self.derivative_arguments}
        return self.function(*inputs, **self._keywords(config), **used)

    def _keywords(self, config: Config) -> Mapping[str, Any]:
        if not config and not self.takes_config:
            return {}
        known = {name: value for name, value in config.items() if self.takes_entries or name in self.options}
        whole = {"config": config} if self.takes_config else {}
        clash = sorted(known.keys() & {*self.vectors, *self.derivative_arguments, *whole})
        unexpected = clash or sorted(config.keys() - known.keys())
        ignored = self.takes_config or (self.ignores_config and not self.options)
        if clash or (unexpected and not ignored):
            names = ", ".join(sorted(self.options)) or "none"
            raise InvalidInput(
                f"config: unexpected entry '{unexpected[0]}': expected entries of '{self.name}': {names}"
            )
        return {**whole, **known}


def inspect_function(function: Callable[..., Any], ignores_config: bool = False) -> VectorCallable:
    """Inspect a function whose positional parameters, except `config`, are vectors.

    Raises ModelFailed naming another parameter without a default.
    """
    vectors = tuple(p.name for p in _parameters(function, *_POSITIONAL) if p.name != "config")
    return _inspect(function, vectors, frozenset(), ignores_config)


def inspect_derivative(function: Callable[..., Any], count: int, ignores_config: bool = False) -> VectorCallable:
    """Inspect a function of derivatives whose first `count` parameters are vectors. Raises ModelFailed as above."""
    vectors = tuple(p.name for p in _parameters(function, *_POSITIONAL)[:count])
    others = {p.name for p in _parameters(function, *_NAMED) if p.name not in vectors}
    return _inspect(function, vectors, frozenset(others & set(DERIVATIVE_ARGUMENTS)), ignores_config)


def _inspect(
    function: Callable[..., Any], vectors: tuple[str, ...], arguments: frozenset[str], ignores_config: bool
) -> VectorCallable:
    others = [p for p in _parameters(function, *_NAMED) if p.name not in (*vectors, *arguments)]
    options = [p for p in others if p.name != "config"]
    result = VectorCallable(
        function,
        vectors,
        variadic=bool(_parameters(function, inspect.Parameter.VAR_POSITIONAL)),
        takes_config=len(options) < len(others),
        takes_entries=bool(_parameters(function, inspect.Parameter.VAR_KEYWORD)),
        ignores_config=ignores_config,
        options=frozenset(p.name for p in options),
        derivative_arguments=arguments,
    )
    for option in options:
        if option.default is inspect.Parameter.empty:
            raise ModelFailed(
                f"function '{result.name}': parameter '{option.name}' is not a vector: expected a default value, "
                "since a config may omit it"
            )
    return result


def _parameters(function: Callable[..., Any], *kinds: Any) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.kind in kinds]
