"""Which derivatives a function gets: as its author says, or the first that suits it."""

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dragoman.core.vector_answers import parts
from dragoman.core.vectors import VectorFunction
from dragoman.derivatives.authored import Authored
from dragoman.derivatives.exact import ByUnitVectors, Linear, OfGradient
from dragoman.derivatives.first_of import FirstOf

log = logging.getLogger("dragoman.derivatives")


def derived(author: Authored) -> VectorFunction:
    """The function with what its author has written, what was asked for, and what follows exactly from these."""
    parts = METHODS[author.declared.derivatives](author) if author.declared.derivatives else (author,)
    if author.declared.linear:
        parts = (*parts, Linear(parts[0]))
    found = FirstOf(*parts)
    return FirstOf(found, ByUnitVectors(found)) if author.declared.derivatives or author.declared.linear else found


def _auto(author: Authored) -> tuple[VectorFunction, ...]:
    framework = _framework(author)
    return METHODS[framework](author) if framework else (author,)


def _framework(author: Authored) -> str:
    """In which framework the function is written: by what it gives for arrays of NumPy, or else takes."""
    try:
        answer = author.evaluate(author.point({}), {})
    except Exception as fault:
        if "torch" not in sys.modules:
            raise
        log.debug("'%s' takes no NumPy arrays (%r); tried with tensors", author.callee.name, fault)
        return "torch"
    return next((name for each in parts(answer) if (name := _home(each)) in ("jax", "torch")), "")


def _home(value: Any) -> str:
    if isinstance(value, list) and value:
        return next((found for each in value if (found := _home(each)) in ("jax", "torch")), "")
    name = type(value).__module__.partition(".")[0]
    return "jax" if name == "jaxlib" else name


def _leaf(name: str) -> Callable[[Authored], tuple[VectorFunction, ...]]:
    """A framework's module is imported only where a function needs it."""

    def parts(author: Authored) -> tuple[VectorFunction, ...]:
        leaf = importlib.import_module(f"dragoman.derivatives.{name}")
        written, function = getattr(leaf, f"written_in_{name}")(author)
        if "gradient" not in author.written:
            return written, function
        return written, OfGradient(author, leaf.push_through, name), function

    return parts


METHODS: Mapping[str, Callable[[Authored], tuple[VectorFunction, ...]]] = {
    "auto": _auto,
    "jax": _leaf("jax"),
    "torch": _leaf("torch"),
}
