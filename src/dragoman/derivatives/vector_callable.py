"""How an author's function is called: which of its parameters are vectors, and which come from the config."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.vectors import Config

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
# What a function of derivatives may ask for by name, after the vectors.
ASKED = ("output", "input", "input1", "input2", "sens", "vec")


@dataclass(frozen=True, slots=True)
class Callee:
    """A function of vectors, and how it is called.

    vectors: the names of its vectors, in order; `open_ended` where it takes any number (`*vectors`).
    takes_config: whether it has a parameter `config`, which gets the whole config.
    takes_entries: whether it has a parameter `**name`, which gets all entries of the config.
    options: keyword-only parameters: entries of the config of the same names, each with a default.
    lenient: whether a function without options may be called under any config, for its sizes depend on that.
    asked: those of `ASKED` that it takes besides the vectors.
    """

    function: Callable[..., Any]
    vectors: tuple[str, ...]
    open_ended: bool = False
    takes_config: bool = False
    takes_entries: bool = False
    lenient: bool = False
    options: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, inputs: Sequence[Any], config: Config, **asked: Any) -> Any:
        """Its answer for these vectors; InvalidInput naming an entry of the config that it has no option for."""
        return self.function(*inputs, **self.keywords(config), **{k: v for k, v in asked.items() if k in self.asked})

    def keywords(self, config: Config) -> Mapping[str, Any]:
        """The keyword arguments of a call; InvalidInput naming an entry that it has no parameter for."""
        if not config and not self.takes_config:
            return {}
        known = {name: value for name, value in config.items() if self.takes_entries or name in self.options}
        whole = {"config": config} if self.takes_config else {}
        clash = sorted(known.keys() & {*self.vectors, *self.asked, *whole})
        unknown = clash or sorted(config.keys() - known.keys())
        ignored = self.takes_config or (self.lenient and not self.options)
        if clash or (unknown and not ignored):
            names = ", ".join(sorted(self.options)) or "none"
            raise InvalidInput(f"config: unexpected entry '{unknown[0]}'; '{self.name}' knows {names}")
        return {**whole, **known}


def callee(function: Callable[..., Any], lenient: bool = False) -> Callee:
    """How a function of vectors is called: its positional parameters, but for `config`, are vectors.

    Raises ModelFailed naming a parameter that nothing can be given for.
    """
    vectors = tuple(p.name for p in _parameters(function, *_POSITIONAL) if p.name != "config")
    return _called(function, vectors, frozenset(), lenient)


def derivative_callee(function: Callable[..., Any], count: int, lenient: bool = False) -> Callee:
    """How a function of derivatives is called: with `count` vectors, and with those of `ASKED` that it takes."""
    vectors = tuple(p.name for p in _parameters(function, *_POSITIONAL)[:count])
    rest = {p.name for p in _parameters(function, *_NAMED) if p.name not in vectors}
    return _called(function, vectors, frozenset(rest & set(ASKED)), lenient)


def _called(function: Callable[..., Any], vectors: tuple[str, ...], asked: frozenset[str], lenient: bool) -> Callee:
    rest = [p for p in _parameters(function, *_NAMED) if p.name not in (*vectors, *asked)]
    options = [p for p in rest if p.name != "config"]
    made = Callee(
        function,
        vectors,
        open_ended=bool(_parameters(function, inspect.Parameter.VAR_POSITIONAL)),
        takes_config=len(options) < len(rest),
        takes_entries=bool(_parameters(function, inspect.Parameter.VAR_KEYWORD)),
        lenient=lenient,
        options=frozenset(p.name for p in options),
        asked=asked,
    )
    for option in options:
        if option.default is inspect.Parameter.empty:
            raise ModelFailed(
                f"function '{made.name}': parameter '{option.name}' is no vector; expected it to have a default, "
                "so that the config may leave it out"
            )
    return made


def _parameters(function: Callable[..., Any], *kinds: Any) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.kind in kinds]
