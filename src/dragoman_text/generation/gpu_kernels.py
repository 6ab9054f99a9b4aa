# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Kernels for a GPU in Triton, each in place of several short ones of PyTorch.

A decoding step of one sequence reads each weight once; its other operations are so short that their number counts.
Results are computed in FP32 and rounded once. Importing it raises ImportError without Triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _norm_kernel(states, weight, output, stride, eps, size: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    x = tl.load(states + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * w
    tl.store(output + row * size + at, x.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(gate_up, output, size, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * size + at, (gate * tl.sigmoid(gate) * up).to(output.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_kernel(
    qkv,
    rotary,
    query_weight,
    key_weight,
    stride,
    queries,
    eps,
    half: tl.constexpr,
    block: tl.constexpr,
    norm: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, block)
    inside = at < half
    begin = qkv + row * stride + head * 2 * half
    x = tl.load(begin + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(begin + half + at, mask=inside, other=0.0).to(tl.float32)
    if norm:
        scale = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / (2 * half) + eps)
        weight = query_weight if head < queries else key_weight
        x = x * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight + half + at, mask=inside, other=0.0).to(tl.float32)
    # Cosines and then sines of both halves; the sines of the first half are negated.
    table = rotary + row * 4 * half
    cosine = tl.load(table + at, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(table + 2 * half + at, mask=inside, other=0.0).to(tl.float32)
    first = x * cosine + y * sine
    cosine = tl.load(table + half + at, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(table + 3 * half + at, mask=inside, other=0.0).to(tl.float32)
    second = y * cosine + x * sine
    tl.store(begin + at, first.to(qkv.dtype.element_ty), mask=inside)
    tl.store(begin + half + at, second.to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def _store_kernel(
    key,
    value,
    keys,
    values,
    indices,
    key_row,
    key_head,
    value_row,
    value_head,
    heads,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    block: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.load(indices + row * heads + head)
    at = tl.arange(0, block)
    x = tl.load(key + row * key_row + head * key_head + at, mask=at < key_size)
    tl.store(keys + index * key_size + at, x, mask=at < key_size)
    x = tl.load(value + row * value_row + head * value_head + at, mask=at < value_size)
    tl.store(values + index * value_size + at, x, mask=at < value_size)


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the root mean square norm of rows [rows, size]."""
    rows, size = states.shape
    output = states.new_empty(rows, size)
    block = triton.next_power_of_2(size)
    warps = min(16, max(1, block // 256))
    _norm_kernel[(rows,)](states, weight, output, states.stride(0), eps, size, block, num_warps=warps)
    return output


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of contiguous rows [rows, gate and up]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(rows, size)
    # Rows first, as in each kernel: a grid has at most 65,535 programs in its other directions.
    _gate_kernel[(rows, triton.cdiv(size, _BLOCK))](gate_up, output, size, _BLOCK)
    return output


def rotate(
    qkv: torch.Tensor,
    rotary: torch.Tensor,
    heads: int,
    queries: int,
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
) -> None:
    """Rotate the first `heads` heads of contiguous rows [rows, all heads, size] in place, after their norms if any.

    rotary: cosines and sines [rows, 2, size], the first half of the sines negated. queries: number of the heads that
    have the first of the two norms.
    """
    half = qkv.shape[-1] // 2
    normed = all(each is not None for each in norms)
    first, second = norms if normed else (rotary, rotary)
    block = triton.next_power_of_2(half)
    arguments = (qkv, rotary, first, second, qkv.stride(0), queries, eps, half, block, normed)
    _rotate_kernel[(len(qkv), heads)](*arguments, num_warps=1)


def store(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, indices: torch.Tensor
) -> None:
    """Write keys and values [rows, heads, size] to rows `indices` [rows, heads] of a layer's flat cache."""
    rows, heads = indices.shape
    key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (key, value))
    sizes = key.shape[-1], value.shape[-1]
    strides = key.stride(0), key.stride(1), value.stride(0), value.stride(1)
    block = triton.next_power_of_2(max(sizes))
    _store_kernel[(rows, heads)](key, value, keys, values, indices, *strides, heads, *sizes, block, num_warps=1)


def problem(device: torch.device, dtype: torch.dtype) -> str:
    """Return why the kernels cannot be used, "" if they compute what PyTorch does."""
    try:
        errors = _errors(device, dtype)
    except Exception as error:  # without a C compiler, for example
        return f"{type(error).__name__}: {error}"
    wrong = [name for name, error in errors.items() if not error < 4 * torch.finfo(dtype).eps]
    return f"the results of {', '.join(wrong)} differ from those of PyTorch" if wrong else ""


def _errors(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return by kernel the largest difference from PyTorch's operations in FP32, as a share of the largest result."""
    functional: Any = torch.nn.functional

    def normal(*shape: int) -> torch.Tensor:
        numbers = torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float32) * 7.0 + len(shape))
        return numbers.view(shape).to(device, dtype)

    def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()

    states, weight, gate_up = normal(3, 80), normal(80), normal(3, 96)
    gate, up = gate_up.float().chunk(2, -1)
    found = {
        "rms_norm": (rms_norm(states, weight, 1e-5), rms(states, weight)),
        "gated": (gated(gate_up), functional.silu(gate) * up),
    }
    qkv, rotary, norms = normal(3, 5, 32), normal(3, 2, 32), (normal(32), normal(2, 16).view(32))
    normed = torch.cat((rms(qkv[:, :3], norms[0]), rms(qkv[:, 3:4], norms[1])), 1)
    for name, used, before in (("rotate", (None, None), qkv[:, :4].float()), ("rotate with norms", norms, normed)):
        expected = before * rotary[:, :1].float() + before.roll(16, -1) * rotary[:, 1:].float()
        actual = qkv.clone()
        rotate(actual, rotary, 4, 3, used, 1e-5)
        found[name] = actual, torch.cat((expected, qkv[:, 4:].float()), 1)
    keys, values = (torch.zeros(20, 32, device=device, dtype=dtype) for _ in range(2))
    indices = torch.tensor([[3, 7], [12, 0], [5, 19]], device=device)
    store(qkv[:, 3:], qkv[:, 1:3], keys, values, indices)
    found["store"] = torch.cat((keys[indices], values[indices])), torch.cat((qkv[:, 3:], qkv[:, 1:3])).float()
    return {name: float((a.float() - b).abs().max() / b.abs().max()) for name, (a, b) in found.items()}
