"""Functions of vectors as authors write them: a decorator, and what becomes of a function that it marks."""

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Literal, TypeVar, overload

from dragoman.core.errors import ModelFailed
from dragoman.core.vectors import MARK, Ability, Config, Vector, VectorFunction, Vectors, carried_by
from dragoman.derivatives.instance import Instance
from dragoman.derivatives.selection import METHODS, derived
from dragoman.derivatives.user_function import Authored, Declared

F = TypeVar("F", bound=Callable[..., Any])
Written = Callable[..., Any]
Derivatives = Literal["auto", "jax", "torch", "complex step", "finite differences"]

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
    verify_derivatives: bool = True,
    evaluate_at_load: bool = True,
    max_evaluations: int = 10_000,
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
    keyword-only parameters with defaults are entries of the config, `**name` gets all entries. A call whose config has
    an entry that the function has no parameter for is an error; only a function without any such parameter, whose
    `inputs` or `outputs` are functions of the config, takes all. A result is a vector (an array, a list or a
    number), or a tuple of them.

    inputs: the sizes of the vectors, `[2]` or by name `{"x": 2}`, or a function of the config that gives them.
    outputs: likewise; without them the function is tried once at a point.
    at: a point, one vector an input, where the function may be tried; it tells the sizes of inputs too.
    derivatives: "jax" and "torch" for functions written in them; "complex step" for NumPy functions that are analytic,
        with Hessian actions by dual numbers where these come through; "finite differences" for any; "auto" takes the
        first of jax, torch and complex step that suits the function, and is none where none does; None adds nothing.
        What the author has written is always preferred.
    vectorised: the function takes matrices, whose rows are points, as well (for "jax": through jax.vmap, by default).
    linear: the function is A x + b; its derivatives follow.
    verify_derivatives: compare what "complex step" and "torch" give (and "jax" where a function cannot be compiled)
        with central differences in each call, at the cost of three evaluations; a call whose derivative is not
        confirmed is an error. False omits the comparison.
    evaluate_at_load: False never evaluates the function before the first call; `outputs` has to be declared, and
        `derivatives` named.
    max_evaluations: a Gradient or Hessian action that takes more evaluations of the function is an error.
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
        setattr(marked, MARK, Deferred(marked, declared))
        return marked

    return mark if function is None else mark(function)


class Deferred(VectorFunction):
    """What a marked function was declared to be; it is tried, and its derivatives are made, when first asked for."""

    def __init__(self, function: Callable[..., Any], declared: Declared) -> None:
        self.function, self.declared = function, declared
        self._lock = Lock()
        self._made: VectorFunction | None = None

    def made(self) -> VectorFunction:
        """The function with its derivatives; ModelFailed where what was declared cannot be done, saying why."""
        with self._lock:
            if self._made is None:
                self._made = derived(Authored(self.function, self.declared))
            return self._made

    @property
    def input_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.made().input_names

    @property
    def output_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.made().output_names

    @property
    def vectorised(self) -> bool:  # type: ignore[override]
        return self.made().vectorised

    def input_sizes(self, config: Config) -> Sequence[int]:
        return self.made().input_sizes(config)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return self.made().output_sizes(config)

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return self.made().evaluate(inputs, config)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return self.made().gradient(output, input, inputs, sens, config)

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return self.made().apply_jacobian(output, input, inputs, vec, config)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        return self.made().apply_hessian(output, input1, input2, inputs, sens, vec, config)

    def sources(self) -> Mapping[Ability, str]:
        return self.made().sources()

    def notes(self) -> Mapping[str, Any]:
        return self.made().notes()

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


def is_vector_function(target: Any) -> bool:
    """Whether an object is marked, or is a VectorFunction or a class of them."""
    if isinstance(target, type):
        return issubclass(target, VectorFunction) and target is not VectorFunction
    return carried_by(target) is not None


def prepared(target: Any) -> VectorFunction:
    """The function of vectors that a marked function, a VectorFunction or a class of them is, with its derivatives.

    Tries the function at a point where its sizes or its derivatives are not declared. Raises ModelFailed where what
    was declared cannot be done, saying why.
    """
    found = carried_by(target() if is_vector_function(target) and isinstance(target, type) else target)
    if found is None:
        raise ModelFailed(f"{type(target).__name__} is no function of vectors; expected one marked @vector_function")
    if isinstance(found, Deferred):
        return found.made()
    return found if found.derivatives is None else derived(Instance(found))
