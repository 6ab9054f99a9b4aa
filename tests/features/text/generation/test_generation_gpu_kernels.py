"""Kernels for a GPU: the forward pass with them, and when they are used. Triton's interpreter runs them on a CPU."""

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import rms_norm, silu

from dragoman_text.generation import gpu
from dragoman_text.generation.cache import KeyValueCache
from dragoman_text.generation.job import BatchRow
from dragoman_text.generation.pretrained import load_pretrained
from dragoman_text.generation.runner import Runner

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_CODE = """
import torch
from dragoman_text.generation import gpu_kernels
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    print(gpu_kernels.problem(torch.device("cpu"), dtype))
"""


def rotate(qkv: Any, rotary: Any, heads: int, queries: int, norms: Any, eps: float) -> None:
    x = qkv[:, :heads]
    if norms[0] is not None:
        parts = zip((x[:, :queries], x[:, queries:]), norms, strict=True)
        x = torch.cat([rms_norm(part, part.shape[-1:], weight, eps) for part, weight in parts], 1)
    qkv[:, :heads] = x * rotary[:, :1] + x.roll(x.shape[-1] // 2, -1) * rotary[:, 1:]


def store(key: Any, value: Any, keys: Any, values: Any, indices: Any) -> None:
    keys[indices], values[indices] = key, value


# As documented in `gpu_kernels`, in PyTorch.
KERNELS = SimpleNamespace(
    rms_norm=lambda states, weight, eps: rms_norm(states, weight.shape, weight, eps),
    gated=lambda gate_up: silu(gate_up.chunk(2, -1)[0]) * gate_up.chunk(2, -1)[1],
    rotate=rotate,
    store=store,
)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_the_forward_pass_with_kernels_has_the_same_logits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SMALL))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(tmp_path)
    plain = Runner(load_pretrained(tmp_path, "float32", "cpu"), packed=False)
    monkeypatch.setattr("dragoman_text.generation.fused.is_cpu", lambda _: False)
    steps = [[BatchRow(0, 0, [5, 9, 7]), BatchRow(1, 0, [8] * 20)], [BatchRow(0, 3, [11]), BatchRow(1, 20, [12])]]
    expected = [_logits(plain, steps)]
    monkeypatch.setattr(gpu, "kernels", lambda *_: KERNELS)
    own = Runner(load_pretrained(tmp_path, "float32", "cpu"), packed=False)
    assert own.fused is not None
    assert own.fused._kernels is KERNELS
    torch.testing.assert_close([_logits(own, steps)], expected, rtol=1e-4, atol=1e-4)


def _logits(runner: Runner, steps: list[list[BatchRow]]) -> torch.Tensor:
    cache = KeyValueCache(runner.shape, 1 << 12, runner.dtype, runner.device)
    cache.reserve(2, 64)
    return torch.cat([runner.run(cache, rows) for rows in steps])


def test_a_cpu_has_no_kernels(caplog: pytest.LogCaptureFixture) -> None:
    assert gpu.kernels(torch.device("cpu"), torch.float32) is None
    assert not caplog.records


@pytest.mark.parametrize("reason", ["no Triton", "wrong results"])
def test_why_kernels_are_not_used_is_logged(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = SimpleNamespace(problem=lambda *_: reason) if reason == "wrong results" else None
    monkeypatch.setitem(sys.modules, "dragoman_text.generation.gpu_kernels", module)
    monkeypatch.setattr("dragoman_text.generation.gpu_kernels", module, raising=False)
    if module is None:
        monkeypatch.delattr("dragoman_text.generation.gpu_kernels")
    with caplog.at_level(logging.WARNING):
        assert gpu.kernels.__wrapped__(torch.device("cuda"), torch.float32) is None
    assert "kernels in Triton are not used" in caplog.text


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
def test_kernels_compute_what_pytorch_does() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", _CODE], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "\n\n\n"
