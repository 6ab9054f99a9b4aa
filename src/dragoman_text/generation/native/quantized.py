"""Weights in 8 or 4 bits: rounding, layout, and the kernel that decodes them.

Each 32 inputs of a column are a group with one scale in BF16, so that a weight takes 8.5 or 4.5 bits. Products are
computed with the integers in the model's dtype, which represents them exactly; the sum of a group is then multiplied by
its scale.
"""

from functools import partial
from typing import Any

import torch
from llvmlite import ir
from torch import nn

from dragoman_text.generation.native.code import INT8, INT32_VECTOR, LANES, VECTOR, Code, Value
from dragoman_text.generation.native.kernels import CHUNK, COLUMNS, GROUP, Decode, KernelConfig, pad

_PACKED_BLOCKS = 16
_BYTES, _QUARTER, _WORDS = ir.VectorType(INT8, 64), ir.VectorType(INT8, 16), ir.VectorType(ir.IntType(16), 32)


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
        vectors = (steps.long() & 15).view(groups, GROUP * COLUMNS * 4 // (8 * CHUNK), -1, lanes)
        packed = (vectors << (4 * torch.arange(vectors.shape[2]))[:, None]).sum(2)
        return packed.to(torch.int16 if config.pair > 1 else torch.int32).view(torch.uint8)
    if config.pair == 1:
        return steps.view(torch.uint8)
    # Sign and magnitude; two vectors of 32 are interleaved by 8, as the instructions that join their bytes expect.
    signed = steps.int().abs() | ((steps < 0).int() << 7)
    return signed.to(torch.uint8).view(groups, -1, 2, 4, 8).transpose(2, 3).contiguous()


def decoder(config: KernelConfig) -> Decode | None:
    """Return the instructions that decode weights; None if they are not quantized."""
    if not config.bits:
        return None
    if config.bits == 8:
        return partial(_decode_pairs if config.pair > 1 else _decode_bytes, config)
    return partial(_look_up_4_bits if config.avx512 else _shift_4_bits, config)


def _look_up_4_bits(config: KernelConfig, code: Code, chunk: Value) -> list[Value]:
    """Look up each field of 4 bits; the instructions ignore all higher bits of a lane."""
    numbers = torch.tensor([*range(8), *range(-8, 0)], dtype=config.dtype)
    if config.bf16:
        table = code.constant(_WORDS, numbers.repeat(2).view(torch.int16).tolist())
        packed, name = chunk.load(_WORDS), "llvm.x86.avx512.permvar.hi.512"
    else:
        table = code.constant(VECTOR, numbers.tolist())
        packed, name = chunk.load(INT32_VECTOR), "llvm.x86.avx512.permvar.sf.512"
    type_ = table.value.type
    return [code.call_external(name, type_, table, packed >> (4 * i)) for i in range(4 if config.bf16 else 8)]


def _shift_4_bits(_: KernelConfig, code: Code, chunk: Value) -> list[Value]:
    """Shift each field of 4 bits to the upper end of its lane and back, which extends its sign."""
    packed = chunk.load(INT32_VECTOR)
    return [(packed << (28 - 4 * i)).shift_right_signed(28).to_float() for i in range(8)]


def _decode_pairs(config: KernelConfig, code: Code, chunk: Value) -> list[Value]:
    """Look up both bytes of the BF16 number of each magnitude of 7 bits, and join them."""
    numbers = torch.arange(128).bfloat16().view(torch.uint8).view(128, 2)
    signed, bytes_ = chunk.load(_BYTES), []
    for part in numbers.t():
        tables = [code.constant(_BYTES, half.tolist()) for half in part.split(64)]
        bytes_.append(code.call_external("llvm.x86.avx512.vpermi2var.qi.512", _BYTES, tables[0], signed, tables[1]))
    low, high = bytes_[0], bytes_[1] | (signed & 128)
    starts = [16 * lane + 8 * half for half in range(2) for lane in range(4)]
    order = [index for start in starts for i in range(start, start + 8) for index in (i, 64 + i)]
    return [low.shuffle(high, order[:64]), low.shuffle(high, order[64:])]


def _decode_bytes(config: KernelConfig, code: Code, chunk: Value) -> list[Value]:
    return [chunk.load(_QUARTER, LANES * i).to_float() for i in range(4)]
