"""A sequence of tokens, a prompt and its completion, with its slot in the cache."""

from dataclasses import dataclass


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
