"""Key-value cache: its slots, their allocation, and the prefix cache."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from dragoman_text.generation.job import Sequence

# Slots are as long as the longest sequence, rounded up to a multiple of this.
LENGTH_STEP = 32
_MIN_LENGTH_ON_GPU = 512


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape per token: `layers` with `heads` key vectors of `key_size` and value vectors of `value_size`."""

    layers: int
    heads: int
    key_size: int
    value_size: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.layers * self.heads * (self.key_size + self.value_size) * dtype.itemsize


class KeyValueCache:
    """Keys and values of shape [layers, slots, heads, length, size], with at most `budget` tokens in all.

    Slots are adjacent and only as long as the longest sequence, so that attention over all sequences reads one block.
    The number of slots times this length stays within the budget. Memory not written yet is zero, never NaN: masked
    positions are multiplied by 0, so slots are cleared before they are reused.
    """

    def __init__(self, shape: CacheShape, budget: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.budget = budget
        self._dtype, self._device = dtype, device
        self.slots = self.length = 0
        self.release()

    def release(self) -> None:
        """Free all memory; no slot may be in use."""
        self.slots = self.length = 0
        shape = self.shape
        self.keys, self.values = (
            torch.empty((shape.layers, 0, shape.heads, 0, size), dtype=self._dtype, device=self._device)
            for size in (shape.key_size, shape.value_size)
        )

    def fits(self, slots: int, length: int) -> bool:
        return slots * round_up(length) <= self.budget

    def reserve(self, slots: int, length: int) -> None:
        """Allocate at least `slots` slots of `length` tokens; `fits` must be true.

        Slots of more than twice that length are shortened.
        """
        if slots <= self.slots and length <= self.length <= 2 * self._ample(length):
            return
        # Allocate twice the slots and an eighth more length if the budget allows, so that resizing is rare.
        ample_slots = max(slots, 2 * self.slots if slots > self.slots else self.slots)
        ample_length, length = self._ample(length), round_up(length)
        sizes = ((ample_slots, ample_length), (slots, ample_length), (ample_slots, length), (slots, length))
        self._resize(*next((size for size in sizes if self.fits(*size)), (slots, length)))

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a slot to another."""
        for part in (self.keys, self.values):
            part[:, target, :, :length] = part[:, source, :, :length]

    def gather(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy several slots at once; sources are read before targets are written."""
        for part in (self.keys, self.values):
            part[:, targets, :, :length] = part[:, sources, :, :length]

    def clear(self, slot: int, length: int) -> None:
        """Zero the first `length` tokens of a slot."""
        if slot < self.slots:
            for part in (self.keys, self.values):
                part[:, slot, :, :length] = 0

    def read(self, slot: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of the tokens from start to stop."""
        return self.keys[:, slot, :, start:stop].clone(), self.values[:, slot, :, start:stop].clone()

    def write(self, slot: int, start: int, block: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write a block returned by `read` at `start`."""
        stop = start + block[0].shape[-2]
        self.keys[:, slot, :, start:stop] = block[0]
        self.values[:, slot, :, start:stop] = block[1]

    def flat(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Keys and values by layer, [slots * heads * length, size]."""
        keys, values = (part.view(len(part), -1, part.shape[-1]).unbind() for part in (self.keys, self.values))
        return keys, values

    def _ample(self, length: int) -> int:
        """Return the length to allocate: occasional copies must cost less than reading unused memory.

        On a GPU unused memory is not read.
        """
        if self._device.type != "cpu":
            return max(_MIN_LENGTH_ON_GPU, 1 << (length - 1).bit_length())
        return round_up(length) if length <= 8 * LENGTH_STEP else round_up(length * 9 // 8)

    def _resize(self, slots: int, length: int) -> None:
        try:  # one after the other, so that at most half of the cache exists twice
            self.keys = self._copy_resized(self.keys, slots, length)
            self.values = self._copy_resized(self.values, slots, length)
        except BaseException:
            self.release()  # otherwise keys and values would have different lengths
            raise
        self.slots, self.length = slots, length

    def _copy_resized(self, old: torch.Tensor, slots: int, length: int) -> torch.Tensor:
        new = old.new_empty(self.shape.layers, slots, self.shape.heads, length, old.shape[-1])
        common_slots, common = min(slots, self.slots), min(length, self.length)
        new[:, :common_slots, :, :common] = old[:, :common_slots, :, :common]
        new[:, :common_slots, :, common:] = 0
        new[:, common_slots:] = 0
        return new


def round_up(length: int) -> int:
    """Return the slot length for this many tokens."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


# Tokens per block; only complete blocks are cached.
BLOCK = 16

# Adapter and salt.
Origin = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Block:
    number: int
    content: Any


class PrefixCache:
    """At most `capacity` blocks of keys and values, identified by their tokens and the previous block.

    The content of a block is opaque. The first block of a prefix is identified by an adapter and a salt instead of a
    previous block, so that prefixes with another adapter or salt are separate.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[tuple[int | Origin, tuple[int, ...]], _Block] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, tokens: list[int], origin: Origin) -> list[Any]:
        """Return the cached blocks of a prefix; never of all tokens, because the last one must be computed."""
        keys, contents = [], []
        before: int | Origin = origin
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

    def add(self, tokens: list[int], origin: Origin, read: Any) -> None:
        """Cache the complete blocks of the tokens; `read(start, stop)` returns the content of a new block."""
        before: int | Origin = origin
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
    masked positions. The kernels do not read masked positions.
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

    @property
    def budget(self) -> int:
        return self.cache.budget

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
        stores = self._stores_prefixes and not sequence.features  # equal tokens may be placeholders of different images
        blocks = self.prefixes.find(sequence.tokens, (sequence.adapter, sequence.salt)) if stores else []
        if blocks:
            keys, values = (torch.cat([block[part] for block in blocks], dim=2) for part in (0, 1))
            self.cache.write(sequence.slot, 0, (keys, values))
        return len(blocks) * BLOCK

    def store_prefix(self, sequence: Sequence) -> None:
        """Store the computed tokens of a sequence in the prefix cache."""
        if self._stores_prefixes and not sequence.features:
            tokens, origin = sequence.tokens[: sequence.computed], (sequence.adapter, sequence.salt)
            self.prefixes.add(tokens, origin, lambda start, stop: self.cache.read(sequence.slot, start, stop))

    def clear_prefixes(self) -> None:
        self.prefixes.clear()

    @property
    def allocated_tokens(self) -> int:
        """Number of tokens for which cache memory is allocated."""
        return self.cache.slots * self.cache.length

    def release(self) -> None:
        self.cache.release()
