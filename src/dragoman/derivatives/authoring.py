"""Functions of vectors as authors write them: a decorator, and what becomes of a function that it marks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

from dragoman.core.errors import ModelFailed
from dragoman.core.vectors import Config, VectorFunction
from dragoman.derivatives.authored import Authored, Declared, Sizes
from dragoman.derivatives.choice import METHODS, derived

F = TypeVar("F", bound=Callable[..., Any])
Written = Callable[..., Any]
Derivatives = Literal["auto", "jax", "torch", "complex step", "finite differences"]

_MARK = "__dragoman_vector_function__"
_WRITTEN = ("jacobian", "gradient", "apply_jacobian", "hessian", "apply_hessian")


@overload
def vector_function(function: F) -> F: ...
@overload
def vector_function(
    *,
    inputs: Sequence[int] | Mapping[str, int] | Callable[[Config], Sequence[int]] | None = None,
    outputs: Sequence[int] | Mapping[str, int] | Callable[[Config], Sequence[int]] | None = None,
    at: Sequence[Any] | None = None,
    derivatives: Derivatives | None = "auto",
    vectorised: bool | None = None,
    linear: bool = False,
    gradient: Written | None = None,
    apply_jacobian: Written | None = None,
    apply_hessian: Written | None = None,
    jacobian: Written | None = None,
    hessian: Written | None = None,
    name: str = "",
    placement: str = "",
) -> Callable[[F], F]: ...
def vector_function(function: Any = None, **options: Any) -> Any:
    """Mark a function of float64 vectors as a model with derivatives. It stays the function it was.

    Each positional parameter is a vector, but for one called `config`, which gets the whole config (a mapping);
    keyword-only parameters with defaults are entries of the config. A result is a vector (an array, a list or a
    number), or a tuple of them.

    inputs: the sizes of the vectors, `[2]` or by name `{"x": 2}`, or a function of the config that gives them.
    outputs: likewise; without them the function is tried once at a point.
    at: a point, one vector an input, where the function may be tried; it tells the sizes of inputs too.
    derivatives: "jax" and "torch" for functions written in them; "complex step" for NumPy functions that are analytic;
        "finite differences" for any; "auto" takes the first of jax, torch and complex step that suits the function, and
        is none where none does; None adds nothing. What the author has written is always preferred.
    vectorised: the function takes matrices, whose rows are points, as well (for "jax": through jax.vmap, by default).
    linear: the function is A x + b; its derivatives follow.
    gradient, apply_jacobian, apply_hessian: functions of the same vectors, and by name of those of `sens`, `vec`,
        `output`, `input`, `input1`, `input2` that they take. Without `sens`, of an output of one number, it is
        multiplied by that.
    jacobian, hessian: functions of the same vectors that give the whole matrix: [output, input], and
        [input1, input2] of an output of one number, else [output, input1, input2].
    name, placement: as for `dragoman.model`.

    Raises ModelFailed, when it is loaded, where these do not fit the function.
    """
    options["written"] = {name: options.pop(name) for name in _WRITTEN if options.get(name) is not None}
    for name in _WRITTEN:
        options.pop(name, None)
    if options.get("derivatives", "auto") not in (*METHODS, None):
        raise ModelFailed(
            f"derivatives: expected {', '.join(map(repr, METHODS))} or None, got {options['derivatives']!r}"
        )
    declared = Declared(**options)

    def mark(marked: Any) -> Any:
        setattr(marked, _MARK, declared)
        return marked

    return mark if function is None else mark(function)


def declared_by(target: Any) -> Declared | None:
    """What `@vector_function` said of an object; None where it was not marked."""
    found = getattr(target, "__dict__", {}).get(_MARK)
    return found if isinstance(found, Declared) else None


def is_vector_function(target: Any) -> bool:
    """Whether an object is marked, or is a VectorFunction or a class of them."""
    kind = target if isinstance(target, type) else type(target)
    return declared_by(target) is not None or issubclass(kind, VectorFunction) and kind is not VectorFunction


def prepared(target: Any) -> VectorFunction:
    """The function of vectors that a marked function, a VectorFunction or a class of them is, with its derivatives.

    Tries the function at a point where its sizes or its derivatives are not declared. Raises ModelFailed where what
    was declared cannot be done, saying why.
    """
    if isinstance(target, type) and issubclass(target, VectorFunction):
        target = target()
    if isinstance(target, VectorFunction):
        return target
    declared = declared_by(target)
    if declared is None:
        raise ModelFailed(f"{type(target).__name__} is no function of vectors; expected one marked @vector_function")
    return derived(Authored(target, declared))


__all__ = ["Sizes", "declared_by", "is_vector_function", "prepared", "vector_function"]
