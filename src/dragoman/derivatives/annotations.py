"""Sizes of vectors from annotations: `x: Annotated[NDArray[np.float64], Shape(2)]`."""

from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from dragoman.core.errors import ModelFailed
from dragoman.core.type_aliases import without_aliases
from dragoman.derivatives.vector_callable import VectorCallable


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
