"""GGUF files: completions equal those of the model that the file was made from."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import architectures

from dragoman.core.errors import ModelFailed
from dragoman.core.text import Chat
from dragoman.core.text_engine_calls import ResetPrefixCache
from dragoman_text.generation.gguf_file import GgufFile
from dragoman_text.generation.gguf_model import NotMapped, load_mapped
from dragoman_text.generation.native.step import NativeStep
from dragoman_text.runtimes.llm.model import LanguageModel
from features.text.generation.helpers import ids, load_model, text
from features.text.generation.test_generation_gguf_file import content, key, tensor

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
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
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


def write_file(path: Path, model: Any, kind: str = "F32", **more: Any) -> dict[str, torch.Tensor]:
    """Write a decoder as llama.cpp does: rows of a Llama's queries and keys in pairs, as it rotates them.

    Matrices are quantized as `kind`. more: further tensors. Returns the weights that the file represents.
    """
    type_ = gguf.GGMLQuantizationType[kind]
    weights: dict[str, torch.Tensor] = {}
    config, writer = model.config, gguf.GGUFWriter(str(path), model.config.model_type)
    has_pairs = config.model_type == "llama"
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
    if has_pairs:
        writer.add_rope_dimension_count(config.head_dim)
    else:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * 3 + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, values in more.items():
        writer.add_tensor(f"{name}.weight", values)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            weights[name] = weights["model.embed_tokens.weight"]
            continue
        values, written = weight.numpy(), NAMES.get(name)
        if written is None:
            _, _, number, parameter = name.split(".", 3)
            layer, _, suffix = parameter.rpartition(".")
            written = f"blk.{number}.{LAYER[layer]}.{suffix}"
            if has_pairs and written.endswith(("attn_q.weight", "attn_k.weight")):
                pairs = values.reshape(-1, 2, config.head_dim // 2, values.shape[1])
                values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(written, values)
        else:
            blocks = quantize(values, kind)
            writer.add_tensor(written, blocks, raw_dtype=type_)
            values = gguf.quants.dequantize(blocks, type_).reshape(values.shape)
        if has_pairs and written.endswith(("attn_q.weight", "attn_k.weight")):
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
    # Those of llama.cpp: a file has none, and small models do not end with a temperature of 1.
    assert model.details()["default_parameters"] == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert (model.details()["file_format"], model.details()["file_quantization"]) == ("gguf", "F32")
    assert model.details()["parameters"] == original.num_parameters()


SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
PROMPT = tuple(range(10, 30))


def quantized_model(folder: Path, kind: str, model_type: str = "llama", **options: Any) -> Any:
    """Write a.gguf, and return the model of transformers with its dequantized weights, in FP32."""
    reference = architectures.save_model(folder, model_type, **{"tie_word_embeddings": False, **SIZES, **options})
    reference.load_state_dict(write_file(folder / "a.gguf", reference, kind))
    return reference


def round_activations(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Round the inputs of a layer as the kernels do: to 8 bits, with one scale for each 32."""
    groups = inputs[0].reshape(*inputs[0].shape[:-1], -1, 32)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return (((groups / scales).round() * scales).flatten(-2),)


def generate(reference: Any, *, rounds: bool = True, rounded: str = "") -> list[int]:
    """Return the greedy text of a model of transformers. rounded: layers with this in their name round their inputs."""
    with rounding(reference, rounded) if rounds else nullcontext(), torch.inference_mode():
        tokens = reference.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    return list(tokens[0, len(PROMPT) :].tolist())


@contextmanager
def rounding(reference: Any, name: str = "") -> Iterator[None]:
    """Let the linear layers with this in their name round their inputs."""
    layers = [each for key, each in reference.named_modules() if isinstance(each, torch.nn.Linear) and name in key]
    hooks = [each.register_forward_pre_hook(round_activations) for each in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# Difference of two logits by rounding activations, relative to the largest logit; those that were measured with a real
# model are smaller (benchmarks/results/text-engine.md, accuracy of quantized weights).
BOUND = 0.1


def assert_greedy(reference: Any, generated: list[int]) -> None:
    """The text is that of the reference whose activations are rounded."""
    assert generated == generate(reference)
    assert_near_greedy(reference, generated)


def assert_near_greedy(reference: Any, generated: list[int], bound: float = BOUND) -> None:
    """In FP32, each token has the largest logit, or one that is smaller by less than the bound."""
    with torch.inference_mode():
        logits = reference(torch.tensor([[*PROMPT, *generated]])).logits[0, len(PROMPT) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(generated)[:, None])[:, 0]
    assert float((logits.max(1).values - chosen).max()) < bound * float(logits.abs().max())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q4_K", "Q6_K"])
async def test_quantized_weights(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dragoman.generation")
    reference = quantized_model(tmp_path, kind)
    model = load_model(tmp_path / "a.gguf")
    assert_greedy(reference, ids(await text(model, PROMPT, max_new_tokens=12, ignore_eos=True)))
    stated = {"Q4_K": "Q4_K_M", "Q4_1": "", "Q5_1": "", "Q6_K": ""}.get(kind, kind)
    assert model.details()["file_quantization"] == stated
    assert model.details()["parameters"] == reference.num_parameters()
    assert "converted" not in caplog.text
    await model.close()


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
async def test_architectures(model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tied head is the embedding's tensor."""
    caplog.set_level("INFO", "dragoman.generation")
    reference = quantized_model(tmp_path, "Q8_0", model_type, tie_word_embeddings=True)
    model = load_model(tmp_path / "a.gguf")
    assert_greedy(reference, ids(await text(model, PROMPT, max_new_tokens=12, ignore_eos=True)))
    assert model.details()["parameters"] == reference.num_parameters()
    assert "converted" not in caplog.text
    await model.close()


async def test_frequencies_of_the_rotary_embedding(tmp_path: Path) -> None:
    """Llama 3.1's files have factors for them."""
    reference = architectures.save_model(tmp_path, "llama", tie_word_embeddings=False, **SIZES)
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    write_file(tmp_path / "a.gguf", reference, rope_freqs=factors)
    unchanged = generate(reference, rounds=False)
    reference.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    expected = generate(reference, rounds=False)
    model = load_model(tmp_path / "a.gguf")
    assert ids(await text(model, PROMPT, max_new_tokens=12, ignore_eos=True)) == expected
    assert expected != unchanged
    await model.close()


async def test_scaled_positions(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    reference = architectures.save_model(tmp_path, "llama", tie_word_embeddings=False, **SIZES, rope_parameters=rope)
    write_file(tmp_path / "a.gguf", reference)
    model = load_model(tmp_path / "a.gguf")
    assert ids(await text(model, PROMPT, max_new_tokens=12, ignore_eos=True)) == generate(reference, rounds=False)
    await model.close()


def test_layers_that_are_compared(tmp_path: Path) -> None:
    """One of each combination of types."""
    models = {}
    for kind in ("Q8_0", "Q4_0"):
        (tmp_path / kind).mkdir()
        quantized_model(tmp_path / kind, kind)
        models[kind] = load_mapped(tmp_path / kind / "a.gguf")
    eight, four = (models[kind].model.layers for kind in ("Q8_0", "Q4_0"))
    mixed = replace(models["Q8_0"], model=replace(models["Q8_0"].model, layers=(*eight, four[0], *eight, *four)))
    types = [layer.mlp.down_proj.segments[0].tensor.type.name for layer in mixed.sample().model.layers]
    assert sorted(types) == ["Q4_0", "Q8_0"]
    assert mixed.sample().config.num_hidden_layers == 2


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    """Of any layer, also one that is not compared."""
    reference = architectures.save_model(tmp_path, "llama", tie_word_embeddings=False, **SIZES)
    with torch.no_grad():
        reference.model.layers[0].mlp.down_proj.weight[3, 4] = torch.nan
    write_file(tmp_path / "a.gguf", reference)
    with pytest.raises(ModelFailed, match="the logits of the weights in the file are not finite numbers"):
        load_model(tmp_path / "a.gguf")


def test_a_tensor_without_a_place(tmp_path: Path) -> None:
    reference = architectures.save_model(tmp_path, "llama", tie_word_embeddings=False, **SIZES)
    write_file(tmp_path / "a.gguf", reference, "Q8_0", extra=np.ones(3, np.float32))
    with pytest.raises(NotMapped, match=r"tensor 'extra.weight' has no place in the architecture llama"):
        load_mapped(tmp_path / "a.gguf")


async def test_the_same_text_in_any_batch(tmp_path: Path) -> None:
    quantized_model(tmp_path, "Q4_1")
    model = load_model(tmp_path / "a.gguf", threads=2)
    prompts = [tuple(range(10 + i, 30 + 3 * i)) for i in range(8)]
    alone = [ids(await text(model, prompt, max_new_tokens=16, ignore_eos=True)) for prompt in prompts]
    await model.reset_prefix_cache(ResetPrefixCache())
    together = await asyncio.gather(*(text(model, each, max_new_tokens=16, ignore_eos=True) for each in prompts))
    assert [ids(each) for each in together] == alone
    await model.close()


async def test_a_step_with_other_logits_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = NativeStep.__call__
    monkeypatch.setattr(NativeStep, "__call__", lambda self, cache, rows: 1.2 * step(self, cache, rows))
    reference = quantized_model(tmp_path, "Q8_0")
    model = load_model(tmp_path / "a.gguf")
    assert model.details()["machine_code"] is False
    assert "the step of the kernels differs by 0.2 from the model's own code and is not used" in caplog.text
    assert_greedy(reference, ids(await text(model, PROMPT, max_new_tokens=12, ignore_eos=True)))
    await model.close()


@pytest.mark.parametrize("token", [-1, 96])
def test_tokens_outside_of_the_embedding(token: int, tmp_path: Path) -> None:
    reference = architectures.save_model(tmp_path, "llama", **SIZES)
    write_file(tmp_path / "a.gguf", reference)
    embedding = load_mapped(tmp_path / "a.gguf").model.embed_tokens
    assert torch.equal(embedding(torch.tensor([[0, 95]]))[0], reference.model.embed_tokens.weight[[0, 95]])
    with pytest.raises(IndexError, match=rf"rows of 'token_embd.weight': expected 0 to below 96, got {token}"):
        embedding(torch.tensor([[0, token, 3]]))


async def test_converted_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation without kernels converts the weights, and says so."""
    caplog.set_level("INFO", "dragoman.generation")
    monkeypatch.setenv("KERNELS_FORM", "none")
    reference = quantized_model(tmp_path, "Q4_0")
    model = load_model(tmp_path / "a.gguf")
    assert ids(await text(model, PROMPT, max_new_tokens=12, ignore_eos=True)) == generate(reference, rounds=False)
    reason = "weights of a.gguf are converted in memory, not used as they are in the file: KERNELS_FORM is none"
    assert reason in caplog.text
    await model.close()


def _keys(hidden: int) -> list[bytes]:
    sizes = {
        "attention.head_count": 1,
        "embedding_length": hidden,
        "feed_forward_length": 32,
        "block_count": 1,
        "context_length": 64,
    }
    return [
        key("general.architecture", 8, "llama"),
        *(key(f"llama.{name}", 4, value) for name, value in sizes.items()),
        key("llama.attention.layer_norm_rms_epsilon", 6, 1e-5),
    ]


def _rope(kind: str) -> list[bytes]:
    return [*_KEYS, key("llama.rope.scaling.type", 8, kind)]


_KEYS = _keys(32)
_EMBEDDING, _NORM = tensor("token_embd.weight", [32, 4], 0, 0), tensor("output_norm.weight", [32], 0, 512)


@pytest.mark.parametrize(
    ("keys", "tensors", "reason"),
    [
        ([key("general.architecture", 8, "bloom")], [], "architecture: expected llama, qwen2, qwen3, got bloom"),
        (_KEYS[:1], [], "the file has no llama.attention.head_count"),
        ([*_KEYS, key("llama.expert_count", 4, 8)], [], "llama.expert_count: expected 0, got 8"),
        (
            [*_KEYS, key("llama.rope.dimension_count", 4, 8), key("llama.attention.key_length", 4, 32)],
            [],
            "expected 32, got 8",
        ),
        (_rope("yarn"), [], "llama.rope.scaling.type: expected none or linear, got yarn"),
        (_KEYS, [], "the file has no tensor 'token_embd.weight'"),
        (
            _KEYS,
            [tensor("token_embd.weight", [64, 4], 0, 0)],
            "'token_embd.weight': expected the shape [4, 32], got [4, 64]",
        ),
        (_KEYS, [tensor("token_embd.weight", [32, 4], 20, 0)], "'token_embd.weight': expected a type of BF16, F16"),
        (
            _keys(40),
            [tensor("token_embd.weight", [40, 4], 0, 0)],
            "'token_embd.weight': expected a multiple of 32 inputs, got 40",
        ),
        (_KEYS, [_EMBEDDING], "the file has no tensor 'output_norm.weight'"),
        (_KEYS, [_EMBEDDING, _NORM], "the file has no tensor 'blk.0.attn_q.weight'"),
    ],
)
def test_what_is_converted(keys: list[bytes], tensors: list[bytes], reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content(keys, tensors, bytes(1024)))
    with pytest.raises(NotMapped) as caught:
        load_mapped(tmp_path / "a.gguf")
    assert reason in str(caught.value)


def test_rows_beyond_the_offsets_of_the_kernels(tmp_path: Path) -> None:
    hidden = (1 << 25) + 32
    data = content(_keys(hidden), [tensor("token_embd.weight", [hidden, 1], 0, 0)])
    with (tmp_path / "a.gguf").open("wb") as file:
        file.write(data)
        file.truncate(len(data) + 4 * hidden)  # a hole
    with pytest.raises(
        NotMapped, match=r"'token_embd.weight': expected rows of at most 134217728 bytes, got 134217856"
    ):
        load_mapped(tmp_path / "a.gguf")


def test_a_load_reads_the_header_once(original: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "a.gguf", original)
    read, paths = GgufFile.__init__, []

    def count(file: GgufFile, path: Path) -> None:
        paths.append(path)
        read(file, path)

    monkeypatch.setattr(GgufFile, "__init__", count)
    asyncio.run(load_model(tmp_path / "a.gguf").close())
    assert paths == [tmp_path / "a.gguf"]


async def test_the_tokenizer_in_the_file(model: LanguageModel) -> None:
    assert model.text_engine.intake.vocabulary.encode("cab#")[1] == [69, 95, 5]
    assert model.text_engine.intake.vocabulary.decode([69, 95, 5], skip_special=True) == "cab#"


async def test_the_settings_replace_sampling_defaults_and_the_chat_template(original: Any, tmp_path: Path) -> None:
    write_file(tmp_path / "a.gguf", original)
    (tmp_path / "short.jinja").write_text("{% for m in messages %}{{ m.content }}#{% endfor %}")
    model = load_model(tmp_path / "a.gguf", chat_template="short.jinja", sampling={"top_k": 1})
    try:
        prompt = Chat(({"role": "user", "content": "cab"},))
        assert model.text_engine.intake.vocabulary.encode(prompt)[0] == "cab#"
        assert model.details()["default_parameters"] == {"temperature": 0.8, "top_k": 1, "top_p": 0.95, "min_p": 0.05}
    finally:
        await model.close()
    with pytest.raises(ModelFailed, match=r"parameter 'chat_template': 'b\.jinja' cannot be read"):
        load_model(tmp_path / "a.gguf", chat_template="b.jinja")
    plain = load_model(tmp_path / "a.gguf", generation_config=False)
    assert plain.details()["default_parameters"] == {}
    await plain.close()


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
