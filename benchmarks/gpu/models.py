"""Models of the GPU kit, made on the spot with random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.architectures import SPECIAL, tokenizer

VOCABULARY = 640
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
# What is tried: the fused forward pass (Llama, Qwen 3 with norms of queries and keys, Mistral with a window), models'
# own code on our attention (Gemma 2 with windows and soft caps, GPT-2), and one that chooses experts by token.
ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {**_SMALL, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen3": ("qwen3", _SMALL),
    "mistral": ("mistral", {**_SMALL, "sliding_window": 24}),
    "gemma2": ("gemma2", {**_SMALL, "sliding_window": 24}),
    "gpt2": (
        "gpt2",
        {"vocab_size": VOCABULARY, "n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 1024, "n_inner": 512},
    ),
    "mixtral": ("mixtral", {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
# The sizes of Llama 3.2 1B and Llama 3.1 8B, and tiny ones for rehearsals.
SIZES: Mapping[str, Mapping[str, Any]] = {
    "1B": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "8B": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    },
    "tiny": {**_SMALL, "max_position_embeddings": 512},
    "small": {**_SMALL, "hidden_size": 320, "max_position_embeddings": 512},
}


def save_architecture(folder: Path, name: str) -> Any:
    """Save a small model of an architecture in FP32 and return it; also weights that begin as 0 or 1 are random."""
    model_type, options = ARCHITECTURES[name]
    torch.manual_seed(3)
    config = transformers.CONFIG_MAPPING[model_type](**options, **SPECIAL)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough for texts that do not repeat one token, small enough that rounding errors do not grow.
            parameter.add_(torch.randn_like(parameter) * (0.05 if parameter.dim() > 1 else 0.1))
    return _save(folder, model, VOCABULARY)


def save_llama(folder: Path, size: str, device: str) -> Path:
    """Save a Llama in BF16, initialized on the device."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZES[size], **SPECIAL)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    _save(folder, model, config.vocab_size)
    return folder


def write_parameters(folder: Path, **parameters: Any) -> None:
    """Write the parameters of a model beside it."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in parameters.items()]
    (folder / "dragoman.toml").write_text("\n".join(["[model.parameters]", *lines, ""]))


def _save(folder: Path, model: Any, vocabulary: int) -> Any:
    model.generation_config = transformers.GenerationConfig(**SPECIAL)
    model.save_pretrained(folder)
    tokenizer(vocabulary).save_pretrained(folder)
    return model
