"""Derivatives of functions and modules of PyTorch by torch.func, or by torch.autograd in reverse mode only."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors, replace_item, split_outputs
from dragoman.derivatives.framework import FrameworkFunction, WrittenDerivatives, select_output
from dragoman.derivatives.user_function import UserFunction

TensorFunction = Callable[..., tuple[torch.Tensor, ...]]

Tensors = tuple[torch.Tensor, ...]


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
        return reverse_vjp(function, output, input, x, _tensor(sens), create_graph=False).detach().numpy()

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        x, function = _tensors(inputs), self._with_config(config)

        def output_of(displace: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = select_output(function(*replace_item(x, input, displace)), output)
            return result

        return jvp(output_of, x[input], _tensor(vec)).detach().numpy()

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        x, weights, function = _tensors(inputs), _tensor(sens), self._with_config(config)

        def gradient(displace: torch.Tensor) -> torch.Tensor:
            return vjp(function, output, input1, replace_item(x, input2, displace), weights)

        return jvp(gradient, x[input2], _tensor(vec)).detach().numpy()


def differentiate(function: UserFunction) -> tuple[VectorFunction, TorchFunction]:
    """Return the derivatives that the user has written, and those by PyTorch."""
    derivatives = TorchFunction(function)
    return WrittenDerivatives(derivatives, _tensor, nullcontext), derivatives


def jacobian_vector_product(function: Callable[..., Any], arguments: Vectors, index: int, vec: Vector) -> Any:
    """Return the derivative of a function of tensors by one argument, applied to vec."""
    x = _tensors(arguments)

    def displace(tensor: torch.Tensor) -> torch.Tensor:
        return _at_least_1d(_to_tensor(function(*replace_item(x, index, tensor))))

    return jvp(displace, x[index], _tensor(vec)).detach().numpy()


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
    inputs: Tensors,
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


def _tensors(vectors: Vectors) -> Tensors:
    return tuple(map(_tensor, vectors))


def reverse_vjp(
    function: Callable[..., Tensors],
    output: int,
    input: int,  # noqa: A002
    inputs: Tensors,
    sens: torch.Tensor,
    create_graph: bool = True,
) -> torch.Tensor:
    """Return Jᵀ sens, differentiable with `create_graph`."""
    x = inputs[input] if inputs[input].requires_grad else inputs[input].detach().requires_grad_()
    return _autograd_gradient(select_output(function(*replace_item(inputs, input, x)), output), x, sens, create_graph)


def reverse_jvp(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
    """Return J vec as the derivative of <vec, Jᵀ s> by s."""
    x = x.detach().requires_grad_()
    value = function(x)
    weights = torch.zeros_like(value, requires_grad=True)
    return _autograd_gradient(_autograd_gradient(value, x, weights), weights, vec)


def _autograd_gradient(
    value: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, create_graph: bool = True
) -> torch.Tensor:
    """Return the gradient of <weights, value>; zeros if `value` does not depend on x."""
    if not value.requires_grad:
        return torch.zeros_like(x)
    (result,) = torch.autograd.grad(value, x, weights, create_graph=create_graph, allow_unused=True)
    return torch.zeros_like(x) if result is None else result


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
        self._vjp, self._jvp = (reverse_vjp, reverse_jvp) if scripted else (vjp, _initialized_jvp)

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector) -> Vector:  # noqa: A002
        return _as_array(self._vjp(self._vectors, output, input, _tensors(inputs), _tensor(sens)))

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector) -> Vector:  # noqa: A002
        x = _tensors(inputs)
        return _as_array(
            self._jvp(lambda moved: self._vectors(*replace_item(x, input, moved))[output], x[input], _tensor(vec))
        )

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector
    ) -> Vector:
        x, weights = _tensors(inputs), _tensor(sens)

        def gradient(moved: torch.Tensor) -> torch.Tensor:
            return self._vjp(self._vectors, output, input1, replace_item(x, input2, moved), weights)

        return _as_array(self._jvp(gradient, x[input2], _tensor(vec)))

    def _vectors(self, *vectors: torch.Tensor) -> Tensors:
        tensors = (x.to(dtype).reshape(shape) for x, (shape, dtype) in zip(vectors, self._inputs, strict=True))
        return tuple(each.reshape(-1).to(torch.float64) for each in self._forward(*tensors))


def _initialized_jvp(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, vec: torch.Tensor
) -> torch.Tensor:
    """Initialize forward mode at first use: most files are never differentiated."""
    initialize_forward_mode()
    return jvp(function, x, vec)


def _as_array(tensor: torch.Tensor) -> Vector:
    array: Vector = tensor.detach().numpy()
    return array
