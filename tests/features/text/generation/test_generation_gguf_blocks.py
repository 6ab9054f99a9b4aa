"""Products with weights in blocks, those of GGUF files and our own: every bit, in each form that this CPU runs."""

import ctypes
from typing import Any

import numpy as np
import pytest

from dragoman_kernels import available_forms, function

gguf = pytest.importorskip("gguf")

# Fields of blocks: bytes of FP16 scales.
_HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
# Types of our own: number, bytes of a block of 32.
OURS = {"Q4_Z": (256, 19), "Q8_Z": (257, 35)}
QUANTIZED = (*OURS, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
FLOATS = ("F32", "F16", "BF16")

Array = np.ndarray[Any, Any]


def weights(kind: str, rows: int, inputs: int) -> Array:
    """Return the bytes of random weights, [rows, bytes]."""
    random = np.random.default_rng(rows)
    if kind in OURS:
        blocks = random.integers(0, 256, (rows, inputs // 32, OURS[kind][1]), np.uint8)
        blocks[..., :2] = random.uniform(-3e-3, 3e-3, (rows, inputs // 32, 1)).astype(np.float16).view(np.uint8)
        return blocks.reshape(rows, -1)
    values = (random.standard_normal((rows, inputs)) / 16).astype(np.float32)
    type_ = gguf.GGMLQuantizationType[kind]
    if kind not in _HALVES:
        return np.ascontiguousarray(gguf.quants.quantize(values, type_)).view(np.uint8).reshape(rows, -1)
    elements, size = gguf.GGML_QUANT_SIZES[type_]
    blocks = random.integers(0, 256, (rows, inputs // elements, size), np.uint8)
    for begin in _HALVES[kind]:
        scales = random.uniform(-3e-4, 3e-4, (rows, inputs // elements, 1)).astype(np.float16)
        blocks[:, :, begin : begin + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def values_of(kind: str, data: Array, inputs: int) -> Array:
    if kind in OURS:
        blocks = data.reshape(len(data), inputs // 32, -1)
        integers = _nibbles(blocks[..., 3:]) if kind == "Q4_Z" else blocks[..., 3:].astype(np.int32)
        values = (integers - blocks[..., 2:3].astype(np.int32)) * _half(blocks, 0)[..., None]
        return np.asarray(values, np.float32).reshape(len(data), inputs)
    return np.asarray(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])).reshape(len(data), inputs)


def _half(blocks: Array, begin: int) -> Array:
    return blocks[..., begin : begin + 2].copy().view(np.float16)[..., 0].astype(np.float32)


def _nibbles(packed: Array) -> Array:
    return np.concatenate((packed & 15, packed >> 4), -1).astype(np.int32)


def decode(kind: str, data: Array) -> tuple[Array, Array, Array]:
    """Return integers [rows, groups, 2, 16], scales [rows, groups, 2] and minima [rows, groups] of a type."""
    size = OURS[kind][1] if kind in OURS else gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = data.reshape(len(data), -1, size)
    if kind in OURS:
        integers = _nibbles(blocks[..., 3:]) if kind == "Q4_Z" else blocks[..., 3:].astype(np.int32)
        scales = _half(blocks, 0)
        minima = scales * -blocks[..., 2].astype(np.float32)
        return integers.reshape(len(data), -1, 2, 16), scales[..., None].repeat(2, 2), minima
    if kind == "Q6_K":
        low, high = blocks[..., :128].reshape(*blocks.shape[:2], 2, 2, 32), blocks[..., 128:192]
        low = np.stack((low & 15, low >> 4), 3).reshape(*blocks.shape[:2], 2, 4, 32)
        high = high.reshape(*blocks.shape[:2], 2, 1, 32) >> np.array([0, 2, 4, 6])[:, None] & 3
        integers = (low | high << 4).astype(np.int32).reshape(len(data), -1, 2, 16) - 32
        scales = blocks[..., 192:208].view(np.int8).astype(np.float32) * _half(blocks, 208)[..., None]
        return integers, scales.reshape(len(data), -1, 2), np.zeros(integers.shape[:2], np.float32)
    if kind.endswith("K"):
        packed, first = blocks[..., 4:16].astype(np.int32), 48 if kind == "Q5_K" else 16
        a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
        six = np.concatenate((a & 63, c & 15 | a >> 6 << 4), -1), np.concatenate((b & 63, c >> 4 | b >> 6 << 4), -1)
        scales, minima = six[0] * _half(blocks, 0)[..., None], six[1] * -_half(blocks, 2)[..., None]
        raw = blocks[..., first:].reshape(*blocks.shape[:2], 4, 1, 32)
        integers = np.concatenate((raw & 15, raw >> 4), 3).reshape(*blocks.shape[:2], 8, 32).astype(np.int32)
        if kind == "Q5_K":
            integers |= (blocks[..., None, 16:48] >> np.arange(8)[:, None] & 1).astype(np.int32) << 4
        scales = scales.astype(np.float32).reshape(len(data), -1, 1).repeat(2, 2)
        return integers.reshape(len(data), -1, 2, 16), scales, minima.astype(np.float32).reshape(len(data), -1)
    minima = _half(blocks, 2) if kind.endswith("1") else np.zeros(blocks.shape[:2], np.float32)
    at = 4 if kind.endswith("1") else 2
    if kind == "Q8_0":
        integers = blocks[..., 2:].view(np.int8).astype(np.int32)
    elif kind.startswith("Q5"):
        bits = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
        integers = _nibbles(blocks[..., at + 4 :]) | bits.astype(np.int32) << 4
        integers -= 0 if kind == "Q5_1" else 16
    else:
        integers = _nibbles(blocks[..., at:]) - (0 if kind == "Q4_1" else 8)
    return integers.reshape(len(data), -1, 2, 16), _half(blocks, 0)[..., None].repeat(2, 2), minima


def round_activations(inputs: Array) -> tuple[Array, Array]:
    """Return integers [rows, groups, 2, 16] and scales [rows, groups]."""
    groups = inputs.reshape(len(inputs), -1, 32)
    largest = np.abs(groups).max(-1)
    safe = np.where(largest > 1e-30, largest, np.float32(1))
    factor = np.where(largest > 1e-30, np.float32(127) / safe, np.float32(0))
    integers = np.rint(groups * factor[..., None]).astype(np.int32)
    return integers.reshape(*largest.shape, 2, 16), np.where(largest > 1e-30, largest / np.float32(127), np.float32(0))


def product(kind: str, data: Array, inputs: Array) -> Array:
    """The formulas of blocks.c, in FP32: [rows of inputs, rows of weights]."""
    integers, scales, minima = decode(kind, data)
    values, factors = round_activations(inputs)
    totals = np.zeros((len(inputs), len(data)), np.float32)
    for group in range(integers.shape[1]):
        sums = np.einsum("rhi,chi->rch", values[:, group], integers[:, group]).astype(np.float32)
        scale = scales[None, :, group] * factors[:, None, group, None]
        if kind == "Q6_K":
            for half in range(2):
                totals += sums[..., half] * scale[..., half]
        else:
            totals += sums.sum(-1, dtype=np.float32) * scale[..., 0]
        if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K", *OURS):
            all_values = values[:, group].sum((1, 2)).astype(np.float32)
            totals += minima[None, :, group] * (factors[:, group] * all_values)[:, None]
    return totals


def _number(kind: str) -> int:
    return OURS[kind][0] if kind in OURS else int(gguf.GGMLQuantizationType[kind])


def multiply(
    form: str,
    kinds: list[str],
    datas: list[Array],
    inputs: Array,
    bias: Array | None = None,
    head: int = 0,
    order: Array | None = None,
) -> Array:
    """Call the kernel for one or several tensors, in one thread."""
    rows, size = inputs.shape
    counts = [len(each) for each in datas]
    segments = np.array(
        [
            (_number(kind), data.ctypes.data, len(data), data.shape[1], first, head)
            for kind, data, first in zip(kinds, datas, np.cumsum([0, *counts[:-1]]), strict=True)
        ],
        np.int64,
    )
    output, shape = np.zeros((rows, sum(counts)), np.float32), (size // 32, rows)
    values, scales = np.zeros((*shape, 32), np.int8), np.zeros(shape, np.float32)
    sums, floats, loops = np.zeros((*shape, 2), np.int32), np.zeros((*shape, 32), np.float32), np.zeros(256, np.uint8)
    blocks = sum(-(-count // 64) for count in counts)
    addresses = [0 if each is None else each.ctypes.data for each in (segments, bias, order)]
    layer = np.array([*addresses[:2], size, blocks, 1, 1, addresses[2]], np.int64)
    memory = (each.ctypes.data for each in (values, scales, sums, floats, loops))
    call = np.array([layer.ctypes.data, inputs.ctypes.data, rows, output.ctypes.data, sum(counts), *memory], np.int64)
    function("blocks_linear", form, ctypes.c_int64)(call.ctypes.data)
    return output


def states(rows: int, size: int) -> Array:
    random = np.random.default_rng(size)
    inputs = random.standard_normal((rows, size)).astype(np.float32) * random.uniform(0.1, 10, (rows, 1))
    inputs = inputs.astype(np.float32)
    inputs[0, 32:64] = 0  # a group without a scale
    return inputs


@pytest.mark.parametrize("kind", QUANTIZED)
def test_integers(kind: str) -> None:
    """The reference of these tests agrees with the package gguf."""
    data = weights(kind, 5, 512)
    integers, scales, minima = decode(kind, data)
    decoded = integers * scales[..., None] + minima[..., None, None]
    np.testing.assert_allclose(decoded.reshape(5, 512), values_of(kind, data, 512), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", [3, 32, 55])  # alone, as whole tiles, and as these and part of one
@pytest.mark.parametrize("form", available_forms())
@pytest.mark.parametrize("kind", QUANTIZED)
def test_every_bit(kind: str, form: str, rows: int) -> None:
    data, inputs = weights(kind, 83, 512), states(rows, 512)
    result = multiply(form, [kind], [data], inputs)
    assert np.array_equal(result, product(kind, data, inputs))
    exact = inputs.astype(np.float64) @ values_of(kind, data, 512).T
    assert np.linalg.norm(result - exact) < 0.01 * np.linalg.norm(exact)  # docs/why/kernels.md


@pytest.mark.parametrize("form", available_forms())
@pytest.mark.parametrize(
    ("kind", "head"), [("Q4_Z", 3), ("Q8_Z", 3), ("Q4_0", 2), ("Q4_1", 4), ("Q5_0", 2), ("Q5_1", 4), ("Q8_0", 2)]
)
def test_largest_integers(kind: str, head: int, form: str) -> None:
    """Sums of products of bytes fit into the registers' numbers of 16 bits."""
    data = weights(kind, 4, 64)
    data.reshape(4, 2, -1)[..., head:] = np.array([0, 0x7F, 0x80, 0xFF], np.uint8)[:, None, None]
    inputs = np.array([np.ones(64), -np.ones(64), np.resize([1, -1], 64)], np.float32)
    assert np.array_equal(multiply(form, [kind], [data], inputs), product(kind, data, inputs))


@pytest.mark.parametrize("form", available_forms())
@pytest.mark.parametrize("kind", FLOATS)
def test_floating_point(kind: str, form: str) -> None:
    data, inputs = weights(kind, 83, 512), states(3, 512)
    exact = inputs.astype(np.float64) @ values_of(kind, data, 512).T
    result = multiply(form, [kind], [data], inputs)
    np.testing.assert_allclose(result, exact, rtol=1e-4, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("form", available_forms())
@pytest.mark.parametrize("kind", [*QUANTIZED, *FLOATS])
def test_other_rows_change_no_bit(kind: str, form: str) -> None:
    """More rows than a panel has; the last part of the columns has one."""
    data, inputs = weights(kind, 65, 256), states(98, 256)
    together = multiply(form, [kind], [data], inputs)
    for row in (0, 1, 95, 97):
        assert np.array_equal(multiply(form, [kind], [data], inputs[row : row + 1].copy())[0], together[row])


@pytest.mark.parametrize("form", available_forms())
def test_several_tensors_with_a_bias(form: str) -> None:
    kinds = ["Q4_1", "Q6_K", "F16"]
    datas = [weights(kind, rows, 256) for kind, rows in zip(kinds, (70, 3, 64), strict=True)]
    inputs, bias = states(2, 256), np.arange(137, dtype=np.float32)
    alone = [multiply(form, [kind], [data], inputs) for kind, data in zip(kinds, datas, strict=True)]
    together = multiply(form, kinds, datas, inputs, bias)
    assert np.array_equal(together, np.concatenate(alone, 1) + bias)


@pytest.mark.parametrize("form", available_forms())
def test_heads_in_pairs(form: str) -> None:
    """Row 2 i + j of a head of 6 is output i + 3 j."""
    data, inputs = weights("Q8_0", 12, 64), states(2, 64)
    in_order = multiply(form, ["Q8_0"], [data], inputs)
    places = [0, 2, 4, 1, 3, 5]
    expected = in_order[:, [*places, *(6 + each for each in places)]]
    assert np.array_equal(multiply(form, ["Q8_0"], [data], inputs, head=6), expected)


@pytest.mark.parametrize("form", available_forms())
@pytest.mark.parametrize("kind", ["Q4_0", "F16"])
def test_inputs_in_another_order(kind: str, form: str) -> None:
    data, inputs = weights(kind, 12, 128), states(2, 128)
    order = np.random.default_rng(0).permutation(128).astype(np.int64)
    expected = multiply(form, [kind], [data], np.ascontiguousarray(inputs[:, order]))
    assert np.array_equal(multiply(form, [kind], [data], inputs, order=order), expected)


@pytest.mark.parametrize("form", available_forms())
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_activations_that_are_not_finite(form: str, number: float) -> None:
    """Integers cannot represent them: the whole row is NaN, and no other."""
    data, inputs = weights("Q8_0", 5, 128), states(2, 128)
    inputs[1, 70] = number
    result = multiply(form, ["Q8_0"], [data], inputs)
    assert np.isnan(result[1]).all()
    assert np.isfinite(result[0]).all()


@pytest.mark.parametrize("form", available_forms())
@pytest.mark.parametrize("kind", [*(kind for kind in QUANTIZED if kind not in OURS), *FLOATS])
def test_rows(kind: str, form: str) -> None:
    data, wanted = weights(kind, 9, 512), np.array([8, 0, 8], np.int64)
    output = np.zeros((3, 512), np.float32)
    types = [ctypes.c_int64] * 7
    arguments = (data.ctypes.data, data.shape[1], 512, wanted.ctypes.data, 3, output.ctypes.data)
    function("blocks_rows", form, *types)(int(gguf.GGMLQuantizationType[kind]), *arguments)
    np.testing.assert_allclose(output, values_of(kind, data, 512)[wanted], rtol=1e-6, atol=1e-9)
