"""The key and value cache: a slot for each sequence, in memory that grows as it is needed, up to a budget."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Slots are as long as the longest sequence, in portions of so many tokens.
PORTION = 32
_LEAST_OF_GPU = 512


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
    multiplied by 0, which is why slots are cleared before others have them.
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
        shape = self.shape
        self.keys, self.values = (
            torch.empty((shape.layers, 0, shape.heads, 0, size), dtype=self._dtype, device=self._device)
            for size in (shape.key_size, shape.value_size)
        )

    def fits(self, slots: int, length: int) -> bool:
        """Whether so many slots of that length are within the budget."""
        return slots * rounded(length) <= self.budget

    def reserve(self, slots: int, length: int) -> None:
        """Have at least so many slots of at least that length, which all that is held is within; `fits` must have said
        so. Slots of more than twice that length become shorter."""
        if slots <= self.slots and length <= self.length <= 2 * self._ample(length):
            return
        # Twice the slots, and an eighth more length, where there is room, so that it seldom grows.
        ample_slots = max(slots, 2 * self.slots if slots > self.slots else self.slots)
        ample_length, length = self._ample(length), rounded(length)
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

    def clear(self, slot: int, length: int) -> None:
        """Forget what a slot holds of the first `length` tokens."""
        if slot < self.slots:
            for part in (self.keys, self.values):
                part[:, slot, :, :length] = 0

    def read(self, slot: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of the tokens from start to stop."""
        return self.keys[:, slot, :, start:stop].clone(), self.values[:, slot, :, start:stop].clone()

    def write(self, slot: int, start: int, block: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Put what `read` gave at `start`."""
        stop = start + block[0].shape[-2]
        self.keys[:, slot, :, start:stop] = block[0]
        self.values[:, slot, :, start:stop] = block[1]

    def flat(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Keys and values by layer, [slots * heads * length, size]."""
        keys, values = (part.view(len(part), -1, part.shape[-1]).unbind() for part in (self.keys, self.values))
        return keys, values

    def _ample(self, length: int) -> int:
        """The length with room to grow: copying it all now and then must cost less than reading what is not used.

        A GPU reads no more than is used, and what was captured on it is lost whenever memory moves.
        """
        if self._device.type != "cpu":
            return max(_LEAST_OF_GPU, 1 << (length - 1).bit_length())
        return rounded(length) if length <= 8 * PORTION else rounded(length * 9 // 8)

    def _resize(self, slots: int, length: int) -> None:
        try:  # one after the other, so that no more than half of it is there twice
            self.keys = self._resized(self.keys, slots, length)
            self.values = self._resized(self.values, slots, length)
        except BaseException:
            self.release()  # half of it would be read at the wrong places
            raise
        self.slots, self.length = slots, length

    def _resized(self, old: torch.Tensor, slots: int, length: int) -> torch.Tensor:
        new = old.new_empty(self.shape.layers, slots, self.shape.heads, length, old.shape[-1])
        kept, common = min(slots, self.slots), min(length, self.length)
        new[:, :kept, :, :common] = old[:, :kept, :, :common]
        new[:, :kept, :, common:] = 0
        new[:, kept:] = 0
        return new


def rounded(length: int) -> int:
    """The length of slots for so many tokens."""
    return -(-length // PORTION) * PORTION
