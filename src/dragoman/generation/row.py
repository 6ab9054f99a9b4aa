"""What one sequence brings to a step."""

from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """What one sequence brings to a step: tokens from its own place `start` on, and whose logits are wanted.

    `wanted`: logits of so many of the last tokens. `adapter` is the name of the LoRA adapter, "" for none.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    wanted: int = 1
    adapter: str = ""
