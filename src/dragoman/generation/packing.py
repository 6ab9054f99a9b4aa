"""Weights of linear layers, reordered once for the CPU's matrix kernels."""

from typing import Any

import torch
from torch import nn

# Number of rows for which the layout of the weights is optimized; it works for any.
_ROWS = 32
# Fewer rows are repeated: they would use other kernels, which are slower and round differently.
MIN_ROWS = 4
_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """Linear layer with its weight in the layout of oneDNN's kernels, the only copy of it.

    in_features, out_features: those of the layer that it replaces.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
        self.bias = None if bias is None else bias.detach()
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._multiply_add = torch.ops.mkldnn._linear_pointwise.binary

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute the layer; the result of a row is bitwise independent of the other rows."""
        count = rows.numel() // self.in_features
        if not 0 < count < MIN_ROWS:
            return self.product(rows)
        found = self.product(rows.reshape(count, -1).repeat(-(-MIN_ROWS // count), 1))
        return found[:count].view(*rows.shape[:-1], -1)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute the layer for at least `MIN_ROWS` rows."""
        found: torch.Tensor = self._multiply(rows, self.packed, self.bias, "none", [], "")
        return found

    def plus(self, rows: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """Return `product` plus `added` in one operation."""
        found: torch.Tensor = self._multiply_add(rows, added, self.packed, self.bias, "add")
        return found


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether this machine has kernels for packed weights of this dtype."""
    if device.type != "cpu" or dtype not in _DTYPES or not torch._C._has_mkldnn:
        return False
    try:
        PackedLinear(torch.zeros(8, 8, dtype=dtype), None)(torch.zeros(1, 8, dtype=dtype))
    except (AttributeError, RuntimeError):  # an operator of this version of PyTorch, or an instruction, is missing
        return False
    return True


def pack(module: nn.Module) -> None:
    """Replace all linear layers, including transposed ones of GPT-2, by packed ones."""
    for name, child in module.named_children():
        made = _pack_layer(child)
        if made is None:
            pack(child)
        else:
            setattr(module, name, made)


def _pack_layer(child: Any) -> PackedLinear | None:
    if type(child) is nn.Linear:
        return PackedLinear(child.weight, child.bias)
    if type(child).__name__ == "Conv1D" and hasattr(child, "nf"):
        return PackedLinear(child.weight.t(), child.bias)
    return None
