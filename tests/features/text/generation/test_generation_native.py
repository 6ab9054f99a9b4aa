"""The decoder step in machine code: logits of transformers, kernels against their references, independent rows."""

import functools
import re
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
from dragoman_kernels.threads import StepThreads
from dragoman_text.generation.cache import KeyValueCache
from dragoman_text.generation.job import BatchRow
from dragoman_text.generation.native.code import INT64, LANES, POINTER, Code, Compiled, cpu_features
from dragoman_text.generation.native.forward import build_module
from dragoman_text.generation.native.kernels import (
    AVX2,
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
    store_items,
    store_key_value,
)
from dragoman_text.generation.native.linear import StepCode, pack_blocks
from dragoman_text.generation.native.quantized import decoder, dequantize, pack_quantized
from dragoman_text.generation.pretrained import load_pretrained
from dragoman_text.generation.runner import QUANTIZATIONS, Runner
from dragoman_text.generation.threads import MAX_THREADS, fastest_thread_count
from features.text.generation.kernel_references import (
    attention_reference,
    exp_reference,
    gate_reference,
    norm_reference,
    product_reference,
    rotate_reference,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not cpu_features() >= AVX2, reason="the machine has no AVX2"),
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
# Instruction set and dtype, with the instructions that the CPU must have. The code for AVX2 is the same on any CPU.
NEEDED = {
    "avx2-float32": AVX2,
    "avx2-bfloat16": AVX2,
    "avx512-float32": {"avx512f"},
    "avx512-bfloat16": {"avx512bf16", "avx512bw", "avx512vbmi"},
}
FORMS = [
    pytest.param(form, marks=pytest.mark.skipif(not needed <= cpu_features(), reason=f"needs {needed}"))
    for form, needed in NEEDED.items()
]


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


def load_runner(folder: Path, form: str = "", quantization: str = "none") -> tuple[Runner, KeyValueCache]:
    """Load a model with code for an instruction set and a dtype of `NEEDED`; by default in FP32 for this CPU."""
    dtype = form.partition("-")[2] or "float32"
    with pytest.MonkeyPatch.context() as patch:
        if form.startswith("avx2"):
            patch.setattr("dragoman_text.generation.native.step.cpu_features", lambda: set(AVX2))
        runner = Runner(load_pretrained(folder, dtype, "cpu"), quantization=quantization)
    assert runner.native
    cache = KeyValueCache(runner.shape, 4096, runner.dtype, runner.device)
    cache.reserve(8, 96)
    return runner, cache


class Llamas:
    """Runners of the model "llama", loaded when they are used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cache  # noqa: B019
    def load(self, form: str, quantization: str = "none") -> tuple[Runner, KeyValueCache]:
        return load_runner(self._folder, form, quantization)


@pytest.fixture(scope="module")
def llamas(folders: Path) -> Llamas:
    return Llamas(folders / "llama")


# For the instructions of this CPU, and for AVX2 with one model: each kernel is compared in all forms below.
@pytest.mark.parametrize(
    ("name", "form"), [*((name, "") for name in MODELS), ("odd-sizes-linear-rotary", "avx2-float32")]
)
def test_logits_equal_those_of_transformers(folders: Path, name: str, form: str) -> None:
    runner, cache = load_runner(folders / name, form)
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


@pytest.mark.parametrize("form", FORMS[1::2])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral-window"])
def test_bf16_is_as_close_to_fp32_as_transformers(folders: Path, name: str, form: str) -> None:
    runner, cache = load_runner(folders / name, form)
    text = prompt(5, 40)
    runner.run(cache, [BatchRow(0, 0, text[:20])])
    actual = torch.cat([runner.run(cache, [BatchRow(0, position, [text[position]])]) for position in range(20, 40)])
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.inference_mode():
        saved = load(folders / name, dtype=torch.bfloat16).eval()
        reference = saved(torch.tensor([text])).logits[0, 20:].float()
        exact = saved.float()(torch.tensor([text])).logits[0, 20:]
    assert (actual - exact).abs().max() < 1.5 * (reference - exact).abs().max() + 1e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("quantization", ["none", *QUANTIZED])
def test_rows_do_not_depend_on_the_batch_or_the_number_of_threads(llamas: Llamas, form: str, quantization: str) -> None:
    runner, cache = llamas.load(form, quantization)
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


@pytest.mark.parametrize(
    ("form", "quantization"),
    [(form, quantization) for form in NEEDED for quantization in ("none", "int4" if "bfloat16" in form else "int8")],
)
@given(cuts=st.lists(st.integers(1, 219), max_size=8), others=st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_sequences_do_not_depend_on_the_steps(
    llamas: Llamas, form: str, quantization: str, cuts: list[int], others: int
) -> None:
    if not NEEDED[form] <= cpu_features():
        return
    runner, cache = llamas.load(form, quantization)
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
    llamas: Llamas,
) -> None:
    runner, cache = llamas.load("")
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
def test_indices_out_of_bounds_are_rejected(llamas: Llamas, row: BatchRow) -> None:
    runner, cache = llamas.load("")
    with pytest.raises(IndexError, match="positions and slots"):
        runner.run(cache, [BatchRow(1, 0, [3]), row])


def test_nan_does_not_reach_other_rows(llamas: Llamas) -> None:
    runner, cache = llamas.load("")
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
@pytest.mark.parametrize("form", FORMS)
def test_quantized_logits_equal_those_of_the_rounded_weights(
    folders: Path, llamas: Llamas, form: str, bits: str
) -> None:
    runner, cache = llamas.load(form, bits)
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
    assert error < (0.08 if "bfloat16" in form else 1e-5)
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
    monkeypatch.setattr("dragoman_text.generation.native.step.cpu_features", lambda: {"avx2", "avx512f"})
    caplog.set_level("INFO", "dragoman.generation")
    assert not Runner(load_pretrained(folders / "llama", "float32", "cpu")).native
    assert "this CPU has no fma" in caplog.text


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_layers_outside_of_the_step_equal_their_reference(form: str, bias: bool) -> None:
    config = kernel_config(form)
    dtype, code = config.dtype, StepCode(config, 1.0)
    layers = [torch.nn.Linear(48, columns, bias=bias, dtype=dtype) for columns in (70, 131)]
    code.threads = 2
    packed, rows, added = code.pack(*layers), random_tensor(1, 100, 48).to(dtype), random_tensor(2, 100, 201).to(dtype)
    found = packed.product(rows)
    with torch.inference_mode():
        expected = torch.cat([layer(rows) for layer in layers], -1)
    assert_equal(found, expected, config.bf16)
    assert_equal(packed.plus(rows, added), expected + added, config.bf16)
    for count in (0, 1, 5, 97):
        assert torch.equal(packed.forward(rows[:count]), found[:count])


# --- each kernel against its reference in PyTorch ------------------------------------------------------------------

RUNS = 4  # rows of a run with heads of 32


def kernel_config(form: str, **changes: Any) -> KernelConfig:
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
    bf16, avx512 = form.endswith("bfloat16"), form.startswith("avx512")
    return KernelConfig(**{**dimensions, **changes}, bf16=bf16, avx512=avx512)


def random_tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, bf16: bool) -> None:
    """Compare a result with its reference: FP32 sums in another order, then at most one rounding to BF16."""
    tolerance = 1e-2 if bf16 else 1e-4
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@functools.cache
def product_kernel(form: str, bits: int = 0) -> Any:
    module, config = ir.Module(), kernel_config(form, bits=bits)
    emit_product(module, config, decoder(config))
    return Compiled(module, config.instructions).function("product", 6)


@pytest.mark.parametrize("form", FORMS)
@given(rows=st.integers(1, 40), steps=st.integers(1, 700), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_product_equals_its_reference(form: str, rows: int, steps: int, seed: int) -> None:
    config = kernel_config(form)
    pair, dtype = config.pair, config.dtype
    inputs, weights = (
        random_tensor(seed, rows, steps * pair).to(dtype),
        random_tensor(seed + 1, COLUMNS, steps * pair).to(dtype),
    )
    block = pack_blocks(weights, config)
    sums = torch.full((rows, COLUMNS), float("nan"))
    row_bytes = config.step_bytes * steps
    product_kernel(form)(inputs.data_ptr(), row_bytes, block.data_ptr(), sums.data_ptr(), rows, steps)
    torch.testing.assert_close(sums, product_reference(inputs.double(), weights.double()), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("form", ["avx2-float32", "avx2-bfloat16"])
def test_code_for_avx2_has_no_instructions_of_avx512(form: str, bits: int) -> None:
    config = kernel_config(form, bits=bits)
    code = Compiled(build_module(config, 1.0), config.instructions).assembly()
    assert "vfmadd" in code
    assert "ymm" in code
    assert not re.search(r"zmm|%k\d|[xy]mm(1[6-9]|[23]\d)", code)


@pytest.mark.parametrize("form", FORMS[1::2])
def test_numbers_are_rounded_to_the_nearest_bf16(form: str) -> None:
    module, config = ir.Module(), kernel_config(form)
    code = Code(module, "round", (POINTER, POINTER, INT64))
    source, target, count = code.arguments
    with code.loop(code.integer(0), count, LANES) as i:
        store_items(config, target, i, source.load_vector(i * 4))
    code.finish()
    bits = np.random.default_rng(1).integers(0, 1 << 32, 16_000, np.uint32)
    ties = bits[:4000] & 0xFFFF0000 | 0x8000
    special = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F7FFFFF], np.uint32)
    numbers = torch.from_numpy(np.concatenate((bits, ties, special, special)).view(np.float32))
    numbers[(numbers.abs() < 1.2e-38) & (numbers != 0)] = 1.0  # instructions of AVX-512 flush subnormal numbers to 0
    rounded = torch.empty(len(numbers), dtype=torch.bfloat16)
    compiled = Compiled(module, config.instructions)
    compiled.function("round", 3)(numbers.data_ptr(), rounded.data_ptr(), len(numbers))
    is_nan = numbers.isnan()
    assert torch.equal(rounded.isnan(), is_nan)
    assert torch.equal(rounded[~is_nan], numbers[~is_nan].bfloat16())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("form", FORMS)
@given(rows=st.integers(1, 40), groups=st.integers(1, 20), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_quantized_product_equals_its_reference(form: str, bits: int, rows: int, groups: int, seed: int) -> None:
    config, size = kernel_config(form, bits=bits), groups * GROUP
    inputs = random_tensor(seed, rows, size).to(config.dtype)
    weights = random_tensor(seed + 1, COLUMNS, size) * random_tensor(seed + 2, COLUMNS, 1).exp()
    weights[0], weights[1, 1:], sums = 0.0, 0.0, torch.full((rows, COLUMNS), float("nan"))
    block = pack_quantized(weights, config)
    function, row_bytes = product_kernel(form, bits), config.item_bytes * size
    function(inputs.data_ptr(), row_bytes, block.data_ptr(), sums.data_ptr(), rows, config.steps(size))
    rounded = dequantize(weights, bits)
    torch.testing.assert_close(sums, product_reference(inputs.double(), rounded.double()), rtol=1e-4, atol=1e-3)
    # Half a step of the integers, plus the rounding of the scale to BF16, and in 4 bits the clamped opposite of -8.
    largest = weights.view(COLUMNS, groups, GROUP).abs().amax(-1, keepdim=True)
    error = (rounded - weights).view(COLUMNS, groups, GROUP).abs()
    assert bool((error <= largest * (0.0045 if bits == 8 else 0.13)).all())


@pytest.mark.parametrize("form", FORMS)
def test_norm_equals_its_reference(form: str) -> None:
    module, config = ir.Module(), kernel_config(form)
    emit_norm(module, config)
    norm = Compiled(module, config.instructions).function("norm", 4)
    states, weight = random_tensor(1, 7, pad(config.hidden)), random_tensor(2, config.hidden)
    output = torch.zeros(7, config.hidden, dtype=config.dtype)
    norm(states.data_ptr(), weight.data_ptr(), output.data_ptr(), 7)
    assert_equal(output, norm_reference(states[:, : config.hidden], weight, config.eps), config.bf16)


@pytest.mark.parametrize("form", FORMS)
def test_gate_equals_its_reference(form: str) -> None:
    module, config = ir.Module(), kernel_config(form)
    code = Code(module, "gate", (POINTER, POINTER))
    gate(code, config, *code.arguments)
    code.finish()
    gates, output = 5 * random_tensor(3, 2 * config.intermediate), torch.zeros(config.intermediate, dtype=config.dtype)
    compiled = Compiled(module, config.instructions)
    compiled.function("gate", 2)(gates.data_ptr(), output.data_ptr())
    assert_equal(output, gate_reference(gates), config.bf16)


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
    return Compiled(module, config.instructions).function("attention", 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("window", [0, 3, 100])
@pytest.mark.parametrize("count", [1, RUNS])
def test_attention_and_cached_keys_equal_their_reference(form: str, qk_norm: bool, window: int, count: int) -> None:
    config, length, start, scaling = kernel_config(form, qk_norm=qk_norm), 64, 37, 0.3
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
        assert_equal(keys[position], key, config.bf16)
        assert_equal(values[position], qkv[row, config.query_heads + config.kv_heads + 1], config.bf16)
        visible = slice(first, position + 1)
        expected = attention_reference(rotated[group : 2 * group], keys[visible], values[visible], scaling)
        assert_equal(output[row, group : 2 * group], expected, config.bf16)
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
