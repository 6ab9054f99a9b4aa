"""The decoder step in machine code: logits of transformers, kernels against their references, independent rows."""

import functools
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llvmlite")

import torch
import transformers
from llvmlite import ir

from dragoman.core.errors import ModelFailed
from dragoman.generation.cache import KeyValueCache
from dragoman.generation.job import BatchRow
from dragoman.generation.native.kernels import (
    COLUMNS,
    GROUP,
    AttentionHead,
    KernelConfig,
    attend,
    emit_norm,
    emit_product,
    exp,
    gate,
    pad,
    store_key_value,
)
from dragoman.generation.native.linear import StepCode
from dragoman.generation.native.quantized import decoder, dequantize, pack_quantized
from dragoman.generation.native.threads import StepThreads
from dragoman.generation.pretrained import load_pretrained
from dragoman.generation.runner import QUANTIZATIONS, Runner
from dragoman.generation.threads import MAX_THREADS, fastest_thread_count
from dragoman.native.code import INT64, LANES, POINTER, Code, Compiled, cpu_features
from generation.kernel_references import (
    attention_reference,
    exp_reference,
    gate_reference,
    norm_reference,
    product_reference,
    rotate_reference,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif("avx512f" not in cpu_features(), reason="the machine has no AVX-512"),
]

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 150,
    "max_position_embeddings": 256,
}
_LLAMA3_ROTARY = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Each is compiled: one model has several properties.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "odd-sizes-linear-rotary": (
        "Llama",
        {
            "intermediate_size": 170,
            "hidden_size": 48,
            "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "biases-heads-of-64": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "head_dim": 64},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "tiny-window": ("Mistral", {"sliding_window": 2}),
    "windows-of-some-layers": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen3-yarn-rotary": ("Qwen3", {"num_attention_heads": 6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "heads-of-128": ("Qwen3", {"head_dim": 128, "num_hidden_layers": 2}),
    "heads-of-256-llama3-rotary": (
        "Llama",
        {"head_dim": 256, "num_hidden_layers": 2, "rope_scaling": _LLAMA3_ROTARY},
    ),
}


QUANTIZED = ["int8", "int4"]
KINDS = [dtype + bits for dtype in ("float32", "bfloat16") for bits in ("", *(f"-{each}" for each in QUANTIZED))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder per model, with weights large enough for attention to matter."""
    folder = tmp_path_factory.mktemp("native")
    for name, (kind, options) in MODELS.items():
        torch.manual_seed(3)
        config = getattr(transformers, f"{kind}Config")(**{**SMALL, **options})
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.1 if parameter.dim() == 1 else 0.0, 0.2)
        model.save_pretrained(folder / name)
    return folder


def prompt(seed: int, length: int) -> list[int]:
    return list(np.random.default_rng(seed).integers(3, 150, length))


def load_runner(folder: Path, dtype: str = "float32", quantization: str = "none") -> tuple[Runner, KeyValueCache]:
    runner = Runner(load_pretrained(folder, dtype, "cpu"), quantization=quantization)
    assert runner.native
    cache = KeyValueCache(runner.shape, 4096, runner.dtype, runner.device)
    cache.reserve(8, 96)
    return runner, cache


@pytest.fixture(scope="module")
def llamas(folders: Path) -> dict[str, tuple[Runner, KeyValueCache]]:
    """Runners by dtype, and with quantized weights by dtype and quantization."""
    kinds = ["float32", *(["bfloat16"] if "avx512bf16" in cpu_features() else [])]
    quantized = {f"{kind}-{bits}": load_runner(folders / "llama", kind, bits) for kind in kinds for bits in QUANTIZED}
    return {kind: load_runner(folders / "llama", kind) for kind in kinds} | quantized


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(folders: Path, name: str) -> None:
    runner, cache = load_runner(folders / name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folders / name, dtype=torch.float32).eval()
    texts = [prompt(i, length) for i, length in enumerate((21, 40, 33, 5, 64))]
    starts = [1, 17, 30, 2, 50]
    rows = [BatchRow(slot, 0, text[:count]) for slot, (text, count) in enumerate(zip(texts, starts, strict=True))]
    runner.run(cache, rows)
    logits_by_slot: list[list[Any]] = [[] for _ in texts]
    for step in range(20):
        rows = [
            BatchRow(slot, count + step, [text[count + step]])
            for slot, (text, count) in enumerate(zip(texts, starts, strict=True))
            if count + step < len(text)
        ]
        for row, logits in zip(rows, runner.run(cache, rows), strict=True):
            logits_by_slot[row.slot].append(logits.clone())
    with torch.inference_mode():
        for text, count, logits in zip(texts, starts, logits_by_slot, strict=True):
            expected = reference(torch.tensor([text])).logits[0, count : count + len(logits)]
            assert len(logits) >= 3
            torch.testing.assert_close(torch.stack(logits), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.skipif("avx512bf16" not in cpu_features(), reason="the machine does not compute in BF16")
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral-window"])
def test_bf16_is_as_close_to_fp32_as_transformers(folders: Path, name: str) -> None:
    runner, cache = load_runner(folders / name, "bfloat16")
    text = prompt(5, 40)
    runner.run(cache, [BatchRow(0, 0, text[:20])])
    actual = torch.cat([runner.run(cache, [BatchRow(0, position, [text[position]])]) for position in range(20, 40)])
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.inference_mode():
        saved = load(folders / name, dtype=torch.bfloat16).eval()
        reference = saved(torch.tensor([text])).logits[0, 20:].float()
        exact = saved.float()(torch.tensor([text])).logits[0, 20:]
    assert (actual - exact).abs().max() < 1.5 * (reference - exact).abs().max() + 1e-3


@pytest.mark.parametrize("dtype", KINDS)
def test_rows_do_not_depend_on_the_batch_or_the_number_of_threads(
    llamas: dict[str, tuple[Runner, KeyValueCache]], dtype: str
) -> None:
    if dtype not in llamas:
        pytest.skip("the machine does not compute in BF16")
    runner, cache = llamas[dtype]
    cache.reserve(30, 96)
    before = torch.get_num_threads()
    try:
        for slot in range(30):
            runner.run(cache, [BatchRow(slot, 0, prompt(slot, 10 + slot))])
        rows = [BatchRow(slot, 10 + slot, [slot + 5]) for slot in range(30)]
        batch = runner.run(cache, rows)
        for threads in (1, 2, 5):
            runner.set_threads(threads)
            for count in (1, 2, 7, 13, 30):
                some = rows[-count:]
                assert torch.equal(runner.run(cache, some), batch[-count:]), (threads, count)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float32-int8", "bfloat16-int4"])
@given(cuts=st.lists(st.integers(1, 219), max_size=8), others=st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_sequences_do_not_depend_on_the_steps(
    llamas: dict[str, tuple[Runner, KeyValueCache]], dtype: str, cuts: list[int], others: int
) -> None:
    if dtype not in llamas:
        return
    runner, cache = llamas[dtype]
    text = prompt(2, 220)
    cache.reserve(5, 256)
    expected = runner.run(cache, [BatchRow(0, 0, text, wanted=220)])
    parts, stops = [], sorted({*cuts, 220})
    for start, stop in pairwise([0, *stops]):
        others_ = [BatchRow(2 + i, 0, prompt(i, 5 + i), wanted=i % 2) for i in range(others)]
        mixed = [*others_, BatchRow(1, start, text[start:stop], wanted=stop - start)]
        parts.append(runner.run(cache, mixed)[-(stop - start) :])
    assert torch.equal(torch.cat(parts), expected)


def test_a_step_of_chunks_and_single_tokens_returns_the_wanted_logits(
    llamas: dict[str, tuple[Runner, KeyValueCache]],
) -> None:
    runner, cache = llamas["float32"]
    single = runner.run(cache, [BatchRow(0, 0, [5])])
    chunk = runner.run(cache, [BatchRow(1, 0, prompt(1, 12), wanted=3)])
    mixed = runner.run(
        cache, [BatchRow(0, 0, [5]), BatchRow(2, 0, [9], wanted=0), BatchRow(1, 0, prompt(1, 12), wanted=3)]
    )
    assert torch.equal(mixed, torch.cat((single, chunk)))
    assert runner.run(cache, [BatchRow(0, 1, [5, 6], wanted=0)]).shape == (0, 150)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head_dim": 24}, "head size: expected a multiple of 32, got 24"),
        ({"hidden_size": 60}, "hidden size: expected a multiple of 16, got 60"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary embedding depends on the length"),
    ],
)
def test_unsupported_models_are_computed_by_pytorch_and_logged(
    tmp_path: Path, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**SMALL, **options})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    caplog.set_level("INFO", "dragoman.generation")
    runner = Runner(load_pretrained(tmp_path, "float32", "cpu"))
    assert not runner.native
    assert [reason in line for line in caplog.messages if "machine code is not used" in line] == [True]
    cache = KeyValueCache(runner.shape, 256, runner.dtype, runner.device)
    cache.reserve(1, 32)
    assert runner.run(cache, [BatchRow(0, 0, [3])]).shape == (1, 150)


@pytest.mark.parametrize(
    "row",
    [BatchRow(0, 0, [150]), BatchRow(0, 0, [-1]), BatchRow(0, 999, [1]), BatchRow(99, 0, [1]), BatchRow(0, -1, [1, 2])],
)
def test_indices_out_of_bounds_are_rejected(llamas: dict[str, tuple[Runner, KeyValueCache]], row: BatchRow) -> None:
    runner, cache = llamas["float32"]
    with pytest.raises(IndexError, match="positions and slots"):
        runner.run(cache, [BatchRow(1, 0, [3]), row])


def test_nan_does_not_reach_other_rows(llamas: dict[str, tuple[Runner, KeyValueCache]]) -> None:
    runner, cache = llamas["float32"]
    for slot in range(3):
        runner.run(cache, [BatchRow(slot, 0, prompt(slot, 10))])
    rows = [BatchRow(slot, 10, [7]) for slot in range(3)]
    before = runner.run(cache, rows)
    cache.keys[1, 1, 0, 4] = float("nan")
    after = runner.run(cache, rows)
    assert torch.isnan(after[1]).all()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_nan_of_a_token_does_not_reach_tokens_before_it(folders: Path) -> None:
    runner, cache = load_runner(folders / "llama")
    text = prompt(3, 20)
    before = runner.run(cache, [BatchRow(0, 0, text, wanted=20)])
    with torch.inference_mode():
        runner.fused.embed[149] = float("nan")  # type: ignore[union-attr]
    for nan_position in (13, 14, 15):
        after = runner.run(cache, [BatchRow(0, 0, [*text[:nan_position], 149, *text[nan_position + 1 :]], wanted=20)])
        assert torch.equal(after[:nan_position], before[:nan_position])
        assert torch.isnan(after[nan_position:]).all()


def test_a_model_may_have_more_threads_than_an_earlier_one(folders: Path) -> None:
    before = torch.get_num_threads()
    try:
        first, second = (Runner(load_pretrained(folders / "llama", "float32", "cpu")) for _ in range(2))
        assert first.set_threads(1) == 1
        assert second.set_threads(3) == 3
        assert fastest_thread_count(lambda threads: 1.0 / threads, MAX_THREADS) == 1 << (MAX_THREADS.bit_length() - 1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bits", QUANTIZED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_logits_equal_those_of_the_rounded_weights(
    folders: Path, llamas: dict[str, tuple[Runner, KeyValueCache]], dtype: str, bits: str
) -> None:
    if dtype not in llamas:
        pytest.skip("the machine does not compute in BF16")
    runner, cache = llamas[f"{dtype}-{bits}"]
    text = prompt(6, 40)
    found = runner.run(cache, [BatchRow(0, 0, text, wanted=40)])
    model = transformers.AutoModelForCausalLM.from_pretrained(folders / "llama", dtype=torch.float32).eval()
    with torch.inference_mode():
        original = model(torch.tensor([text])).logits[0]
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight = torch.nn.Parameter(dequantize(layer.weight, QUANTIZATIONS[bits]), requires_grad=False)
        rounded = model(torch.tensor([text])).logits[0]
    error, cost = (found - rounded).norm() / rounded.norm(), (rounded - original).norm() / original.norm()
    assert error < (1e-5 if dtype == "float32" else 0.08)
    assert cost < (0.03 if bits == "int8" else 0.4)
    assert cost > 1e-4, "nothing was rounded"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hidden_size": 48}, "hidden size: expected a multiple of 32, got 48"),
        ({"head_dim": 24}, "head size: expected a multiple of 32, got 24"),
    ],
)
def test_models_that_cannot_be_quantized_are_rejected(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **options})).save_pretrained(tmp_path)
    with pytest.raises(ModelFailed, match=f"parameter 'quantization': 'int8' is not possible: {reason}"):
        Runner(load_pretrained(tmp_path, "float32", "cpu"), quantization="int8")


def test_quantization_needs_packed_weights(folders: Path) -> None:
    with pytest.raises(ModelFailed, match="weights are not packed"):
        Runner(load_pretrained(folders / "llama", "float32", "cpu"), packed=False, quantization="int8")


def test_missing_instructions_are_named(
    folders: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dragoman.generation.native.step.cpu_features", lambda: {"avx2"})
    caplog.set_level("INFO", "dragoman.generation")
    assert not Runner(load_pretrained(folders / "llama", "float32", "cpu")).native
    assert "this CPU has no avx512f" in caplog.text


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_outside_of_the_step_equal_their_reference(
    llamas: dict[str, tuple[Runner, KeyValueCache]], dtype: str, bias: bool
) -> None:
    if dtype not in llamas:
        pytest.skip("the machine does not compute in BF16")
    kind = getattr(torch, dtype)
    layers = [torch.nn.Linear(48, columns, bias=bias, dtype=kind) for columns in (70, 131)]
    code = StepCode(kernel_config(kind is torch.bfloat16), 1.0)
    code.threads = 2
    packed, rows, added = code.pack(*layers), random_tensor(1, 100, 48).to(kind), random_tensor(2, 100, 201).to(kind)
    found = packed.product(rows)
    with torch.inference_mode():
        expected = torch.cat([layer(rows) for layer in layers], -1)
    assert_equal(found, expected, dtype == "bfloat16")
    assert_equal(packed.plus(rows, added), expected + added, dtype == "bfloat16")
    for count in (0, 1, 5, 97):
        assert torch.equal(packed.forward(rows[:count]), found[:count])


# --- each kernel against its reference in PyTorch ------------------------------------------------------------------

BF16 = [False, pytest.param(True, marks=pytest.mark.skipif("avx512bf16" not in cpu_features(), reason="no BF16"))]
RUNS = 4  # rows of a run with heads of 32


def kernel_config(bf16: bool, **changes: Any) -> KernelConfig:
    dimensions: dict[str, Any] = {
        "layers": 1,
        "hidden": 80,
        "intermediate": 48,
        "query_heads": 4,
        "kv_heads": 2,
        "head_size": 32,
        "vocabulary": 64,
        "eps": 1e-6,
        "qk_norm": False,
    }
    return KernelConfig(**{**dimensions, **changes}, bf16=bf16)


def random_tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, bf16: bool) -> None:
    """Compare a result with its reference: FP32 sums in another order, then at most one rounding to BF16."""
    tolerance = 1e-2 if bf16 else 1e-4
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@functools.cache
def product_kernel(bf16: bool, bits: int = 0) -> Any:
    module, config = ir.Module(), kernel_config(bf16, bits=bits)
    emit_product(module, config, decoder(config))
    return Compiled(module).function("product", 6)


@pytest.mark.parametrize("bf16", BF16)
@given(rows=st.integers(1, 40), steps=st.integers(1, 700), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_product_equals_its_reference(bf16: bool, rows: int, steps: int, seed: int) -> None:
    pair, dtype = 2 if bf16 else 1, kernel_config(bf16).dtype
    inputs, weights = (
        random_tensor(seed, rows, steps * pair).to(dtype),
        random_tensor(seed + 1, COLUMNS, steps * pair).to(dtype),
    )
    block = weights.view(COLUMNS, steps, pair).transpose(0, 1).contiguous()
    sums = torch.full((rows, COLUMNS), float("nan"))
    product_kernel(bf16)(inputs.data_ptr(), 4 * steps, block.data_ptr(), sums.data_ptr(), rows, steps)
    torch.testing.assert_close(sums, product_reference(inputs.double(), weights.double()), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bf16", BF16)
@given(rows=st.integers(1, 40), groups=st.integers(1, 20), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_quantized_product_equals_its_reference(bf16: bool, bits: int, rows: int, groups: int, seed: int) -> None:
    config, size = kernel_config(bf16, bits=bits), groups * GROUP
    inputs = random_tensor(seed, rows, size).to(config.dtype)
    weights = random_tensor(seed + 1, COLUMNS, size) * random_tensor(seed + 2, COLUMNS, 1).exp()
    weights[0], weights[1, 1:], sums = 0.0, 0.0, torch.full((rows, COLUMNS), float("nan"))
    block = pack_quantized(weights, config)
    function, row_bytes = product_kernel(bf16, bits), config.item_bytes * size
    function(inputs.data_ptr(), row_bytes, block.data_ptr(), sums.data_ptr(), rows, config.steps(size))
    rounded = dequantize(weights, bits)
    torch.testing.assert_close(sums, product_reference(inputs.double(), rounded.double()), rtol=1e-4, atol=1e-3)
    # Half a step of the integers, plus the rounding of the scale to BF16, and in 4 bits the clamped opposite of -8.
    largest = weights.view(COLUMNS, groups, GROUP).abs().amax(-1, keepdim=True)
    error = (rounded - weights).view(COLUMNS, groups, GROUP).abs()
    assert bool((error <= largest * (0.0045 if bits == 8 else 0.13)).all())


@pytest.mark.parametrize("bf16", BF16)
def test_norm_equals_its_reference(bf16: bool) -> None:
    module, config = ir.Module(), kernel_config(bf16)
    emit_norm(module, config)
    norm = Compiled(module).function("norm", 4)
    states, weight = random_tensor(1, 7, pad(config.hidden)), random_tensor(2, config.hidden)
    output = torch.zeros(7, config.hidden, dtype=config.dtype)
    norm(states.data_ptr(), weight.data_ptr(), output.data_ptr(), 7)
    assert_equal(output, norm_reference(states[:, : config.hidden], weight, config.eps), bf16)


@pytest.mark.parametrize("bf16", BF16)
def test_gate_equals_its_reference(bf16: bool) -> None:
    module, config = ir.Module(), kernel_config(bf16)
    code = Code(module, "gate", (POINTER, POINTER))
    gate(code, config, *code.arguments)
    code.finish()
    gates, output = 5 * random_tensor(3, 2 * config.intermediate), torch.zeros(config.intermediate, dtype=config.dtype)
    Compiled(module).function("gate", 2)(gates.data_ptr(), output.data_ptr())
    assert_equal(output, gate_reference(gates), bf16)


@functools.cache
def attention_kernel(config: KernelConfig, scaling: float) -> Any:
    """Compile attention of one key-value head for a run of rows, with the arguments in a table."""
    module = ir.Module()
    code = Code(module, "attention", (POINTER, INT64))
    table, count = code.arguments

    def at(row: int, field: int) -> Any:
        return table + 8 * (row * 9 + field)

    def head(row: int) -> AttentionHead:
        return AttentionHead(
            head=code.integer(1),
            position=at(row, 0).load_int(),
            first=at(row, 1).load_int(),
            qkv=at(row, 2).load_pointer(),
            rotary=at(row, 3).load_pointer(),
            keys=at(row, 4).load_pointer(),
            values=at(row, 5).load_pointer(),
            output=at(row, 6).load_pointer(),
            norms=(table + 8 * 9 * RUNS, table + 8 * 9 * RUNS + 4 * config.head_size),
            query=at(row, 7).load_pointer(),
            scores=at(row, 8).load_pointer() + 4 * LANES,
        )

    def run(rows: int) -> None:
        heads = [head(row) for row in range(rows)]
        for each in heads:
            store_key_value(code, config, each)
        attend(code, config, scaling, heads)

    code.if_else(code.integer(1) < count, lambda: run(RUNS), lambda: run(1))
    code.finish()
    return Compiled(module).function("attention", 2)


@pytest.mark.parametrize("bf16", BF16)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("window", [0, 3, 100])
@pytest.mark.parametrize("count", [1, RUNS])
def test_attention_and_cached_keys_equal_their_reference(bf16: bool, qk_norm: bool, window: int, count: int) -> None:
    config, length, start, scaling = kernel_config(bf16, qk_norm=qk_norm), 64, 37, 0.3
    size, group = config.head_size, config.query_heads // config.kv_heads
    qkv, rotary = random_tensor(4, count, config.qkv_heads, size), random_tensor(5, count, 2, size)
    keys, values = random_tensor(6, length, size).to(config.dtype), random_tensor(7, length, size).to(config.dtype)
    norms = random_tensor(8, 2, size)
    output = torch.zeros(count, config.query_heads, size, dtype=config.dtype)
    query, scores = torch.zeros(count, size), torch.zeros(count, length + 2 * LANES)
    positions = [start + row for row in range(count)]
    firsts = [max(0, position + 1 - window) if window else 0 for position in positions]
    table = np.zeros(9 * RUNS + size, np.int64)
    for row in range(count):
        memory = (qkv[row], rotary[row], keys, values, output[row], query[row], scores[row])
        table[9 * row : 9 * row + 9] = positions[row], firsts[row], *(each.data_ptr() for each in memory)
    table[9 * RUNS :].view(np.float32)[:] = norms.numpy().reshape(-1)
    attention_kernel(config, scaling)(table.ctypes.data, count)
    query_norm, key_norm = norms if qk_norm else (None, None)
    for row, (position, first) in enumerate(zip(positions, firsts, strict=True)):
        rotated = rotate_reference(qkv[row], rotary[row], query_norm, config.eps)
        key = rotate_reference(qkv[row], rotary[row], key_norm, config.eps)[config.query_heads + 1]
        assert_equal(keys[position], key, bf16)
        assert_equal(values[position], qkv[row, config.query_heads + config.kv_heads + 1], bf16)
        visible = slice(first, position + 1)
        expected = attention_reference(rotated[group : 2 * group], keys[visible], values[visible], scaling)
        assert_equal(output[row, group : 2 * group], expected, bf16)
        assert (output[row, :group] == 0).all(), "heads that share another key are not written"


def test_exp_equals_its_reference_within_two_units_in_the_last_place() -> None:
    module = ir.Module()
    code = Code(module, "powers", (POINTER, INT64))
    numbers, count = code.arguments
    with code.loop(code.integer(0), count, LANES) as i:
        numbers.store(exp(numbers.load_vector(i * 4)), i * 4)
    code.finish()
    powers = Compiled(module).function("powers", 2)
    exponents = np.linspace(-86.9, 87.9, 160_000, dtype=np.float32)
    actual = exponents.copy()
    powers(actual.ctypes.data, len(actual))
    expected = exp_reference(torch.from_numpy(exponents).double()).numpy()
    assert (np.abs(actual - expected) / np.spacing(expected.astype(np.float32))).max() < 2
    ends = np.full(LANES, -1e9, np.float32)
    ends[1], ends[2] = np.nan, 0
    powers(ends.ctypes.data, LANES)
    assert ends[0] < 1e-37
    assert np.isnan(ends[1])
    assert ends[2] == 1


def test_shared_work_is_done_once_by_any_number_of_threads() -> None:
    module = ir.Module()
    code = Code(module, "work", (POINTER, POINTER))
    counters, marks = code.arguments

    def mark(part: Any) -> None:
        marks.store(marks.load_int(part * 8) + 1, part * 8)

    for turn in range(3):
        code.share_work(counters + 128 * turn, code.integer(50), lambda: None, mark)
    code.finish()
    work, threads = Compiled(module).function("work", 2), StepThreads()
    for count in (1, 2, 4, 1):
        for _ in range(200):
            counted, marked = np.zeros(3 * 16, np.int64), np.zeros(50, np.int64)
            threads.run(work, [(counted.ctypes.data, marked.ctypes.data)] * count, (counted, marked))
            assert (marked == 3).all()


def test_a_failed_allocation_leaves_a_usable_state(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't allocate memory")

    rows = [BatchRow(0, 0, prompt(1, 60))]
    runner, cache = load_runner(folders / "llama")
    expected = runner.run(cache, rows).clone()
    other, other_cache = load_runner(folders / "llama")
    other.run(other_cache, [BatchRow(0, 0, [5])])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", fail)
        with pytest.raises(RuntimeError, match="allocate"):
            other.run(other_cache, rows)
    assert torch.equal(other.run(other_cache, rows), expected)
