"""Derivatives of functions written in PyTorch: reverse mode, forward mode, and forward over reverse; in float64."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from dragoman.core.vector_answers import parts
from dragoman.core.vectors import Config, Vector, VectorFunction, Vectors, put
from dragoman.derivatives import torch_reverse
from dragoman.derivatives.config_cache import OfConfig
from dragoman.derivatives.framework import Lifted, Traced, only
from dragoman.derivatives.user_function import Authored

Function = Callable[..., tuple[torch.Tensor, ...]]


class TorchFunction(Traced):
    """A function of float64 tensors. Gradient is reverse mode, ApplyJacobian torch.func.jvp, ApplyHessian jvp of vjp.

    An operation that has no forward mode is differentiated twice in reverse instead, which gives the same numbers.
    """

    source = "torch"

    def __init__(self, author: Authored) -> None:
        super().__init__(author)
        self._made: OfConfig[Function] = OfConfig(self._of_config)
        self.vectorised = bool(author.declared.vectorised)
        ready()

    def _of_config(self, config: Config) -> Function:
        def function(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return _vectors(self.author.evaluate(x, config))

        return function

    def needs_verification(self, config: Config) -> bool:
        """Always: `item`, `tolist` and `detach` make plain numbers of tensors, whose derivatives are lost."""
        return True

    def evaluate(self, inputs: Vectors, config: Config) -> Any:
        with torch.no_grad():
            if inputs and inputs[0].ndim > 1:
                return self.author.evaluate(_tensors(inputs), config)
            return tuple(each.numpy() for each in self._made(config)(*_tensors(inputs)))

    def gradient(self, output: int, input: int, inputs: Vectors, sens: Vector, config: Config) -> Any:  # noqa: A002
        # The same as torch.func.vjp, at a quarter of its price for a small function.
        function, x = self._made(config), _tensors(inputs)
        return torch_reverse.pull(function, output, input, x, _tensor(sens), again=False).detach().numpy()

    def apply_jacobian(self, output: int, input: int, inputs: Vectors, vec: Vector, config: Config) -> Any:  # noqa: A002
        x, function = _tensors(inputs), self._made(config)

        def one(at: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = only(function(*put(x, input, at)), output)
            return found

        return push(one, x[input], _tensor(vec)).detach().numpy()

    def apply_hessian(
        self, output: int, input1: int, input2: int, inputs: Vectors, sens: Vector, vec: Vector, config: Config
    ) -> Any:
        x, weight, function = _tensors(inputs), _tensor(sens), self._made(config)

        def gradient(at: torch.Tensor) -> torch.Tensor:
            return pull(function, output, input1, put(x, input2, at), weight)

        return push(gradient, x[input2], _tensor(vec)).detach().numpy()


def written_in_torch(author: Authored) -> tuple[VectorFunction, TorchFunction]:
    """What the author has written, and what follows from the function."""
    function = TorchFunction(author)
    return Lifted(function, _tensor, nullcontext), function


def push_through(function: Callable[..., Any], arguments: Vectors, index: int, vec: Vector) -> Any:
    """The derivative of a function of tensors by one argument, applied to vec."""
    x = _tensors(arguments)
    pushed = push(lambda at: _at_least_1d(_joined(function(*put(x, index, at)))), x[index], _tensor(vec))
    return pushed.detach().numpy()


@cache
def ready() -> None:
    """PyTorch makes its forward mode when that is first used; it warns there of a way of its own that is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
        push(torch.sin, torch.zeros(1), torch.ones(1))


def pull(function: Function, output: int, input: int, x: tuple[torch.Tensor, ...], sens: torch.Tensor) -> torch.Tensor:  # noqa: A002
    """Jᵀ sens."""
    back = torch.func.vjp(lambda at: only(function(*put(x, input, at)), output), x[input])[1]
    found: torch.Tensor = back(sens)[0]
    return found


def push(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
    """J vec: in forward mode, or where an operation has none, as the derivative of Jᵀ sens by sens."""
    try:
        forward: torch.Tensor = torch.func.jvp(function, (x,), (vec,))[1]
        return forward
    except NotImplementedError:
        pulled: Any = torch.func.vjp(function, x)
        value, back = pulled
        twice: torch.Tensor = torch.func.vjp(lambda sens: back(sens)[0], torch.zeros_like(value))[1](vec)[0]
        return twice


def _vectors(answer: Any) -> tuple[torch.Tensor, ...]:
    """Each output as a float64 vector: of a tensor, a list of numbers, or one number."""
    return tuple(_at_least_1d(_joined(each)).to(torch.float64) for each in parts(answer))


def _joined(value: Any) -> torch.Tensor:
    if isinstance(value, list | tuple) and any(isinstance(each, torch.Tensor) for each in value):
        return torch.stack([torch.as_tensor(each, dtype=torch.float64) for each in value])
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=torch.float64)


def _at_least_1d(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(1) if value.ndim == 0 else value


def _tensor(vector: Vector) -> torch.Tensor:
    """A copy: PyTorch knows no memory that must not be written."""
    return torch.tensor(vector, dtype=torch.float64)


def _tensors(vectors: Vectors) -> tuple[torch.Tensor, ...]:
    return tuple(map(_tensor, vectors))
