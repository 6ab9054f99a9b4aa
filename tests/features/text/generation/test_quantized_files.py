"""Folders quantized by GPTQ, AWQ, FP8 and compressed-tensors: completions equal those of the dequantized weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import architectures
from safetensors.torch import load_file, save_file

from dragoman.core.errors import ModelFailed
from features.text.generation.helpers import ids, load_model, text

pytestmark = pytest.mark.filterwarnings("ignore")

GROUP = 16
PROMPT = tuple((5 + 7 * i * i) % 90 + 3 for i in range(14))
Tensors = dict[str, torch.Tensor]


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned integers [rows, n] into words of 32 bits [rows, n*bits/32], lowest bits first."""
    per_word = 32 // bits
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % per_word))
    words = [[0] * (values.shape[1] // per_word) for _ in values]
    for row, numbers in enumerate(values.tolist()):
        for column, number in enumerate(numbers):
            words[row][column // per_word] |= int(number) << (column % per_word * bits)
    return torch.tensor([[word - (1 << 32) if word >> 31 else word for word in row] for row in words]).int()


def quantize(weight: torch.Tensor, bits: int, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return integers [N, K], scales [N, G] and zero points [N, G]; group: that of each input."""
    integers, scales, zeros = torch.zeros(weight.shape, dtype=torch.int64), [], []
    for number in range(int(group.max()) + 1):
        part = weight[:, group == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=1e-3)
        scale = ((high - low) / (2**bits - 1)).half().float()
        zero = (-low / scale).round()
        integers[:, group == number] = ((part / scale[:, None]).round() + zero[:, None]).clamp(0, 2**bits - 1).long()
        scales.append(scale)
        zeros.append(zero)
    return integers, torch.stack(scales, 1), torch.stack(zeros, 1).long()


def dense(integers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    return (integers - zeros[:, group]).float() * scales[:, group]


def gptq(bits: int, version: str = "gptq", in_order: bool = True) -> Callable[[torch.Tensor], tuple[Tensors, Any]]:
    def convert(weight: torch.Tensor) -> tuple[Tensors, Any]:
        inputs = weight.shape[1]
        group = torch.arange(inputs) // GROUP
        if not in_order:  # act-order: inputs of a group are not side by side
            group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
        integers, scales, zeros = quantize(weight, bits, group)
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


def awq(weight: torch.Tensor) -> tuple[Tensors, Any]:
    group = torch.arange(weight.shape[1]) // GROUP
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


def packed_integers(bits: int, symmetric: bool) -> Callable[[torch.Tensor], tuple[Tensors, Any]]:
    def convert(weight: torch.Tensor) -> tuple[Tensors, Any]:
        group = torch.arange(weight.shape[1]) // GROUP
        integers, scales, zeros = quantize(weight, bits, group)
        if symmetric:
            zeros[:] = 2 ** (bits - 1)
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
        if "proj" in name:
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
    source, reference = original
    expected = save_quantized(source, tmp_path, *FORMATS[name])
    before = {key: value.clone() for key, value in reference.state_dict().items()}
    try:
        reference.load_state_dict(expected)
        model = load_model(tmp_path)
        assert model.details()["dtype"] == "float32"
        with torch.inference_mode():
            completion = reference.generate(
                torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None
            )
        assert ids(await text(model, PROMPT, max_new_tokens=12, ignore_eos=True)) == completion[0, 14:].tolist()
        await model.close()
    finally:
        reference.load_state_dict(before)


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
