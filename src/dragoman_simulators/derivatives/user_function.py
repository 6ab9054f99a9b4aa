"""A user's function, or class of functions, as a `VectorFunction` with the derivatives that the user has written."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np

from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.spec import Placement
from dragoman.core.vector_binding import config_key
from dragoman.core.vectors import (
    ABILITIES,
    Ability,
    Config,
    OwnArguments,
    Vector,
    VectorFunction,
    Vectors,
    as_vectors,
    number_array,
    split_outputs,
)
from dragoman_simulators.derivatives.derived import sample_point
from dragoman_simulators.derivatives.vector_callable import (
    VectorCallable,
    annotated_inputs,
    annotated_outputs,
    inspect_derivative,
    inspect_function,
)

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


T = TypeVar("T")

_MAX_CONFIGS = 32


class ConfigCache(Generic[T]):
    """Call `create(config)` once for each of the last 32 configs used, in one thread at a time.

    Exceptions of `create` are raised to the caller and not cached.
    """

    def __init__(self, create: Callable[[Config], T]) -> None:
        self._create = create
        self._values: OrderedDict[str, T] = OrderedDict()
        self._lock = Lock()

    def __call__(self, config: Config) -> T:
        key = config_key(config)
        with self._lock:
            if key not in self._values:
                self._values[key] = self._create(dict(config))
            self._values.move_to_end(key)
            if len(self._values) > _MAX_CONFIGS:
                self._values.popitem(last=False)
            return self._values[key]


# Sizes of vectors as users declare them: numbers, names with numbers, or a function of the config.
Sizes = Sequence[int] | Mapping[str, int] | Callable[[Config], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionOptions:
    """The arguments of `@vector_function`, which documents them. `written`: derivatives by name."""

    inputs: Sizes | None = None
    outputs: Sizes | None = None
    at: Sequence[Any] | None = None
    derivatives: str | None = "auto"
    vectorised: bool | None = None
    linear: bool = False
    written: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    verify: Any = None  # checked when it is used
    evaluate_at_load: bool = True
    max_evaluations: int = 10_000
    noise: float = 0.0
    step: float = 0.0
    name: str = ""
    placement: Placement = ""


class UserFunction(VectorFunction):
    """A marked function with its written derivatives. Raises ModelFailed if the options do not fit the function."""

    def __init__(self, function: Callable[..., Any], options: FunctionOptions) -> None:
        self.options = options
        sized_by_config = callable(options.inputs) or callable(options.outputs)
        self._callable = inspect_function(function, sized_by_config)
        self.name = self._callable.name
        self.vectorised = bool(options.vectorised)
        self._inputs = _declared_inputs(self._callable, options)
        self._outputs = options.outputs if options.outputs is not None else annotated_outputs(function)
        self._inferred_sizes = ConfigCache(
            lambda config: self.infer_output_sizes(lambda inputs, config: self.sample_result(config), config)
        )
        self.sample_result = ConfigCache(lambda config: self.evaluate(self.sample_point(config), config))
        self.input_names = _names(options.inputs) or self._callable.vectors
        self.output_names = _names(options.outputs)
        if self._callable.variadic and not _names(options.inputs):
            self.input_names = ()
        count = len(self._callable.vectors) or len(self.input_sizes({}))
        written = inspect_derivatives(options.written, count, sized_by_config)
        self.written: Collection[str] = written
        self._methods = derivative_methods(written)

    def input_sizes(self, config: Config) -> tuple[int, ...]:
        return _config_sizes(self._inputs, config, "inputs") if callable(self._inputs) else tuple(self._inputs)

    def output_sizes(self, config: Config) -> tuple[int, ...]:
        declared = self.declared_output_sizes(config)
        return self._inferred_sizes(config) if declared is None else declared

    def declared_output_sizes(self, config: Config) -> tuple[int, ...] | None:
        """Return the sizes of the outputs; None if the user has not declared them."""
        outputs = self._outputs
        if callable(outputs):
            return _config_sizes(outputs, config, "outputs")
        if outputs is None:
            return None
        return tuple(outputs.values() if isinstance(outputs, Mapping) else outputs)

    def infer_output_sizes(self, evaluate: Callable[[Vectors, Config], Any], config: Config) -> tuple[int, ...]:
        """Evaluate at the sample point and return the sizes of the result. Raises ModelFailed if that fails."""
        try:
            result = evaluate(self.sample_point(config), config)
        except DragomanError:
            raise
        except Exception as error:
            raise ModelFailed(
                f"function '{self.name}' raised {type(error).__name__} when it was evaluated to infer the sizes of its "
                f"outputs: {error}; declare outputs=[...], or a point where it can be evaluated, at=[...]"
            ) from error
        arrays = [number_array(each, f"output {i}") for i, each in enumerate(split_outputs(result))]
        if any(each.ndim > 1 for each in arrays):
            raise InvalidOutput(f"expected output vectors, got shapes {[list(each.shape) for each in arrays]}")
        return tuple(each.size for each in arrays)

    def sample_point(self, config: Config) -> tuple[Vector, ...]:
        """Return the point used for inference of sizes and for checks: `at`, or numbers between 0.3 and 0.8."""
        sizes = self.input_sizes(config)
        declared = tuple(np.asarray(each, np.float64).reshape(-1) for each in self.options.at or ())
        if tuple(each.size for each in declared) == sizes:
            return declared
        return sample_point(sizes)

    def sample_outputs(self, config: Config) -> tuple[Vector, ...]:
        """Return the outputs at the sample point, where the function is evaluated once for each config."""
        return as_vectors(self.sample_result(config), self.output_sizes(config))

    def evaluate(self, inputs: Sequence[Any], config: Config) -> Any:
        return self._callable(inputs, config)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return self._methods["gradient"](
            {"output": output, "input": input, "inputs": inputs, "sens": sens, "config": config}
        )

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return self._methods["apply_jacobian"](
            {"output": output, "input": input, "inputs": inputs, "vec": vec, "config": config}
        )

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        indices = {"output": output, "input1": input1, "input2": input2}
        return self._methods["apply_hessian"]({**indices, "inputs": inputs, "sens": sens, "vec": vec, "config": config})

    def accepts(self, name: str) -> bool:
        return self._callable.accepts(name)

    def sources(self) -> Mapping[Ability, str]:
        return {name: "author" for name in ABILITIES if name == "evaluate" or name in self._methods}

    def notes(self) -> Mapping[str, Any]:
        point = {"point": [x.tolist() for x in self.sample_point({})]} if self.options.at is not None else {}
        return point if self.options.evaluate_at_load else {**point, "evaluate_at_load": False}


class UserClassFunction(UserFunction):
    """An instance of a user's VectorFunction class that requests derivatives by its attribute `derivatives`."""

    def __init__(self, function: VectorFunction, verify: Any = None) -> None:
        self._function = OwnArguments(function)
        self.options = FunctionOptions(
            derivatives=function.derivatives,
            vectorised=function.vectorised,
            verify=function.verify if verify is None else verify,
            noise=function.noise,
            step=function.step,
            evaluate_at_load=function.evaluate_at_load,
            max_evaluations=function.max_evaluations,
        )
        self.vectorised = function.vectorised
        self.name = type(function).__name__
        self.input_names, self.output_names = function.input_names, function.output_names
        self.written = frozenset(function.sources())
        self.sample_result = ConfigCache(lambda config: self.evaluate(self.sample_point(config), config))

    def input_sizes(self, config: Config) -> tuple[int, ...]:
        return tuple(self._function.input_sizes(config))

    def declared_output_sizes(self, config: Config) -> tuple[int, ...]:
        return tuple(self._function.output_sizes(config))

    def evaluate(self, inputs: Sequence[Any], config: Config) -> Any:
        return self._function.evaluate(inputs, config)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return self._function.gradient(output, input, inputs, sens, config)

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return self._function.apply_jacobian(output, input, inputs, vec, config)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        return self._function.apply_hessian(output, input1, input2, inputs, sens, vec, config)

    def accepts(self, name: str) -> bool:
        return self._function.accepts(name)

    def sources(self) -> Mapping[Ability, str]:
        return self._function.sources()

    def notes(self) -> Mapping[str, Any]:
        return self._function.notes()

    def close(self) -> None:
        self._function.close()


def _names(sizes: Sizes | None) -> tuple[str, ...]:
    return tuple(sizes) if isinstance(sizes, Mapping) else ()


def _declared_inputs(
    function: VectorCallable, options: FunctionOptions
) -> Sequence[int] | Callable[[Config], Sequence[int]]:
    """Return the sizes of inputs from `inputs`, `at` or annotations. Raises ModelFailed if they do not fit."""
    if callable(options.inputs):
        return options.inputs
    if options.inputs is not None:
        sizes = tuple(options.inputs.values() if isinstance(options.inputs, Mapping) else options.inputs)
    elif options.at is not None:
        sizes = tuple(np.size(each) for each in options.at)
    else:
        sizes = annotated_inputs(function)
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in sizes):
        raise ModelFailed(f"function '{function.name}': inputs: expected sizes, got {list(sizes)}")
    if not function.variadic and len(sizes) != len(function.vectors):
        raise ModelFailed(
            f"function '{function.name}': inputs: expected {len(function.vectors)} sizes, for "
            f"{', '.join(function.vectors)}; got {len(sizes)}"
        )
    return sizes


def _config_sizes(function: Callable[[Config], Sequence[int]], config: Config, name: str) -> tuple[int, ...]:
    """Return the sizes that the user's function computes from the config. Raises InvalidInput if it computes none."""
    try:
        sizes = tuple(function(config))
    except DragomanError:
        raise
    except Exception as error:
        raise InvalidInput(
            f"config: cannot compute the sizes of {name} from it: {type(error).__name__}: {error}"
        ) from error
    if not all(isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 0 for size in sizes):
        raise InvalidInput(f"config: expected sizes of {name} that are non-negative integers, got {list(sizes)}")
    return tuple(int(size) for size in sizes)
