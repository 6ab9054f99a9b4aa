"""Architectures: random models of our attention and of the general path generate what transformers generates."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from benchmarks import architectures

from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman_text.generation import pretrained
from dragoman_text.generation.attention import AttentionForm, MaskRecorder, UnsupportedArchitecture, attention
from dragoman_text.generation.general import GeneralRunner
from dragoman_text.runtimes.llm.model import LanguageModel
from features.text.generation.helpers import generation, ids, load_model, text, text_engine

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = [tuple((5 + 7 * i * i) % 90 + 3 for i in range(length)) for length in (14, 9, 21)]
NEW = 8


def reference(model: Any, prompt: tuple[int, ...], **options: Any) -> list[list[int]]:
    """Return the new tokens of each sequence that transformers generates."""
    source = torch.tensor([prompt])
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    values = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, **options}
    with torch.inference_mode():
        sequences = model.generate(source, attention_mask=torch.ones_like(source), **values)
    return [row[start:].tolist() for row in sequences]


async def crowd(model: LanguageModel) -> list[list[int]]:
    """Return the completions of all prompts, alone and then together."""
    alone = [await text(model, prompt, max_new_tokens=NEW, ignore_eos=True) for prompt in PROMPTS]
    together = await asyncio.gather(
        *(text(model, prompt, max_new_tokens=NEW, ignore_eos=True) for prompt in PROMPTS * 2)
    )
    return [ids(each) for each in (*alone, *together)]


# Each with the path that it takes: our attention, the model's own cache, or all tokens again in each step.
ARCHITECTURES = {
    "qwen3_moe": "ours",
    "stablelm": "ours",  # does not pass arguments to its attention
    "falcon": "cache",
    "bloom": "cache",  # ALiBi
    "gpt_oss": "cache",  # sinks
    "llama4_text": "cache",  # attention within chunks, longer than the sequences that are compared at load
    "diffllama": "cache",  # passes halves of its heads to attention
    "mamba": "cache",
    "jamba": "cache",  # states and attention
    "recurrent_gemma": "no cache",  # keeps its states in its layers
    "bart": "cache",
    "t5": "cache",
}
ENCODERS = ("bart", "t5")
OPTIONS: dict[str, Any] = {"llama4_text": {"attention_chunk_size": 16}}


@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_greedy_decoding_equals_transformers_alone_and_in_a_crowd(name: str, tmp_path: Path) -> None:
    kind: Any = transformers.AutoModelForSeq2SeqLM if name in ENCODERS else transformers.AutoModelForCausalLM
    original = architectures.save_model(tmp_path, name, kind, **OPTIONS.get(name, {}))
    model = load_model(tmp_path)
    try:
        assert await crowd(model) == [reference(original, prompt)[0] for prompt in PROMPTS] * 3
        assert model.details()["forward"] == ARCHITECTURES[name]
    finally:
        await model.close()


def test_our_attention_rejects_arguments_that_it_does_not_know() -> None:
    tensors = [torch.zeros(1, 2, 3, 4)] * 3
    with pytest.raises(UnsupportedArchitecture, match="attention with s_aux"):
        attention(None, *tensors, scaling=1.0, s_aux=torch.zeros(2), dropout=0.0)


def test_masks_must_be_the_windows_of_the_layers() -> None:
    def window(size: int) -> Any:
        return lambda batch, head, row, column: (column <= row) & (column > row - size)

    def chunk(batch: Any, head: Any, row: Any, column: Any) -> Any:
        return (column <= row) & (column // 8 == row // 8)

    def layers(*windows: int) -> dict[int, AttentionForm]:
        return {number: AttentionForm(1.0, window) for number, window in enumerate(windows)}

    recorder = MaskRecorder(64)
    with pytest.raises(UnsupportedArchitecture, match="a mask that is not a window"):
        recorder.add(chunk)
    recorder.add(window(100))
    recorder.compare(layers(0, 64))
    recorder.add(window(6))
    recorder.compare(layers(0, 6))
    with pytest.raises(UnsupportedArchitecture, match="masks with the windows"):
        recorder.compare(layers(0, 0))


@dataclass(frozen=True)
class Loaded:
    model: LanguageModel
    original: Any


def _load(folder: Path, name: str, kind: Any = transformers.AutoModelForCausalLM, **options: Any) -> Loaded:
    original = architectures.save_model(folder, name, kind)
    return Loaded(load_model(folder, **options), original)


@pytest.fixture(scope="module")
def falcon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    loaded = _load(tmp_path_factory.mktemp("falcon"), "falcon", max_batch=6)
    yield loaded
    asyncio.run(loaded.model.close())


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    loaded = _load(tmp_path_factory.mktemp("bart"), "bart", transformers.AutoModelForSeq2SeqLM)
    yield loaded
    asyncio.run(loaded.model.close())


@pytest.mark.parametrize("kind", ["falcon", "bart"])
async def test_beams_of_the_general_path_equal_transformers(kind: str, request: pytest.FixtureRequest) -> None:
    loaded: Loaded = request.getfixturevalue(kind)
    options = {"num_beams": 3, "ignore_eos": True}
    results = await asyncio.gather(
        *(generation(loaded.model, prompt, max_new_tokens=NEW, n=2, **options) for prompt in PROMPTS)
    )
    for prompt, each in zip(PROMPTS, results, strict=True):
        expected = reference(loaded.original, prompt, num_beams=3, num_return_sequences=2)
        assert [ids(completion) for completion in each.texts] == expected


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("falcon", "expected a model type of llama, mistral, qwen2, qwen3, got falcon"),
        ("gemma2", "expected a model type of llama, mistral, qwen2, qwen3, got gemma2"),
    ],
)
def test_architectures_that_cannot_be_quantized_are_rejected(tmp_path: Path, kind: str, message: str) -> None:
    with pytest.raises(ModelFailed, match=message):
        _load(tmp_path, kind, quantization="int8")


async def test_several_completions_of_a_prompt_equal_each_alone(falcon: Loaded) -> None:
    options = {"max_new_tokens": NEW, "do_sample": True, "ignore_eos": True}
    together = await generation(falcon.model, PROMPTS[0], n=3, seed=5, **options)
    alone = [await text(falcon.model, PROMPTS[0], seed=5 + choice, **options) for choice in range(3)]
    assert [ids(each) for each in together.texts] == [ids(each) for each in alone]
    assert len({tuple(ids(each)) for each in alone}) == 3


async def test_prompt_log_probabilities_of_the_general_path(falcon: Loaded) -> None:
    result = await generation(falcon.model, PROMPTS[0], max_new_tokens=2, prompt_logprobs=1)
    with torch.inference_mode():
        expected = torch.log_softmax(falcon.original(torch.tensor([PROMPTS[0]])).logits[0], -1)
    values = [float(expected[i, token]) for i, token in enumerate(PROMPTS[0][1:])]
    assert [token.logprob for token in result.prompts[0].prefill[1:]] == pytest.approx(values, abs=1e-4)


async def test_a_failed_step_of_the_general_path_is_repeated(falcon: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails after some of its sequences have advanced, whose caches cannot go back."""
    expected = [reference(falcon.original, prompt)[0] for prompt in PROMPTS]
    compute, calls = GeneralRunner._forward, list[int]()

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        logits = compute(*arguments, **options)
        if len(calls) in (8, 14):
            raise RuntimeError("out of memory")
        return logits

    monkeypatch.setattr(GeneralRunner, "_forward", failing)
    options = {"max_new_tokens": NEW, "ignore_eos": True}
    results = await asyncio.gather(*(text(falcon.model, prompt, **options) for prompt in PROMPTS))
    assert [ids(each) for each in results] == expected
    assert len(calls) > 14


async def test_sequences_that_outgrow_memory_are_computed_again(tmp_path: Path) -> None:
    loaded = _load(tmp_path, "falcon", cache_memory=38 / 1024**2)
    try:
        options = {"max_new_tokens": 40, "ignore_eos": True}
        results = await asyncio.gather(*(text(loaded.model, prompt, **options) for prompt in PROMPTS))
        expected = [reference(loaded.original, prompt, max_new_tokens=40)[0] for prompt in PROMPTS]
        assert [ids(each) for each in results] == expected
        assert text_engine(loaded.model).engine.scheduler.preempted
    finally:
        await loaded.model.close()


async def test_states_are_freed(falcon: Loaded) -> None:
    stream = asyncio.create_task(text(falcon.model, PROMPTS[0], max_new_tokens=400, ignore_eos=True))
    await asyncio.sleep(0.05)
    stream.cancel()
    await text(falcon.model, PROMPTS[1], max_new_tokens=1)
    await text(falcon.model, PROMPTS[1], max_new_tokens=1)
    assert text_engine(falcon.model).engine._memory.allocated_tokens == 0


async def test_rules_of_models_with_an_encoder(bart: Loaded) -> None:
    """The completion does not continue the prompt, so penalties ignore its tokens."""
    options = {"max_new_tokens": NEW, "ignore_eos": True, "repetition_penalty": 1.5}
    results = [ids(await text(bart.model, prompt, **options)) for prompt in PROMPTS]
    assert results == [reference(bart.original, prompt, repetition_penalty=1.5)[0] for prompt in PROMPTS]
    with pytest.raises(InvalidInput, match="prompt_logprobs: expected none: this model reads prompts with an encoder"):
        await generation(bart.model, PROMPTS[0], prompt_logprobs=1)


async def test_the_forced_first_token_of_a_model_with_an_encoder(tmp_path: Path) -> None:
    """Its text begins after the token that names the language."""
    original = architectures.save_model(tmp_path, "bart", transformers.AutoModelForSeq2SeqLM)
    original.generation_config.forced_bos_token_id = 7
    original.generation_config.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    try:
        (expected,) = reference(original, PROMPTS[0], max_new_tokens=NEW + 1)
        assert [7, *ids(await text(model, PROMPTS[0], max_new_tokens=NEW, ignore_eos=True))] == expected
    finally:
        await model.close()


@pytest.mark.parametrize(("factor", "difference"), [(1.1, "0\\.1"), (float("nan"), "nan")])
def test_a_model_whose_steps_differ_from_transformers_is_rejected(
    factor: float, difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architectures.save_model(tmp_path, "falcon")
    compute = GeneralRunner._forward
    monkeypatch.setattr(GeneralRunner, "_forward", lambda *a, **k: compute(*a, **k) * factor)
    with pytest.raises(
        ModelFailed, match=f"models of the type 'falcon' cannot generate here: its logits differ by {difference}"
    ):
        load_model(tmp_path)


def test_rotary_embeddings_that_depend_on_the_longest_sequence() -> None:
    config = architectures.tiny_config("phi3", original_max_position_embeddings=64)
    assert not pretrained.depends_on_length(config, 0)
    config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    assert [pretrained.depends_on_length(config, context) for context in (0, 64, 65)] == [True, False, True]
