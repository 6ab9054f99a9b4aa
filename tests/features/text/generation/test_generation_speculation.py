"""Speculative decoding: the same completions in fewer steps, and metrics of the drafts."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from dragoman.core.errors import ModelFailed
from dragoman.core.metrics import Family, Sample
from dragoman.core.text import Grammar
from dragoman_text.generation.speculation import DraftRate, PromptLookup
from dragoman_text.runtimes.llm.model import LanguageModel
from dragoman_text.vllm_metric_names import families
from features.text.generation.helpers import engine_metrics, ids, load_model, prompts, text, text_engine

pytestmark = pytest.mark.filterwarnings("ignore")

REPEATED = "one two three four one two three four one two three four one two"


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def models(folders: Path, request: pytest.FixtureRequest) -> Iterator[tuple[LanguageModel, LanguageModel]]:
    """A model without and with speculation: by the kernels, and in PyTorch."""
    folder = folders / f"tiny-{request.param}"
    plain, speculating = load_model(folder), load_model(folder, speculative_tokens=4)
    yield plain, speculating
    asyncio.run(plain.close())
    asyncio.run(speculating.close())


@pytest.fixture(scope="module")
def speculating(models: tuple[LanguageModel, LanguageModel]) -> LanguageModel:
    return models[1]


def _counts(model: LanguageModel) -> tuple[float, float, float]:
    """Return the numbers of drafted and accepted tokens, and of decoding steps, after the current step."""
    between_steps = threading.Event()
    text_engine(model).service.commands.put(lambda _: between_steps.set())
    assert between_steps.wait(60)
    metrics = engine_metrics(model)
    names: tuple[tuple[str, ...], ...] = (
        ("draft_tokens_total",),
        ("accepted_draft_tokens_total",),
        ("steps_total", "decode", "ok"),
    )
    drafted, accepted, steps = (metrics[name] for name in names)
    return drafted, accepted, steps


PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 40},
    "sampling": {"max_new_tokens": 40, "do_sample": True, "seed": 7, "temperature": 0.4, "top_k": 5},
    "penalties": {"max_new_tokens": 24, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "min_new_tokens": 20},
    "logprobs": {"max_new_tokens": 16, "top_logprobs": 3},
    "stop": {"max_new_tokens": 40, "stop": ("e",), "min_new_tokens": 3},
    "several": {"max_new_tokens": 16, "n": 2, "do_sample": True, "seed": 3, "temperature": 0.3},
    "one token": {"max_new_tokens": 1},
    "grammar": {"max_new_tokens": 16, "grammar": Grammar("regex", "(ab ){1,9}")},
    "beams": {"max_new_tokens": 8, "num_beams": 2},
}


@pytest.mark.parametrize("name", PARAMETERS)
async def test_completions_are_those_without_speculation(
    models: tuple[LanguageModel, LanguageModel], name: str
) -> None:
    plain, speculating = models
    for prompt in (REPEATED, prompts(3)[1]):
        expected = await text(plain, prompt, **PARAMETERS[name])
        assert await text(speculating, prompt, **PARAMETERS[name]) == expected


async def test_a_crowd_has_the_completions_of_single_requests(models: tuple[LanguageModel, LanguageModel]) -> None:
    plain, speculating = models
    requests: list[tuple[str, dict[str, Any]]] = [
        (prompt, {"max_new_tokens": 20, "do_sample": i % 2 == 1, "seed": i}) for i, prompt in enumerate(prompts(6))
    ]
    requests += [(REPEATED, {"max_new_tokens": 30})]
    expected = [await text(plain, prompt, **parameters) for prompt, parameters in requests]
    crowd = await asyncio.gather(*(text(speculating, prompt, **parameters) for prompt, parameters in requests))
    assert crowd == expected


def test_names_of_the_metrics_in_vllm() -> None:
    own = ("dragoman_text_draft_tokens_total", "dragoman_text_accepted_draft_tokens_total")
    ours = [Family(name, "counter", "", (Sample(name, {"model": "m"}, value),)) for value, name in enumerate(own)]
    samples = [(family.kind, sample.name, sample.value) for family in families(ours) for sample in family.samples]
    assert samples == [
        ("counter", "vllm:spec_decode_num_draft_tokens_total", 0),
        ("counter", "vllm:spec_decode_num_accepted_tokens_total", 1),
    ]


async def test_drafts_save_steps_and_are_counted(speculating: LanguageModel) -> None:
    before = _counts(speculating)
    completion = await text(speculating, REPEATED, max_new_tokens=60, ignore_eos=True)
    drafted, accepted, steps = (now - then for now, then in zip(_counts(speculating), before, strict=True))
    assert completion.generated == 60
    assert 0 < accepted <= drafted
    assert steps == 59 - accepted


def _draft_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptLookup, "propose", lambda self, tokens, count: [9] * count)


async def test_slots_are_cleared_with_their_rejected_drafts(
    speculating: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text_engine(speculating).details["machine_code"]:
        pytest.skip("the kernels do not read masked positions, so that slots are not cleared")
    # The temperature makes a new token likely, which ends the second completion long before its last possible token.
    parameters: dict[str, Any] = {"do_sample": True, "seed": 1, "temperature": 5.0}
    first, second, end = ids(await text(speculating, REPEATED, max_new_tokens=3, **parameters))
    assert end not in (first, second)
    _draft_wrong_tokens(monkeypatch)
    completion = await text(speculating, REPEATED, max_new_tokens=20, stop_token_ids=(end,), **parameters)
    assert completion.generated == 3
    _counts(speculating)
    scheduler = text_engine(speculating).engine.scheduler
    assert (scheduler.active, scheduler.cache_tokens[0]) == (0, 0)
    cache = text_engine(speculating).engine._memory.cache
    assert not cache.keys.any()
    assert not cache.values.any()


async def test_drafts_stay_within_the_context(
    models: tuple[LanguageModel, LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, speculating = models
    context = speculating.details()["max_context"]
    prompt = (5,) * (context - 6)
    _draft_wrong_tokens(monkeypatch)
    expected = await text(plain, prompt, ignore_eos=True)
    assert (await text(speculating, prompt, ignore_eos=True)) == expected
    assert (expected.generated, expected.finish) == (6, "length")


def test_prompt_lookup() -> None:
    lookup = PromptLookup(3)
    assert lookup.propose([1, 2, 3, 4, 5], 4) == []
    assert lookup.propose([1, 2, 3, 4, 5, 2, 3], 2) == [4, 5]
    assert lookup.propose([1, 2, 3, 4, 5, 2, 3, 9, 1, 2, 3], 3) == [4, 5, 2]  # three tokens before two
    assert PromptLookup(2).propose([1, 2, 3, 4, 5, 2, 3, 9, 1, 2, 3], 3) == [9, 1, 2]  # the last occurrence
    assert PromptLookup(3).propose([7, 8, 7, 8], 5) == [7, 8, 7, 8, 7]  # the text repeats itself
    assert PromptLookup(3).propose([5], 5) == []


def test_drafts_that_are_rarely_accepted_pause() -> None:
    rate = DraftRate()
    for _ in range(4):
        assert not rate.is_paused()
        rate.record(4, 1)
    assert [rate.is_paused() for _ in range(33)] == [*[True] * 32, False]
    rate.record(16, 5)
    assert not rate.is_paused()


# --- draft model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafting(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageModel]:
    """A model whose draft model has one layer less, and so often agrees."""
    import transformers

    small = tmp_path_factory.mktemp("draft") / "small"
    copytree(folders / "tiny-llama", small)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(small)
    model.config.num_hidden_layers -= 1
    del model.model.layers[-1]
    model.save_pretrained(small)
    loaded = load_model(folders / "tiny-llama", prefill_chunk=24, speculative_tokens=4, draft_model=str(small))
    yield loaded
    asyncio.run(loaded.close())


@pytest.mark.parametrize("name", PARAMETERS)
async def test_completions_are_those_without_a_draft_model(
    llama: LanguageModel, drafting: LanguageModel, name: str
) -> None:
    for prompt in (REPEATED, prompts(3)[1]):
        assert await text(drafting, prompt, **PARAMETERS[name]) == await text(llama, prompt, **PARAMETERS[name])


async def test_a_crowd_with_a_draft_model(llama: LanguageModel, drafting: LanguageModel) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        (prompt, {"max_new_tokens": 12 + i, "do_sample": i % 2 == 1, "seed": i}) for i, prompt in enumerate(prompts(7))
    ]
    expected = [await text(llama, prompt, **parameters) for prompt, parameters in requests]
    before = _counts(drafting)
    crowd = await asyncio.gather(*(text(drafting, prompt, **parameters) for prompt, parameters in requests))
    assert crowd == expected
    drafted, accepted, _ = (now - then for now, then in zip(_counts(drafting), before, strict=True))
    assert 0 < accepted < drafted


async def test_a_failing_draft_model_is_switched_off(
    llama: LanguageModel, drafting: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = text_engine(drafting).engine

    def fail(*_: Any) -> None:
        raise RuntimeError("no drafts")

    source = engine._speculation._source
    with monkeypatch.context() as patch:
        patch.setattr(source, "propose", fail)
        patch.setattr(engine, "_speculation", engine._speculation)  # restored afterwards
        assert await text(drafting, REPEATED, max_new_tokens=9) == await text(llama, REPEATED, max_new_tokens=9)
        assert engine._speculation is None
    await text(drafting, REPEATED, max_new_tokens=9)
    text_engine(drafting).service.commands.put(lambda each: each.release_memory())
    _counts(drafting)
    assert (source._states, source._cache.slots, len(source._free)) == ({}, 0, 32)


def test_draft_models_with_another_vocabulary_are_rejected(folders: Path, tmp_path: Path) -> None:
    import transformers

    other = tmp_path / "other"
    copytree(folders / "tiny-llama", other)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(other)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model.save_pretrained(other)
    with pytest.raises(ModelFailed, match="'draft_model': expected a model with the same vocabulary"):
        load_model(folders / "tiny-llama", speculative_tokens=2, draft_model=str(other))
    short = tmp_path / "short"
    copytree(folders / "tiny-llama", short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    with pytest.raises(ModelFailed, match=r"expected a context of at least \d+ tokens \(max_context\), got 64"):
        load_model(folders / "tiny-llama", speculative_tokens=2, draft_model=str(short))
