"""Vector functions as models: simulators in Python with their derivatives, and models of the `umbridge` package."""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

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
from dragoman.system.threads import DaemonThreads, run_cancellable
from dragoman_simulators.derivatives.decorator import LazyVectorFunction, build_vector_function
from dragoman_simulators.vector_model import is_umbridge, takes_name

A = TypeVar("A")
C = TypeVar("C")

log = logging.getLogger("dragoman.model")

_CACHED_CONFIGS = 256


def vector_model(target: Any, spec: ModelSpec) -> "VectorModel":
    """Return the model of a vector function. Raises ModelFailed if it cannot be built."""
    if is_umbridge(target):
        return VectorModel(spec, UmBridgeFunction(_instance(target, spec)))
    found = find_vector_function(target)
    placement: Placement = found.options.placement if isinstance(found, LazyVectorFunction) else ""
    function = build_vector_function(target, spec.parameters.get("verify"))
    if function.concurrency > 1:
        return WaitingModel(spec, function, function.concurrency, placement)
    return VectorModel(spec, function, placement)


@dataclass(frozen=True, slots=True)
class Interface:
    """Inputs and outputs of a vector function for one config."""

    signature: Signature
    outputs: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, function: VectorFunction, config: Config) -> "Interface":
        sizes = tuple(function.output_sizes(config))
        input_sizes = function.input_sizes(config)
        rows = function.vectorised and bool(input_sizes)  # without inputs the number of rows is unknown
        inputs = _specs(input_sizes, function.input_names, "input", rows)
        outputs = _specs(sizes, function.output_names, "output", rows)
        signature = Signature(inputs, outputs, batched=rows)
        return cls(signature, tuple(spec.name for spec in outputs), tuple(int(size) for size in sizes))


def _interface(function: VectorFunction, config: Config) -> Interface:
    """Return the interface. Raises InvalidInput if the config leads to invalid sizes."""
    try:
        return Interface.of(function, config)
    except (CallerError, InvalidOutput):
        raise
    except Exception as error:
        if not config or (isinstance(error, DragomanError) and not isinstance(error, BadSizes)):
            raise
        message = error.message if isinstance(error, BadSizes) else f"{type(error).__name__}: {error}"
        raise InvalidInput(f"config: no valid sizes of the vectors: {message}") from error


class BadSizes(ModelFailed):
    """Sizes that are not integers from 0."""


class VectorModel(Model):
    """A VectorFunction: FP64 vectors under its names, else `input_0`, `output_0` and so on.

    A vectorised one takes many points in a call, one per row.
    """

    def __init__(self, spec: ModelSpec, function: VectorFunction, placement: Placement = "") -> None:
        super().__init__(spec)
        self.placement = placement
        self.function = function
        self._interfaces: OrderedDict[str, Interface] = OrderedDict()

    def load(self) -> Any:
        """Set the methods that the function supports: methods declare the abilities of a model."""
        for ability in self.function.sources():
            setattr(self, "infer" if ability == "evaluate" else ability, getattr(self, f"_{ability}"))

    def signature(self) -> Signature:
        """Return the signature without a config; open for `umbridge` models whose sizes need one."""
        try:
            return self._interface(NONE).signature
        except Exception as error:
            if not isinstance(self.function, UmBridgeFunction) or not self.function.sources():
                raise
            log.warning("model '%s' has no sizes without a config: %s: %s", self.spec.name, type(error).__name__, error)
            return OPEN

    def signature_for(self, call: SignatureFor) -> Signature:
        return self._interface(call.config).signature

    def details(self) -> Mapping[str, Any]:
        sources = {name: source for name, source in self.function.sources().items() if name != "evaluate"}
        missing = self.function.missing()
        reasons = {"missing_derivatives": dict(missing)} if missing else {}
        return {"derivatives": sources, **reasons, **self.function.notes()}

    def example_inputs(self) -> Mapping[str, Any] | None:
        """Return the declared point, as one row of a vectorised function."""
        point, specs = self.function.notes().get("point"), self.signature().inputs
        if point is None or [len(x) for x in point] != [spec.shape[-1] for spec in specs if spec.shape]:
            return None
        vectors = zip(specs, point, strict=True)
        return {
            spec.name: np.array(x, np.float64).reshape((1,) * (len(spec.shape or ()) - 1) + (-1,))
            for spec, x in vectors
        }

    def unavailable(self) -> str:
        return self.function.unavailable()

    def _interface(self, config: Config) -> "Interface":
        """Return the interface for a config; the last ones are cached."""
        key = config_key(config) if config else ""
        interface = self._interfaces.get(key)
        if interface is None:
            interface = self._interfaces[key] = _interface(self.function, config)
            if len(self._interfaces) > _CACHED_CONFIGS:
                self._interfaces.popitem(last=False)
        return interface

    def close(self) -> Any:
        return self.function.close()

    def _evaluate(self, call: Infer) -> dict[str, Tensor]:
        interface = self._interface(call.config)
        inputs = [tensor.data for tensor in call.inputs.values()]
        result = self.function.evaluate(inputs, call.config)
        if interface.signature.batched:
            outputs: Sequence[Vector] = as_matrices(result, len(inputs[0]), interface.sizes)
        elif type(result) is np.ndarray and result.shape == interface.sizes and result.dtype is FP64.dtype:
            return {interface.outputs[0]: Tensor(result, FP64)}  # exactly the declared array
        else:
            outputs = as_vectors(result, interface.sizes)
        return {name: Tensor(vector, FP64) for name, vector in zip(interface.outputs, outputs, strict=True)}

    def _gradient(self, call: Gradient) -> Vector:
        inputs, output = self._inputs_and_output(call)
        index = _index(call.inputs, call.input)
        result = self.function.gradient(output, index, inputs, call.sens.data, call.config)
        return as_vector(result, len(inputs[index]), "gradient")

    def _apply_jacobian(self, call: ApplyJacobian) -> Vector:
        inputs, output = self._inputs_and_output(call)
        index = _index(call.inputs, call.input)
        result = self.function.apply_jacobian(output, index, inputs, call.vec.data, call.config)
        return as_vector(result, self._interface(call.config).sizes[output], "apply_jacobian")

    def _apply_hessian(self, call: ApplyHessian) -> Vector:
        inputs, output = self._inputs_and_output(call)
        index = _index(call.inputs, call.input1)
        index2 = _index(call.inputs, call.input2)
        result = self.function.apply_hessian(output, index, index2, inputs, call.sens.data, call.vec.data, call.config)
        return as_vector(result, len(inputs[index]), "apply_hessian")

    def _inputs_and_output(self, call: DerivativeCall) -> tuple[list[Vector], int]:
        outputs = self._interface(call.config).outputs
        return [tensor.data for tensor in call.inputs.values()], outputs.index(str(call.output))


class WaitingModel(VectorModel):
    """A vector function that waits for remote or sibling models: up to `concurrency` calls, each in a thread."""

    def __init__(
        self, spec: ModelSpec, function: VectorFunction, concurrency: int, placement: Placement = "inline"
    ) -> None:
        super().__init__(spec, function, placement)
        self._threads = DaemonThreads(concurrency, f"{type(self).__name__}-{spec.name}")

    def close(self) -> Any:
        self._threads.shutdown(wait=False, cancel_futures=True)
        super().close()

    async def _evaluate(self, call: Infer) -> dict[str, Tensor]:  # type: ignore[override]
        return await self._run(super()._evaluate, call)

    async def _gradient(self, call: Gradient) -> Vector:  # type: ignore[override]
        return await self._run(super()._gradient, call)

    async def _apply_jacobian(self, call: ApplyJacobian) -> Vector:  # type: ignore[override]
        return await self._run(super()._apply_jacobian, call)

    async def _apply_hessian(self, call: ApplyHessian) -> Vector:  # type: ignore[override]
        return await self._run(super()._apply_hessian, call)

    async def signature_for(self, call: SignatureFor) -> Signature:  # type: ignore[override]
        return await self._run(super().signature_for, call)

    async def _run(self, method: Callable[[C], A], call: C) -> A:
        cancelled = threading.Event()
        try:
            # In the context of the request, for log lines and for the trace of calls of other models.
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, copy_context().run, run_cancellable, cancelled, method, call
            )
        except asyncio.CancelledError:
            cancelled.set()  # a graph calls no further nodes
            raise


def _index(names: Mapping[str, object], name: str | int) -> int:
    return [*names].index(str(name))


def _specs(sizes: Sequence[int], names: Sequence[str], noun: str, vectorised: bool) -> tuple[TensorSpec, ...]:
    if names and len(names) != len(sizes):
        raise ModelFailed(f"expected one size for each {noun} {', '.join(names)}; got {len(sizes)} sizes")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 0:
            raise BadSizes(f"the sizes of the {noun}s: expected integers from 0, got {list(sizes)}")
    names = names or [f"{noun}_{i}" for i in range(len(sizes))]
    rows = (-1,) if vectorised else ()
    return tuple(TensorSpec(name, FP64, (*rows, int(size))) for name, size in zip(names, sizes, strict=True))


# --- models written for the umbridge package ---------------------------------------------------------------


class UmBridgeFunction(VectorFunction):
    """A model of the `umbridge` package, which takes and returns lists and declares what it supports."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def input_sizes(self, config: Config) -> Sequence[int]:
        return list(self._model.get_input_sizes(dict(config)))

    def output_sizes(self, config: Config) -> Sequence[int]:
        return list(self._model.get_output_sizes(dict(config)))

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        return self._model(_to_lists(inputs), dict(config))

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        return self._model.gradient(output, input, _to_lists(inputs), sens.tolist(), dict(config))

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        return self._model.apply_jacobian(output, input, _to_lists(inputs), vec.tolist(), dict(config))

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        return self._model.apply_hessian(
            output, input1, input2, _to_lists(inputs), sens.tolist(), vec.tolist(), dict(config)
        )

    def sources(self) -> Mapping[Ability, str]:
        return {name: "author" for name in ABILITIES if getattr(self._model, f"supports_{name}", bool)()}


def _to_lists(inputs: Vectors) -> list[list[float]]:
    return [vector.tolist() for vector in inputs]


def _instance(target: Any, spec: ModelSpec) -> Any:
    if not isinstance(target, type):
        return target
    return target(spec.name) if takes_name(target) else target()
