"""The key and value cache: a slot for each sequence, in memory that grows as it is needed, up to a budget."""

from dataclasses import dataclass

import torch

# Slots are as long as the longest sequence, in portions of so many tokens.
PORTION = 32


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token takes: `layers`, each with `heads` vectors of `key_size` and of `value_size`."""

    layers: int
    heads: int
    key_size: int
    value_size: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.layers * self.heads * (self.key_size + self.value_size) * dtype.itemsize


class Cache:
    """Keys and values, [layers, slots, heads, length, size] each, of `budget` tokens at most.

    Slots lie side by side, and are hardly longer than what they hold, so that attention of all sequences reads one
    block without gaps. Every slot is as long as the longest, which is why the number of slots times that length must
    stay within the budget. Memory that no token has been written to is zero, never NaN: masked positions are
    multiplied by 0.
    """

    def __init__(self, shape: CacheShape, budget: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.budget = budget
        self._dtype, self._device = dtype, device
        self.slots = self.length = 0
        self.release()

    def release(self) -> None:
        """Give all memory back; nothing must be in use."""
        self.slots = self.length = 0
        self.keys, self.values = self._empty(0, 0)

    def fits(self, slots: int, length: int) -> bool:
        """Whether so many slots of that length are within the budget."""
        return slots * rounded(length) <= self.budget

    def reserve(self, slots: int, length: int) -> None:
        """Have at least so many slots of at least that length, which all that is held is within; `fits` must have said
        so. Slots of more than twice that length become shorter."""
        if slots <= self.slots and length <= self.length <= 2 * _ample(length):
            return
        # Twice the slots, and an eighth more length, where there is room, so that it seldom grows.
        ample_slots = max(slots, 2 * self.slots if slots > self.slots else self.slots)
        ample_length, length = _ample(length), rounded(length)
        sizes = ((ample_slots, ample_length), (slots, ample_length), (ample_slots, length), (slots, length))
        self._resize(*next((size for size in sizes if self.fits(*size)), (slots, length)))

    def copy(self, source: int, target: int, length: int) -> None:
        """Write what one slot holds of the first `length` tokens into another."""
        for part in (self.keys, self.values):
            part[:, target, :, :length] = part[:, source, :, :length]

    def gather(self, sources: list[int], targets: list[int], length: int) -> None:
        """Several copies at once, each target getting what its source held before."""
        for part in (self.keys, self.values):
            part[:, targets, :, :length] = part[:, sources, :, :length]

    def read(self, slot: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of the tokens from start to stop."""
        return self.keys[:, slot, :, start:stop].clone(), self.values[:, slot, :, start:stop].clone()

    def write(self, slot: int, start: int, block: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Put what `read` gave at `start`."""
        stop = start + block[0].shape[-2]
        self.keys[:, slot, :, start:stop] = block[0]
        self.values[:, slot, :, start:stop] = block[1]

    def _empty(self, slots: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        common = (self.shape.layers, slots, self.shape.heads, length)
        keys = torch.empty((*common, self.shape.key_size), dtype=self._dtype, device=self._device)
        return keys, torch.empty((*common, self.shape.value_size), dtype=self._dtype, device=self._device)

    def _resize(self, slots: int, length: int) -> None:
        grown = self._empty(slots, length)
        kept, common = min(slots, self.slots), min(length, self.length)
        for new, old in zip(grown, (self.keys, self.values), strict=True):
            new[:, :kept, :, :common] = old[:, :kept, :, :common]
            new[:, :kept, :, common:] = 0
            new[:, kept:] = 0
        (self.keys, self.values), self.slots, self.length = grown, slots, length


def rounded(length: int) -> int:
    """The length of slots for so many tokens."""
    return -(-length // PORTION) * PORTION


def _ample(length: int) -> int:
    """The same with room to grow: copying it all now and then must cost less than reading what is not used."""
    return rounded(length) if length <= 8 * PORTION else rounded(length * 9 // 8)
