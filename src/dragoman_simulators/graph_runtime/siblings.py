"""A node of a graph that calls another model of the same server."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.core import calls
from dragoman.core.datatypes import FP64
from dragoman.core.errors import InvalidInput, ModelNotFound
from dragoman.core.signature import Signature
from dragoman.core.spec import SiblingModels
from dragoman.core.tensor import Tensor
from dragoman.core.vector_binding import VectorSignature, vector_signature
from dragoman.core.vectors import Ability, Config, Vector, VectorFunction, Vectors

_CALLS: Mapping[type[calls.Call[Any]], Ability] = {
    calls.Infer: "evaluate",
    calls.Gradient: "gradient",
    calls.ApplyJacobian: "apply_jacobian",
    calls.ApplyHessian: "apply_hessian",
}


class SiblingFunction(VectorFunction):
    """The vector function of a model. The constructor waits until the model is loaded, and raises InvalidInput if it is
    not a vector function."""

    def __init__(self, name: str, siblings: SiblingModels) -> None:
        self._name = name
        self._siblings = siblings
        try:
            description = siblings.describe(name)
        except ModelNotFound as error:
            raise InvalidInput(
                f"served: model '{name}' not found on this server; serve it beside the graph, as in "
                "dragoman serve GRAPH PATH"
            ) from error
        self._vector_signature = _vector_signature(description.signature, name)
        self._configurable = calls.SignatureFor in description.calls
        self._sources = {
            ability: f"served by '{name}'" for call, ability in _CALLS.items() if call in description.calls
        }
        self.vectorised = description.signature.batched and all(
            len(s.shape) == 2 for s in self._vector_signature.inputs
        )
        self.input_names = tuple(spec.name for spec in self._vector_signature.inputs)
        self.output_names = tuple(spec.name for spec in self._vector_signature.outputs)

    def input_sizes(self, config: Config) -> Sequence[int]:
        return [spec.size for spec in self._signature(config).inputs]

    def output_sizes(self, config: Config) -> Sequence[int]:
        return [spec.size for spec in self._signature(config).outputs]

    def evaluate(self, inputs: Vectors, config: Config) -> tuple[Vector, ...]:
        rows = inputs[0].shape[0] if inputs and inputs[0].ndim == 2 else None
        if rows is None:
            call = calls.Infer({}, positional=_tensors(inputs), config=config)
        else:
            specs = zip(self._vector_signature.inputs, inputs, strict=True)
            call = calls.Infer({spec.name: Tensor.of(np.array(x), spec.datatype) for spec, x in specs}, config=config)
        outputs = self._siblings.call(calls.Request(call, self._name)).outputs
        shape = (-1,) if rows is None else (rows, -1)
        return tuple(outputs[name].data.astype(np.float64).reshape(shape) for name in self.output_names)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Vector:  # noqa: A002
        point, weights = _tensors(inputs), Tensor(sens, FP64)
        return self._call(calls.Gradient(positional=point, output=output, input=input, sens=weights, config=config))

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Vector:  # noqa: A002
        point, direction = _tensors(inputs), Tensor(vec, FP64)
        return self._call(
            calls.ApplyJacobian(positional=point, output=output, input=input, vec=direction, config=config)
        )

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Vector:
        call = calls.ApplyHessian(
            positional=_tensors(inputs),
            output=output,
            input1=input1,
            input2=input2,
            sens=Tensor(sens, FP64),
            vec=Tensor(vec, FP64),
            config=config,
        )
        return self._call(call)

    def sources(self) -> Mapping[Ability, str]:
        return self._sources

    def unavailable(self) -> str:
        return self._siblings.unavailable(self._name)

    def _call(self, call: calls.DerivativeCall) -> Vector:
        return self._siblings.call(calls.Request(call, self._name)).data

    def _signature(self, config: Config) -> VectorSignature:
        if not config or not self._configurable:
            return self._vector_signature
        return _vector_signature(self._siblings.call(calls.Request(calls.SignatureFor(config), self._name)), self._name)


def _vector_signature(signature: Signature, name: str) -> VectorSignature:
    vectors = vector_signature(signature)
    if vectors is None:
        raise InvalidInput(f"model '{name}' is not a vector function: expected only float vectors of known sizes")
    return vectors


def _tensors(inputs: Vectors) -> tuple[Tensor, ...]:
    return tuple(Tensor(x, FP64) for x in inputs)
