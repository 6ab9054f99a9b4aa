"""One sequence of tokens: a prompt and what has been written after it, with its place in the cache."""

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Sequence:
    """`tokens` are the prompt's and the text's; the keys and values of the first `computed` are in the cache's `slot`.

    `cached` of them were there already when it came.

    One token that is not computed is the next step of a text; several are (the rest of) a prompt.
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
