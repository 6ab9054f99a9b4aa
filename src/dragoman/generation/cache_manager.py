"""Memory of sequences: slots of the key-value cache, and the prefix cache."""

import torch

from dragoman.generation.cache import CacheShape, KeyValueCache
from dragoman.generation.prefix_cache import BLOCK, PrefixCache
from dragoman.generation.sequence import Sequence


class CacheManager:
    """Key-value cache for `budget` tokens, and prefix cache for `prefix_tokens` tokens (0: none).

    clears: zero slots when they become free, because NaN of a failed sequence would spread to the next one through
    masked positions. The machine code does not read masked positions.
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
        self.cache = KeyValueCache(shape, budget, dtype, device)
        self.prefixes = PrefixCache(prefix_tokens // BLOCK)
        self._stores_prefixes, self._clears = prefix_tokens >= BLOCK, clears

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

    def load_prefix(self, sequence: Sequence) -> int:
        """Copy the cached prefix of a sequence into its slot; return the number of its tokens."""
        blocks = self.prefixes.find(sequence.tokens, sequence.adapter) if self._stores_prefixes else []
        if blocks:
            keys, values = (torch.cat([block[part] for block in blocks], dim=2) for part in (0, 1))
            self.cache.write(sequence.slot, 0, (keys, values))
        return len(blocks) * BLOCK

    def store_prefix(self, sequence: Sequence) -> None:
        """Store the computed tokens of a sequence in the prefix cache."""
        if self._stores_prefixes:
            known = sequence.tokens[: sequence.computed]
            self.prefixes.add(known, sequence.adapter, lambda start, stop: self.cache.read(sequence.slot, start, stop))

    @property
    def allocated_tokens(self) -> int:
        """Number of tokens for which cache memory is allocated."""
        return self.cache.slots * self.cache.length

    def release(self) -> None:
        self.cache.release()
