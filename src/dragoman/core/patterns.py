"""Regular expressions that are compiled when they are first used."""

import re
from collections.abc import Callable
from typing import Any

_METHODS = ("finditer", "fullmatch", "match", "search", "split", "sub")


class LazyPattern:
    """A compiled regular expression, with the methods of `re.Pattern`.

    For patterns that most servers never use: compiling one takes up to a millisecond, importing a module less.
    """

    __slots__ = ("_text", *_METHODS)

    match: Callable[..., re.Match[str] | None]
    search: Callable[..., re.Match[str] | None]

    def __init__(self, text: str) -> None:
        self._text = text

    def __getattr__(self, name: str) -> Any:
        """Compile the pattern and set the methods; Python asks only for attributes that are not set."""
        if name not in _METHODS:
            raise AttributeError(name)
        compiled = re.compile(self._text)
        for method in _METHODS:
            setattr(self, method, getattr(compiled, method))
        return getattr(compiled, name)
