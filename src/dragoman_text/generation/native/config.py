"""Dimensions of a model, and what its weights' layout in the kernels follows from."""

from dataclasses import dataclass

import torch

# Weights are stored in blocks of this many columns (outputs), adjacent for each step along the inputs.
COLUMNS = 64
# Inputs of a block of weights: one scale for each, and one for the activations.
GROUP = 32
# Numbers of a vector of the kernels.
LANES = 16
# The largest head of attention.c.
MAX_HEAD_SIZE = 512


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Dimensions of a model. bf16: weights, keys and values are BF16 (else FP32); sums and states are always FP32.

    qk_norm: the queries and keys of each head are normalized (Qwen 3). eps: of the norms. scaling: of the scores of
    attention. form: of the kernels.
    """

    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    eps: float
    qk_norm: bool
    bf16: bool
    form: str
    scaling: float = 1.0

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def item_bytes(self) -> int:
        """Bytes of a weight, and of an input of a product."""
        return 2 if self.bf16 else 4

    @property
    def qkv_heads(self) -> int:
        """Number of heads of queries, keys and values together."""
        return self.query_heads + 2 * self.kv_heads

    @property
    def run_rows(self) -> int:
        """Rows of one sequence that attend together: see attention.h."""
        return 1 if self.form == "portable" else {32: 4, 64: 4, 128: 2}.get(self.head_size, 1)

    @property
    def pair(self) -> int:
        """Inputs of a step of a product: one, or two that an instruction for BF16 multiplies together."""
        return 2 if self.bf16 and self.form in ("avx512_bf16", "amx") else 1

    @property
    def parts(self) -> int:
        """Parts of the columns of a block that are stored one after the other, for tiles that read only one of them."""
        return 1 if self.form in ("avx512", "avx512_bf16", "amx") else COLUMNS // LANES

    def block_bytes(self, inputs: int) -> int:
        """Return the bytes of a block of weights."""
        return inputs * self.item_bytes * COLUMNS


def pad(columns: int) -> int:
    """Round up to whole blocks of columns."""
    return -(-columns // COLUMNS) * COLUMNS
