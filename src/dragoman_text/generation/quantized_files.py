"""Read weights that GPTQ, AWQ, FP8 or compressed-tensors quantized, as integers with scales or as their values.

A layer of such a folder has several tensors (integers, scales, zero points) in the place of `weight`. Shapes below: N
outputs, K inputs, G groups of inputs that share a scale. Activations are not quantized, also where the folder says so.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dragoman.core.errors import ModelFailed
from dragoman.runtimes.saved_sizes import weight_files
from dragoman_text.generation.integer_weights import IntegerWeight

Tensors = Mapping[str, torch.Tensor]
Settings = Mapping[str, Any]

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Scales of activations and of key-value caches.
_UNUSED = {"input_scale", "input_zero_point", "input_global_scale", "output_scale"} | {
    f"{name}_scale" for name in ("q", "k", "v", "kv")
}
# AWQ packs column _AWQ_ORDER[i] of each eight into the i-th four bits (github:casper-hansen/AutoAWQ, gemm.py).
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_COMPRESSED = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision", "dense")


def is_readable(quantization: Settings) -> bool:
    """Return whether weights with this `quantization_config` of config.json are read here."""
    return quantization.get("quant_method") in _METHODS


def read_weights(
    folder: Path,
    quantization: Settings,
    dtype: torch.dtype,
    take: Callable[[str, IntegerWeight], bool] = lambda _, __: False,
) -> dict[str, torch.Tensor]:
    """Return the weights of a folder by name, those of quantized layers dequantized and rounded to `dtype`.

    take: is called with the name and the integers of each layer that has some; if it returns true, the layer's weight
    is not returned. Raises ModelFailed for variants of a format that are not supported, and for tensors that do not fit
    together.
    """
    method = str(quantization["quant_method"])
    suffixes, read = _METHODS[method]
    weights: dict[str, torch.Tensor] = {}
    with ExitStack() as files:
        tensors: dict[str, Any] = {}
        for path in weight_files(folder):
            file = files.enter_context(safe_open(path, framework="pt"))
            tensors.update(dict.fromkeys(file.keys(), file))
        for name in tensors:
            layer, _, suffix = name.rpartition(".")
            parts = {each: f"{layer}.{each}" for each in suffixes if f"{layer}.{each}" in tensors}
            if suffix in _UNUSED or (suffix in suffixes and suffix != next(iter(parts))):
                continue
            if len(parts) < 2 or suffix not in parts:
                weights[name] = tensors[name].get_tensor(name)
                continue
            packed = {each: tensors[part].get_tensor(part) for each, part in parts.items()}
            try:
                weight = read(packed, quantization)
                if isinstance(weight, IntegerWeight):
                    if take(layer, weight):
                        continue
                    weight = weight.dense()
                weights[f"{layer}.weight"] = weight.to(dtype).contiguous()
            except ModelFailed as error:
                raise ModelFailed(f"{method} weights of {layer}: {error.message}") from error
            except (ArithmeticError, RuntimeError, IndexError, KeyError, TypeError, ValueError) as error:
                shapes = ", ".join(f"{each} {list(value.shape)}" for each, value in packed.items())
                raise ModelFailed(f"{method} weights of {layer} do not fit together: {shapes}") from error
    for name in _unread(weights):
        raise ModelFailed(f"{method} weights: {name} is of {weights[name].dtype} and has no scale")
    return weights


def check_scales(unexpected: Iterable[str]) -> None:
    """Raise ModelFailed if the model has no place for a scale among these tensors: it would compute without that.

    AWQ scales activations of some models, and experts may be in one tensor with scales of other names.
    """
    scales = sorted(name for name in unexpected if "scale" in name.rpartition(".")[2])
    if scales:
        raise ModelFailed(f"the scale {scales[0]} is not supported")


def _unread(weights: Tensors) -> Iterator[str]:
    """Yield the names of FP8 tensors, and of integer tensors of layers, that nothing has dequantized."""
    for name, weight in weights.items():
        if weight.dtype in _FP8 or ("weight" in name.rpartition(".")[2] and not weight.dtype.is_floating_point):
            yield name


# --- integers and scales -------------------------------------------------------------------------------------


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unsigned integers in words of 32 bits, lowest bits first: [rows, words] to [rows, words*32/bits]."""
    values = packed.contiguous().view(torch.uint8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((values.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _apply_block_scales(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return values [N, K] by the scale of their block, [N/block[0], K/block[1]] rounded up."""
    rows, columns = (-(-length // size) for length, size in zip(values.shape, block, strict=True))
    if scale.shape != (rows, columns):
        raise ValueError("one scale for each block is needed")
    scales = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return values.float() * scales[: values.shape[0], : values.shape[1]]


# --- formats -------------------------------------------------------------------------------------------------


def _read_gptq(layer: Tensors, settings: Settings) -> IntegerWeight:
    """qweight [K*bits/32, N], qzeros [G, N*bits/32], scales [G, N], g_idx [K] (github:ModelCloud/GPTQModel).

    The first version of the format stores zero points less 1, modulo 2**bits.
    """
    version = settings.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise ModelFailed(f"the format {version!r} is not supported, only 'gptq' and 'gptq_v2' are")
    bits = settings.get("bits")
    if bits not in (2, 4, 8):
        raise ModelFailed(f"{bits!r} bits are not supported, only 2, 4 and 8 are")
    values = _unpack(layer["qweight"].t(), bits)
    zeros = _unpack(layer["qzeros"], bits).t()
    if version == "gptq":
        zeros = (zeros + 1) & ((1 << bits) - 1)
    group = layer["g_idx"].long() if "g_idx" in layer else None
    if group is not None and (len(group) != values.shape[1] or bool((group < 0).any())):
        raise ValueError("one group for each input is needed")
    return IntegerWeight(values, layer["scales"].t(), zeros, group)


def _read_awq(layer: Tensors, settings: Settings) -> IntegerWeight:
    """qweight [K, N/8], qzeros [G, N/8], scales [G, N]."""
    version, bits = str(settings.get("version") or settings.get("format") or "gemm").lower(), settings.get("bits", 4)
    if version != "gemm" or bits != 4:
        raise ModelFailed(f"version {version!r} with {bits!r} bits is not supported, only 'gemm' with 4 bits is")
    order = torch.tensor(_AWQ_ORDER).argsort()
    values, zeros = (
        _unpack(layer[name], 4).view(len(layer[name]), -1, 8)[:, :, order].flatten(1).t()
        for name in ("qweight", "qzeros")
    )
    return IntegerWeight(values, layer["scales"].t(), zeros)


def _dequantize_fp8(layer: Tensors, settings: Settings) -> torch.Tensor:
    """weight [N, K] in FP8, weight_scale_inv: one factor for each block of weight_block_size, or one for all."""
    scale = layer["weight_scale_inv"]
    if scale.numel() == 1:
        return layer["weight"].float() * scale.float().reshape(1, 1)
    rows, columns = settings.get("weight_block_size") or (128, 128)
    return _apply_block_scales(layer["weight"], scale, (rows, columns))


def _read_compressed(layer: Tensors, settings: Settings) -> IntegerWeight | torch.Tensor:
    """weight_packed [N, K*bits/32] or weight [N, K] of INT8 or FP8, weight_scale, weight_zero_point, weight_g_idx.

    Packed integers are stored plus 2**(bits-1), also zero points, which are packed along N.
    """
    format_ = settings.get("format") or "dense"
    if format_ not in _COMPRESSED or settings.get("transform_config"):
        named = repr(format_) if format_ not in _COMPRESSED else "with transform_config"
        raise ModelFailed(f"the format {named} is not supported, only {', '.join(_COMPRESSED[:-2])} are")
    scale, zero, group = layer["weight_scale"], layer.get("weight_zero_point"), layer.get("weight_g_idx")
    scale = scale if scale.ndim == 2 else scale.reshape(1, 1)
    # It may also be there and not in use.
    group = None if group is None or bool((group < 0).all()) else group.long()
    if "weight_packed" not in layer:
        weight, block = layer["weight"], _block(settings)
        if block is not None and zero is None and scale.numel() > 1:
            return _apply_block_scales(weight, scale, block)
        zero = torch.zeros(1, scale.shape[1]) if zero is None else zero.float().reshape(len(zero), -1)
        if weight.dtype is torch.int8:
            return IntegerWeight((weight.short() + 128).to(torch.uint8), scale, zero + 128, group)
        return IntegerWeight(weight, scale, zero, group).dense()
    packed = layer["weight_packed"]
    rows, columns = layer["weight_shape"].tolist()
    bits = _bits(settings, packed, columns)
    offset = 1 << (bits - 1)
    values = _unpack(packed, bits)[:, :columns]
    if zero is None:
        zero = torch.full((1, scale.shape[1]), offset)
    elif zero.dtype is torch.int32:
        zero = _unpack(zero.t(), bits)[:, :rows].t()
    else:
        zero = zero.float() + offset
    if len(values) != rows:
        raise ValueError("weight_shape does not fit")
    return IntegerWeight(values, scale, zero, group)


def _groups(settings: Settings) -> list[Settings]:
    return [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]


def _block(settings: Settings) -> tuple[int, int] | None:
    """Return the size of blocks with one scale each, None if layers have other scales."""
    blocks = {tuple(each["block_structure"]) for each in _groups(settings) if each.get("strategy") == "block"}
    if len(blocks) > 1 or (blocks and len({each.get("strategy") for each in _groups(settings)}) > 1):
        raise ModelFailed("several block structures are not supported")
    return next(iter(blocks), None)


def _bits(settings: Settings, packed: torch.Tensor, columns: int) -> int:
    """Return the bits of a packed integer: those of a group of the configuration that fit the shape."""
    named = {each.get("num_bits") for each in _groups(settings)}
    fitting = [bits for bits in (2, 4, 8) if bits in named and -(-columns * bits // 32) == packed.shape[1]]
    if len(fitting) != 1:
        raise ModelFailed(f"{sorted(map(str, named))} bits do not fit the shape; only 2, 4 and 8 are supported")
    return fitting[0]


# By quant_method: the names of a layer's tensors, and the function that reads its weight from them.
_METHODS: Mapping[str, tuple[tuple[str, ...], Callable[[Tensors, Settings], IntegerWeight | torch.Tensor]]] = {
    "gptq": (("qweight", "qzeros", "scales", "g_idx"), _read_gptq),
    "awq": (("qweight", "qzeros", "scales"), _read_awq),
    "fp8": (("weight", "weight_scale_inv"), _dequantize_fp8),
    "compressed-tensors": (
        ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        _read_compressed,
    ),
}
