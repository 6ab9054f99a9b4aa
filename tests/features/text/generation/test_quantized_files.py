"""Folders quantized by GPTQ, AWQ, FP8 and compressed-tensors: completions equal those of the dequantized weights."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import architectures
from safetensors.torch import load_file, save_file

from dragoman.core.errors import ModelFailed
from dragoman_text.generation.integer_weights import IntegerWeight, NoBlocks
from features.text.generation import test_generation_gguf as gguf_tests
from features.text.generation.helpers import ids, load_model, text
from features.text.generation.test_generation_gguf import SIZES
from features.text.generation.test_generation_gguf_blocks import values_of

pytestmark = pytest.mark.filterwarnings("ignore")

GROUP = 16
PROMPT = tuple((5 + 7 * i * i) % 90 + 3 for i in range(14))
Tensors = dict[str, torch.Tensor]


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned integers [rows, n] into words of 32 bits [rows, n*bits/32], lowest bits first."""
    per_word = 32 // bits
    values = torch.nn.functional.pad(values.long(), (0, -values.shape[1] % per_word))
    words = (values.view(len(values), -1, per_word) << bits * torch.arange(per_word)).sum(-1)
    return torch.where(words >> 31 > 0, words - (1 << 32), words).int()


def quantize(
    weight: torch.Tensor, bits: int, group: torch.Tensor, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return integers [N, K], scales [N, G] and zero points [N, G]; group: that of each input."""
    integers, scales, zeros = torch.zeros(weight.shape, dtype=torch.int64), [], []
    for number in range(int(group.max()) + 1):
        part = weight[:, group == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=1e-3)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / (2**bits - 1)).half().float()
        zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else (-low / scale).round()
        integers[:, group == number] = ((part / scale[:, None]).round() + zero[:, None]).clamp(0, 2**bits - 1).long()
        scales.append(scale)
        zeros.append(zero)
    return integers, torch.stack(scales, 1), torch.stack(zeros, 1).long()


def dense(integers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    return (integers - zeros[:, group]).float() * scales[:, group]


def gptq(
    bits: int, version: str = "gptq", in_order: bool = True, size: int = GROUP, symmetric: bool = False
) -> Callable[[torch.Tensor], tuple[Tensors, Any]]:
    def convert(weight: torch.Tensor) -> tuple[Tensors, Any]:
        inputs = weight.shape[1]
        group = torch.arange(inputs) // size
        if not in_order:  # act-order: inputs of a group are not side by side
            group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
        integers, scales, zeros = quantize(weight, bits, group, symmetric)
        if not symmetric:
            zeros[0, 0] = 0  # stored as the largest integer by the first version
        stored = (zeros - 1) % 2**bits if version == "gptq" else zeros
        parts = {
            "qweight": pack(integers, bits).t().contiguous(),
            "qzeros": pack(stored.t(), bits),
            "scales": scales.t().half().contiguous(),
            "g_idx": group.int(),
        }
        return parts, dense(integers, scales, zeros, group)

    return convert


def awq(weight: torch.Tensor, size: int = GROUP) -> tuple[Tensors, Any]:
    group = torch.arange(weight.shape[1]) // size
    integers, scales, zeros = quantize(weight, 4, group)

    def packed(values: torch.Tensor) -> torch.Tensor:
        return pack(values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    parts = {"qweight": packed(integers.t()), "qzeros": packed(zeros.t()), "scales": scales.t().half().contiguous()}
    return parts, dense(integers, scales, zeros, group)


def fp8(block: tuple[int, int] = (16, 24)) -> Callable[[torch.Tensor], tuple[Tensors, Any]]:
    def convert(weight: torch.Tensor) -> tuple[Tensors, Any]:
        rows, columns = (-(-length // size) for length, size in zip(weight.shape, block, strict=True))
        scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(2)) + 0.5
        stored = weight.to(torch.float8_e4m3fn)
        expected = stored.float()
        for row in range(rows):
            for column in range(columns):
                area = slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1])
                expected[area] *= scale[row, column]
        return {"weight": stored, "weight_scale_inv": scale}, expected

    return convert


def packed_integers(bits: int, symmetric: bool, size: int = GROUP) -> Callable[[torch.Tensor], tuple[Tensors, Any]]:
    def convert(weight: torch.Tensor) -> tuple[Tensors, Any]:
        group = torch.arange(weight.shape[1]) // size
        integers, scales, zeros = quantize(weight, bits, group, symmetric)
        parts = {
            "weight_packed": pack(integers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack(zeros.t(), bits).t().contiguous()
        return parts, dense(integers, scales, zeros, group)

    return convert


def integers_by_row(weight: torch.Tensor) -> tuple[Tensors, Any]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round().to(torch.int8)
    return {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(1.0)}, stored.float() * scale


def fp8_by_tensor(weight: torch.Tensor) -> tuple[Tensors, Any]:
    stored = weight.to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": torch.tensor(0.75)}, stored.float() * 0.75


def compressed(format_: str, bits: int = 8, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, **weights}}}
    return {"quant_method": "compressed-tensors", "format": format_, "config_groups": groups}


FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], tuple[Tensors, Any]]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq(4)),
    "gptq-act-order": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, gptq(4, in_order=False)),
    "gptq-8": ({"quant_method": "gptq", "bits": 8}, gptq(8)),
    "gptq-2-v2": ({"quant_method": "gptq", "bits": 2, "checkpoint_format": "gptq_v2"}, gptq(2, "gptq_v2")),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 24]}, fp8()),
    "packed-4": (compressed("pack-quantized", 4, strategy="group"), packed_integers(4, True)),
    "packed-8-zero": (compressed("pack-quantized", 8, strategy="group"), packed_integers(8, False)),
    "int8-rows": (compressed("int-quantized", 8, strategy="channel"), integers_by_row),
    "fp8-tensor": (compressed("float-quantized", 8, strategy="tensor"), fp8_by_tensor),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("original")
    return folder, architectures.save_model(folder, "llama")


def save_quantized(source: Path, folder: Path, settings: dict[str, Any], convert: Any) -> Tensors:
    """Save a folder with quantized layers and return its weights as they should be read."""
    saved: Tensors = {}
    expected: Tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith("proj.weight"):
            parts, expected[name] = convert(weight)
            saved |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
        else:
            saved[name] = expected[name] = weight
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return expected


@pytest.mark.parametrize("name", FORMATS)
async def test_completions_equal_those_of_the_dequantized_weights(
    name: str, original: tuple[Path, Any], tmp_path: Path
) -> None:
    """Groups of 16 are not those of the kernels: weights are dequantized."""
    source, reference = original
    expected = save_quantized(source, tmp_path, *FORMATS[name])
    before = {key: value.clone() for key, value in reference.state_dict().items()}
    try:
        reference.load_state_dict(expected)
        model = load_model(tmp_path, packed=name != "int8-rows")
        assert model.details()["dtype"] == "float32"
        assert model.details()["block_types"] == ()
        with torch.inference_mode():
            completion = reference.generate(
                torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None
            )
        assert ids(await text(model, PROMPT, max_new_tokens=12, ignore_eos=True)) == completion[0, 14:].tolist()
        await model.close()
    finally:
        reference.load_state_dict(before)


def _int4(weight: torch.Tensor) -> tuple[Tensors, Any]:
    return awq(weight, 64)


def _compressed_rows(bits: int, symmetric: bool) -> Any:
    settings = compressed("pack-quantized", bits, strategy="channel")
    return settings, lambda weight: packed_integers(bits, symmetric, weight.shape[1])(weight)


# Formats whose groups are those of the kernels, and the types of their blocks.
BLOCKS: dict[str, tuple[dict[str, Any], Any, tuple[str, ...]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq(4, size=32, symmetric=True), ("Q4_0",)),
    "gptq-zeros": ({"quant_method": "gptq", "bits": 4}, gptq(4, size=128), ("Q4_Z",)),
    "gptq-act-order": ({"quant_method": "gptq", "bits": 4}, gptq(4, in_order=False, size=64), ("Q4_Z",)),
    "gptq-8": ({"quant_method": "gptq", "bits": 8}, gptq(8, size=32, symmetric=True), ("Q8_0",)),
    "gptq-2": ({"quant_method": "gptq", "bits": 2}, gptq(2, size=32), ("Q4_0",)),
    "awq": ({"quant_method": "awq", "bits": 4}, _int4, ("Q4_Z",)),
    "packed-4": (*_compressed_rows(4, True), ("Q4_0",)),
    "packed-8-zero": (*_compressed_rows(8, False), ("Q8_Z",)),
    "int8-rows": (*FORMATS["int8-rows"], ("Q8_0",)),
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("large")
    return folder, architectures.save_model(folder, "qwen2", tie_word_embeddings=True, **SIZES)


@pytest.mark.parametrize("name", BLOCKS)
async def test_layers_in_blocks(
    name: str, large: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The text is that of the dequantized weights, with activations rounded."""
    caplog.set_level("INFO", "dragoman.generation")
    source, reference = large
    settings, convert, types = BLOCKS[name]
    expected = save_quantized(source, tmp_path, settings, convert)
    before = {key: value.clone() for key, value in reference.state_dict().items()}
    reference.load_state_dict(expected, strict=False)
    model = load_model(tmp_path)
    try:
        details = model.details()
        assert details["block_types"] == types
        assert details["machine_code"]
        assert details["batch_invariant"]
        assert (details["quantization"], details["file_quantization"]) == ("none", settings["quant_method"])
        assert details["parameters"] == reference.num_parameters()
        assert f"stay in their bits: 28 layers in {types[0]}" in caplog.text
        generated = ids(await text(model, gguf_tests.PROMPT, max_new_tokens=12, ignore_eos=True))
        gguf_tests.assert_near_greedy(reference, generated)
        if name != "gptq-act-order":  # whose inputs are rounded in the order of the weights
            with gguf_tests.rounding(reference, "proj"):  # the last bit of an input may decide how it is rounded
                gguf_tests.assert_near_greedy(reference, generated, 0.03)
    finally:
        await model.close()
        reference.load_state_dict(before)


async def test_the_same_text_in_any_batch(large: tuple[Path, Any], tmp_path: Path) -> None:
    """In BF16, with inputs in another order than the weights."""
    save_quantized(large[0], tmp_path, *BLOCKS["gptq-act-order"][:2])
    model = load_model(tmp_path, threads=2, dtype="bfloat16", prefix_cache=0)
    assert (model.details()["dtype"], model.details()["machine_code"]) == ("bfloat16", True)
    prompts = [tuple(range(10 + i, 30 + 3 * i)) for i in range(8)]
    alone = [ids(await text(model, prompt, max_new_tokens=8, ignore_eos=True)) for prompt in prompts]
    together = await asyncio.gather(*(text(model, each, max_new_tokens=8, ignore_eos=True) for each in prompts))
    assert [ids(each) for each in together] == alone
    await model.close()


def random_weight(highest: int, scales: Any = 0.001, groups: Any = None) -> IntegerWeight:
    """Return a weight of 3 outputs and 128 inputs in 2 groups, with the integers 0 to `highest`."""
    random = np.random.default_rng(highest)
    integers = torch.from_numpy(random.integers(0, highest + 1, (3, 128), np.uint8))
    integers[0, :2] = torch.tensor([0, highest])
    zeros = torch.from_numpy(random.integers(0, highest + 1, (3, 2)))
    return IntegerWeight(integers, torch.full((3, 2), scales).half().float(), zeros, groups)


@pytest.mark.parametrize(
    ("highest", "zero", "type_"), [(15, 8, "Q4_0"), (15, None, "Q4_Z"), (255, 128, "Q8_0"), (255, None, "Q8_Z")]
)
def test_blocks_have_the_same_values(highest: int, zero: int | None, type_: str) -> None:
    weight = random_weight(highest)
    if zero is not None:
        weight.zeros[:] = zero
    found, blocks = weight.blocks()
    assert (found.name, found.bytes * 4) == (type_, blocks.shape[1])
    assert np.array_equal(values_of(type_, blocks.numpy(), 128), weight.dense().numpy())


def test_inputs_of_a_group_are_brought_side_by_side() -> None:
    groups = torch.arange(128) % 2
    weight = random_weight(15, groups=groups)
    ordered, order = weight.in_order()
    assert order is not None
    assert torch.equal(ordered.dense(), weight.dense()[:, order])
    assert random_weight(15, groups=torch.arange(128) // 64).in_order()[1] is None


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (lambda: random_weight(15, groups=torch.arange(128) // 65), "groups of inputs differ in size"),
        (lambda: random_weight(15, groups=torch.arange(128) // 16), "groups of inputs differ in size"),
        (
            lambda: replace(random_weight(15), scales=torch.full((3, 2), 1e-7)),
            "its scales are beyond the range of FP16",
        ),
        (lambda: replace(random_weight(15), scales=torch.full((3, 2), 1e5)), "its scales are beyond the range of FP16"),
        (lambda: replace(random_weight(15), scales=torch.full((3, 2), torch.nan)), "its scales are beyond the range"),
        (
            lambda: replace(random_weight(15), zeros=torch.full((3, 2), 0.5)),
            "its zero points are not integers of 8 bits",
        ),
        (
            lambda: replace(random_weight(15), zeros=torch.full((3, 2), 256)),
            "its zero points are not integers of 8 bits",
        ),
        (
            lambda: replace(random_weight(15), scales=torch.ones(3, 8), zeros=torch.ones(3, 8)),
            "expected groups of a multiple of 32 inputs, got 128 inputs in 8 groups",
        ),
    ],
)
def test_weights_that_have_no_blocks(weight: Callable[[], IntegerWeight], reason: str) -> None:
    with pytest.raises(NoBlocks, match=reason):
        weight().in_order()[0].blocks()


def _order(saved: Tensors, layer: str) -> None:
    saved[f"{layer}.g_idx"] = (torch.arange(256) // 64).int()


def _leave(saved: Tensors, layer: str) -> None:
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del saved[f"{layer}.{part}"]
    saved[f"{layer}.weight"] = torch.ones(256, 256)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_order, "have their inputs in different orders"),
        (_leave, "only some of model.layers.0.self_attn.q_proj, "),
    ],
)
async def test_layers_that_are_computed_together(
    change: Callable[[Tensors, str], Any],
    reason: str,
    large: tuple[Path, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Their inputs must be in one order, and all of them in blocks; the model is dequantized otherwise."""
    caplog.set_level("INFO", "dragoman.generation")
    save_quantized(large[0], tmp_path, *BLOCKS["gptq-act-order"][:2])
    saved = load_file(tmp_path / "model.safetensors")
    change(saved, "model.layers.0.self_attn.q_proj")
    save_file(saved, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_model(tmp_path)
    assert model.details()["block_types"] == ()
    assert f"weights quantized by gptq are dequantized to torch.float32: {reason}" in caplog.text.replace(
        "model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj have", "have"
    )
    await model.close()


@pytest.mark.parametrize("name", FORMATS)
def test_weights_by_value(name: str, original: tuple[Path, Any], tmp_path: Path) -> None:
    from dragoman_text.generation.quantized_files import read_weights

    settings, convert = FORMATS[name]
    expected = save_quantized(original[0], tmp_path, settings, convert)
    weights = read_weights(tmp_path, settings, torch.float32)
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "convert", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, gptq(4), "3 bits are not supported, only 2, 4 and 8 are"),
        ({"quant_method": "gptq", "bits": 8}, gptq(4), "do not fit together: qweight ["),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, gptq(4), "format 'marlin' is not"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, awq, "version 'gemv' with 4 bits is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, fp8(), "do not fit together: weight ["),
        (compressed("nvfp4-pack-quantized", 4), packed_integers(4, True), "'nvfp4-pack-quantized' is not supported"),
        (compressed("pack-quantized", 2), packed_integers(4, True), "['2'] bits do not fit the shape"),
        ({"quant_method": "gptq", "bits": 4}, fp8_by_tensor, "proj.weight is of torch.float8_e4m3fn and has"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, awq, "has weights quantized by 'bitsandbytes'"),
    ],
)
def test_formats_that_are_not_read(
    settings: dict[str, Any], convert: Any, message: str, original: tuple[Path, Any], tmp_path: Path
) -> None:
    save_quantized(original[0], tmp_path, settings, convert)
    with pytest.raises(ModelFailed) as caught:
        load_model(tmp_path)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("awq", {"model.layers.0.mlp.act_fn.scales": torch.ones(8)}, "the scale model.layers.0.mlp.act_fn.scales is"),
        (
            "fp8",
            {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 8).to(torch.float8_e4m3fn)},
            "fp8 weights: model.layers.0.mlp.experts.gate_up_proj is of torch.float8_e4m3fn and has no scale",
        ),
    ],
)
def test_scales_that_would_not_be_applied(
    name: str, more: Tensors, message: str, original: tuple[Path, Any], tmp_path: Path
) -> None:
    save_quantized(original[0], tmp_path, *FORMATS[name])
    save_file({**load_file(tmp_path / "model.safetensors"), **more}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFailed, match=message):
        load_model(tmp_path)
