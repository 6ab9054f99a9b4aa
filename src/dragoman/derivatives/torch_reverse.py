"""Derivatives by torch.autograd in reverse mode only: fast for small functions, and the only mode of TorchScript."""

from collections.abc import Callable

import torch

from dragoman.core.vectors import replace_item
from dragoman.derivatives.framework import select_output

Tensors = tuple[torch.Tensor, ...]


def vjp(
    function: Callable[..., Tensors],
    output: int,
    input: int,  # noqa: A002
    inputs: Tensors,
    sens: torch.Tensor,
    create_graph: bool = True,
) -> torch.Tensor:
    """Return Jᵀ sens, differentiable with `create_graph`."""
    x = inputs[input] if inputs[input].requires_grad else inputs[input].detach().requires_grad_()
    return _gradient(select_output(function(*replace_item(inputs, input, x)), output), x, sens, create_graph)


def jvp(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
    """Return J vec as the derivative of <vec, Jᵀ s> by s."""
    x = x.detach().requires_grad_()
    value = function(x)
    weights = torch.zeros_like(value, requires_grad=True)
    return _gradient(_gradient(value, x, weights), weights, vec)


def _gradient(value: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, create_graph: bool = True) -> torch.Tensor:
    """Return the gradient of <weights, value>; zeros if `value` does not depend on x."""
    if not value.requires_grad:
        return torch.zeros_like(x)
    (result,) = torch.autograd.grad(value, x, weights, create_graph=create_graph, allow_unused=True)
    return torch.zeros_like(x) if result is None else result
