"""The decorator `@vector_function`, and the functions of vectors that it marks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, Literal, TypeVar, overload

import numpy as np

from dragoman.core.errors import ModelFailed
from dragoman.core.vectors import (
    MARK,
    Ability,
    Config,
    OwnArguments,
    Vector,
    VectorFunction,
    Vectors,
    find_vector_function,
)
from dragoman_simulators.derivatives.selection import METHODS, add_derivatives
from dragoman_simulators.derivatives.user_function import FunctionOptions, UserClassFunction, UserFunction
from dragoman_simulators.derivatives.verified import check_verify
from dragoman_simulators.vector_model import is_vector_function

F = TypeVar("F", bound=Callable[..., Any])
Written = Callable[..., Any]
Verify = Literal["always", "sampled", "never"]
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
    verify: Verify | None = None,
    evaluate_at_load: bool = True,
    max_evaluations: int = 10_000,
    noise: float = 0.0,
    step: float = 0.0,
    gradient: Written | None = None,
    apply_jacobian: Written | None = None,
    apply_hessian: Written | None = None,
    jacobian: Written | None = None,
    hessian: Written | None = None,
    name: str = "",
    placement: str = "",
) -> Callable[[F], F]: ...
def vector_function(function: Any = None, **options: Any) -> Any:
    """Mark a function of float64 vectors as a model with derivatives, and return the function itself.

    Each positional parameter is a vector, except `config`, which receives the whole config (a mapping).
    Keyword-only parameters with defaults are entries of the config; `**name` receives all entries. A config entry
    without a parameter is an error, unless the function has no such parameters and `inputs` or `outputs` are functions
    of the config. The function returns a vector (array, list or number) or a tuple of vectors.

    Parameters
    ----------
    inputs : sizes of the input vectors, as `[2]`, by name `{"x": 2}`, or as a function of the config.
    outputs : sizes of the output vectors, in the same forms; by default the function is evaluated once to infer them.
    at : a point, one vector per input, where the function can be evaluated; implies the sizes of the inputs.
    derivatives : "jax" or "torch" for functions written in these; "complex step" for analytic NumPy functions, with
        Hessian actions by dual numbers where possible; "finite differences" for any function; "auto" for the first of
        jax, torch and complex step that applies, if any; None for none. Derivatives that you write take precedence.
    vectorised : the function also accepts matrices whose rows are points (for "jax" by default, through jax.vmap).
    linear : the function is A x + b, which determines its derivatives.
    verify : when derivatives that you have not written are compared with central differences at the point of the call,
        at the cost of three evaluations: "always", in each call; "sampled", in the first call of each config, in every
        32nd, and in those that differ; "never". By default "sampled" for compiled JAX and `linear`, and "always" for
        the others. A call whose derivative is not confirmed is an error.
    evaluate_at_load : if False, the function is not evaluated before the first call; requires `outputs`, and
        `derivatives` other than "auto".
    noise : relative noise of the function's values, such as the tolerance of a solver; estimated by default.
    step : relative step of finite differences; found by the noise by default.
    max_evaluations : limit of evaluations of the function for one Gradient or Hessian action.
    gradient, apply_jacobian, apply_hessian : functions of the same vectors and, by name, of those of `sens`, `vec`,
        `output`, `input`, `input1`, `input2` that they need. Without `sens`, the result for an output of one number is
        multiplied by it.
    jacobian, hessian : functions of the same vectors that return the matrix [output, input], or [input1, input2] for
        an output of one number, else [output, input1, input2].
    name, placement : as for `dragoman.model`.

    Raises ModelFailed if an option has another form, or, when the model is loaded, if the options do not fit the
    function.
    """
    options["written"] = {name: options.pop(name) for name in _WRITTEN if options.get(name) is not None}
    for name in _WRITTEN:
        options.pop(name, None)
    if options.get("derivatives", "auto") not in (*METHODS, None):
        raise ModelFailed(
            f"derivatives: expected {', '.join(map(repr, METHODS))} or None, got {options['derivatives']!r}"
        )
    for name in ("inputs", "outputs"):
        _check_sizes(name, options.get(name))
    if np.isscalar(options.get("at")):
        raise ModelFailed(f"at: expected a list with a vector for each input, got {options['at']!r}")
    check_verify(options.get("verify"), "verify")
    function_options = FunctionOptions(**options)

    def mark(marked: Any) -> Any:
        setattr(marked, MARK, LazyVectorFunction(marked, function_options))
        return marked

    return mark if function is None else mark(function)


def _check_sizes(name: str, value: Any) -> None:
    """Raise ModelFailed unless a value has the form of `inputs` and `outputs`."""
    if (
        value is None
        or callable(value)
        or (isinstance(value, Mapping | Sequence | np.ndarray) and not isinstance(value, str))
    ):
        return
    size = value if isinstance(value, int | np.integer) else 3
    raise ModelFailed(f'{name}: expected [{size}] or {{"x": {size}}}, got {value!r}')


class LazyVectorFunction(VectorFunction):
    """A marked function; its sizes and derivatives are determined at first use."""

    def __init__(self, function: Callable[..., Any], options: FunctionOptions) -> None:
        self.function, self.options = function, options
        self._lock = Lock()
        self._built: VectorFunction | None = None

    def build(self, verify: Any = None) -> VectorFunction:
        """Return the function with its derivatives. Raises ModelFailed if the options do not fit the function."""
        if verify is not None:
            return add_derivatives(UserFunction(self.function, replace(self.options, verify=verify)))
        with self._lock:
            if self._built is None:
                self._built = add_derivatives(UserFunction(self.function, self.options))
            return self._built

    @property
    def input_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.build().input_names

    @property
    def output_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.build().output_names

    @property
    def vectorised(self) -> bool:  # type: ignore[override]
        return self.build().vectorised

    def input_sizes(self, config: Config) -> Sequence[int]:
        return self.build().input_sizes(config)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return self.build().output_sizes(config)

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return self.build().evaluate(inputs, config)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return self.build().gradient(output, input, inputs, sens, config)

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return self.build().apply_jacobian(output, input, inputs, vec, config)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        return self.build().apply_hessian(output, input1, input2, inputs, sens, vec, config)

    def sources(self) -> Mapping[Ability, str]:
        return self.build().sources()

    def notes(self) -> Mapping[str, Any]:
        return self.build().notes()

    def missing(self) -> Mapping[Ability, str]:
        return self.build().missing()

    def accepts(self, name: str) -> bool:
        return self.build().accepts(name)

    def close(self) -> None:
        if self._built is not None:
            self._built.close()


def build_vector_function(target: Any, verify: Any = None) -> VectorFunction:
    """Return the VectorFunction of a marked function, an instance or a subclass, with its derivatives.

    verify: takes precedence over the function's own option, unless it is None.

    Evaluates the function where sizes or derivatives are not declared. Raises ModelFailed if the options do not fit.
    """
    function = find_vector_function(target() if is_vector_function(target) and isinstance(target, type) else target)
    if function is None:
        raise ModelFailed(
            f"{type(target).__name__} is not a function of vectors: expected a function marked with @vector_function"
        )
    if isinstance(function, LazyVectorFunction):
        return function.build(verify)
    if function.derivatives is None:
        return OwnArguments(function)
    return add_derivatives(UserClassFunction(function, verify))
