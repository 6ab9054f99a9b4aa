"""Calls of a user's function: its vector parameters, those from the config, and sizes by annotations."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.type_aliases import without_aliases
from dragoman.core.vectors import Config, call_with_copies

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
    options : keyword-only parameters, which are entries of the config, with their defaults.
    derivative_arguments : its parameters among `DERIVATIVE_ARGUMENTS`.
    """

    function: Callable[..., Any]
    vectors: tuple[str, ...]
    variadic: bool = False
    takes_config: bool = False
    takes_entries: bool = False
    ignores_config: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    derivative_arguments: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, inputs: Sequence[Any], config: Config, **arguments: Any) -> Any:
        """Call the function with copies of all arguments.

        Raises InvalidInput naming a config entry that it has no parameter for, or that has another type than the
        parameter's default.
        """
        if not (arguments or config or self.takes_config):
            return call_with_copies(self.function, *inputs)
        used = {name: value for name, value in arguments.items() if name in self.derivative_arguments}
        return call_with_copies(self.function, *inputs, **self._keywords(config), **used)

    def accepts(self, name: str) -> bool:
        """Return whether the config may have an entry of this name."""
        return self.takes_config or self.takes_entries or self._ignores_entries or name in self.options

    @property
    def _ignores_entries(self) -> bool:
        return self.ignores_config and not self.options

    def _keywords(self, config: Config) -> Mapping[str, Any]:
        if not config and not self.takes_config:
            return {}
        known = {name: value for name, value in config.items() if self.takes_entries or name in self.options}
        whole = {"config": config} if self.takes_config else {}
        clash = sorted(known.keys() & {*self.vectors, *self.derivative_arguments, *whole})
        unexpected = clash or sorted(config.keys() - known.keys())
        ignored = self.takes_config or self._ignores_entries
        if clash or (unexpected and not ignored):
            names = ", ".join(sorted(self.options)) or "none"
            raise InvalidInput(
                f"config: unexpected entry '{unexpected[0]}': expected entries of '{self.name}': {names}"
            )
        for name, value in known.items():
            _check_type(name, value, self.options.get(name))
        return {**whole, **known}


# The types of entries of a config by the type of the default, and their names in messages.
_ENTRY_TYPES: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "a boolean"),
    int: ((int, float), "a number"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
}


def _check_type(name: str, value: Any, default: Any) -> None:
    """Raise InvalidInput if an entry of the config has another type than a default that is a number or a string."""
    types, expected = _ENTRY_TYPES.get(type(default), ((), ""))
    if types and type(value) not in types:
        raise InvalidInput(f"config: entry '{name}': expected {expected}, got {value!r:.100}")


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
        options={p.name: p.default for p in options},
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


# --- sizes from annotations: `x: Annotated[NDArray[np.float64], Shape(2)]` --------------------------------


def annotated_inputs(function: VectorCallable) -> tuple[int, ...]:
    """Return the sizes of the function's input vectors. Raises ModelFailed naming those without annotation."""
    hints = _type_hints(function.function)
    sizes = [_size(hints.get(name)) for name in function.vectors]
    missing = [name for name, size in zip(function.vectors, sizes, strict=True) if size is None]
    if missing or not sizes:
        raise ModelFailed(
            f"function '{function.name}': the sizes of its input vectors are unknown: expected inputs=[...], a "
            f"function of the config, a point at=[...], or annotations with Shape(n); got none for {missing or 'any'}"
        )
    return tuple(size for size in sizes if size is not None)


def annotated_outputs(function: Callable[..., Any]) -> tuple[int, ...] | None:
    """Return the sizes of the function's output vectors; None unless all are annotated."""
    result = _type_hints(function).get("return")
    sizes = [_size(each) for each in (get_args(result) if get_origin(result) is tuple else (result,))]
    return None if None in sizes else tuple(size for size in sizes if size is not None)


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return {name: without_aliases(hint) for name, hint in get_type_hints(function, include_extras=True).items()}
    except (NameError, TypeError, AttributeError):  # annotations that cannot be resolved are ignored
        return {}


def _size(annotation: Any) -> int | None:
    """Return n of `Annotated[..., Shape(n)]`, else None."""
    if get_origin(annotation) is not Annotated:
        return None
    shapes = [each for each in get_args(annotation)[1:] if isinstance(each, tuple) and len(each) == 1]
    return next((shape[0] for shape in shapes if isinstance(shape[0], int) and shape[0] >= 0), None)
