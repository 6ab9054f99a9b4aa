"""A node of a graph that is another model of the same server, held once and asked as any caller asks it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.core.calls import (
    ApplyHessian,
    ApplyJacobian,
    Call,
    DerivativeCall,
    Gradient,
    Infer,
    Request,
    SignatureFor,
)
from dragoman.core.datatypes import FP64
from dragoman.core.errors import InvalidInput, ModelNotFound
from dragoman.core.sibling_models import SiblingModels
from dragoman.core.signature import Signature
from dragoman.core.tensor import Tensor
from dragoman.core.vector_binding import VectorSignature, vector_signature
from dragoman.core.vectors import Ability, Config, Vector, VectorFunction, Vectors

_CALLS: Mapping[type[Call[Any]], Ability] = {
    Infer: "evaluate",
    Gradient: "gradient",
    ApplyJacobian: "apply_jacobian",
    ApplyHessian: "apply_hessian",
}


class Served(VectorFunction):
    """The model of that name; waits until it is loaded. Raises InvalidInput where it is no function of vectors."""

    def __init__(self, name: str, siblings: SiblingModels) -> None:
        self._name = name
        self._siblings = siblings
        try:
            told = siblings.describe(name)
        except ModelNotFound as fault:
            raise InvalidInput(
                f"served: there is no model '{name}' on this server; serve it beside the graph, as in "
                "dragoman serve GRAPH PATH"
            ) from fault
        self._vector_signature = _vector_signature(told.signature, name)
        self._configurable = SignatureFor in told.calls
        self._sources = {ability: f"served by '{name}'" for call, ability in _CALLS.items() if call in told.calls}
        self.vectorised = told.signature.batched and all(len(s.shape) == 2 for s in self._vector_signature.inputs)
        self.input_names = tuple(spec.name for spec in self._vector_signature.inputs)
        self.output_names = tuple(spec.name for spec in self._vector_signature.outputs)

    def input_sizes(self, config: Config) -> Sequence[int]:
        return [spec.size for spec in self._under(config).inputs]

    def output_sizes(self, config: Config) -> Sequence[int]:
        return [spec.size for spec in self._under(config).outputs]

    def evaluate(self, inputs: Vectors, config: Config) -> tuple[Vector, ...]:
        rows = inputs[0].shape[0] if inputs and inputs[0].ndim == 2 else None
        if rows is None:
            call = Infer({}, positional=_tensors(inputs), config=config)
        else:
            specs = zip(self._vector_signature.inputs, inputs, strict=True)
            call = Infer({spec.name: Tensor.of(np.array(x), spec.datatype) for spec, x in specs}, config=config)
        answer = self._siblings.call(Request(call, self._name)).outputs
        shape = (-1,) if rows is None else (rows, -1)
        return tuple(answer[name].data.astype(np.float64).reshape(shape) for name in self.output_names)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Vector:  # noqa: A002
        at = _tensors(inputs)
        return self._asked(Gradient(positional=at, output=output, input=input, sens=_tensor(sens), config=config))

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Vector:  # noqa: A002
        at = _tensors(inputs)
        return self._asked(ApplyJacobian(positional=at, output=output, input=input, vec=_tensor(vec), config=config))

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Vector:
        at, along, by = _tensors(inputs), _tensor(sens), _tensor(vec)
        return self._asked(
            ApplyHessian(positional=at, output=output, input1=input1, input2=input2, sens=along, vec=by, config=config)
        )

    def sources(self) -> Mapping[Ability, str]:
        return self._sources

    def unavailable(self) -> str:
        return self._siblings.unavailable(self._name)

    def _asked(self, call: DerivativeCall) -> Vector:
        return self._siblings.call(Request(call, self._name)).data

    def _under(self, config: Config) -> VectorSignature:
        if not config or not self._configurable:
            return self._vector_signature
        return _vector_signature(self._siblings.call(Request(SignatureFor(config), self._name)), self._name)


def _vector_signature(signature: Signature, name: str) -> VectorSignature:
    found = vector_signature(signature)
    if found is None:
        raise InvalidInput(
            f"model '{name}' is no function of vectors: not all its tensors are float vectors of known sizes"
        )
    return found


def _tensor(values: Vector) -> Tensor:
    return Tensor(values, FP64)


def _tensors(inputs: Vectors) -> tuple[Tensor, ...]:
    return tuple(_tensor(x) for x in inputs)
