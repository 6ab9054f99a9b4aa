"""Python objects that are vector functions, recognised without an import of the modules for derivatives.

Each Python model is asked whether it is one, so that this import is a part of every start.
"""

import inspect
from typing import Any

from dragoman.core.model import Model
from dragoman.core.runtime import PythonObjects, lazy_function
from dragoman.core.vectors import VectorFunction, find_vector_function

# The methods of a model of the `umbridge` package, which need not be derived from its class.
_UMBRIDGE_METHODS = ("get_input_sizes", "get_output_sizes", "supports_evaluate", "__call__")


def is_vector_function(target: Any) -> bool:
    """Return whether an object is a marked function, or a VectorFunction instance or subclass."""
    if isinstance(target, type):
        return issubclass(target, VectorFunction) and target is not VectorFunction
    return find_vector_function(target) is not None


def is_umbridge(target: Any) -> bool:
    """Return whether an object or a class is a model of the `umbridge` package."""
    kind = target if isinstance(target, type) else type(target)
    return not issubclass(kind, Model) and all(callable(getattr(kind, name, None)) for name in _UMBRIDGE_METHODS)


def is_any_vector_function(target: Any) -> bool:
    """Return whether an object or a class is a vector function: a VectorFunction, marked, or a model of `umbridge`."""
    return is_vector_function(target) or is_umbridge(target)


def takes_name(kind: type) -> bool:
    """Return whether the constructor of a class of the `umbridge` package takes the model's name."""
    parameters = inspect.signature(kind).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _names_itself(target: Any) -> bool:
    return is_umbridge(target) and not (isinstance(target, type) and takes_name(target))


def _own_name(target: Any) -> str:
    name = getattr(target() if isinstance(target, type) else target, "name", "")
    return name if isinstance(name, str) else ""


VECTOR_FUNCTIONS = PythonObjects(
    is_any_vector_function, lazy_function("dragoman_simulators.simulator_model:vector_model"), _names_itself, _own_name
)
