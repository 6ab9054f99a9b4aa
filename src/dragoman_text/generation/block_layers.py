"""Decoders whose linear layers are in blocks in memory: those of quantized files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dragoman_text.generation.fused import ARCHITECTURES
from dragoman_text.generation.gguf_model import BlockKernels, MappedLinear
from dragoman_text.generation.integer_weights import IntegerWeight, NoBlocks
from dragoman_text.generation.quantized_files import read_weights

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
