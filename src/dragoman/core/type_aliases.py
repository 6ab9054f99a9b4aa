"""Type aliases in annotations: `type Vector = NDArray[np.float64]`, and NumPy's `NDArray` itself from 2.5 on."""

import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin


def without_aliases(annotation: Any, is_opaque: Callable[[Any], bool] = lambda alias: False) -> Any:
    """Return the annotation with every type alias in it replaced by its value, arguments included.

    An annotation without aliases is returned as it is. Aliases for which `is_opaque` is true are kept. Raises TypeError
    for an alias that refers to itself or gets the wrong number of arguments, and NameError for an undefined name in its
    value, which Python looks up here for the first time.
    """
    return _resolve(annotation, is_opaque, ())


def _resolve(annotation: Any, is_opaque: Callable[[Any], bool], outer: tuple[Any, ...]) -> Any:
    alias = annotation if _is_alias(annotation) else get_origin(annotation)
    if _is_alias(alias):
        if is_opaque(annotation):
            return annotation
        if any(alias is each for each in outer):
            raise TypeError(f"type alias '{alias.__name__}' refers to itself, so it has no tensor form")
        return _resolve(_value(alias, get_args(annotation)), is_opaque, (*outer, alias))
    return _with_resolved_arguments(annotation, lambda each: _resolve(each, is_opaque, outer))


def _is_alias(annotation: Any) -> bool:
    """Return whether this is an alias, by the type's name: Python 3.11 has the class in `typing_extensions` only."""
    return type(annotation).__name__ == "TypeAliasType"


def _value(alias: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the value of an alias, with its type parameters replaced by the arguments where there are any."""
    value, parameters = alias.__value__, alias.__type_params__
    used = getattr(value, "__parameters__", ())
    if not arguments:
        return value
    if tuple(used) == parameters:
        return value[arguments]
    if len(arguments) != len(parameters):
        raise TypeError(f"type alias '{alias.__name__}' expects {len(parameters)} arguments, got {len(arguments)}")
    given = dict(zip(parameters, arguments, strict=True))
    return value[tuple(given[each] for each in used)] if used else given.get(value, value)


def _with_resolved_arguments(annotation: Any, resolve: Callable[[Any], Any]) -> Any:
    """Return the annotation, rebuilt only if resolving one of its arguments changed it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is None or origin is Literal:
        return annotation
    if origin is Annotated:
        inner = resolve(arguments[0])
        return annotation if inner is arguments[0] else Annotated[(inner, *arguments[1:])]
    resolved = tuple(resolve(each) for each in arguments)
    if all(new is old for new, old in zip(resolved, arguments, strict=True)):
        return annotation
    return (Union if origin is types.UnionType else origin)[resolved if len(resolved) > 1 else resolved[0]]
