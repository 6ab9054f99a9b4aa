"""A plain function as a `VectorFunction`, with the derivatives that its author has written."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dragoman.core.errors import DragomanError, InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.vector_answers import as_vectors, number_array, parts
from dragoman.core.vectors import ABILITIES, Ability, Config, Vector, VectorFunction, Vectors
from dragoman.derivatives.annotations import annotated_inputs, annotated_outputs
from dragoman.derivatives.config_cache import OfConfig
from dragoman.derivatives.vector_callable import Callee, callee, derivative_callee

# Sizes as an author gives them: numbers, names with numbers, or what a config makes of them.
Sizes = Sequence[int] | Mapping[str, int] | Callable[[Config], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What `@vector_function` says of a function; see there for the meaning of each."""

    inputs: Sizes | None = None
    outputs: Sizes | None = None
    at: Sequence[Any] | None = None
    derivatives: str | None = "auto"
    vectorised: bool | None = None
    linear: bool = False
    written: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    verify_derivatives: bool = True
    evaluate_at_load: bool = True
    max_evaluations: int = 10_000
    name: str = ""
    placement: str = ""


class Authored(VectorFunction):
    """The function itself, and what its author has written of its derivatives; raises ModelFailed where they clash."""

    def __init__(self, function: Callable[..., Any], declared: Declared) -> None:
        self.declared = declared
        sized_by_config = callable(declared.inputs) or callable(declared.outputs)
        self.callee = callee(function, sized_by_config)
        self.name = self.callee.name
        self.vectorised = bool(declared.vectorised)
        self._inputs = _input_sizes(self.callee, declared)
        self._declared_outputs = declared.outputs if declared.outputs is not None else annotated_outputs(function)
        self._tried = OfConfig(lambda config: self.tried_outputs(lambda inputs, config: self.answer(config), config))
        self.answer = OfConfig(lambda config: self.evaluate(self.point(config), config))
        self.input_names = _names(declared.inputs) or self.callee.vectors
        self.output_names = _names(declared.outputs)
        if self.callee.open_ended and not _names(declared.inputs):
            self.input_names = ()
        written = _written(declared.written, self._count(), sized_by_config)
        self.written: Collection[str] = written
        self._methods = _methods(written)

    def input_sizes(self, config: Config) -> tuple[int, ...]:
        return _sizes_of(self._inputs, config, "inputs") if callable(self._inputs) else tuple(self._inputs)

    def output_sizes(self, config: Config) -> tuple[int, ...]:
        declared = self.declared_outputs(config)
        return self._tried(config) if declared is None else declared

    def declared_outputs(self, config: Config) -> tuple[int, ...] | None:
        """The sizes of the outputs, where the author has said them."""
        declared = self._declared_outputs
        if callable(declared):
            return _sizes_of(declared, config, "outputs")
        if declared is None:
            return None
        return tuple(declared.values() if isinstance(declared, Mapping) else declared)

    def tried_outputs(self, evaluate: Callable[[Vectors, Config], Any], config: Config) -> tuple[int, ...]:
        """The sizes of what `evaluate` gives at a point."""
        try:
            answer = evaluate(self.point(config), config)
        except DragomanError:
            raise
        except Exception as fault:
            raise ModelFailed(
                f"function '{self.name}' raised {type(fault).__name__} where it was tried for the sizes of its "
                f"outputs: {fault}; declare outputs=[...], or a point where it can be tried, at=[...]"
            ) from fault
        found = [number_array(each, f"output {i}") for i, each in enumerate(parts(answer))]
        if any(each.ndim > 1 for each in found):
            raise InvalidOutput(f"expected output vectors, got shapes {[list(each.shape) for each in found]}")
        return tuple(each.size for each in found)

    def trial(self, config: Config) -> tuple[Vector, ...]:
        """The outputs at the point where the function may be tried; it is evaluated there once for each config."""
        return as_vectors(self.answer(config), self.output_sizes(config))

    def evaluate(self, inputs: Sequence[Any], config: Config) -> Any:
        return self.callee(inputs, config)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        given = {"output": output, "input": input, "inputs": inputs, "sens": sens, "config": config}
        return self._methods["gradient"](given)

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        given = {"output": output, "input": input, "inputs": inputs, "vec": vec, "config": config}
        return self._methods["apply_jacobian"](given)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        where = {"output": output, "input1": input1, "input2": input2}
        return self._methods["apply_hessian"]({**where, "inputs": inputs, "sens": sens, "vec": vec, "config": config})

    def sources(self) -> Mapping[Ability, str]:
        return {name: "author" for name in ABILITIES if name == "evaluate" or name in self._methods}

    def notes(self) -> Mapping[str, Any]:
        return {"point": [x.tolist() for x in self.point({})]} if self.declared.at is not None else {}

    def point(self, config: Config) -> tuple[Vector, ...]:
        """A point where the function may be tried: the author's `at`, or numbers between 0.3 and 0.8."""
        sizes = self.input_sizes(config)
        found = tuple(np.asarray(each, np.float64).reshape(-1) for each in self.declared.at or ())
        if tuple(each.size for each in found) == sizes:
            return found
        return tuple(
            0.3 + 0.5 * np.modf(0.618034 * np.arange(1, size + 1) + 0.1 * i)[0] for i, size in enumerate(sizes)
        )

    def _count(self) -> int:
        return len(self.callee.vectors) or len(self.input_sizes({}))


def _names(sizes: Sizes | None) -> tuple[str, ...]:
    return tuple(sizes) if isinstance(sizes, Mapping) else ()


def _input_sizes(function: Callee, declared: Declared) -> Sequence[int] | Callable[[Config], Sequence[int]]:
    if callable(declared.inputs):
        return declared.inputs
    if declared.inputs is not None:
        sizes = tuple(declared.inputs.values() if isinstance(declared.inputs, Mapping) else declared.inputs)
    elif declared.at is not None:
        sizes = tuple(np.size(each) for each in declared.at)
    else:
        sizes = annotated_inputs(function)
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in sizes):
        raise ModelFailed(f"function '{function.name}': inputs: expected sizes, got {list(sizes)}")
    if not function.open_ended and len(sizes) != len(function.vectors):
        raise ModelFailed(
            f"function '{function.name}': inputs: expected {len(function.vectors)} sizes, for "
            f"{', '.join(function.vectors)}; got {len(sizes)}"
        )
    return sizes


def _sizes_of(function: Callable[[Config], Sequence[int]], config: Config, what: str) -> tuple[int, ...]:
    """The sizes under a config; InvalidInput where it gives none, for the config is what they come from."""
    try:
        sizes = tuple(function(config))
    except DragomanError:
        raise
    except Exception as error:
        raise InvalidInput(f"config: no sizes of {what} follow from it: {type(error).__name__}: {error}") from error
    if not all(isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 0 for size in sizes):
        raise InvalidInput(f"config: expected sizes of {what} that are integers from 0, got {list(sizes)}")
    return tuple(int(size) for size in sizes)


# --- what an author has written --------------------------------------------------------------------------

Given = Mapping[str, Any]
_WHERE: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("gradient", "apply_jacobian", "jacobian"), frozenset({"input"})),
    **dict.fromkeys(("apply_hessian", "hessian"), frozenset({"input1", "input2"})),
}


def _written(functions: Mapping[str, Callable[..., Any]], count: int, sized_by_config: bool) -> Mapping[str, Callee]:
    found = {name: derivative_callee(function, count, sized_by_config) for name, function in functions.items()}
    for name, each in found.items():
        missing = _WHERE[name] - each.asked
        if count > 1 and missing:
            raise ModelFailed(
                f"{name} '{each.name}': of a function of {count} vectors; expected a parameter '{min(missing)}', which "
                "says by which vector"
            )
    return found


def _methods(written: Mapping[str, Callee]) -> Mapping[str, Callable[[Given], Any]]:
    """The abilities that follow from what is written; a function of an action goes before a whole matrix."""
    found: dict[str, Callable[[Given], Any]] = {}
    if "jacobian" in written:
        found["gradient"] = lambda given: _jacobian(written["jacobian"], given).T @ np.asarray(given["sens"])
        found["apply_jacobian"] = lambda given: _jacobian(written["jacobian"], given) @ np.asarray(given["vec"])
    if "hessian" in written:
        found["apply_hessian"] = lambda given: _hessian(written["hessian"], given)
    for name in ABILITIES[1:]:
        if name in written:
            found[name] = _action(written[name], name)
    return found


def _action(function: Callee, name: str) -> Callable[[Given], Any]:
    def act(given: Given) -> Any:
        asked = {key: value for key, value in given.items() if key not in ("inputs", "config")}
        answer = function(given["inputs"], given["config"], **asked)
        if "sens" in given and "sens" not in function.asked:
            return _times(answer, given["sens"], f"{name} without 'sens'")
        return answer

    return act


def _times(answer: Any, sens: Vector, what: str) -> Any:
    """What a function gives for an output of one number, for any weight of that number."""
    if len(sens) != 1:
        raise InvalidOutput(f"{what}: expected an output of one number, got {len(sens)}")
    return answer * sens[0] if hasattr(answer, "dtype") else number_array(answer, what) * sens[0]


def _jacobian(function: Callee, given: Given) -> Any:
    where = {"output": given["output"], "input": given["input"]}
    matrix = _matrix(function(given["inputs"], given["config"], **where), "jacobian")
    columns = len(given["inputs"][given["input"]])
    if matrix.ndim == 1:
        matrix = matrix.reshape(1, -1)
    rows = len(given["sens"]) if "sens" in given else matrix.shape[0]
    if tuple(matrix.shape) != (rows, columns):
        raise InvalidOutput(f"jacobian: expected a matrix of shape {[rows, columns]}, got {list(matrix.shape)}")
    return matrix


def _hessian(function: Callee, given: Given) -> Any:
    where = {key: given[key] for key in ("output", "input1", "input2")}
    found = _matrix(function(given["inputs"], given["config"], **where), "hessian")
    sens, (rows, columns) = given["sens"], (len(given["inputs"][where[key]]) for key in ("input1", "input2"))
    if found.ndim == 2 and len(sens) == 1:
        found = found[None]
    if tuple(found.shape) != (len(sens), rows, columns):
        raise InvalidOutput(f"hessian: expected shape {[len(sens), rows, columns]}, got {list(found.shape)}")
    return np.asarray(np.einsum("o,oij,j->i", sens, number_array(found, "hessian"), given["vec"]))


def _matrix(answer: Any, what: str) -> Any:
    """Return the author's answer as an array of NumPy; a complex one stays complex for the complex step."""
    found = np.asarray(answer) if isinstance(answer, list | tuple | np.ndarray) else answer
    return found if isinstance(found, np.ndarray) and found.dtype.kind == "c" else number_array(answer, what)
