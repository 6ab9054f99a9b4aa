"""Weights as integers with scales: their values, and the blocks in which the kernels multiply them (blocks.c).

Shapes: N outputs, K inputs, G groups of inputs that share a scale and a zero point.
"""

from dataclasses import dataclass

import torch

from dragoman_text.generation.gguf_file import TYPES, TensorType
from dragoman_text.generation.native.config import GROUP

_Q4_0, _Q8_0 = TYPES[2], TYPES[8]
# Types of our own, with zero points; files cannot have them.
_Q4_Z, _Q8_Z = TensorType("Q4_Z", 256, GROUP, 19), TensorType("Q8_Z", 257, GROUP, 35)
# Rounding of a scale to FP16, relative to the largest one of a weight: a tenth of the error of rounded activations.
_SCALE_ERROR = 2.0**-11
# Weights that are computed together, to limit memory.
_TOGETHER = 1 << 24


class NoBlocks(Exception):
    """Weights cannot be in blocks; the message says why."""


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A weight of the values (integers - zeros) * scales. Raises ValueError if their shapes do not fit.

    integers: [N, K], 0 to 255. scales, zeros: [N or 1, G]. groups: the group of each input; None: in order, all of
    one size.
    """

    integers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rows, inputs = self.integers.shape
        count = self.scales.shape[1]
        if self.zeros.shape[1] != count or any(len(each) not in (1, rows) for each in (self.scales, self.zeros)):
            raise ValueError("one scale and one zero point for each group is needed")
        if (inputs % max(count, 1)) if self.groups is None else len(self.groups) != inputs:
            raise ValueError("the groups do not divide the inputs")

    def dense(self) -> torch.Tensor:
        """Return its values [N, K], FP32. Raises IndexError for a group that has no scale."""
        return (self.integers.float() - self._by_input(self.zeros)) * self._by_input(self.scales)

    def _by_input(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of groups by input, FP32 [N or 1, K]."""
        if self.groups is not None:
            return values.float()[:, self.groups]
        return values.float().repeat_interleave(self.integers.shape[1] // max(values.shape[1], 1), 1)

    def in_order(self) -> tuple["IntegerWeight", torch.Tensor | None]:
        """Return it with the inputs of each group side by side, and the present place of each of these inputs; None if
        that is the same. Raises NoBlocks if groups differ in size."""
        if self.groups is None:
            return self, None
        groups, order = torch.sort(self.groups, stable=True)
        count = self.scales.shape[1]
        if not torch.equal(groups, torch.arange(len(groups)) // max(1, len(groups) // count)):
            raise NoBlocks("groups of inputs differ in size")
        if torch.equal(order, torch.arange(len(order))):
            return IntegerWeight(self.integers, self.scales, self.zeros), None
        return IntegerWeight(self.integers[:, order], self.scales, self.zeros), order

    def blocks(self) -> tuple[TensorType, torch.Tensor]:
        """Return a type and the bytes [N, bytes of a row] of blocks with the same values; groups must be in order.

        It is Q4_0 or Q8_0 if those can hold the integers less their zero points, else one with zero points. Nothing is
        rounded but scales that FP16 does not have. Raises NoBlocks for groups that are not a multiple of 32 inputs, and
        for scales that would be rounded too much.
        """
        rows, inputs = self.integers.shape
        groups = self.scales.shape[1]
        if not groups or inputs % (GROUP * groups):
            raise NoBlocks(f"expected groups of a multiple of {GROUP} inputs, got {inputs} inputs in {groups} groups")
        scales, zeros = (self._by_input(each)[:, ::GROUP].expand(rows, -1) for each in (self.scales, self.zeros))
        halves = _fp16_scales(scales)
        if not bool(((zeros == zeros.round()) & (zeros >= 0) & (zeros <= 255)).all()):
            raise NoBlocks("its zero points are not integers of 8 bits")
        blocks, zeros = self.integers.view(rows, -1, GROUP), zeros.to(torch.uint8)
        parts = _parts(rows, inputs)
        bounds = [torch.aminmax(_shifted(blocks[part], zeros[part])) for part in parts]
        low, high = min(int(each.min) for each in bounds), max(int(each.max) for each in bounds)
        type_, offset = _Q8_Z, None
        if low >= -8 and high <= 7:
            type_, offset = _Q4_0, 8
        elif int(self.integers.max()) <= 15:
            type_ = _Q4_Z
        elif low >= -128 and high <= 127:
            type_, offset = _Q8_0, 0
        packed = torch.empty(rows, inputs // GROUP, type_.bytes, dtype=torch.uint8)
        packed[:, :, :2] = halves.contiguous().view(torch.uint8).view(rows, -1, 2)
        if offset is None:
            packed[:, :, 2] = zeros
        for part in parts:
            each = blocks[part] if offset is None else (_shifted(blocks[part], zeros[part]) + offset).to(torch.uint8)
            if type_ in (_Q4_0, _Q4_Z):
                each = each[:, :, : GROUP // 2] | each[:, :, GROUP // 2 :] << 4
            packed[part, :, -each.shape[2] :] = each
        return type_, packed.flatten(1)


def _parts(rows: int, inputs: int) -> list[slice]:
    """Return the parts of the rows that are computed together."""
    count = max(1, _TOGETHER // inputs)
    return [slice(first, first + count) for first in range(0, rows, count)]


def _shifted(integers: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    return integers.short() - zeros.short()[:, :, None]


def _fp16_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales of a weight in FP16. Raises NoBlocks if they would be rounded too much."""
    halves = scales.half()
    if not bool((halves.float() - scales).abs().max() <= _SCALE_ERROR * scales.abs().max()):
        raise NoBlocks("its scales are beyond the range of FP16")
    return halves


def round_weight(weight: torch.Tensor, bits: int) -> IntegerWeight:
    """Round a weight [N, K] to integers of 8 or 4 bits with one scale for each 32 inputs, as llama.cpp does.

    8 bits: -127 to 127. 4 bits: -8 to 7, where the largest weight of a group becomes -8.
    Raises NoBlocks for inputs that are not a multiple of 32, and for scales that FP16 does not have.
    """
    rows, inputs = weight.shape
    if inputs % GROUP:
        raise NoBlocks(f"expected a multiple of {GROUP} inputs, got {inputs}")
    lowest, highest = (-127, 127) if bits == 8 else (-8, 7)
    integers, scales = torch.empty(rows, inputs, dtype=torch.uint8), torch.empty(rows, inputs // GROUP)
    for part in _parts(rows, inputs):
        groups = weight[part].detach().float().reshape(-1, inputs // GROUP, GROUP)
        largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        scale = _fp16_scales(largest.abs() / 127 if bits == 8 else largest / -8).float()
        rounded = (groups / torch.where(scale == 0, 1.0, scale)).round().clamp(lowest, highest)
        integers[part], scales[part] = (rounded + 128).to(torch.uint8).flatten(1), scale[..., 0]
    return IntegerWeight(integers, scales, torch.full((1, inputs // GROUP), 128))
