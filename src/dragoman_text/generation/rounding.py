"""Data to compare implementations: tokens, and numbers by which the order of a sum shows in each result."""

import torch


def cancelling(columns: int, rows: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [columns, inputs] and [rows, inputs] whose products of rows with columns are exactly 0.

    The terms have very different sizes, and each has its negative: a computed result is the rounding error of the sum,
    which another order of the terms changes. Beside other data it would be lost in the last bit of the result.
    """
    generator = torch.Generator().manual_seed(0)
    half = inputs // 2
    opposite = torch.randperm(half, generator=generator)
    made = []
    for count, sign in ((columns, -1), (rows, 1)):
        sizes = 2.0 ** torch.randint(-6, 7, (count, half), generator=generator)
        values = (torch.randn(count, half, generator=generator) * sizes).to(dtype)
        made.append(torch.cat((values, sign * values[:, opposite], values.new_zeros(count, inputs % 2)), 1))
    return made[0], made[1]


def check_tokens(count: int, vocabulary: int) -> list[int]:
    """Return tokens of a prompt by which implementations are compared."""
    return [(11 + 7919 * i) % vocabulary for i in range(count)]
