"""Tiny random models of the architectures of transformers, saved as folders with a tokenizer."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

VOCABULARY = 96
WINDOW = 6  # shorter than the prompts of the tests

# Sizes by the names that configurations give them.
_SIZES: Mapping[int, tuple[str, ...]] = {
    VOCABULARY: ("vocab_size", "n_vocab"),
    32: ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size", "lru_width"),
    64: (
        *("intermediate_size", "ffn_hidden_size", "d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"),
        *(
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "intermediate_size_mlp",
            "shared_intermediate_size",
        ),
        *(
            "dense_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
            "dim_ff",
            "d_inner",
        ),
    ),
    4: (
        *(
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
        ),
        *(
            "num_encoder_attention_heads",
            "num_decoder_attention_heads",
            "linear_num_key_heads",
            "linear_num_value_heads",
        ),
        *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "encoder_layers"),
        *("decoder_layers", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "mamba_d_conv"),
        *("num_encoder_layers", "mamba_n_heads", "linear_conv_kernel_dim"),
    ),
    2: ("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "moe_topk", "moe_k", "experts_per_token"),
    1: ("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "n_groups", "mamba_n_groups"),
    8: ("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "mamba_d_state", "state_size", "d_kv"),
    16: ("q_lora_rank", "kv_lora_rank", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"),
    WINDOW: ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size"),
    512: ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length"),
}
_BY_NAME = {name: size for size, names in _SIZES.items() for name in names}
# What the sizes above contradict, by model type.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "mamba2": {"head_dim": 16, "num_heads": 4, "n_groups": 1, "state_size": 8, "chunk_size": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8, "n_ctx": 512},
    "rwkv": {"attention_hidden_size": 32, "context_length": 512},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_d_head": 16, "mamba_n_heads": 4},
    "xlnet": {"n_layer": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "ministral": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_headdim": 16, "n_mamba_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
}
_MOST_PARAMETERS = 20_000_000
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def tiny_config(model_type: str, **options: Any) -> Any:
    """Return a configuration of a model type with four layers of 32 units."""
    return _shrink(transformers.CONFIG_MAPPING[model_type], {**_OPTIONS.get(model_type, {}), **options})


def _shrink(kind: Any, options: Mapping[str, Any]) -> Any:
    defaults = kind().to_dict()
    values: dict[str, Any] = {}
    for name, value in defaults.items():
        if name in _BY_NAME and isinstance(value, int) and not isinstance(value, bool):
            values[name] = _BY_NAME[name]
        elif name in _SPECIAL:
            values[name] = _SPECIAL[name]
        elif name == "layer_types" and isinstance(value, list) and value:
            kinds = list(dict.fromkeys(value))
            values[name] = [kinds[i % len(kinds)] for i in range(4)]
    if "kv_lora_rank" in defaults and "num_key_value_heads" in defaults:
        values["num_key_value_heads"] = 4
    for name, part in getattr(kind, "sub_configs", {}).items():
        if isinstance(part, type) and isinstance(defaults.get(name), dict) and part is not transformers.AutoConfig:
            values[name] = _shrink(part, {}).to_dict()
    return kind(**{**values, **options})


def tokenizer() -> Any:
    """Return a tokenizer of words w3, w4, ..."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def save_model(folder: Path, model_type: str, factory: Any = transformers.AutoModelForCausalLM, **options: Any) -> Any:
    """Save a random model in a folder, and return it. Weights that begin as zeros or ones are random as well."""
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(3)
    config = tiny_config(model_type, **options)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in factory.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    model = factory.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.generation_config = transformers.GenerationConfig(**_SPECIAL)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model
