"""Which derivatives a function gets: as its author says, or the first that suits it."""

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dragoman.core.errors import DragomanError, InvalidOutput, ModelFailed
from dragoman.core.vector_answers import parts
from dragoman.core.vectors import VectorFunction
from dragoman.derivatives.complex_step import AnalyticGradient, ComplexStep
from dragoman.derivatives.derived import ByUnitVectors, Linear, OfGradient
from dragoman.derivatives.dual_hessian import DualNumbers
from dragoman.derivatives.finite_differences import Differences
from dragoman.derivatives.first_of import FirstOf
from dragoman.derivatives.user_function import Authored
from dragoman.derivatives.vectorised import check_rows
from dragoman.derivatives.verified import Verified

log = logging.getLogger("dragoman.derivatives")


Parts = tuple[VectorFunction, ...]

_AT = "name a point where it can be tried, at=[...]"


def derived(author: Authored) -> VectorFunction:
    """The function with what its author has written, what was asked for, and what follows exactly from these."""
    declared = author.declared
    if not declared.evaluate_at_load:
        _check_declared(author)
    parts = METHODS[declared.derivatives](author) if declared.derivatives else (author,)
    if declared.linear:
        parts = (*parts, Linear(parts[0]))
    found = FirstOf(*parts)
    if declared.vectorised and declared.evaluate_at_load and len(author.input_sizes({})):
        check_rows(found, author.point({}), author.name)
    if not (declared.derivatives or declared.linear):
        return found
    return FirstOf(found, ByUnitVectors(found, declared.max_evaluations))


def _check_declared(author: Authored) -> None:
    """ModelFailed where something has to be declared so that the function need not be evaluated while it is loaded."""
    if author.declared.derivatives == "auto":
        choices = ", ".join(repr(name) for name in METHODS if name != "auto")
        raise ModelFailed(
            f"function '{author.name}': derivatives: expected {choices} or None with evaluate_at_load=False, got 'auto'"
        )
    if author.declared_outputs({}) is None:
        raise ModelFailed(f"function '{author.name}': with evaluate_at_load=False, outputs=[...] has to be declared")


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
    return (author, _by_unit_vectors(author), *_analytic(author, log_why=True))


def _complex_step(author: Authored) -> Parts:
    """As asked for: what the complex step does not give exactly is differenced, and says so."""
    found = (author, _by_unit_vectors(author), *_analytic(author, log_why=False))
    if "gradient" in author.sources():
        return found
    return (*found, _verified(ComplexStep(author, curvature=True), author))


def _analytic(author: Authored, log_why: bool) -> Parts:
    """What is exact, of the function or, where that is written, of its gradient; tried, and compared in each call."""
    written = "gradient" in author.sources()
    found: ComplexStep | AnalyticGradient = AnalyticGradient(author) if written else ComplexStep(author)
    if found.sources().keys() <= author.sources().keys():
        return ()
    verified = _verified(found, author)
    if not author.declared.evaluate_at_load:
        return (verified,)
    try:
        found.check({})
    except DragomanError as fault:
        if not log_why or not isinstance(fault, ModelFailed | InvalidOutput):
            raise
        log.info("no derivatives are added: %s", fault.message)
        return ()
    return (verified,) if isinstance(found, AnalyticGradient) else (verified, *_curvature(author, found))


def _verified(function: VectorFunction, author: Authored) -> VectorFunction:
    return Verified(function, author, author.name, author.declared.verify_derivatives)


def _curvature(author: Authored, exact: ComplexStep) -> Parts:
    """Dual numbers, where they come through the function."""
    found = DualNumbers(author, exact)
    try:
        found.check({})
    except ModelFailed as fault:
        log.info("no Hessian action is added: %s", fault.message)
        return ()
    return (found,)


def _by_unit_vectors(author: Authored) -> VectorFunction:
    return ByUnitVectors(author, author.declared.max_evaluations)


def _differences(author: Authored) -> Parts:
    return author, _by_unit_vectors(author), Differences(author)


def _framework(author: Authored) -> str:
    """In which framework the function is written: by what it gives for arrays of NumPy, or else for tensors."""
    try:
        answer = author.answer({})
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
        enabled = author.declared.verify_derivatives
        verified = Verified(function, function, author.name, enabled, function.needs_verification)
        if "gradient" not in author.written:
            return written, verified
        of_gradient = OfGradient(author, leaf.push_through, name)
        return written, Verified(of_gradient, FirstOf(written, function), author.name, enabled), verified

    return parts


METHODS: Mapping[str, Callable[[Authored], Parts]] = {
    "auto": _auto,
    "jax": _leaf("jax"),
    "torch": _leaf("torch"),
    "complex step": _complex_step,
    "finite differences": _differences,
}
