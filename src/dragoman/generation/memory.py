"""What the scheduler asks of memory: the cache's slots, and the beginnings that are kept beside them."""

import torch

from dragoman.generation.cache import Cache, CacheShape
from dragoman.generation.prefixes import BLOCK, Prefixes
from dragoman.generation.sequence import Sequence


class Memory:
    """A cache for `budget` tokens in all, and beginnings of prompts of at most `prefix_tokens` tokens (0: none).

    `clears`: slots are cleared when they become free, since what is left of a text whose numbers are none would spoil
    the next one's, though masked. Machine code does not look at what is masked.
    """

    def __init__(
        self,
        shape: CacheShape,
        budget: int,
        prefix_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        clears: bool = True,
    ) -> None:
        self.cache = Cache(shape, budget, dtype, device)
        self.prefixes = Prefixes(prefix_tokens // BLOCK)
        self._keeps, self._clears = prefix_tokens >= BLOCK, clears

    def fits(self, slots: int, length: int) -> bool:
        return self.cache.fits(slots, length)

    def reserve(self, slots: int, length: int) -> None:
        self.cache.reserve(slots, length)

    def move(self, source: int, target: int, length: int) -> None:
        self.cache.copy(source, target, length)

    def clear(self, slot: int, length: int) -> None:
        if self._clears:
            self.cache.clear(slot, length)

    def gather(self, sources: list[int], targets: list[int], length: int) -> None:
        if sources != targets:
            self.cache.gather(sources, targets, length)

    def recall(self, sequence: Sequence) -> int:
        """Put what is known of the sequence's beginning into its slot, and give the number of those tokens."""
        blocks = self.prefixes.find(sequence.tokens, sequence.adapter) if self._keeps else []
        if blocks:
            keys, values = (torch.cat([block[part] for block in blocks], dim=2) for part in (0, 1))
            self.cache.write(sequence.slot, 0, (keys, values))
        return len(blocks) * BLOCK

    def keep(self, sequence: Sequence) -> None:
        """Keep what has been computed of the sequence as a beginning of others."""
        if self._keeps:
            known = sequence.tokens[: sequence.computed]
            self.prefixes.add(known, sequence.adapter, lambda start, stop: self.cache.read(sequence.slot, start, stop))

    @property
    def held(self) -> int:
        """How many tokens there is memory for."""
        return self.cache.slots * self.cache.length

    def release(self) -> None:
        self.cache.release()
