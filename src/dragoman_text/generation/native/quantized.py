"""Weights in 8 or 4 bits: rounding, and the layout that product.c decodes.

Each 32 inputs of a column are a group with one scale in BF16, so that a weight takes 8.5 or 4.5 bits. Products are
computed with the integers in the model's dtype, which represents them exactly; the sum of a group is then multiplied by
its scale.
"""

from typing import Any

import torch
from torch import nn

from dragoman_text.generation.native.config import COLUMNS, GROUP, LANES, KernelConfig, pad

# Bytes of quantized weights that are decoded together.
_CHUNK = 64
_PACKED_BLOCKS = 16


def quantize(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round weights [columns, inputs] to integers; return them, int8, and the scales [columns, groups], BF16.

    8 bits: -127 to 127. 4 bits: -8 to 7, where the largest weight of a group becomes -8, as in llama.cpp's Q4_0.
    """
    groups = weight.detach().float().view(len(weight), -1, GROUP)
    if bits == 8:
        scales, lowest, highest = groups.abs().amax(-1) / 127, -127, 127
    else:
        largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
        scales, lowest, highest = largest / -8, -8, 7
    scales = scales.bfloat16()
    divisor = torch.where(scales == 0, 1.0, scales.float())[..., None]
    integers = (groups / divisor).round().clamp(lowest, highest).to(torch.int8)
    return integers.view(weight.shape), scales


def dequantize(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the FP32 values of the weights after quantization."""
    integers, scales = quantize(weight, bits)
    return (integers.view(len(weight), -1, GROUP) * scales.float()[..., None]).view(weight.shape)


def dequantize_layers(model: Any, bits: int) -> None:
    """Replace the weights of a decoder's linear layers by their values after quantization, in the model's dtype."""
    layers = [each for each in model.model.layers.modules() if isinstance(each, nn.Linear)]
    for layer in (*layers, model.lm_head):
        weight = dequantize(layer.weight, bits).to(layer.weight.dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)  # not in place: the head may share the embedding's


def pack_quantized(weight: torch.Tensor, config: KernelConfig) -> torch.Tensor:
    """Return the blocks of weights [columns, inputs] as bytes [columns / 64, groups, bytes of a group].

    A group consists of the scales of 64 columns, then its steps.
    """
    columns, inputs = weight.shape
    groups = inputs // GROUP
    blocks = torch.zeros(pad(columns) // COLUMNS, groups, config.group_bytes, dtype=torch.uint8)
    for first in range(0, len(blocks), _PACKED_BLOCKS):  # a few at a time, to limit memory
        part = blocks[first : first + _PACKED_BLOCKS]
        padded = torch.zeros(len(part) * COLUMNS, inputs)
        rows = weight.detach()[first * COLUMNS : (first + len(part)) * COLUMNS]
        padded[: len(rows)] = rows
        integers, scales = quantize(padded, config.bits)
        in_blocks = scales.view(len(part), COLUMNS, groups).transpose(1, 2).contiguous()
        part[..., : 2 * COLUMNS] = in_blocks.view(torch.uint8)
        steps = integers.view(len(part), COLUMNS, groups, -1, config.pair).permute(0, 2, 3, 1, 4)
        encoded = _encode(steps.contiguous().view(len(part) * groups, -1, COLUMNS, config.pair), config)
        part[..., 2 * COLUMNS :] = encoded.reshape(len(part), groups, -1)
    return blocks


def _encode(steps: torch.Tensor, config: KernelConfig) -> torch.Tensor:
    """Return integers [groups, steps, 64 columns, inputs of a step] as bytes in the order that the kernel decodes."""
    groups = len(steps)
    if config.bits == 4:  # each lane of 16 or 32 bits has that lane of 4 or 8 vectors, the first in the lowest bits
        lanes = LANES * config.pair
        vectors = (steps.long() & 15).view(groups, GROUP * COLUMNS * 4 // (8 * _CHUNK), -1, lanes)
        packed = (vectors << (4 * torch.arange(vectors.shape[2]))[:, None]).sum(2)
        return packed.to(torch.int16 if config.pair > 1 else torch.int32).view(torch.uint8)
    if config.pair == 1:
        return steps.view(torch.uint8)
    # Sign and magnitude; two vectors of 32 are interleaved by 8, as the instructions that join their bytes expect.
    signed = steps.int().abs() | ((steps < 0).int() << 7)
    return signed.to(torch.uint8).view(groups, -1, 2, 4, 8).transpose(2, 3).contiguous()
