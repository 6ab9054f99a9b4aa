"""GGUF files: completions equal those of the model that the file was made from."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import architectures

from dragoman.core.errors import ModelFailed
from dragoman_text.runtimes.llm.model import LanguageModel
from features.text.generation.helpers import ids, load_model, text

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")

# A byte-level vocabulary with one merge.
WORDS = ["<pad>", "<s>", "</s>", *(chr(33 + i) for i in range(92)), "ab"]
# Names of llama.cpp for the weights of a layer.
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


# What llama.cpp writes as `general.file_type`.
FILE_TYPES = {"F32": 0, "Q4_0": 2, "Q8_0": 7, "Q4_K": 15}

# Where blocks of random bytes need a scale, in FP16.
SCALES = {"Q4_K": slice(0, 4), "Q6_K": slice(208, 210)}


def quantize(values: Any, kind: str) -> Any:
    """Return blocks of a type of GGUF as bytes, random ones with small scales for types that gguf only reads."""
    if kind not in SCALES:
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows, columns = values.shape
    blocks = np.random.default_rng(rows).integers(0, 256, (rows, columns // block, size), np.uint8)
    blocks[:, :, SCALES[kind]] = np.frombuffer(np.full(2, 1e-3, np.float16).tobytes(), np.uint8)[
        : SCALES[kind].stop - SCALES[kind].start
    ]
    return blocks.reshape(rows, -1)


def write_file(path: Path, model: Any, kind: str = "F32") -> dict[str, torch.Tensor]:
    """Write a Llama as llama.cpp does: rows of queries and keys in pairs, as its rotary embedding reads them.

    Matrices are quantized as `kind`. Returns the weights that the file represents.
    """
    type_, weights = gguf.GGMLQuantizationType[kind], {}
    config, writer = model.config, gguf.GGUFWriter(str(path), "llama")
    if kind in FILE_TYPES:
        writer.add_array("general.tags", ["a", "b"])
        writer.add_file_type(FILE_TYPES[kind])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * 3 + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in model.state_dict().items():
        values, written = weight.numpy(), NAMES.get(name)
        if written is None:
            _, _, number, layer = name.removesuffix(".weight").split(".", 3)
            written = f"blk.{number}.{LAYER[layer]}.weight"
            if written.endswith(("attn_q.weight", "attn_k.weight")):
                pairs = values.reshape(-1, 2, config.head_dim // 2, values.shape[1])
                values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(written, values)
        else:
            blocks = quantize(values, kind)
            writer.add_tensor(written, blocks, raw_dtype=type_)
            values = gguf.quants.dequantize(blocks, type_).reshape(values.shape)
        if written.endswith(("attn_q.weight", "attn_k.weight")):
            pairs = values.reshape(-1, config.head_dim // 2, 2, values.shape[1])
            values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
        weights[name] = torch.from_numpy(values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("original")
    return architectures.save_model(folder, "llama", head_dim=8, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def model(original: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_file(path, original)
    # Files of other models in the folder are not read.
    (path.parent / "generation_config.json").write_text('{"eos_token_id": 40, "repetition_penalty": 2.0}')
    model = load_model(path)
    yield model
    asyncio.run(model.close())


async def test_completions_equal_those_of_the_original(model: LanguageModel, original: Any) -> None:
    prompt = tuple((5 + 7 * i * i) % 90 + 3 for i in range(14))
    with torch.inference_mode():
        expected = original.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert ids(await text(model, prompt, max_new_tokens=12, ignore_eos=True)) == expected[0, 14:].tolist()
    assert model.details()["end_tokens"] == [2]
    assert model.details()["default_parameters"] == {}
    assert (model.details()["file_format"], model.details()["file_quantization"]) == ("gguf", "F32")
    assert model.details()["parameters"] == original.num_parameters()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
async def test_quantized_weights(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    reference = architectures.save_model(tmp_path, "llama", tie_word_embeddings=False, **sizes)
    reference.load_state_dict(write_file(tmp_path / "tiny.gguf", reference, kind))
    prompt = tuple(range(10, 30))
    with torch.inference_mode():
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    model = load_model(tmp_path / "tiny.gguf")
    assert ids(await text(model, prompt, max_new_tokens=12, ignore_eos=True)) == expected[0, 20:].tolist()
    stated = {"Q4_K": "Q4_K_M", "Q6_K": ""}.get(kind, kind)
    assert model.details()["file_quantization"] == stated
    await model.close()


async def test_the_tokenizer_in_the_file(model: LanguageModel) -> None:
    assert model.text_engine.intake.vocabulary.encode("cab#")[1] == [69, 95, 5]
    assert model.text_engine.intake.vocabulary.decode([69, 95, 5], skip_special=True) == "cab#"


@pytest.mark.parametrize(
    ("name", "start", "message"),
    [
        ("a.gguf", b"GGML", "a.gguf is not a valid GGUF file: expected the bytes 'GGUF' at its start, got b'GGML'"),
        ("a.gguf", b"version https://git-lfs.github.com", "a.gguf is a Git LFS pointer instead of weights"),
        (
            "a-00001-of-00003.gguf",
            b"GGUF\x03\x00\x00\x00" + bytes(16),
            "is one of several files; join them with `llama-gguf-split --merge`",
        ),
        (
            "a.gguf",
            b"GGUF\x03\x00\x00\x00",
            "a.gguf is not a valid GGUF file: number of tensors: expected 8 bytes or more at 8, got the end of the "
            "file at 8; copy it again",
        ),
    ],
)
def test_files_that_cannot_be_loaded(tmp_path: Path, name: str, start: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(start)
    with pytest.raises(ModelFailed) as caught:
        load_model(tmp_path / name)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_more_layers_than_tensors(original: Any, tmp_path: Path) -> None:
    write_file(tmp_path / "a.gguf", original)
    content = (tmp_path / "a.gguf").read_bytes()
    name = b"llama.block_count" + (4).to_bytes(4, "little")  # an integer of 32 bits
    before, after = content.split(name)
    (tmp_path / "a.gguf").write_bytes(before + name + (10**7).to_bytes(4, "little") + after[4:])
    with pytest.raises(ModelFailed, match=r"a.gguf has llama.block_count 10000000, but \d+ tensors; copy it again"):
        load_model(tmp_path / "a.gguf")
