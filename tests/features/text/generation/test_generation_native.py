"""The decoder step of the kernels: logits of transformers, kernels against their references, independent rows."""

import ctypes
import functools
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import dragoman_kernels
from dragoman.core.errors import ModelFailed
from dragoman_text.generation.cache import KeyValueCache
from dragoman_text.generation.gguf_model import MappedLinear
from dragoman_text.generation.integer_weights import NoBlocks, round_weight
from dragoman_text.generation.job import BatchRow
from dragoman_text.generation.native.config import COLUMNS, LANES, KernelConfig
from dragoman_text.generation.native.linear import StepCode, pack_blocks
from dragoman_text.generation.native.structures import AttentionHead, AttentionShape
from dragoman_text.generation.pretrained import QUANTIZATIONS, load_pretrained
from dragoman_text.generation.runner import Runner
from dragoman_text.generation.threads import MAX_THREADS, fastest_thread_count
from features.kernels.forms import forms
from features.text.generation.kernel_references import (
    attention_reference,
    exp_reference,
    gate_reference,
    product_reference,
    rotate_reference,
)

pytestmark = pytest.mark.filterwarnings("ignore")

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
# One model has several properties.
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
# Form of the kernels and dtype.
FORMS = [f"{form}-{dtype}" for form in forms() for dtype in ("float32", "bfloat16")]
BF16_FORMS = FORMS[1::2]


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
    """Load a model with a form of the kernels and a dtype, of `FORMS`; by default in FP32 for this CPU."""
    name, _, dtype = form.partition("-")
    with pytest.MonkeyPatch.context() as patch:
        if name:
            patch.setenv("KERNELS_FORM", name)
        runner = Runner(load_pretrained(folder, dtype or "float32", "cpu", bits=QUANTIZATIONS[quantization]))
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


# In the form for this CPU, and in the others with one model: each kernel is compared in all forms below.
@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "") for name in MODELS), *(("odd-sizes-linear-rotary", form) for form in FORMS[:-2:2])],
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


@pytest.mark.parametrize("form", BF16_FORMS)
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
    [(form, quantization) for form in FORMS for quantization in ("none", "int4" if "bfloat16" in form else "int8")],
)
@given(cuts=st.lists(st.integers(1, 219), max_size=8), others=st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_sequences_do_not_depend_on_the_steps(
    llamas: Llamas, form: str, quantization: str, cuts: list[int], others: int
) -> None:
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
    assert [reason in line for line in caplog.messages if "the kernels are not used" in line] == [True]
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
        runner.fused.embed.weight[149] = float("nan")  # type: ignore[union-attr]
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
                weight = round_weight(layer.weight, QUANTIZATIONS[bits]).dense()
                layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        rounded = model(torch.tensor([text])).logits[0]
    error, cost = (found - rounded).norm() / rounded.norm(), (rounded - original).norm() / original.norm()
    assert error < (0.12 if "bfloat16" in form else 0.04)
    assert cost < (0.03 if bits == "int8" else 0.4)
    assert cost > 1e-4, "nothing was rounded"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Llama", "expected a multiple of 32 inputs, got 48"),
        ("Gemma", "expected a model type of llama, mistral, qwen2, qwen3, got gemma"),
    ],
)
def test_models_that_cannot_be_quantized_are_rejected(tmp_path: Path, kind: str, reason: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, "hidden_size": 48})
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path)
    with pytest.raises(ModelFailed, match=f"parameter 'quantization': 'int8' is not possible: {reason}"):
        load_pretrained(tmp_path, "float32", "cpu", bits=8)


def test_the_memory_of_quantized_weights(folders: Path) -> None:
    """8.5 and 4.5 bits for each weight of the layers and of the head."""
    for bits, per_weight in ((8, 8.5), (4, 4.5)):
        model = load_pretrained(folders / "llama", "float32", "cpu", bits=bits).model
        layers = [each for each in model.modules() if isinstance(each, MappedLinear)]
        memories = [layer.segments[0].memory for layer in layers]
        assert len(layers) == 3 * 7 + 1
        assert [0 if each is None else 8 * each.numel() for each in memories] == [
            per_weight * layer.weights for layer in layers
        ]
        assert not any(type(each) is torch.nn.Linear for each in model.modules())


@pytest.mark.parametrize(("bits", "error"), [(8, 0.0042), (4, 0.13)])
def test_rounded_weights(bits: int, error: float) -> None:
    """Half a step of the integers, plus the rounding of the scale to FP16; in 4 bits the clamped opposite of -8."""
    weights = random_tensor(1, 50, 640) * random_tensor(2, 50, 1).exp()
    weights[0], weights[1, 1:] = 0.0, 0.0
    groups = weights.view(50, 20, 32)
    rounded = round_weight(weights, bits).dense().view(50, 20, 32)
    assert bool(((rounded - groups).abs() <= groups.abs().amax(-1, keepdim=True) * error).all())
    for factor in (1e-7, 1e8):
        with pytest.raises(NoBlocks, match="scales are beyond the range of FP16"):
            round_weight(weights * factor, bits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_do_not_need_packed_weights_of_pytorch(
    folders: Path, dtype: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """oneDNN, whose layout PyTorch packs weights in, may be missing, or lack BF16 on this CPU."""
    caplog.set_level("INFO", "dragoman.generation")

    def load(**options: bool) -> Runner:
        return Runner(load_pretrained(folders / "qwen2", dtype, "cpu"), **options)

    def logits(runner: Runner) -> torch.Tensor:
        cache = KeyValueCache(runner.shape, 256, runner.dtype, runner.device)
        cache.reserve(2, 64)
        rows = [BatchRow(0, 0, prompt(1, 9), wanted=9), BatchRow(1, 0, prompt(2, 1))]
        return runner.run(cache, rows)

    expected = logits(load())
    monkeypatch.setattr("dragoman_text.generation.runner.can_pack", lambda *_: False)
    runner = load()
    assert runner.native
    assert not runner.packed
    assert runner.batch_invariant
    assert torch.equal(logits(runner), expected)
    assert not load(packed=False).native
    assert "the kernels are not used, PyTorch computes: a GPU, or `packed = false`" in caplog.messages


def test_an_installation_without_kernels_says_so(
    folders: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KERNELS_FORM", "none")
    runner = Runner(load_pretrained(folders / "llama", "float32", "cpu"))
    assert not runner.native
    assert [line for line in caplog.messages if "KERNELS_FORM is none" in line] == [
        "the kernels are not used, PyTorch computes: KERNELS_FORM is none"
    ]
    cache = KeyValueCache(runner.shape, 256, runner.dtype, runner.device)
    cache.reserve(1, 32)
    assert runner.run(cache, [BatchRow(0, 0, [3])]).shape == (1, 150)
    with pytest.raises(ModelFailed, match="'int8' is not possible: KERNELS_FORM is none"):
        load_pretrained(folders / "llama", "float32", "cpu", bits=8)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_layers_outside_of_the_step_equal_their_reference(form: str, bias: bool) -> None:
    config = kernel_config(form)
    dtype, code = config.dtype, StepCode(config)
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
    name, _, dtype = form.partition("-")
    return KernelConfig(**{**dimensions, **changes}, bf16=dtype == "bfloat16", form=name)


def random_tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, bf16: bool) -> None:
    """Compare a result with its reference: FP32 sums in another order, then at most one rounding to BF16."""
    tolerance = 1e-2 if bf16 else 1e-4
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


_ADDRESS, _INTEGER = ctypes.c_void_p, ctypes.c_int64


def product(inputs: torch.Tensor, block: torch.Tensor, config: KernelConfig) -> torch.Tensor:
    """Return the product of inputs with one block of weights, by the kernel."""
    rows, size = inputs.shape
    sums = torch.full((rows, COLUMNS), float("nan"))
    types = (_ADDRESS, _INTEGER, _ADDRESS, _ADDRESS, *[_INTEGER] * 3)
    function = dragoman_kernels.function("product", config.form, *types)
    function(
        inputs.data_ptr(),
        config.item_bytes * size,
        block.data_ptr(),
        sums.data_ptr(),
        rows,
        size,
        config.bf16,
    )
    return sums


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
    sums = product(inputs, pack_blocks(weights, config), config)
    torch.testing.assert_close(sums, product_reference(inputs.double(), weights.double()), rtol=1e-4, atol=1e-3)


@pytest.mark.skipif("amx" not in forms(), reason="needs a CPU with AMX")
@given(rows=st.integers(1, 70), steps=st.integers(1, 400), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_product_of_amx_has_the_bits_of_its_reference(rows: int, steps: int, seed: int) -> None:
    config = kernel_config("amx-bfloat16")
    inputs, weights = (random_tensor(seed + i, n, 2 * steps).bfloat16() for i, n in enumerate((rows, COLUMNS)))
    sums = product(inputs, pack_blocks(weights, config), config)
    padding = (0, -2 * steps % 32)
    wide, columns = (torch.nn.functional.pad(each.float(), padding).numpy() for each in (inputs, weights))
    expected = np.zeros((rows, COLUMNS), np.float32)
    for first in range(0, wide.shape[1], 32):  # even and odd inputs in one chain each: a product is exact in FP32
        chains = np.zeros((2, rows, COLUMNS), np.float32)
        for i in range(first, first + 32):
            chains[i % 2] += wide[:, i, None] * columns[:, i]
        expected += chains[0] + chains[1]
    assert np.array_equal(sums.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("form", BF16_FORMS)
def test_numbers_are_rounded_to_the_nearest_bf16(form: str) -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 16_000, np.uint32)
    ties = bits[:4000] & 0xFFFF0000 | 0x8000
    special = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F7FFFFF], np.uint32)
    numbers = torch.from_numpy(np.concatenate((bits, ties, special, special)).view(np.float32))
    numbers[(numbers.abs() < 1.2e-38) & (numbers != 0)] = 1.0  # instructions of AVX-512 flush subnormal numbers to 0
    rounded = torch.empty(len(numbers), dtype=torch.bfloat16)
    kernel = dragoman_kernels.function("round_to_bf16", form.partition("-")[0], _ADDRESS, _ADDRESS, _INTEGER)
    kernel(numbers.data_ptr(), rounded.data_ptr(), len(numbers))
    is_nan = numbers.isnan()
    assert torch.equal(rounded.isnan(), is_nan)
    assert torch.equal(rounded[~is_nan], numbers[~is_nan].bfloat16())


@pytest.mark.parametrize("size", [48, 42])
@pytest.mark.parametrize("form", FORMS)
def test_gate_equals_its_reference(form: str, size: int) -> None:
    config = kernel_config(form, intermediate=size)
    gates, output = 5 * random_tensor(3, 2 * size), torch.full((size + 1,), 7.0, dtype=config.dtype)
    gate = dragoman_kernels.function("gate", config.form, _ADDRESS, _ADDRESS, _INTEGER, _INTEGER)
    gate(gates.data_ptr(), output.data_ptr(), size, config.bf16)
    assert_equal(output[:size], gate_reference(gates), config.bf16)
    assert output[size] == 7, "written beyond the output"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("qk_norm", "window"), [(False, 0), (True, 3), (True, 100)])
@pytest.mark.parametrize("several", [False, True])
def test_attention_and_cached_keys_equal_their_reference(form: str, qk_norm: bool, window: int, several: bool) -> None:
    for head_size in (32, 64, 96, 128, 288):
        check_attention(form, qk_norm, window, several, head_size)


def check_attention(form: str, qk_norm: bool, window: int, several: bool, head_size: int) -> None:
    config, length, start = kernel_config(form, qk_norm=qk_norm, head_size=head_size, scaling=0.3), 64, 37
    count = config.run_rows if several else 1
    size, group = config.head_size, config.query_heads // config.kv_heads
    qkv, rotary = random_tensor(4, count, config.qkv_heads, size), random_tensor(5, count, 2, size)
    keys, values = random_tensor(6, length, size).to(config.dtype), random_tensor(7, length, size).to(config.dtype)
    norms = random_tensor(8, 2, size)
    output = torch.zeros(count, config.query_heads, size, dtype=config.dtype)
    query, scores = torch.zeros(count, size), torch.zeros(count, length + LANES)
    positions = [start + row for row in range(count)]
    firsts = [max(0, position + 1 - window) if window else 0 for position in positions]
    shape = AttentionShape(4, 2, size, qk_norm, config.bf16, config.eps, config.scaling)
    heads = (AttentionHead * count)()
    for row, head in enumerate(heads):
        memory = (qkv[row], rotary[row], keys, values, output[row], *norms, query[row], scores[row])
        heads[row] = AttentionHead(1, positions[row], firsts[row], *(each.data_ptr() for each in memory))
        store = dragoman_kernels.function("store_key_value", config.form, _ADDRESS, _ADDRESS)
        store(ctypes.addressof(shape), ctypes.addressof(head))
    attend = dragoman_kernels.function("attend", config.form, _ADDRESS, _ADDRESS, _INTEGER)
    attend(ctypes.addressof(shape), ctypes.addressof(heads), count)
    query_norm, key_norm = norms if qk_norm else (None, None)
    for row, (position, first) in enumerate(zip(positions, firsts, strict=True)):
        rotated = rotate_reference(qkv[row], rotary[row], query_norm, config.eps)
        key = rotate_reference(qkv[row], rotary[row], key_norm, config.eps)[config.query_heads + 1]
        assert_equal(keys[position], key, config.bf16)
        assert_equal(values[position], qkv[row, config.query_heads + config.kv_heads + 1], config.bf16)
        visible = slice(first, position + 1)
        expected = attention_reference(rotated[group : 2 * group], keys[visible], values[visible], config.scaling)
        assert_equal(output[row, group : 2 * group], expected, config.bf16)
        assert (output[row, :group] == 0).all(), "heads that share another key are not written"


@pytest.mark.parametrize("form", forms())
def test_exp_equals_its_reference_within_two_units_in_the_last_place(form: str) -> None:
    powers = dragoman_kernels.function("exponentials", form, _ADDRESS, _INTEGER)
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


def test_shared_work_is_done_by_any_number_of_threads() -> None:
    form = forms()[-1]
    code = StepCode(kernel_config(f"{form}-float32"))
    layer = code.pack(torch.nn.Linear(16, 50 * COLUMNS, bias=False))
    inputs = random_tensor(1, 3, 16)
    expected = layer.forward(inputs)
    for count in (1, 2, 4, 1):
        code.threads = count
        for _ in range(100):
            assert torch.equal(layer.forward(inputs), expected)


def test_a_failed_allocation_leaves_a_usable_state(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't allocate memory")

    rows = [BatchRow(slot, 0, prompt(1, 60)) for slot in range(8)]  # more than at load
    runner, cache = load_runner(folders / "llama")
    expected = runner.run(cache, rows).clone()
    other, other_cache = load_runner(folders / "llama")
    other.run(other_cache, [BatchRow(0, 0, [5])])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", fail)
        with pytest.raises(RuntimeError, match="allocate"):
            other.run(other_cache, rows)
    assert torch.equal(other.run(other_cache, rows), expected)
