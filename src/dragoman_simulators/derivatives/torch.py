"""Derivatives of functions and modules of PyTorch by torch.autograd, in reverse mode only.

Forward mode (torch.func.jvp, torch.autograd.forward_ad) keeps its level in a variable of the process, so calls in
several threads mix their tangents. J v is computed by differentiating Jᵀ s by s instead, and a Hessian action by
differentiating <v, J2ᵀ s> by the other input: two passes in reverse mode, whose state belongs to each call.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from dragoman.core.vectors import (
    ABILITIES,
    Ability,
    Config,
    Vector,
    VectorFunction,
    Vectors,
    split_outputs,
)
from dragoman_simulators.derivatives.framework import FrameworkFunction, WrittenDerivatives, select_output
from dragoman_simulators.derivatives.user_function import UserFunction

Tensors = tuple[torch.Tensor, ...]
TensorFunction = Callable[..., Tensors]


class ReverseMode(VectorFunction):
    """Derivatives of a function of float64 vectors, which `vectors` returns for a config, as NumPy arrays."""

    source = "torch"

    def vectors(self, config: Config) -> TensorFunction:
        raise NotImplementedError

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        with torch.enable_grad():
            x, value = _differentiable(self.vectors(config), output, inputs, (input,))
            return _as_array(_pull(value, x[input], _tensor(sens), create_graph=False))

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        with torch.enable_grad():
            x, value = _differentiable(self.vectors(config), output, inputs, (input,))
            return _as_array(_push(value, x[input], _tensor(vec)))

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        with torch.enable_grad():
            x, value = _differentiable(self.vectors(config), output, inputs, (input1, input2))
            slope = _pull(value, x[input2], _tensor(sens))
            return _as_array(_pull(slope, x[input1], _tensor(vec), create_graph=False))

    def sources(self) -> Mapping[Ability, str]:
        return dict.fromkeys(ABILITIES[1:], self.source)


class TorchFunction(ReverseMode, FrameworkFunction):
    """A user's function of float64 tensors."""

    def __init__(self, function: UserFunction) -> None:
        super().__init__(function)
        self.vectorised = bool(function.options.vectorised)

    def vectors(self, config: Config) -> TensorFunction:
        return lambda *x: _vectors(self.function.evaluate(x, config))

    def needs_verification(self, config: Config) -> bool:
        """Return True: `item`, `tolist` and `detach` convert tensors to numbers without derivatives."""
        return True

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        with torch.no_grad():
            if inputs and inputs[0].ndim > 1:
                return self.function.evaluate(to_arrays(inputs), config)
            return tuple(map(_as_array, self.vectors(config)(*to_arrays(inputs))))

    def sources(self) -> Mapping[Ability, str]:
        return {"evaluate": "author", **super().sources()}


class ModuleFunction(ReverseMode):
    """`forward` as a function of vectors: it takes a tensor of a shape and dtype for each vector and returns a tuple.

    The module computes in its own precision, to which vectors are rounded.
    """

    def __init__(
        self,
        forward: TensorFunction,
        inputs: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        outputs: Sequence[int],
    ) -> None:
        self._forward, self._inputs = forward, tuple(zip(inputs, dtypes, strict=True))
        self._outputs = tuple(outputs)

    def input_sizes(self, config: Config) -> Sequence[int]:
        return [int(np.prod(shape)) for shape, _ in self._inputs]

    def output_sizes(self, config: Config) -> Sequence[int]:
        return self._outputs

    def vectors(self, config: Config) -> TensorFunction:
        def function(*vectors: torch.Tensor) -> Tensors:
            tensors = (x.to(dtype).reshape(shape) for x, (shape, dtype) in zip(vectors, self._inputs, strict=True))
            return tuple(each.reshape(-1).to(torch.float64) for each in self._forward(*tensors))

        return function

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        with torch.no_grad():
            return tuple(map(_as_array, self.vectors(config)(*to_arrays(inputs))))

    def sources(self) -> Mapping[Ability, str]:
        return {"evaluate": "author", **super().sources()}


def differentiate(function: UserFunction) -> tuple[VectorFunction, TorchFunction]:
    """Return the derivatives that the user has written, and those by PyTorch."""
    derivatives = TorchFunction(function)
    return WrittenDerivatives(derivatives, _tensor, nullcontext), derivatives


def jacobian_vector_product(function: Callable[..., Any], arguments: Vectors, index: int, vec: Vector) -> Any:
    """Return the derivative of a function of tensors by one argument, applied to vec."""
    with torch.enable_grad():
        x, value = _differentiable(lambda *x: (_at_least_1d(_to_tensor(function(*x))),), 0, arguments, (index,))
        return _as_array(_push(value, x[index], _tensor(vec)))


def _differentiable(
    function: TensorFunction, output: int, inputs: Vectors, indices: Sequence[int]
) -> tuple[Tensors, torch.Tensor]:
    """Return the inputs as tensors, of which those with these indices require gradients, and an output at them."""
    x = to_arrays(inputs)
    for index in indices:
        x[index].requires_grad_()
    return x, select_output(function(*x), output)


def _push(value: torch.Tensor, x: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
    """Return J vec as the derivative of <vec, Jᵀ s> by s."""
    weights = torch.zeros_like(value, requires_grad=True)
    return _pull(_pull(value, x, weights), weights, vec, create_graph=False)


def _pull(value: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, create_graph: bool = True) -> torch.Tensor:
    """Return Jᵀ weights; zeros if `value` does not depend on x."""
    if not value.requires_grad:
        return torch.zeros_like(x)
    (result,) = torch.autograd.grad(value, x, weights, create_graph=create_graph, allow_unused=True)
    return torch.zeros_like(x) if result is None else result


def _vectors(result: Any) -> Tensors:
    """Convert the outputs (tensors, lists of numbers, or numbers) to float64 vectors."""
    return tuple(_at_least_1d(_to_tensor(each)).to(torch.float64) for each in split_outputs(result))


def _to_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, list | tuple) and any(isinstance(each, torch.Tensor) for each in value):
        return torch.stack([torch.as_tensor(each, dtype=torch.float64) for each in value])
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=torch.float64)


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def _tensor(vector: Vector) -> torch.Tensor:
    """Copy the vector, since PyTorch does not support read-only memory."""
    return torch.tensor(vector, dtype=torch.float64)


def to_arrays(vectors: Vectors) -> Tensors:
    return tuple(map(_tensor, vectors))


def _as_array(tensor: torch.Tensor) -> Vector:
    """Copy the tensor, which a function may return again."""
    return np.array(tensor.detach().cpu().numpy())
