"""Decoders whose linear layers are in blocks in memory: those of quantized files, and layers that are rounded here."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dragoman.core.errors import ModelFailed
from dragoman_kernels import NoKernels
from dragoman_text.generation.fused import ARCHITECTURES
from dragoman_text.generation.gguf_model import BlockKernels, MappedLinear
from dragoman_text.generation.integer_weights import IntegerWeight, NoBlocks, round_weight
from dragoman_text.generation.quantized_files import read_weights
from dragoman_text.generation.rounding import check_tokens

log = logging.getLogger("dragoman.generation")

# Layers of a decoder that are computed as one, from the same inputs.
_TOGETHER = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


def read_blocks(
    folder: Path, quantization: Mapping[str, Any], dtype: torch.dtype, kernels: BlockKernels, model: Any
) -> tuple[dict[str, torch.Tensor], dict[str, MappedLinear]]:
    """Return the weights of a folder without those of quantized layers, and these layers by name, in blocks.

    model: of transformers, on the device meta. Raises NoBlocks, and ModelFailed as `read_weights`.
    """
    if model.config.model_type not in ARCHITECTURES:
        raise NoBlocks(f"expected a model type of {', '.join(ARCHITECTURES)}, got {model.config.model_type}")
    own = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
    tied = ["lm_head"] if model.config.tie_word_embeddings else []
    layers: dict[str, MappedLinear] = {}

    def take(name: str, weight: IntegerWeight) -> bool:
        linear = own.get(name)
        if linear is None or name in tied or linear.weight.shape != weight.integers.shape:
            raise NoBlocks(f"{name} is no linear layer of the model with {list(weight.integers.shape)} weights")
        try:
            layers[name] = kernels.linear(name, weight, linear.bias)
        except NoBlocks as error:
            raise NoBlocks(f"{name}: {error}") from error
        return True

    weights = read_weights(folder, quantization, dtype, take)
    for number in range(model.config.num_hidden_layers):
        for block, names in _TOGETHER:
            _check_together([f"model.layers.{number}.{block}.{name}" for name in names], layers)
    return weights, layers


def _check_together(names: Sequence[str], layers: Mapping[str, MappedLinear]) -> None:
    """Raise NoBlocks unless these layers, which have the same inputs, can be computed as one."""
    orders = [layers[name].segments[0].order for name in names if name in layers]
    if orders and len(orders) < len(names):
        raise NoBlocks(f"only some of {', '.join(names)} are quantized")
    if len({None if order is None else tuple(order.tolist()) for order in orders}) > 1:
        raise NoBlocks(f"{', '.join(names)} have their inputs in different orders")


def with_layers(factory: Any, layers: Mapping[str, MappedLinear]) -> Any:
    """Return a class of transformers whose models have these layers in the place of their own."""

    def initialize(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        factory.__init__(self, config, *arguments, **options)
        for name, layer in layers.items():
            self.set_submodule(name, layer)

    return type(factory.__name__, (factory,), {"__init__": initialize, "__module__": factory.__module__})


def quantize_layers(model: Any, device: torch.device, bits: int) -> dict[str, MappedLinear]:
    """Round the weights of a decoder's linear layers and of its output head to integers; return the layers by name.

    The log states how much the logits differ. Raises ModelFailed if the kernels cannot multiply them.
    """
    layers: dict[str, MappedLinear] = {}
    try:
        if device.type != "cpu":
            raise NoBlocks(f"expected the device cpu, got {device.type}")
        if model.config.model_type not in ARCHITECTURES:
            raise NoBlocks(f"expected a model type of {', '.join(ARCHITECTURES)}, got {model.config.model_type}")
        kernels, before = BlockKernels(), _logits(model)
        for name in [name for name, each in model.named_modules() if type(each) is nn.Linear]:
            linear = model.get_submodule(name)
            layers[name] = kernels.linear(name, round_weight(linear.weight, bits), linear.bias)
            model.set_submodule(name, layers[name])
    except (NoBlocks, NoKernels) as error:
        raise ModelFailed(f"parameter 'quantization': 'int{bits}' is not possible: {error}") from error
    difference = float((_logits(model) - before).norm() / before.norm())
    log.info("quantized to int%d: logits differ by %.2g (norm of the difference)", bits, difference)
    return layers


def _logits(model: Any) -> torch.Tensor:
    """Return the logits of a few tokens."""
    tokens = torch.tensor([check_tokens(19, model.config.vocab_size)])
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits[0].float()
    return logits
