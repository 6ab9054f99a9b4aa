"""Load the weights of a folder with transformers, as an object that runs with the model's own code."""

import logging
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dragoman.core.errors import ModelFailed
from dragoman.runtimes.pretrained import takes_images
from dragoman.runtimes.saved_sizes import check_parameters
from dragoman.system.load_steps import report_step
from dragoman_kernels import NoKernels
from dragoman_text.generation.block_layers import quantize_layers, read_blocks, with_layers
from dragoman_text.generation.fused import is_cpu
from dragoman_text.generation.gguf_conversion import require_conversion
from dragoman_text.generation.gguf_file import open_file
from dragoman_text.generation.gguf_model import BlockKernels, MappedLinear, NotMapped, load_mapped
from dragoman_text.generation.integer_weights import NoBlocks
from dragoman_text.generation.quantized_files import check_scales, is_readable, read_weights

log = logging.getLogger("dragoman.generation")

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Bits of a weight in memory by name; 0: those of the dtype, or of the file.
QUANTIZATIONS: Mapping[str, int] = {"none": 0, "int8": 8, "int4": 4}
# Maximum difference of logits by rounding, relative to the largest logit.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
# Of weights in blocks, whose products round activations to 8 bits: the last bit of one may decide how it is rounded.
_BLOCK_TOLERANCE = 0.1
# Names of the context length in configurations.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
# Context of a model without a limit of its own, such as one with a recurrent state.
_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model of transformers in memory.

    config: that of the decoder. has_vision: prompts may have images.
    forced_bos: first token of every completion of an encoder-decoder model.
    parameters: their number. file_format, file_quantization: of the weights in the files, "" if unknown.
    blocks: the kernels that multiply with weights in blocks, in a GGUF file or in memory; None if there are none.
    block_types: the types of these blocks.
    """

    model: Any
    config: Any
    dtype: torch.dtype
    device: torch.device
    has_vision: bool = False
    forced_bos: int | None = None
    parameters: int = 0
    file_format: str = ""
    file_quantization: str = ""
    blocks: BlockKernels | None = None
    block_types: tuple[str, ...] = ()

    @property
    def tolerance(self) -> float:
        """Maximum difference of logits by rounding, relative to the largest logit."""
        return TOLERANCE[self.dtype] + (0 if self.blocks is None else _BLOCK_TOLERANCE)

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    @property
    def context(self) -> int | None:
        """Context length of the model, None if it has no limit."""
        lengths = (getattr(self.config, name, None) for name in _LENGTHS)
        return next((length for length in lengths if isinstance(length, int) and length > 0), None)

    @property
    def default_context(self) -> int:
        return self.context or _DEFAULT_CONTEXT


def load_pretrained(folder: Path, dtype: str, device_name: str, *, maps: bool = False, bits: int = 0) -> Pretrained:
    """Load the weights of a folder or a GGUF file. Raises ModelFailed if some are missing, or cannot be quantized.

    maps: keep quantized weights in their bits, in a GGUF file or in memory, if the kernels can multiply with them. They
    are converted otherwise. bits: of `QUANTIZATIONS`: round the weights of linear layers and of the output head.
    """
    device = torch.device(device_name)
    if maps and folder.is_file() and (mapped := _map(folder, dtype, device)):
        return mapped
    if folder.is_file():
        require_conversion()
    # Takes seconds, which a mapped file does not need.
    from transformers import AutoConfig, GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    inside: dict[str, Any] = {}
    layers: dict[str, MappedLinear] = {}
    file_format, file_quantization = "safetensors", ""
    if folder.is_file():
        file_format, file_quantization = "gguf", open_file(folder).quantization
        folder, inside = folder.parent, {"gguf_file": folder.name}
        report_step("reading the configuration")
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **inside)
    quantization = getattr(config, "quantization_config", None) or {}
    is_dequantized = is_readable(quantization)
    if inside or is_dequantized:  # quantized weights, whose products are computed in the shorter dtype
        config.dtype = torch.bfloat16
        report_step("converting weights")
    used_dtype = DTYPES[dtype] if dtype != "auto" else _default_dtype(config, device)
    has_vision = not inside and takes_images(folder)
    factory = _model_class(config, has_vision=has_vision)
    source: Path | None = folder
    if quantization:
        file_quantization = str(quantization.get("quant_method", ""))
    if is_dequantized:
        del config.quantization_config
        with torch.device("meta"):  # weights in memory are loaded by the class itself
            own = factory.from_config(config)
        weights, layers = _read_quantized(folder, quantization, used_dtype, own if maps and is_cpu(device) else None)
        factory = with_layers(type(own), layers) if layers else type(own)
        source, inside = None, {"state_dict": weights}
    elif not (quantization or inside):
        with torch.device("meta"):
            own = factory.from_config(deepcopy(config))
        check_parameters(sum(each.numel() for each in own.parameters()), folder)
    model, loading_info = factory.from_pretrained(
        source,
        config=config,
        dtype=used_dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        **inside,
    )
    _check_weights(loading_info, is_dequantized=is_dequantized)
    model.eval().to(device)
    saved = model.generation_config
    if is_dequantized and (folder / GENERATION_CONFIG_NAME).is_file():
        saved = GenerationConfig.from_pretrained(folder, local_files_only=True)
    count = sum(each.numel() for each in model.parameters()) + sum(each.weights for each in layers.values())
    if bits:
        layers = quantize_layers(model, device, bits)
    # The engine applies all rules of generation itself.
    model.generation_config = GenerationConfig(**{name: getattr(saved, name, None) for name in _SPECIAL_TOKENS})
    return Pretrained(
        model,
        model.config.get_text_config(decoder=True),
        used_dtype,
        device,
        has_vision,
        getattr(saved, "forced_bos_token_id", None),
        count,
        file_format,
        file_quantization,
        *_blocks_of(layers.values()),
    )


def _read_quantized(
    folder: Path, quantization: Mapping[str, Any], dtype: torch.dtype, model: Any | None
) -> tuple[dict[str, torch.Tensor], dict[str, MappedLinear]]:
    """Return the weights of a folder in a dtype, and layers in blocks: if a model on the device meta is given, and they
    can be."""
    method, reason = quantization["quant_method"], "`packed = false`, `quantization` or a GPU"
    try:
        if model is not None:
            weights, layers = read_blocks(folder, quantization, dtype, BlockKernels(), model)
            if layers:
                types = ", ".join(_blocks_of(layers.values())[1])
                log.info("weights quantized by %s stay in their bits: %d layers in %s", method, len(layers), types)
                return weights, layers
            reason = "they are not integers"
    except (NoBlocks, NoKernels) as error:
        reason = str(error)
    log.info("weights quantized by %s are dequantized to %s: %s", method, dtype, reason)
    return read_weights(folder, quantization, dtype), {}


def _blocks_of(layers: Collection[MappedLinear]) -> tuple[BlockKernels | None, tuple[str, ...]]:
    """Return the kernels of layers in blocks, and the types of their blocks."""
    types = {segment.tensor.type.name for layer in layers for segment in layer.segments}
    return next((layer.kernels for layer in layers), None), tuple(sorted(types))


def _map(path: Path, dtype: str, device: torch.device) -> Pretrained | None:
    """Return the model of a GGUF file whose weights stay in the file; None, with a line in the log, if they cannot."""
    report_step("mapping weights")
    try:
        if device.type != "cpu" or dtype not in ("auto", "float32"):
            raise NotMapped(f"expected the device cpu and dtype auto or float32, got {device.type} and {dtype}")
        model = load_mapped(path)
    except NotMapped as error:
        log.info("weights of %s are converted in memory, not used as they are in the file: %s", path.name, error)
        return None
    return Pretrained(
        model,
        model.config,
        torch.float32,
        device,
        parameters=model.parameters,
        file_format="gguf",
        file_quantization=model.quantization,
        blocks=model.kernels,
        block_types=_blocks_of([*(each for layer in model.model.layers for each in layer.linear), model.lm_head])[1],
    )


def depends_on_length(config: Any, max_context: int) -> bool:
    """Whether rotary embeddings change for all positions once one sequence of a batch is long (longrope)."""
    rotary: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds: list[dict[str, Any]] = [rotary, *(each for each in rotary.values() if isinstance(each, dict))]
    originals = [
        each.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", 0) or 0
        for each in kinds
        if each.get("rope_type") == "longrope"
    ]
    return any(not 0 < max_context <= original for original in originals)


def _model_class(config: Any, *, has_vision: bool) -> Any:
    """Return the class of transformers that loads a model. Raises ModelFailed if none can be used here."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    if not has_vision:
        return AutoModelForSeq2SeqLM if _is_encoder_decoder(config) else AutoModelForCausalLM
    if config.is_encoder_decoder:
        raise ModelFailed(f"models of the type '{config.model_type}', with encoders of images and texts, do not load")
    return AutoModelForImageTextToText


def _is_encoder_decoder(config: Any) -> bool:
    """Whether the folder holds a model with an encoder, not the decoder of one."""
    names = getattr(config, "architectures", None) or []
    return bool(config.is_encoder_decoder) and not any(str(name).endswith("ForCausalLM") for name in names)


def _check_weights(loading_info: Mapping[str, Any], *, is_dequantized: bool) -> None:
    """Raise ModelFailed if weights are missing: transformers would initialize them at random."""
    missing = sorted(loading_info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelFailed(f"the files of weights lack {', '.join(missing[:3])}{more}")
    if is_dequantized:
        check_scales(loading_info["unexpected_keys"])


def _default_dtype(config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype of the saved weights if the device computes in it, else FP32."""
    named = getattr(config, "dtype", None)
    saved = named if isinstance(named, torch.dtype) else DTYPES.get(str(named), torch.float32)
    if device.type == "cpu" and (saved is torch.float16 or not _has_bfloat16()):
        return torch.float32
    return saved


def _has_bfloat16() -> bool:
    """Return whether this CPU has instructions for BF16 products; without them it is slower than FP32."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "amx", "bf16"))
