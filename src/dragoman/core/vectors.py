"""Functions of vectors, such as simulators: several float vectors in and out, with derivatives; checks of results.

A function never shares memory with its caller: `OwnArguments` and `call_with_copies` copy what goes in and out, so code
that writes into its arguments, or returns the same array twice, changes no other evaluation.

`derivatives` and `graphs` work on this interface; a runtime makes a `Model` of it.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from dragoman.core.errors import InvalidOutput

Vector = npt.NDArray[np.float64]
Vectors = Sequence[Vector]
Config = Mapping[str, Any]

Ability = Literal["evaluate", "gradient", "apply_jacobian", "apply_hessian"]
ABILITIES: tuple[Ability, ...] = ("evaluate", "gradient", "apply_jacobian", "apply_hessian")

T = TypeVar("T")

_FLOAT64 = np.dtype(np.float64)


@dataclass(frozen=True, slots=True)
class Estimate:
    """An approximate derivative, with an estimate of the absolute error of each element."""

    value: Vector
    error: Vector

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.value, dtype)


# The attribute under which a plain function carries the VectorFunction that it was declared to be.
MARK = "__vector_function__"


class VectorFunction:
    """y_0, ..., y_m = F(x_0, ..., x_n; config), of float64 vectors. Subclasses override what they support.

    With J the derivative of output `output` by input `input`:

    - `gradient` is Jᵀ sens, as long as that input; sens is as long as that output;
    - `apply_jacobian` is J vec, as long as that output; vec is as long as that input;
    - `apply_hessian` is d/d x_input2 (J_input1ᵀ sens) · vec, as long as input1; vec is as long as input2.

    (Source: the UM-Bridge interface.) Arguments may be changed: callers use `OwnArguments` for code of users. Results
    may be arrays, lists or scalars, and an `Estimate` for approximate derivatives; the caller checks them. Methods may
    be called from several threads at a time.

    - `vectorised`: `evaluate` also accepts matrices whose rows are points, and returns matrices with as many rows.
    - `concurrency`: useful number of threads; more than one for functions that wait for other servers.
    - `needs_value`: the caller checks that the value at a point is finite before it asks for derivatives there.
    - `derivatives`: how missing derivatives are added, as for `@vector_function` ("auto", "jax", ...); None adds none.
    - `verify`, `evaluate_at_load`, `max_evaluations`, `noise`, `step`: options of added
      derivatives, as for `@vector_function`.
    """

    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    vectorised: bool = False
    concurrency: int = 1
    derivatives: str | None = None
    needs_value: bool = True
    verify: Literal["always", "sampled", "never"] | None = None
    evaluate_at_load: bool = True
    max_evaluations: int = 10_000
    noise: float = 0.0
    step: float = 0.0

    def input_sizes(self, config: Config) -> Sequence[int]:
        raise NotImplementedError

    def output_sizes(self, config: Config) -> Sequence[int]:
        raise NotImplementedError

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        raise NotImplementedError

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        raise NotImplementedError

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        raise NotImplementedError

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        raise NotImplementedError

    def sources(self) -> Mapping[Ability, str]:
        """Return the supported operations and where each comes from: "author", "torch", "jax", "complex step", "dual
        numbers", "finite differences", "graph", ... By default every overridden method is the author's.
        """
        return {
            name: "author"
            for name in ABILITIES
            if getattr(type(self), name) is not getattr(VectorFunction, name) or name in vars(self)
        }

    def notes(self) -> Mapping[str, Any]:
        """Return further metadata as JSON values, e.g. cost and accuracy of derivatives."""
        return {}

    def missing(self) -> Mapping[Ability, str]:
        """Return why operations are not supported, as far as that is known."""
        return {}

    def accepts(self, name: str) -> bool:
        """Return whether the config may have an entry of this name."""
        return True

    def unavailable(self) -> str:
        """Return why it cannot answer now, e.g. because a server is down; "" if it can. Must return at once."""
        return ""

    def close(self) -> None:
        """Free connections and threads."""


class FunctionWrapper(VectorFunction):
    """Forward everything to the function, except methods that a subclass replaces."""

    def __init__(self, function: VectorFunction) -> None:
        self._function = function
        self.input_names, self.output_names = function.input_names, function.output_names
        self.vectorised, self.concurrency = function.vectorised, function.concurrency
        self.input_sizes = function.input_sizes  # type: ignore[method-assign]
        self.output_sizes = function.output_sizes  # type: ignore[method-assign]
        self.sources = function.sources  # type: ignore[method-assign]
        self.notes = function.notes  # type: ignore[method-assign]
        self.missing = function.missing  # type: ignore[method-assign]
        self.accepts = function.accepts  # type: ignore[method-assign]
        self.unavailable = function.unavailable  # type: ignore[method-assign]
        for ability in ABILITIES:
            setattr(self, ability, getattr(function, ability))

    def close(self) -> None:
        self._function.close()


class OwnArguments(FunctionWrapper):
    """A function that gets its own copies of all arguments, and whose results are copies."""

    def __init__(self, function: VectorFunction) -> None:
        super().__init__(function)
        for ability in ABILITIES:
            setattr(self, ability, _with_copies(getattr(function, ability)))


def _with_copies(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: call_with_copies(method, *arguments)


def call_with_copies(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function with copies of all vectors and configs; return a copy of its result."""
    copies = {name: _copy(value) for name, value in options.items()} if options else {}
    return _copy(function(*map(_copy, arguments), **copies))


def _copy(value: Any) -> Any:
    """Copy arrays, tensors of PyTorch, and lists, tuples and mappings of them; other values cannot be changed.

    A copy of a tensor keeps its place in the graph of operations.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is list or type(value) is tuple:
        return value[:] if value and isinstance(value[0], int | float) else type(value)(map(_copy, value))
    if isinstance(value, Mapping):
        return deepcopy(dict(value)) if value else {}
    return value.clone() if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "clone") else value


def find_vector_function(target: Any) -> VectorFunction | None:
    """Return the VectorFunction that an object is or carries; None if there is none."""
    candidate = target if isinstance(target, VectorFunction) else getattr(target, "__dict__", {}).get(MARK)
    return candidate if isinstance(candidate, VectorFunction) else None


def replace_item(inputs: Sequence[T], index: int, value: T) -> tuple[T, ...]:
    return (*inputs[:index], value, *inputs[index + 1 :])


# --- results of functions --------------------------------------------------------------------------------


def as_vectors(result: Any, sizes: Sequence[int]) -> tuple[Vector, ...]:
    """Return the outputs of `evaluate`, a float64 vector for each size. Raises InvalidOutput naming the output.

    A tuple has one item per output, and so has a list or a matrix whose items are vectors. Anything else is the only
    output: an array of one axis, a list of numbers, or one number.
    """
    if len(sizes) == 1 and _is_vector_of(result, sizes[0]):  # the usual case
        return (result,)
    outputs = split_outputs(result)
    if len(outputs) != len(sizes):
        raise InvalidOutput(f"expected {len(sizes)} output vectors, got {len(outputs)}")
    return tuple(as_vector(y, size, f"output {i}") for i, (y, size) in enumerate(zip(outputs, sizes, strict=True)))


def as_vector(result: Any, size: int, name: str) -> Vector:
    """Return an array of one axis, a list of numbers, or one number as a vector of `size` numbers. `name` is for the
    message of InvalidOutput. An `Estimate` is its value."""
    if isinstance(result, Estimate):
        result = result.value
    if _is_vector_of(result, size):
        return result
    vector = number_array(result, name)
    if vector.ndim == 0:
        vector = vector.reshape(1)
    if vector.ndim != 1:
        raise InvalidOutput(f"{name}: expected a vector of {size} numbers, got shape {list(vector.shape)}")
    if len(vector) != size:
        raise InvalidOutput(f"{name}: expected {size} numbers, got {len(vector)}")
    return vector


def _is_vector_of(result: Any, size: int) -> TypeGuard[Vector]:
    return type(result) is np.ndarray and result.shape == (size,) and result.dtype == _FLOAT64


def as_matrices(result: Any, rows: int, sizes: Sequence[int]) -> list[Vector]:
    """Return the outputs of a vectorised `evaluate`, a matrix [rows, size] each. Raises InvalidOutput.

    An output of size one may be a vector with one number per row; a single row may be a vector.
    """
    several = isinstance(result, tuple | list) and len(result) == len(sizes)
    outputs = list(result) if several else [result]
    if len(outputs) != len(sizes):
        got = len(result) if isinstance(result, tuple) else 1
        raise InvalidOutput(f"expected {len(sizes)} outputs, got {got}")
    return [_as_matrix(y, rows, size, f"output {i}") for i, (y, size) in enumerate(zip(outputs, sizes, strict=True))]


def _as_matrix(result: Any, rows: int, size: int, name: str) -> Vector:
    array = number_array(result, name)
    if array.shape != (rows, size) and not (array.size == rows * size and array.ndim <= 1 and 1 in (rows, size)):
        raise InvalidOutput(f"{name}: expected shape {[rows, size]}, got {list(array.shape)}")
    return array.reshape(rows, size)


def number_array(result: Any, name: str) -> Vector:
    """Return an array of NumPy, PyTorch or JAX, a list or a scalar as a float64 array. Raises InvalidOutput."""
    if hasattr(result, "detach"):  # a PyTorch tensor, which may require gradients
        result = result.detach().cpu().numpy()
    try:
        array = np.asarray(result)
    except (TypeError, ValueError) as error:
        raise InvalidOutput(f"{name}: expected numbers, got {type(result).__name__}: {error}") from error
    if array.dtype.kind not in "fiu":
        if array.size == 0:
            return np.zeros(array.shape)
        hint = "; return its real part (.real) if the imaginary part is zero" if array.dtype.kind == "c" else ""
        raise InvalidOutput(f"{name}: expected real numbers, got {type(result).__name__} of {array.dtype.name}{hint}")
    return np.asarray(array, np.float64)


def split_outputs(result: Any) -> tuple[Any, ...]:
    """Return the result of `evaluate` as a tuple with one item per output."""
    if isinstance(result, tuple):
        return result
    if isinstance(result, list) and result and all(_is_vector(item) for item in result):
        return tuple(result)
    return tuple(result) if getattr(result, "ndim", 0) == 2 else (result,)


def _is_vector(value: Any) -> bool:
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0
