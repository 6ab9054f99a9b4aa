"""Every text architecture of transformers as a tiny random model: does the text engine generate what it generates?

usage: python -m benchmarks.architectures [--page] [MODEL_TYPE ...]

Each model completes three prompts greedily, alone and together. --page writes the table into
benchmarks/results/text-engine.md.
"""

import argparse
import asyncio
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers.models.auto import modeling_auto

from benchmarks.processes import ROOT
from dragoman.core.calls import Generate
from dragoman.core.spec import ModelSpec
from dragoman.core.text import Sampling
from dragoman_text.runtimes.llm.model import LanguageModel

PAGE = ROOT / "benchmarks" / "results" / "text-engine.md"
_MARKED = re.compile(r"(<!-- from results: architectures -->\n).*?(<!-- end -->)", re.S)
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
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 32]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4,
        "activation_sparsity_pattern": 0.0,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "global_head_dim": 16,
    },
    "kimi_linear": {"num_experts_per_token": 2, "num_experts": 4},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_headdim": 16, "n_mamba_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
}
_MAX_PARAMETERS = 20_000_000
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def tiny_config(model_type: str, **options: Any) -> Any:
    """Return a configuration of a model type with four layers of 32 units."""
    return _shrink(transformers.CONFIG_MAPPING[model_type], {**_OPTIONS.get(model_type, {}), **options})


def _shrink(kind: Any, options: Mapping[str, Any]) -> Any:
    defaults = kind().to_dict()
    values: dict[str, Any] = {}
    for name, value in defaults.items():
        if name in _BY_NAME and isinstance(value, int) and not isinstance(value, bool):
            values[name] = _BY_NAME[name]
        elif name in SPECIAL:
            values[name] = SPECIAL[name]
        elif name == "layer_types" and isinstance(value, list) and value:
            kinds = list(dict.fromkeys(value))
            values[name] = [kinds[i % len(kinds)] for i in range(4)]
    if "kv_lora_rank" in defaults and "num_key_value_heads" in defaults:
        values["num_key_value_heads"] = 4
    for name, part in getattr(kind, "sub_configs", {}).items():
        if isinstance(part, type) and isinstance(defaults.get(name), dict) and part is not transformers.AutoConfig:
            values[name] = _shrink(part, {}).to_dict()
    return kind(**{**values, **options})


def tokenizer(vocabulary: int = VOCABULARY) -> Any:
    """Return a tokenizer of words w3, w4, ..."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, vocabulary)}}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def save_model(folder: Path, model_type: str, factory: Any = transformers.AutoModelForCausalLM, **options: Any) -> Any:
    """Save a random model in a folder, and return it as transformers loads it.

    Weights that begin as zeros or ones are random as well.
    """
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(3)
    config = tiny_config(model_type, **options)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in factory.from_config(config).parameters())
    if size > _MAX_PARAMETERS:
        raise ValueError(f"{size} parameters")
    model = factory.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.generation_config = transformers.GenerationConfig(**SPECIAL)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return factory.from_pretrained(folder).eval()  # computed weights, such as positions, are not saved


# --- the table -----------------------------------------------------------------------------------------------

_PROMPTS = [tuple((5 + 7 * i * i) % 90 + 3 for i in range(length)) for length in (14, 9, 21)]
_NEW = 10
_DIFFERENT = "different text"
# Rows of the table, by result.
_ROWS: Mapping[str, str] = {
    "ours": "our attention: sequences are computed together",
    "cache": "general path: the model's own code and cache, one sequence at a time",
    "no cache": "general path without a cache: all tokens are computed again in each step",
    _DIFFERENT: "**loaded, but generates another text**",
    "not loaded": "not loaded",
    "not generated": "transformers cannot generate with the random model",
    "no model": "no small random model: its configuration cannot be reduced by rules, or needs another package",
}
# Models with an encoder for text.
_ENCODERS = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "fsmt", "led", "longt5", "m2m_100", "marian"),
    *("mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet", "switch_transformers"),
    *("t5", "t5gemma", "umt5"),
)


def expected_text(model: Any, prompt: Sequence[int], new: int) -> list[int]:
    """Return the tokens that transformers generates greedily."""
    source = torch.tensor([prompt], device=model.device)
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    with torch.inference_mode():
        (row,) = model.generate(
            source, attention_mask=torch.ones_like(source), max_new_tokens=new, do_sample=False, eos_token_id=None
        )
    tokens: list[int] = row[start:].tolist()
    return tokens


async def generated_texts(model: LanguageModel, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """Return the tokens of all prompts, alone and then of twice as many together; close the model."""

    async def tokens(prompt: Sequence[int]) -> list[int]:
        call = Generate(prompts=(tuple(prompt),), sampling=Sampling(max_new_tokens=new, ignore_eos=True))
        return [token.id async for chunk in model.generate(call) for token in chunk.texts[0].tokens]

    alone = [await tokens(prompt) for prompt in prompts]
    together = await asyncio.gather(*(tokens(prompt) for prompt in (*prompts, *prompts)))
    await model.close()
    return [*alone, *together]


def measure(model_type: str, factory: Any, folder: Path) -> str:
    """Return the row of the table for a model type."""
    try:
        original = save_model(folder, model_type, factory)
    except Exception as error:  # code of any model
        print(f"  {model_type}: {type(error).__name__}: {error}"[:200])
        return "no model"
    try:
        expected = [expected_text(original, prompt, _NEW) for prompt in _PROMPTS]
    except Exception as error:
        print(f"  {model_type}: {type(error).__name__}: {error}"[:200])
        return "not generated"
    options = {"threads": 1, "dtype": "float32", "cache_memory": 0.1}
    model = LanguageModel(ModelSpec(name=model_type, uri=str(folder), parameters=options))
    try:
        model.load()
        if asyncio.run(generated_texts(model, _PROMPTS, _NEW)) != expected * 3:
            return _DIFFERENT
    except Exception as error:
        print(f"  {model_type}: {error}"[:200])
        return "not loaded"
    return str(model.details()["forward"])


def table(results: Mapping[str, str]) -> str:
    """Return the table of model types by result."""
    lines = ["| result | number | model types |", "|---|---|---|"]
    for result, text in _ROWS.items():
        names = sorted(name for name, each in results.items() if each == result)
        if names:
            lines.append(f"| {text} | {len(names)} | {', '.join(names)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the table into benchmarks/results/text-engine.md")
    parser.add_argument("names", nargs="*", metavar="MODEL_TYPE")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    results: dict[str, str] = {}
    kinds = (
        (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForCausalLM, ""),
        (_ENCODERS, transformers.AutoModelForSeq2SeqLM, " (encoder-decoder)"),
    )
    with tempfile.TemporaryDirectory() as folder:
        for names, factory, suffix in kinds:
            for name in sorted(names):
                if not arguments.names or name in arguments.names:
                    results[name + suffix] = measure(name, factory, Path(folder) / "model")
                    print(f"{name}{suffix}: {results[name + suffix]}", flush=True)
    text = table(results)
    print(text)
    if arguments.page:
        line = f"transformers {transformers.__version__}, PyTorch {torch.__version__}, FP32 on a CPU."
        page = PAGE.read_text()
        PAGE.write_text(_MARKED.sub(lambda part: f"{part[1]}\n{line}\n\n{text}\n\n{part[2]}", page))


if __name__ == "__main__":
    main()
