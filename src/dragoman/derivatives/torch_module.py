"""Derivatives of PyTorch modules that were loaded from files, as functions of float64 vectors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dragoman.core.vectors import Vector, Vectors, put
from dragoman.derivatives import torch_reverse
from dragoman.derivatives.torch import pull, push, ready

Tensors = tuple[torch.Tensor, ...]


class ModuleDerivatives:
    """What follows from `forward`, which takes a tensor of a shape and dtype for each vector and gives a tuple.

    The module computes in its own precision; vectors are rounded to that and what it gives is as exact as it. Programs
    of torch.export are differentiated by torch.func; TorchScript, which that does not take, by its own graphs, forward
    mode being the derivative of reverse mode.
    """

    def __init__(
        self, forward: Callable[..., Tensors], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any], scripted: bool
    ) -> None:
        self._forward, self._forms = forward, tuple(zip(shapes, dtypes, strict=True))
        self._pull, self._push = (torch_reverse.pull, torch_reverse.push) if scripted else (pull, _ready_push)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector) -> Vector:  # noqa: A002
        return _array(self._pull(self._vectors, output, input, _tensors(inputs), torch.tensor(sens)))

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector) -> Vector:  # noqa: A002
        x = _tensors(inputs)
        return _array(self._push(lambda at: self._vectors(*put(x, input, at))[output], x[input], torch.tensor(vec)))

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector
    ) -> Vector:
        x, weight = _tensors(inputs), torch.tensor(sens)

        def gradient(at: torch.Tensor) -> torch.Tensor:
            return self._pull(self._vectors, output, input1, put(x, input2, at), weight)

        return _array(self._push(gradient, x[input2], torch.tensor(vec)))

    def _vectors(self, *vectors: torch.Tensor) -> Tensors:
        given = (x.to(dtype).reshape(shape) for x, (shape, dtype) in zip(vectors, self._forms, strict=True))
        return tuple(each.reshape(-1).to(torch.float64) for each in self._forward(*given))


def _ready_push(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
    """The forward mode is made when it is first needed: most files are never asked for derivatives."""
    ready()
    return push(function, x, vec)


def _array(tensor: torch.Tensor) -> Vector:
    found: Vector = tensor.detach().numpy()
    return found


def _tensors(vectors: Vectors) -> Tensors:
    return tuple(torch.tensor(vector) for vector in vectors)
