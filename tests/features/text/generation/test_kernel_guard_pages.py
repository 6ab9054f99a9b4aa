"""Kernels read and write nothing behind their arguments: each of these ends where a page without access begins.

A kernel that reads or writes further kills the test with a segmentation fault.
"""

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import dragoman_kernels
from dragoman_text.generation.native.config import COLUMNS, LANES, KernelConfig
from dragoman_text.generation.native.linear import pack_blocks
from dragoman_text.generation.native.structures import AttentionHead, AttentionShape
from features.kernels.forms import forms
from features.text.generation.test_generation_gguf_blocks import FLOATS, QUANTIZED, multiply, states, weights

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")

_ADDRESS, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_PAGE = mmap.PAGESIZE


class Guarded:
    """Copies of tensors that end at a page without access."""

    def __init__(self) -> None:
        self._maps: list[Any] = []
        self._mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        self._mprotect.argtypes = (_ADDRESS, ctypes.c_size_t, ctypes.c_int)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy, in memory that is kept until this object is dropped."""
        data = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        pages = -(-data.size // _PAGE)
        memory = mmap.mmap(-1, (pages + 1) * _PAGE)
        self._maps.append(memory)
        bytes_ = np.frombuffer(memory, np.uint8)
        assert self._mprotect(bytes_.ctypes.data + pages * _PAGE, _PAGE, 0) == 0
        end = bytes_[pages * _PAGE - data.size : pages * _PAGE]
        end[:] = data
        return torch.from_numpy(end).view(tensor.dtype).view(tensor.shape)


def config_of(form: str, bf16: bool, **changes: Any) -> KernelConfig:
    sizes = {"layers": 1, "hidden": 64, "intermediate": 64, "query_heads": 2, "kv_heads": 1, "head_size": 32}
    return KernelConfig(**{**sizes, **changes}, vocabulary=64, eps=1e-6, qk_norm=True, bf16=bf16, form=form)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("form", forms())
def test_products(form: str, bf16: bool) -> None:
    config = config_of(form, bf16)
    types = (_ADDRESS, _INTEGER, _ADDRESS, _ADDRESS, *[_INTEGER] * 3)
    product = dragoman_kernels.function("product", form, *types)
    for size in (2, 34, 96, 290):
        block = pack_blocks(torch.randn(COLUMNS, size).to(config.dtype), config)
        for rows in (1, 2, 3, 4, 5, 6, 7, 13, 20, 35):
            inputs, results = torch.randn(rows, size).to(config.dtype), []
            for copy in (torch.clone, Guarded()):
                given, weights, sums = copy(inputs), copy(block), copy(torch.zeros(rows, COLUMNS))
                product(
                    given.data_ptr(),
                    config.item_bytes * size,
                    weights.data_ptr(),
                    sums.data_ptr(),
                    rows,
                    size,
                    bf16,
                )
                results.append(sums.clone())
            assert torch.equal(*results)


@pytest.mark.parametrize("head_size", [32, 64, 96, 128])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("form", forms())
def test_attention(form: str, bf16: bool, head_size: int) -> None:
    config = config_of(form, bf16, head_size=head_size, scaling=0.2)
    store = dragoman_kernels.function("store_key_value", form, _ADDRESS, _ADDRESS)
    attend = dragoman_kernels.function("attend", form, _ADDRESS, _ADDRESS, _INTEGER)
    shape = AttentionShape(2, 1, head_size, 1, bf16, config.eps, config.scaling)
    for length in (4, 5, 17, 33):
        for window in (length, 3):
            for count in {1, config.run_rows}:
                torch.manual_seed(length)
                cache = torch.randn(2, length, head_size).to(config.dtype)
                others = (torch.randn(count, 4, head_size), torch.randn(count, 2, head_size), torch.randn(2, head_size))
                results = []
                for copy in (torch.clone, Guarded()):
                    (keys, values), (qkv, rotary, norms) = map(copy, cache), map(copy, others)
                    output = copy(torch.zeros(count, 2, head_size, dtype=config.dtype))
                    query = copy(torch.zeros(count, head_size))
                    heads, kept = (AttentionHead * count)(), []
                    for row in range(count):
                        position = length - count + row
                        first = max(0, position + 1 - window)
                        scores = copy(torch.zeros(position + 1 - first + LANES))
                        kept.append(scores)
                        memory = (qkv[row], rotary[row], keys, values, output[row], *norms, query[row], scores)
                        heads[row] = AttentionHead(0, position, first, *(each.data_ptr() for each in memory))
                        store(ctypes.addressof(shape), ctypes.addressof(heads[row]))
                    attend(ctypes.addressof(shape), ctypes.addressof(heads), count)
                    results.append(torch.cat((output.flatten(), keys.flatten(), values.flatten())))
                assert torch.equal(*results)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("form", forms())
def test_norms_and_gates(form: str, bf16: bool) -> None:
    config, guarded = config_of(form, bf16), Guarded()
    norm_types = (_ADDRESS, _INTEGER, _ADDRESS, _ADDRESS, _INTEGER, _INTEGER, ctypes.c_float, _INTEGER)
    norm = dragoman_kernels.function("norm", form, *norm_types)
    states, weight = guarded(torch.randn(3, 48)), guarded(torch.randn(48))
    output = guarded(torch.zeros(3, 48, dtype=config.dtype))
    norm(states.data_ptr(), 48, weight.data_ptr(), output.data_ptr(), 3, 48, config.eps, bf16)
    gate = dragoman_kernels.function("gate", form, _ADDRESS, _ADDRESS, _INTEGER, _INTEGER)
    for size in (1, 15, 16, 17, 40):
        gates, output = guarded(torch.randn(2, size)), guarded(torch.zeros(size, dtype=config.dtype))
        gate(gates.data_ptr(), output.data_ptr(), size, bf16)
        assert output.float().abs().max() > 0


@pytest.mark.parametrize("kind", [*QUANTIZED, *FLOATS])
@pytest.mark.parametrize("form", forms())
def test_blocks_of_files(form: str, kind: str) -> None:
    data, inputs = weights(kind, 19, 256), states(3, 256)
    guarded = Guarded()
    given, rows = (guarded(torch.from_numpy(each.copy())).numpy() for each in (data, inputs))
    assert (multiply(form, [kind], [given], rows) == multiply(form, [kind], [data], inputs)).all()
