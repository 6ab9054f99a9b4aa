"""What the kernels of the decoder step compute, in PyTorch."""

import torch
from torch.nn.functional import silu


def exp_reference(exponent: torch.Tensor) -> torch.Tensor:
    return torch.exp(exponent.clamp(-87, 88))


def product_reference(inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """inputs [rows, n], weights [columns, n] -> [rows, columns], FP32."""
    return inputs.float() @ weights.float().T


def norm_reference(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * weight


def gate_reference(gates: torch.Tensor) -> torch.Tensor:
    gated, up = gates.chunk(2, -1)
    return silu(gated) * up


def rotate_reference(
    states: torch.Tensor, rotary: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 0.0
) -> torch.Tensor:
    """Rotary embedding of states [heads, size] by `rotary` [2, size], after the norm of that weight if there is one."""
    if weight is not None:
        states = norm_reference(states, weight, eps)
    return states * rotary[0] + states.roll(states.shape[-1] // 2, -1) * rotary[1]


def attention_reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """query [heads, size], keys and values [visible positions, size] -> [heads, size], FP32."""
    return torch.softmax(query @ keys.float().T * scaling, -1) @ values.float()
