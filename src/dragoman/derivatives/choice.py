"""Which derivatives a function gets: as its author says, or the first that suits it."""

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dragoman.core.errors import ModelFailed
from dragoman.core.vector_answers import parts
from dragoman.core.vectors import VectorFunction
from dragoman.derivatives.authored import Authored
from dragoman.derivatives.complex_step import AnalyticGradient, ComplexStep
from dragoman.derivatives.differences import Differences
from dragoman.derivatives.dual_numbers import DualNumbers
from dragoman.derivatives.exact import ByUnitVectors, Linear, OfGradient
from dragoman.derivatives.first_of import FirstOf
from dragoman.derivatives.rows import check_rows

log = logging.getLogger("dragoman.derivatives")


Parts = tuple[VectorFunction, ...]

_AT = "name a point where it can be tried, at=[...]"


def derived(author: Authored) -> VectorFunction:
    """The function with what its author has written, what was asked for, and what follows exactly from these."""
    parts = METHODS[author.declared.derivatives](author) if author.declared.derivatives else (author,)
    if author.declared.linear:
        parts = (*parts, Linear(parts[0]))
    found = FirstOf(*parts)
    if author.declared.vectorised and len(author.input_sizes({})):
        check_rows(found, author.point({}), author.name)
    return FirstOf(found, ByUnitVectors(found)) if author.declared.derivatives or author.declared.linear else found


def _auto(author: Authored) -> Parts:
    try:
        framework = _framework(author)
    except Exception as fault:
        if author.declared_outputs({}) is None:
            raise  # there is nothing else to tell its sizes from
        log.warning("no derivatives are added: '%s' raised where it was tried: %r; %s", author.name, fault, _AT)
        return (author,)
    if framework:
        return METHODS[framework](author)
    if author.declared.linear:
        return (author,)
    return (author, ByUnitVectors(author), *_analytic(author, log_why=True))


def _complex_step(author: Authored) -> Parts:
    """As asked for: what the complex step does not give exactly is differenced, and says so."""
    found = (author, ByUnitVectors(author), *_analytic(author, log_why=False))
    return found if "gradient" in author.sources() else (*found, ComplexStep(author, curvature=True))


def _analytic(author: Authored, log_why: bool) -> Parts:
    """What is exact, of the function or, where that is written, of its gradient; checked."""
    written = "gradient" in author.sources()
    found: ComplexStep | AnalyticGradient = AnalyticGradient(author) if written else ComplexStep(author)
    if found.sources().keys() <= author.sources().keys():
        return ()
    try:
        found.check({})
    except ModelFailed as fault:
        if not log_why:
            raise
        log.info("no derivatives are added: %s", fault.message)
        return ()
    return (found,) if written else (found, *_curvature(author, found))


def _curvature(author: Authored, exact: VectorFunction) -> Parts:
    """Dual numbers, where they come through the function."""
    found = DualNumbers(author, exact)
    try:
        found.check({})
    except ModelFailed as fault:
        log.info("no Hessian action is added: %s", fault.message)
        return ()
    return (found,)


def _differences(author: Authored) -> Parts:
    return author, ByUnitVectors(author), Differences(author)


def _framework(author: Authored) -> str:
    """In which framework the function is written: by what it gives for arrays of NumPy, or else for tensors."""
    try:
        answer = author.evaluate(author.point({}), {})
    except Exception as fault:
        torch = sys.modules.get("torch")  # who writes in it has imported it
        if torch is None:
            raise
        try:
            answer = author.evaluate([torch.tensor(x) for x in author.point({})], {})
        except Exception:
            raise fault from None
    return next((name for each in parts(answer) if (name := _home(each)) in ("jax", "torch")), "")


def _home(value: Any) -> str:
    if isinstance(value, list) and value:
        return next((found for each in value if (found := _home(each)) in ("jax", "torch")), "")
    name = type(value).__module__.partition(".")[0]
    return "jax" if name == "jaxlib" else name


def _leaf(name: str) -> Callable[[Authored], Parts]:
    """A framework's module is imported only where a function needs it."""

    def parts(author: Authored) -> Parts:
        leaf = importlib.import_module(f"dragoman.derivatives.{name}")
        written, function = getattr(leaf, f"written_in_{name}")(author)
        if "gradient" not in author.written:
            return written, function
        return written, OfGradient(author, leaf.push_through, name), function

    return parts


METHODS: Mapping[str, Callable[[Authored], Parts]] = {
    "auto": _auto,
    "jax": _leaf("jax"),
    "torch": _leaf("torch"),
    "complex step": _complex_step,
    "finite differences": _differences,
}
