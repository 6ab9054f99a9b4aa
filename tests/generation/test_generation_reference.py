"""Completions equal those of transformers: greedy, beams, rules, prompt log-probabilities."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.runtimes.llm.model import LanguageModel
from generation.helpers import Reference, generate_chunks, generation, ids, load_model, prompts, text

pytestmark = pytest.mark.filterwarnings("ignore")


async def disturbed(model: LanguageModel, over: asyncio.Event) -> int:
    """Callers who come and leave in mid-text until it is over; gives how many did."""
    count = 0
    while not over.is_set():
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
    asked = [(prompt, 4 + i % 22) for i, prompt in enumerate(prompts(100))]
    room, over = asyncio.Semaphore(32), asyncio.Event()

    async def one(prompt: str, count: int) -> Any:
        async with room:
            return await generation(llama, prompt, max_new_tokens=count)

    noise = asyncio.create_task(disturbed(llama, over))
    found = await asyncio.gather(*(one(*each) for each in asked))
    over.set()
    assert await noise > 3
    assert sum(each.prompts[0].cached > 0 for each in found) > 5, "beginnings are found again"
    for (prompt, count), each in zip(asked, found, strict=True):
        wanted, logits = reference.generate(prompt, count)
        assert ids(each.texts[0]) == wanted[0]
        for token, row in zip(each.texts[0].tokens, logits, strict=True):
            expected = reference.torch.log_softmax(row[0], -1)[token.id].item()
            assert token.logprob == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def gpt2(folders: Path) -> Iterator[LanguageModel]:
    model = load_model(folders / "tiny-gpt2", prefill_chunk=16, packed=False)
    yield model
    asyncio.run(model.close())


async def test_another_architecture_needs_no_code(gpt2: LanguageModel, folders: Path) -> None:
    reference = Reference(folders / "tiny-gpt2")
    asked = prompts(12)
    found = await asyncio.gather(*(text(gpt2, prompt, max_new_tokens=12) for prompt in asked))
    for prompt, each in zip(asked, found, strict=True):
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
    asked = prompts(6, seed=3)
    over = asyncio.Event()
    noise = asyncio.create_task(disturbed(llama, over))
    found = await asyncio.gather(
        *(generation(llama, prompt, max_new_tokens=14, num_beams=4, n=3, **options) for prompt in asked)
    )
    over.set()
    await noise
    for prompt, each in zip(asked, found, strict=True):
        wanted, _ = reference.generate(prompt, 14, num_beams=4, num_return_sequences=3, **options)
        assert [ids(one) for one in each.texts] == wanted


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


async def test_the_prompts_log_probabilities(llama: LanguageModel, reference: Reference) -> None:
    prompt = prompts(1, seed=8)[0]
    found = await generation(llama, prompt, max_new_tokens=3, prompt_logprobs=2, top_logprobs=3)
    tokens = reference.tokenizer(prompt).input_ids
    prefill = found.prompts[0].prefill
    assert [token.id for token in prefill] == tokens
    assert prefill[0].logprob is None
    expected = reference.logprobs(tokens)
    for place, token in enumerate(prefill[1:]):
        assert token.logprob == pytest.approx(float(expected[place, token.id]), abs=1e-4)
        best = expected[place].topk(2)
        assert [top.id for top in token.top] == best.indices.tolist()
    top = found.texts[0].tokens[0].top
    assert [each.logprob for each in top] == pytest.approx(expected[-1].topk(3).values.tolist(), abs=1e-4)


async def test_preempted_sequences_continue_with_the_same_results(llama_folder: Path, reference: Reference) -> None:
    # 112 KiB hold 224 tokens of 512 bytes: hardly two of these texts at their full length.
    model = load_model(llama_folder, cache_memory=112 / 1024**2, prefix_cache=0)
    asked = [prompt for i, prompt in enumerate(prompts(8, 8, seed=9)) if i % 4]
    try:
        found = await asyncio.gather(*(text(model, prompt, max_new_tokens=60) for prompt in asked))
        for prompt, each in zip(asked, found, strict=True):
            assert ids(each) == reference.generate(prompt, 60)[0][0]
        assert model._loaded.engine.scheduler.preempted
    finally:
        await model.close()


async def test_chunks_join_to_the_whole_text(llama: LanguageModel, reference: Reference) -> None:
    prompt = "How do I say hello in Japanese?"
    found = await generate_chunks(llama, prompt, max_new_tokens=60, do_sample=True, seed=4, temperature=1.5)
    assert [len(piece.prompts) for piece in found] == [1] + [0] * (len(found) - 1)
    last = found[-1].texts[0]
    assert "".join(piece.texts[0].text for piece in found) == last.whole
    tokens = [token.id for piece in found for token in piece.texts[0].tokens]
    start = reference.tokenizer(prompt).input_ids
    decode = reference.tokenizer.decode
    assert (
        last.whole == decode(start + tokens, skip_special_tokens=True)[len(decode(start, skip_special_tokens=True)) :]
    )
