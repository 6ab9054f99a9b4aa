"""A model of an engine as a synchronous function of vectors."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from dragoman.core.calls import (
    ApplyHessian,
    ApplyJacobian,
    Call,
    DerivativeCall,
    Describe,
    Gradient,
    Infer,
    ModelDescription,
    Request,
    SignatureFor,
)
from dragoman.core.errors import NotSupported
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import NONE, Tensor
from dragoman.core.vectors import Ability, Config, Vector, VectorFunction, Vectors
from dragoman.engine.engine import Engine

A = TypeVar("A")

_ABILITIES: Mapping[type[Call[Any]], Ability] = {
    Infer: "evaluate",
    Gradient: "gradient",
    ApplyJacobian: "apply_jacobian",
    ApplyHessian: "apply_hessian",
}


class ServedFunction(VectorFunction):
    """A model whose methods send calls to the engine in the event loop of `runner`."""

    def __init__(self, engine: Engine, name: str, runner: asyncio.Runner, config: Config) -> None:
        self.name, self._engine, self._runner = name, engine, runner
        self._description: ModelDescription = self._call(Describe())
        found = self._signature(config)
        self.input_names = tuple(spec.name for spec in found.inputs)
        self.output_names = tuple(spec.name for spec in found.outputs)

    def input_sizes(self, config: Config) -> Sequence[int]:
        return [_size(spec) for spec in self._signature(config).inputs]

    def output_sizes(self, config: Config) -> Sequence[int]:
        return [_size(spec) for spec in self._signature(config).outputs]

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        result = self._call(Infer({}, positional=_tensors(inputs), config=config or NONE))
        return tuple(tensor.data.reshape(-1) for tensor in result.outputs.values())

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        where: Any = {"output": output, "input": input, "sens": Tensor.of(sens)}
        return self._derivative(Gradient, inputs, config, where)

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        where: Any = {"output": output, "input": input, "vec": Tensor.of(vec)}
        return self._derivative(ApplyJacobian, inputs, config, where)

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        where: Any = {"output": output, "input1": input1, "input2": input2}
        where |= {"sens": Tensor.of(sens), "vec": Tensor.of(vec)}
        return self._derivative(ApplyHessian, inputs, config, where)

    def sources(self) -> Mapping[Ability, str]:
        known = self._description.details.get("derivatives", {})
        return {
            name: known.get(name, "the model") for kind, name in _ABILITIES.items() if kind in self._description.calls
        }

    def point(self, sizes: Sequence[int]) -> list[Vector]:
        """Return the default point of the model if it has these sizes, otherwise zeros."""
        point = [np.array(each, np.float64) for each in self._description.details.get("point", [])]
        return point if [len(each) for each in point] == list(sizes) else [np.zeros(size) for size in sizes]

    def _signature(self, config: Config) -> Signature:
        return self._call(SignatureFor(config or NONE))

    def _derivative(self, kind: type[DerivativeCall], inputs: Vectors, config: Config, where: Mapping[str, Any]) -> Any:
        result = self._call(kind(positional=_tensors(inputs), config=config or NONE, **where))
        return result.data.reshape(-1)

    def _call(self, call: Call[A]) -> A:
        return self._runner.run(self._engine.call(Request(call, self.name))).answer


def _tensors(inputs: Vectors) -> tuple[Tensor, ...]:
    return tuple(map(Tensor.of, inputs))


def _size(spec: TensorSpec) -> int:
    if not spec.shape or spec.shape[-1] < 0:
        raise NotSupported(f"'{spec.name}' is not a vector of known size")
    return spec.shape[-1]
