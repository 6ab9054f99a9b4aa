"""Derivatives of PyTorch modules that were loaded from files, as functions of float64 vectors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dragoman.core.vectors import Vector, Vectors, replace_item
from dragoman.derivatives import torch_reverse
from dragoman.derivatives.torch import initialize_forward_mode, jvp, vjp

Tensors = tuple[torch.Tensor, ...]


class ModuleDerivatives:
    """Derivatives of `forward`, which takes a tensor of a shape and dtype for each vector and returns a tuple.

    The module computes in its own precision, to which vectors are rounded. Programs of torch.export are differentiated
    by torch.func; TorchScript (`scripted`), which torch.func does not support, by torch.autograd, with forward mode as
    the derivative of reverse mode.
    """

    def __init__(
        self, forward: Callable[..., Tensors], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any], scripted: bool
    ) -> None:
        self._forward, self._inputs = forward, tuple(zip(shapes, dtypes, strict=True))
        self._vjp, self._jvp = (torch_reverse.vjp, torch_reverse.jvp) if scripted else (vjp, _initialized_jvp)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector) -> Vector:  # noqa: A002
        return _array(self._vjp(self._vectors, output, input, _tensors(inputs), torch.tensor(sens)))

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector) -> Vector:  # noqa: A002
        x = _tensors(inputs)
        return _array(
            self._jvp(lambda moved: self._vectors(*replace_item(x, input, moved))[output], x[input], torch.tensor(vec))
        )

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector
    ) -> Vector:
        x, weights = _tensors(inputs), torch.tensor(sens)

        def gradient(moved: torch.Tensor) -> torch.Tensor:
            return self._vjp(self._vectors, output, input1, replace_item(x, input2, moved), weights)

        return _array(self._jvp(gradient, x[input2], torch.tensor(vec)))

    def _vectors(self, *vectors: torch.Tensor) -> Tensors:
        tensors = (x.to(dtype).reshape(shape) for x, (shape, dtype) in zip(vectors, self._inputs, strict=True))
        return tuple(each.reshape(-1).to(torch.float64) for each in self._forward(*tensors))


def _initialized_jvp(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, vec: torch.Tensor
) -> torch.Tensor:
    """Initialize forward mode at first use: most files are never differentiated."""
    initialize_forward_mode()
    return jvp(function, x, vec)


def _array(tensor: torch.Tensor) -> Vector:
    array: Vector = tensor.detach().numpy()
    return array


def _tensors(vectors: Vectors) -> Tensors:
    return tuple(torch.tensor(vector) for vector in vectors)
