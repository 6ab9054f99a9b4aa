"""Sizes of vectors as annotations tell them: `x: Annotated[NDArray[np.float64], Shape(2)]`."""

from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from dragoman.core.errors import ModelFailed
from dragoman.core.type_aliases import without_aliases
from dragoman.derivatives.vector_callable import Callee


def annotated_inputs(function: Callee) -> tuple[int, ...]:
    """The sizes of the function's vectors. Raises ModelFailed naming one that is not annotated."""
    hints = _hints(function.function)
    sizes = [_size(hints.get(name)) for name in function.vectors]
    missing = [name for name, size in zip(function.vectors, sizes, strict=True) if size is None]
    if missing or not sizes:
        raise ModelFailed(
            f"function '{function.name}': the sizes of its input vectors are not known; expected inputs=[...], a "
            f"function of the config, a point at=[...], or annotations with Shape(n); got none for {missing or 'any'}"
        )
    return tuple(size for size in sizes if size is not None)


def annotated_outputs(function: Callable[..., Any]) -> tuple[int, ...] | None:
    """The sizes of what the function gives, one or a tuple; None where they are not all annotated."""
    found = _hints(function).get("return")
    sizes = [_size(each) for each in (get_args(found) if get_origin(found) is tuple else (found,))]
    return None if None in sizes else tuple(size for size in sizes if size is not None)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return {name: without_aliases(hint) for name, hint in get_type_hints(function, include_extras=True).items()}
    except (NameError, TypeError, AttributeError):  # what cannot be looked up tells nothing
        return {}


def _size(annotation: Any) -> int | None:
    """The one axis of a Shape beside the annotation."""
    if get_origin(annotation) is not Annotated:
        return None
    shapes = [each for each in get_args(annotation)[1:] if isinstance(each, tuple) and len(each) == 1]
    return next((shape[0] for shape in shapes if isinstance(shape[0], int) and shape[0] >= 0), None)
