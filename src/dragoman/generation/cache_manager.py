"""Memory of sequences: slots of the key-value cache, and the prefix cache."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from dragoman.generation.cache import CacheShape, KeyValueCache
from dragoman.generation.sequence import Sequence

# Tokens per block; only complete blocks are cached.
BLOCK = 16


@dataclass(frozen=True, slots=True)
class _Block:
    number: int
    content: Any


class PrefixCache:
    """At most `capacity` blocks of keys and values, identified by their tokens and the previous block.

    The content of a block is opaque. Prefixes of different adapters are separate.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[tuple[int | str, tuple[int, ...]], _Block] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, tokens: list[int], adapter: str) -> list[Any]:
        """Return the cached blocks of a prefix; never of all tokens, because the last one must be computed."""
        keys, contents = [], []
        before: int | str = adapter
        for start in range(0, len(tokens) - BLOCK, BLOCK):
            key = (before, tuple(tokens[start : start + BLOCK]))
            block = self._blocks.get(key)
            if block is None:
                break
            before = block.number
            keys.append(key)
            contents.append(block.content)
        for key in reversed(keys):  # a block is evicted after those that follow it
            self._blocks.move_to_end(key)
        return contents

    def add(self, tokens: list[int], adapter: str, read: Any) -> None:
        """Cache the complete blocks of the tokens; `read(start, stop)` returns the content of a new block."""
        before: int | str = adapter
        keys = []
        for start in range(0, min(len(tokens), self._capacity * BLOCK) - BLOCK + 1, BLOCK):
            key = (before, tuple(tokens[start : start + BLOCK]))
            block = self._blocks.get(key)
            if block is None:
                self._next += 1
                block = self._blocks[key] = _Block(self._next, read(start, start + BLOCK))
            before = block.number
            keys.append(key)
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


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
