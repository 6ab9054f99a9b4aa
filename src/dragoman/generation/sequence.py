"""A sequence in the engine, and its input in one step."""

from collections import abc
from dataclasses import dataclass
from typing import NamedTuple


class BatchRow(NamedTuple):
    """Tokens of one sequence in a step.

    start: position of the first token in the sequence. wanted: number of last tokens whose logits are returned.
    adapter: name of the LoRA adapter, "" for none.
    """

    slot: int
    start: int
    tokens: abc.Sequence[int]
    wanted: int = 1
    adapter: str = ""


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens of a prompt and its completion.

    computed: number of tokens whose keys and values are in the cache's `slot`. cached: how many of these came from the
    prefix cache. A sequence with one pending token is decoding; with several, (the rest of) its prompt is computed.
    """

    tokens: list[int]
    prompt: int
    adapter: str = ""
    slot: int = -1
    computed: int = 0
    cached: int = 0

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return self.pending == 1 and self.computed > 0
