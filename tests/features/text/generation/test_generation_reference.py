"""Completions equal those of transformers: greedy, beams, rules, prompt log-probabilities."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman_text.runtimes.llm.model import LanguageModel
from features.text.generation.helpers import (
    Reference,
    engine_metrics,
    generate_chunks,
    generation,
    ids,
    load_model,
    prompts,
    text,
)

pytestmark = pytest.mark.filterwarnings("ignore")


async def disturb(model: LanguageModel, stop: asyncio.Event) -> int:
    """Start streams and disconnect at random until `stop` is set; return their number."""
    count = 0
    while not stop.is_set():
        stream = model.generate(_call(prompts(1, 80, count)[0], max_new_tokens=40, do_sample=count % 2 == 0))
        async for _ in stream:
            if random.random() < 0.3:
                break
        await stream.aclose()
        count += 1
    return count


def _call(prompt: str, **sampling: Any) -> Any:
    from dragoman.core.calls import Generate
    from dragoman.core.text import Sampling

    return Generate(prompts=(prompt,), sampling=Sampling(**sampling), stream=True)


async def test_greedy_decoding_in_a_batch_equals_transformers(llama: LanguageModel, reference: Reference) -> None:
    requests = [(prompt, 4 + i % 22) for i, prompt in enumerate(prompts(100))]
    limit, stop = asyncio.Semaphore(32), asyncio.Event()

    async def generate(prompt: str, count: int) -> Any:
        async with limit:
            return await generation(llama, prompt, max_new_tokens=count)

    disturbance = asyncio.create_task(disturb(llama, stop))
    results = await asyncio.gather(*(generate(*each) for each in requests))
    stop.set()
    assert await disturbance > 3
    assert sum(each.prompts[0].cached > 0 for each in results) > 5, "cached prefixes are used"
    for (prompt, count), each in zip(requests, results, strict=True):
        tokens, logits = reference.generate(prompt, count)
        assert ids(each.texts[0]) == tokens[0]
        for token, row in zip(each.texts[0].tokens, logits, strict=True):
            expected_tokens = reference.torch.log_softmax(row[0], -1)[token.id].item()
            assert token.logprob == pytest.approx(expected_tokens, abs=1e-4)


@pytest.fixture(scope="module")
def gpt2(folders: Path) -> Iterator[LanguageModel]:
    model = load_model(folders / "tiny-gpt2", prefill_chunk=16, packed=False)
    yield model
    asyncio.run(model.close())


async def test_gpt2_equals_transformers(gpt2: LanguageModel, folders: Path) -> None:
    reference = Reference(folders / "tiny-gpt2")
    requests = prompts(12)
    results = await asyncio.gather(*(text(gpt2, prompt, max_new_tokens=12) for prompt in requests))
    for prompt, each in zip(requests, results, strict=True):
        assert ids(each) == reference.generate(prompt, 12)[0][0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"length_penalty": 2.0, "early_stopping": True},
        {"length_penalty": 0.0, "early_stopping": "never"},
        {"length_penalty": -1.0},
        {"repetition_penalty": 1.3},
    ],
    ids=str,
)
async def test_beams_equal_transformers(llama: LanguageModel, reference: Reference, options: dict[str, Any]) -> None:
    requests = prompts(6, seed=3)
    stop = asyncio.Event()
    disturbance = asyncio.create_task(disturb(llama, stop))
    results = await asyncio.gather(
        *(generation(llama, prompt, max_new_tokens=14, num_beams=4, n=3, **options) for prompt in requests)
    )
    stop.set()
    await disturbance
    for prompt, each in zip(requests, results, strict=True):
        tokens, _ = reference.generate(prompt, 14, num_beams=4, num_return_sequences=3, **options)
        assert [ids(generate) for generate in each.texts] == tokens


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.5}, {"repetition_penalty": 0.7}, {"min_new_tokens": 10}],
    ids=str,
)
async def test_rules_equal_those_of_transformers(
    llama: LanguageModel, reference: Reference, options: dict[str, Any]
) -> None:
    for prompt in prompts(8, seed=5):
        assert (
            ids(await text(llama, prompt, max_new_tokens=16, **options))
            == reference.generate(prompt, 16, **options)[0][0]
        )


async def test_log_probabilities_of_the_prompt(llama: LanguageModel, reference: Reference) -> None:
    prompt = prompts(1, seed=8)[0]
    results = await generation(llama, prompt, max_new_tokens=3, prompt_logprobs=2, top_logprobs=3)
    tokens = reference.tokenizer(prompt).input_ids
    prefill = results.prompts[0].prefill
    assert [token.id for token in prefill] == tokens
    assert prefill[0].logprob is None
    expected = reference.logprobs(tokens)
    for position, token in enumerate(prefill[1:]):
        assert token.logprob == pytest.approx(float(expected[position, token.id]), abs=1e-4)
        best = expected[position].topk(2)
        assert [top.id for top in token.top] == best.indices.tolist()
    top = results.texts[0].tokens[0].top
    assert [each.logprob for each in top] == pytest.approx(expected[-1].topk(3).values.tolist(), abs=1e-4)


async def test_preempted_sequences_continue_with_the_same_results(llama_folder: Path, reference: Reference) -> None:
    # 112 KiB hold 224 tokens of 512 bytes: less than two of these sequences at their full length.
    model = load_model(llama_folder, cache_memory=112 / 1024**2, prefix_cache=0)
    requests = [prompt for i, prompt in enumerate(prompts(8, 8, seed=9)) if i % 4]
    try:
        results = await asyncio.gather(*(text(model, prompt, max_new_tokens=60) for prompt in requests))
        for prompt, each in zip(requests, results, strict=True):
            assert ids(each) == reference.generate(prompt, 60)[0][0]
        assert engine_metrics(model)[("preemptions_total",)] > 0
    finally:
        await model.close()


async def test_chunks_join_to_the_whole_text(llama: LanguageModel, reference: Reference) -> None:
    prompt = "How do I say hello in Japanese?"
    results = await generate_chunks(llama, prompt, max_new_tokens=60, do_sample=True, seed=4, temperature=1.5)
    assert [len(chunk.prompts) for chunk in results] == [1] + [0] * (len(results) - 1)
    last = results[-1].texts[0]
    assert "".join(chunk.texts[0].text for chunk in results) == last.whole
    tokens = [token.id for chunk in results for token in chunk.texts[0].tokens]
    start = reference.tokenizer(prompt).input_ids
    decode = reference.tokenizer.decode
    assert (
        last.whole == decode(start + tokens, skip_special_tokens=True)[len(decode(start, skip_special_tokens=True)) :]
    )
