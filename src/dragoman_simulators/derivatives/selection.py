"""Select the methods of differentiation for a user's function."""

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np

from dragoman.core.errors import DragomanError, InvalidOutput, ModelFailed
from dragoman.core.vectors import (
    ABILITIES,
    Config,
    Vector,
    VectorFunction,
    Vectors,
    as_vectors,
    number_array,
    split_outputs,
)
from dragoman_simulators.derivatives.complex_step import ComplexStep, ComplexStepHessian
from dragoman_simulators.derivatives.derived import (
    CombinedFunction,
    GradientHessian,
    LinearHessian,
    LinearJacobian,
    MissingDerivatives,
    UnitVectorProducts,
)
from dragoman_simulators.derivatives.dual_hessian import DualHessian
from dragoman_simulators.derivatives.finite_differences import FiniteDifferences
from dragoman_simulators.derivatives.user_function import UserFunction
from dragoman_simulators.derivatives.verified import SAMPLING_INTERVAL, Verification, VerifiedDerivatives, check_verify

log = logging.getLogger("dragoman.derivatives")

_RELATIVE_TOLERANCE = 1e-9  # between a row and its point


# Functions by precedence: each ability is taken from the first that has it.
Functions = tuple[VectorFunction, ...]


def add_derivatives(function: UserFunction) -> VectorFunction:
    """Return the function with its written derivatives, the requested ones, and those that follow exactly."""
    options = function.options
    if not options.evaluate_at_load:
        _check_options(function)
    functions = METHODS[options.derivatives](function) if options.derivatives else (function,)
    if options.linear:
        functions = (*functions, _verify(LinearJacobian(functions[0]), function, sampled=True), LinearHessian(function))
    combined = CombinedFunction(*functions)
    if options.vectorised and options.evaluate_at_load and len(function.input_sizes({})):
        _check_vectorised(combined, function.sample_point({}), function.name)
    if not (options.derivatives or options.linear):
        return combined
    return CombinedFunction(combined, UnitVectorProducts(combined, options.max_evaluations))


def _check_options(function: UserFunction) -> None:
    """Raise ModelFailed if a missing option would require to evaluate the function at load."""
    if function.options.derivatives == "auto":
        choices = ", ".join(repr(name) for name in METHODS if name != "auto")
        raise ModelFailed(
            f"function '{function.name}': derivatives: expected {choices} or None with evaluate_at_load=False, "
            "got 'auto'"
        )
    if function.declared_output_sizes({}) is None:
        raise ModelFailed(f"function '{function.name}': evaluate_at_load=False requires outputs=[...]")


def _auto(function: UserFunction) -> Functions:
    try:
        framework = _framework(function)
    except Exception as error:
        if function.declared_output_sizes({}) is None:
            raise  # its output sizes are unknown
        log.warning(
            "no derivatives added, evaluation failed; set at=[...] to a valid point: function=%s error=%r",
            function.name,
            error,
        )
        reason = f"it fails at the sample point ({type(error).__name__}: {error}); set at=[...] to a valid point"
        return (function, _missing(function, reason))
    if framework:
        return METHODS[framework](function)
    if function.options.linear:
        return (function,)
    return (function, _unit_vector_products(function), *_analytic(function, optional=True))


def _complex_step(function: UserFunction) -> Functions:
    """Requested by name, so Hessian actions may be finite differences of the complex step."""
    functions = (function, _unit_vector_products(function), *_analytic(function, optional=False))
    if "gradient" in function.sources():
        return functions
    return (*functions, _verify(ComplexStep(function, with_hessian=True), function))


def _analytic(function: UserFunction, optional: bool) -> Functions:
    """The complex step of the function, or of its written gradient, checked at the sample point.

    If `optional`, a function that is not analytic is logged, not an error.
    """
    has_gradient = "gradient" in function.sources()
    derivatives: ComplexStep | ComplexStepHessian = (
        ComplexStepHessian(function) if has_gradient else ComplexStep(function)
    )
    if derivatives.sources().keys() <= function.sources().keys():
        return ()
    verified = _verify(derivatives, function)
    if not function.options.evaluate_at_load:
        return (verified,)
    try:
        derivatives.check({})
    except DragomanError as error:
        if not optional or not isinstance(error, ModelFailed | InvalidOutput):
            raise
        log.info("no derivatives added: %s", error.message)
        return (_missing(function, error.message),)
    return (verified,) if isinstance(derivatives, ComplexStepHessian) else (verified, *_dual(function, derivatives))


def _verify(derivatives: VectorFunction, function: UserFunction, sampled: bool = False) -> VerifiedDerivatives:
    return VerifiedDerivatives(derivatives, function, _verification(function, lambda config: sampled))


def _verification(function: UserFunction, is_sampled: Callable[[Config], bool]) -> Verification:
    """Return the options of a function: by default calls are sampled where that is enough."""
    options = function.options
    check_verify(options.verify, f"function '{function.name}': verify")

    def interval(config: Config) -> int:
        sampled = is_sampled(config) if options.verify is None else options.verify == "sampled"
        return SAMPLING_INTERVAL if sampled else 1

    return Verification(name=function.name, enabled=options.verify != "never", interval=interval, noise=options.noise)


def _missing(function: UserFunction, reason: str) -> VectorFunction:
    return MissingDerivatives(function, dict.fromkeys(ABILITIES[1:], reason))


def _dual(function: UserFunction, complex_step: ComplexStep) -> Functions:
    """Hessian actions by dual numbers, if the function can be evaluated on them."""
    derivatives = DualHessian(function, complex_step)
    try:
        derivatives.check({})
    except ModelFailed as error:
        log.info("no Hessian action added: %s", error.message)
        return (MissingDerivatives(function, {"apply_hessian": error.message}),)
    return (derivatives,)


def _unit_vector_products(function: UserFunction) -> VectorFunction:
    return UnitVectorProducts(function, function.options.max_evaluations)


def _finite_differences(function: UserFunction) -> Functions:
    return function, _unit_vector_products(function), FiniteDifferences(function)


def _framework(function: UserFunction) -> str:
    """Return "jax" or "torch" if the function returns arrays of these for NumPy arrays, or for their own; else ""."""
    # A function written in a framework has imported it. It runs with the settings of later calls, such as float64.
    frameworks = {name: _framework_module(name) for name in ("torch", "jax") if name in sys.modules}
    with frameworks["jax"].float64() if "jax" in frameworks else nullcontext():
        try:
            result = function.sample_result({})
        except Exception as error:
            for module in frameworks.values():
                with suppress(Exception):
                    result = function.evaluate(module.to_arrays(function.sample_point({})), {})
                    break
            else:
                raise error from None
    return next((name for each in split_outputs(result) if (name := _library(each)) in ("jax", "torch")), "")


def _library(value: Any) -> str:
    if isinstance(value, list) and value:
        return next((name for each in value if (name := _library(each)) in ("jax", "torch")), "")
    name = type(value).__module__.partition(".")[0]
    return "jax" if name == "jaxlib" else name


def _framework_module(name: str) -> Any:
    """Import the module of a framework only for functions that need it."""
    return importlib.import_module(f"dragoman_simulators.derivatives.{name}")


def _by_framework(name: str) -> Callable[[UserFunction], Functions]:
    def functions(function: UserFunction) -> Functions:
        module = _framework_module(name)
        written, derivatives = module.differentiate(function)
        verification = _verification(function, lambda config: not derivatives.needs_verification(config))
        verified = [VerifiedDerivatives(derivatives, derivatives, verification)]
        if "gradient" in function.written:
            hessian = GradientHessian(function, module.jacobian_vector_product, name)
            base = CombinedFunction(written, derivatives)
            verified.insert(0, VerifiedDerivatives(hessian, base, _verification(function, lambda config: False)))
        if function.options.evaluate_at_load:
            offered = set(written.sources())
            for each in verified:
                each.try_at(function.sample_point({}), {}, [name for name in each.sources() if name not in offered])
                offered |= set(each.sources())
        return (written, *verified)

    return functions


METHODS: Mapping[str, Callable[[UserFunction], Functions]] = {
    "auto": _auto,
    "jax": _by_framework("jax"),
    "torch": _by_framework("torch"),
    "complex step": _complex_step,
    "finite differences": _finite_differences,
}


def _check_vectorised(function: VectorFunction, point: Vectors, name: str) -> None:
    """Raise ModelFailed if three rows do not give the results of three points; skipped if evaluation fails."""
    points = [tuple(x * factor for x in point) for factor in (1.0, 1.001, 0.999)]
    sizes = function.output_sizes({})
    try:
        expected = [as_vectors(function.evaluate(each, {}), sizes) for each in points]
    except DragomanError:
        raise
    except Exception as error:
        log.debug("vectorised evaluation not checked: function=%s error=%r", name, error)
        return
    outputs = _evaluate_rows(function, [np.stack(column) for column in zip(*points, strict=True)], len(sizes), name)
    for output, rows in enumerate(outputs):
        values = np.stack([each[output] for each in expected])
        if rows.size != values.size:
            raise _vectorised_error(name, output, f"shape {list(values.shape)}", f"{list(rows.shape)}")
        gap = float(np.max(np.abs(rows.reshape(values.shape) - values), initial=0.0))
        if gap > _RELATIVE_TOLERANCE * max(1.0, float(np.max(np.abs(values), initial=0.0))):
            raise _vectorised_error(name, output, "the same numbers as for each point", f"a difference of {gap:.3g}")


def _evaluate_rows(function: VectorFunction, rows: Vectors, count: int, name: str) -> list[Vector]:
    try:
        result: Any = function.evaluate(rows, {})
        several = isinstance(result, tuple | list) and len(result) == count
        outputs = [number_array(each, "rows") for each in (result if several else [result])]
    except Exception as error:
        raise _vectorised_error(name, 0, "a result", f"{type(error).__name__}: {error}") from error
    if len(outputs) != count:
        raise _vectorised_error(name, 0, f"{count} outputs", str(len(outputs)))
    return outputs


def _vectorised_error(name: str, output: int, expected: str, got: str) -> ModelFailed:
    return ModelFailed(
        f"'{name}' is declared vectorised: expected {expected} for three rows of points in output {output}, got {got}"
    )
