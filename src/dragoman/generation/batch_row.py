"""Input of one sequence in a step."""

from collections.abc import Sequence
from typing import NamedTuple


class BatchRow(NamedTuple):
    """Tokens of one sequence in a step.

    start: position of the first token in the sequence. wanted: number of last tokens whose logits are returned.
    adapter: name of the LoRA adapter, "" for none.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    wanted: int = 1
    adapter: str = ""
