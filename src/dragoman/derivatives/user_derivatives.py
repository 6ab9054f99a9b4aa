"""Derivatives written by the user: functions of actions (`gradient`, ...) and of whole matrices (`jacobian`, ...)."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dragoman.core.errors import InvalidOutput, ModelFailed
from dragoman.core.vectors import ABILITIES, Vector, number_array
from dragoman.derivatives.vector_callable import VectorCallable, inspect_derivative

# The arguments of a call by name: inputs, config, sens, vec, output, input, input1, input2.
Arguments = Mapping[str, Any]

_INDEX_PARAMETERS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("gradient", "apply_jacobian", "jacobian"), frozenset({"input"})),
    **dict.fromkeys(("apply_hessian", "hessian"), frozenset({"input1", "input2"})),
}


def inspect_derivatives(
    functions: Mapping[str, Callable[..., Any]], count: int, ignores_config: bool
) -> Mapping[str, VectorCallable]:
    """Inspect the derivatives of a function of `count` vectors. Raises ModelFailed naming a missing parameter."""
    result = {name: inspect_derivative(function, count, ignores_config) for name, function in functions.items()}
    for name, each in result.items():
        missing = _INDEX_PARAMETERS[name] - each.derivative_arguments
        if count > 1 and missing:
            raise ModelFailed(
                f"{name} '{each.name}': expected a parameter '{min(missing)}', the index of an input, since the "
                f"function has {count} input vectors"
            )
    return result


def derivative_methods(written: Mapping[str, VectorCallable]) -> Mapping[str, Callable[[Arguments], Any]]:
    """Return the methods of a VectorFunction by name; a function of an action takes precedence over a matrix."""
    methods: dict[str, Callable[[Arguments], Any]] = {}
    if "jacobian" in written:
        methods["gradient"] = lambda arguments: (
            _jacobian(written["jacobian"], arguments).T @ np.asarray(arguments["sens"])
        )
        methods["apply_jacobian"] = lambda arguments: (
            _jacobian(written["jacobian"], arguments) @ np.asarray(arguments["vec"])
        )
    if "hessian" in written:
        methods["apply_hessian"] = lambda arguments: _apply_hessian(written["hessian"], arguments)
    for name in ABILITIES[1:]:
        if name in written:
            methods[name] = _action(written[name], name)
    return methods


def _action(function: VectorCallable, name: str) -> Callable[[Arguments], Any]:
    def act(arguments: Arguments) -> Any:
        optional = {key: value for key, value in arguments.items() if key not in ("inputs", "config")}
        result = function(arguments["inputs"], arguments["config"], **optional)
        if "sens" in arguments and "sens" not in function.derivative_arguments:
            return _scale(result, arguments["sens"], f"{name} without 'sens'")
        return result

    return act


def _scale(result: Any, sens: Vector, name: str) -> Any:
    """Multiply the derivative of an output of one number by `sens`."""
    if len(sens) != 1:
        raise InvalidOutput(f"{name}: expected an output of one number, got {len(sens)}")
    return result * sens[0] if hasattr(result, "dtype") else number_array(result, name) * sens[0]


def _jacobian(function: VectorCallable, arguments: Arguments) -> Any:
    indices = {"output": arguments["output"], "input": arguments["input"]}
    matrix = _matrix(function(arguments["inputs"], arguments["config"], **indices), "jacobian")
    columns = len(arguments["inputs"][arguments["input"]])
    if matrix.ndim == 1:
        matrix = matrix[None]
    rows = len(arguments["sens"]) if "sens" in arguments else matrix.shape[0]
    if tuple(matrix.shape) != (rows, columns):
        raise InvalidOutput(f"jacobian: expected a matrix of shape {[rows, columns]}, got {list(matrix.shape)}")
    return matrix


def _apply_hessian(function: VectorCallable, arguments: Arguments) -> Any:
    indices = {key: arguments[key] for key in ("output", "input1", "input2")}
    result = number_array(function(arguments["inputs"], arguments["config"], **indices), "hessian")
    sens, (rows, columns) = arguments["sens"], (len(arguments["inputs"][indices[key]]) for key in ("input1", "input2"))
    if result.ndim == 2 and len(sens) == 1:
        result = result[None]
    if result.shape != (len(sens), rows, columns):
        raise InvalidOutput(f"hessian: expected shape {[len(sens), rows, columns]}, got {list(result.shape)}")
    return np.asarray(np.einsum("o,oij,j->i", sens, result, arguments["vec"]))


def _matrix(result: Any, name: str) -> Any:
    """Return the user's result as an array of NumPy; a complex one stays complex for the complex step."""
    array = np.asarray(result) if isinstance(result, list | tuple | np.ndarray) else result
    return array if isinstance(array, np.ndarray) and array.dtype.kind == "c" else number_array(result, name)
