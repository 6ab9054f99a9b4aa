"""Derivatives of functions written in PyTorch: reverse mode, forward mode, and forward over reverse, in float64."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors, replace_item, split_outputs
from dragoman.derivatives import torch_reverse
from dragoman.derivatives.framework import FrameworkFunction, WrittenDerivatives, select_output
from dragoman.derivatives.user_function import UserFunction

TensorFunction = Callable[..., tuple[torch.Tensor, ...]]


class TorchFunction(FrameworkFunction):
    """A function of float64 tensors: torch.autograd for Gradient, torch.func.jvp for ApplyJacobian, jvp of vjp.

    Operations without forward mode are differentiated twice in reverse mode instead, with the same results.
    """

    source = "torch"

    def __init__(self, function: UserFunction) -> None:
        super().__init__(function)
        self.vectorised = bool(function.options.vectorised)
        initialize_forward_mode()

    def _with_config(self, config: Config) -> TensorFunction:
        return lambda *x: _vectors(self.function.evaluate(x, config))

    def needs_verification(self, config: Config) -> bool:
        """Return True: `item`, `tolist` and `detach` convert tensors to numbers without derivatives."""
        return True

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        with torch.no_grad():
            if inputs and inputs[0].ndim > 1:
                return self.function.evaluate(_tensors(inputs), config)
            return tuple(each.numpy() for each in self._with_config(config)(*_tensors(inputs)))

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        # Equals torch.func.vjp, which takes four times as long for a small function.
        function, x = self._with_config(config), _tensors(inputs)
        return torch_reverse.vjp(function, output, input, x, _tensor(sens), create_graph=False).detach().numpy()

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        x, function = _tensors(inputs), self._with_config(config)

        def output_of(displaced: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = select_output(function(*replace_item(x, input, displaced)), output)
            return result

        return jvp(output_of, x[input], _tensor(vec)).detach().numpy()

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        x, weights, function = _tensors(inputs), _tensor(sens), self._with_config(config)

        def gradient(displaced: torch.Tensor) -> torch.Tensor:
            return vjp(function, output, input1, replace_item(x, input2, displaced), weights)

        return jvp(gradient, x[input2], _tensor(vec)).detach().numpy()


def differentiate(function: UserFunction) -> tuple[VectorFunction, TorchFunction]:
    """Return the derivatives that the user has written, and those by PyTorch."""
    derivatives = TorchFunction(function)
    return WrittenDerivatives(derivatives, _tensor, nullcontext), derivatives


def jacobian_vector_product(function: Callable[..., Any], arguments: Vectors, index: int, vec: Vector) -> Any:
    """Return the derivative of a function of tensors by one argument, applied to vec."""
    x = _tensors(arguments)

    def displaced(tensor: torch.Tensor) -> torch.Tensor:
        return _at_least_1d(_to_tensor(function(*replace_item(x, index, tensor))))

    return jvp(displaced, x[index], _tensor(vec)).detach().numpy()


@cache
def initialize_forward_mode() -> None:
    """Run forward mode once, ignoring the DeprecationWarning of PyTorch's own code at first use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
        jvp(torch.sin, torch.zeros(1), torch.ones(1))


def vjp(
    function: TensorFunction,
    output: int,
    input: int,  # noqa: A002
    inputs: tuple[torch.Tensor, ...],
    sens: torch.Tensor,
) -> torch.Tensor:
    """Return Jᵀ sens."""
    pullback = torch.func.vjp(
        lambda x: select_output(function(*replace_item(inputs, input, x)), output), inputs[input]
    )[1]
    result: torch.Tensor = pullback(sens)[0]
    return result


def jvp(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
    """Return J vec by forward mode or, for operations without it, as the derivative of Jᵀ s by s."""
    try:
        forward: torch.Tensor = torch.func.jvp(function, (x,), (vec,))[1]
        return forward
    except NotImplementedError:
        value_and_pullback: Any = torch.func.vjp(function, x)
        value, pullback = value_and_pullback
        reverse: torch.Tensor = torch.func.vjp(lambda s: pullback(s)[0], torch.zeros_like(value))[1](vec)[0]
        return reverse


def _vectors(result: Any) -> tuple[torch.Tensor, ...]:
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


def _tensors(vectors: Vectors) -> tuple[torch.Tensor, ...]:
    return tuple(map(_tensor, vectors))
