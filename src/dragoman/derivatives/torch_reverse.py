"""Derivatives in PyTorch by its own graphs, in reverse alone: quick for small functions; all that TorchScript takes."""

from collections.abc import Callable

import torch

from dragoman.core.vectors import put
from dragoman.derivatives.framework import only

Tensors = tuple[torch.Tensor, ...]


def pull(
    function: Callable[..., Tensors],
    output: int,
    input: int,  # noqa: A002
    x: Tensors,
    sens: torch.Tensor,
    again: bool = True,
) -> torch.Tensor:
    """Jᵀ sens; it can be differentiated `again` by x."""
    at = x[input] if x[input].requires_grad else x[input].detach().requires_grad_()
    return _slope(only(function(*put(x, input, at)), output), at, sens, again)


def push(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
    """J vec: the derivative by s of <vec, Jᵀ s>."""
    at = x.detach().requires_grad_()
    value = function(at)
    weights = torch.zeros_like(value, requires_grad=True)
    return _slope(_slope(value, at, weights), weights, vec)


def _slope(value: torch.Tensor, by: torch.Tensor, weights: torch.Tensor, again: bool = True) -> torch.Tensor:
    """The gradient of <weights, value>; zeros where the one does not depend on the other."""
    if not value.requires_grad:
        return torch.zeros_like(by)
    (found,) = torch.autograd.grad(value, by, weights, create_graph=again, allow_unused=True)
    return torch.zeros_like(by) if found is None else found
