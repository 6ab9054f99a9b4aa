"""Functions of vectors as models: simulators in Python with their derivatives."""

import inspect
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dragoman.core.calls import ApplyHessian, ApplyJacobian, DerivativeCall, Gradient, Infer, SignatureFor
from dragoman.core.datatypes import FP64
from dragoman.core.errors import CallerError, DragomanError, InvalidInput, InvalidOutput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.signature import OPEN, Signature, TensorSpec
from dragoman.core.spec import ModelSpec, Placement
from dragoman.core.tensor import NONE, Tensor
from dragoman.core.vector_binding import config_key
from dragoman.core.vectors import (
    ABILITIES,
    Ability,
    Config,
    Vector,
    VectorFunction,
    Vectors,
    as_matrices,
    as_vector,
    as_vectors,
    find_vector_function,
)
from dragoman.derivatives.decorator import LazyVectorFunction, build_vector_function, is_vector_function

log = logging.getLogger("dragoman.model")

_REMEMBERED = 256
# Calls of UM-Bridge are single points; so many that wait for a vectorised function are asked of it at once.
_MERGED = 64
# What makes an object a model of the `umbridge` package, which it need not be derived from.
_THEIRS = ("get_input_sizes", "get_output_sizes", "supports_evaluate", "__call__")


def is_vectors(target: Any) -> bool:
    """Return whether an object or a class is a function of vectors: ours, marked, or a model of `umbridge`."""
    return is_vector_function(target) or is_umbridge(target)


def vector_model(target: Any, spec: ModelSpec) -> "VectorModel":
    """Return the model of a function of vectors. Raises ModelFailed if it cannot be built."""
    if is_umbridge(target):
        return VectorModel(spec, Theirs(_instance(target, spec)))
    function = find_vector_function(target)
    placement: Placement = function.options.placement if isinstance(function, LazyVectorFunction) else ""
    return VectorModel(spec, build_vector_function(target), placement)


@dataclass(frozen=True, slots=True)
class Sides:
    """Inputs and outputs of a function for one config: the signature, and names and sizes of the outputs."""

    signature: Signature
    outputs: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, function: VectorFunction, config: Config) -> "Sides":
        sizes = tuple(function.output_sizes(config))
        taken = function.input_sizes(config)
        rows = function.vectorised and bool(taken)  # without inputs there is nothing to count rows by
        inputs = _specs(taken, function.input_names, "input", rows)
        outputs = _specs(sizes, function.output_names, "output", rows)
        signature = Signature(inputs, outputs, batched=rows)
        return cls(signature, tuple(spec.name for spec in outputs), tuple(int(size) for size in sizes))


def _sides(function: VectorFunction, config: Config) -> Sides:
    """Return the inputs and outputs. Raises InvalidInput if the config leads to invalid sizes."""
    try:
        return Sides.of(function, config)
    except (CallerError, InvalidOutput):
        raise
    except Exception as error:
        if not config or (isinstance(error, DragomanError) and not isinstance(error, BadSizes)):
            raise
        message = error.message if isinstance(error, BadSizes) else f"{type(error).__name__}: {error}"
        raise InvalidInput(f"config: the sizes of the vectors do not follow from it: {message}") from error


class BadSizes(ModelFailed):
    """Sizes of vectors that are not non-negative integers."""


class VectorModel(Model):
    """A VectorFunction: FP64 vectors under its names, else `input_0`, `output_0` and so on.

    A vectorised one takes many points in a call, one per row.
    """

    def __init__(self, spec: ModelSpec, function: VectorFunction, placement: Placement = "") -> None:
        super().__init__(spec)
        self.placement = placement
        self.function = function
        self._known: OrderedDict[str, Sides] = OrderedDict()

    def load(self) -> Any:
        """Set the methods that the function supports: a model's own methods declare its abilities."""
        self.merges = _MERGED if self.function.vectorised else 0
        for ability in self.function.sources():
            setattr(self, "infer" if ability == "evaluate" else ability, getattr(self, f"_{ability}"))

    # --- what it tells ---------------------------------------------------------------------------------------

    def signature(self) -> Signature:
        """Return the signature without a config; open for `umbridge` models whose sizes need one."""
        try:
            return self._under(NONE).signature
        except Exception as error:
            if not isinstance(self.function, Theirs) or not self.function.sources():
                raise
            log.warning("model '%s' has no sizes without a config: %s: %s", self.spec.name, type(error).__name__, error)
            return OPEN

    def signature_for(self, call: SignatureFor) -> Signature:
        return self._under(call.config).signature

    def details(self) -> Mapping[str, Any]:
        found = {name: source for name, source in self.function.sources().items() if name != "evaluate"}
        return {"derivatives": found, **self.function.notes()}

    def unavailable(self) -> str:
        return self.function.unavailable()

    def _under(self, config: Config) -> "Sides":
        """Return the inputs and outputs for a config; the last ones are cached."""
        key = config_key(config) if config else ""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _sides(self.function, config)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return found

    def close(self) -> Any:
        return self.function.close()

    # --- what it can do, as far as the function does -----------------------------------------------------------

    def _evaluate(self, call: Infer) -> dict[str, Tensor]:
        sides = self._under(call.config)
        inputs = [tensor.data for tensor in call.inputs.values()]
        answer = self.function.evaluate(inputs, call.config)
        if sides.signature.batched:
            found: Sequence[Vector] = as_matrices(answer, len(inputs[0]), sides.sizes)
        elif _is_the_only(answer, sides.sizes):
            return {sides.outputs[0]: Tensor(answer, FP64)}
        else:
            found = as_vectors(answer, sides.sizes)
        return {name: Tensor(vector, FP64) for name, vector in zip(sides.outputs, found, strict=True)}

    def _gradient(self, call: Gradient) -> Vector:
        inputs, output = self._where(call)
        at = _place(call.inputs, call.input)
        answer = self.function.gradient(output, at, inputs, call.sens.data, call.config)
        return as_vector(answer, len(inputs[at]), "gradient")

    def _apply_jacobian(self, call: ApplyJacobian) -> Vector:
        inputs, output = self._where(call)
        at = _place(call.inputs, call.input)
        answer = self.function.apply_jacobian(output, at, inputs, call.vec.data, call.config)
        return as_vector(answer, self._under(call.config).sizes[output], "apply_jacobian")

    def _apply_hessian(self, call: ApplyHessian) -> Vector:
        inputs, output = self._where(call)
        at = _place(call.inputs, call.input1)
        by = _place(call.inputs, call.input2)
        answer = self.function.apply_hessian(output, at, by, inputs, call.sens.data, call.vec.data, call.config)
        return as_vector(answer, len(inputs[at]), "apply_hessian")

    def _where(self, call: DerivativeCall) -> tuple[list[Vector], int]:
        """Return the inputs in order, and the position of the output."""
        outputs = self._under(call.config).outputs
        return [tensor.data for tensor in call.inputs.values()], outputs.index(str(call.output))


def _is_the_only(answer: Any, sizes: Sequence[int]) -> bool:
    """Return whether a result needs no check: it is exactly the declared array."""
    return type(answer) is np.ndarray and answer.shape == sizes and answer.dtype == np.float64


def _place(names: Mapping[str, object], name: str | int) -> int:
    return [*names].index(str(name))


def _specs(sizes: Sequence[int], names: Sequence[str], noun: str, vectorised: bool) -> tuple[TensorSpec, ...]:
    if names and len(names) != len(sizes):
        raise ModelFailed(f"expected as many {noun}s as there are names, {', '.join(names)}; got {len(sizes)} sizes")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 0:
            raise BadSizes(f"the sizes of the {noun}s: expected integers from 0, got {list(sizes)}")
    named = names or [f"{noun}_{i}" for i in range(len(sizes))]
    rows = (-1,) if vectorised else ()
    return tuple(TensorSpec(name, FP64, (*rows, int(size))) for name, size in zip(named, sizes, strict=True))


# --- models written for the umbridge package ---------------------------------------------------------------


class Theirs(VectorFunction):
    """A model of the `umbridge` package: it takes and returns lists and declares what it supports."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def input_sizes(self, config: Config) -> Sequence[int]:
        return list(self._model.get_input_sizes(dict(config)))

    def output_sizes(self, config: Config) -> Sequence[int]:
        return list(self._model.get_output_sizes(dict(config)))

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return self._model(_lists(inputs), dict(config))

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return self._model.gradient(output, input, _lists(inputs), sens.tolist(), dict(config))

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return self._model.apply_jacobian(output, input, _lists(inputs), vec.tolist(), dict(config))

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        return self._model.apply_hessian(
            output, input1, input2, _lists(inputs), sens.tolist(), vec.tolist(), dict(config)
        )

    def sources(self) -> Mapping[Ability, str]:
        return {name: "author" for name in ABILITIES if getattr(self._model, f"supports_{name}", bool)()}


def _lists(inputs: Vectors) -> list[list[float]]:
    return [vector.tolist() for vector in inputs]


def is_umbridge(target: Any) -> bool:
    """Return whether an object or a class is a model of the `umbridge` package."""
    kind = target if isinstance(target, type) else type(target)
    return not issubclass(kind, Model) and all(callable(getattr(kind, name, None)) for name in _THEIRS)


def takes_name(kind: type) -> bool:
    """Return whether the constructor of a class of the `umbridge` package takes the model's name."""
    parameters = inspect.signature(kind).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _instance(target: Any, spec: ModelSpec) -> Any:
    if not isinstance(target, type):
        return target
    return target(spec.name) if takes_name(target) else target()
