"""Many streams at the same time with cancellations, failing steps and little memory: the others are as if alone."""

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from dragoman.core.calls import Generate
from dragoman.core.errors import WorkerLost
from dragoman.core.text import Grammar, Prompt, Sampling, Text, merge_chunks
from dragoman.core.text_engine_calls import UnloadAdapter
from dragoman_text.runtimes.llm.model import LanguageModel
from features.text.generation.helpers import Reference, ids, load_model, prompts, text_engine
from features.text.generation.test_generation_adapters import save_adapter

pytestmark = pytest.mark.filterwarnings("ignore")

STREAMS = 64


@pytest.fixture(scope="module")
def model(
    llama_folder: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LanguageModel]:
    """A model with two adapters, speculation, and memory for a few of the sequences."""
    folder = tmp_path_factory.mktemp("load") / "llama"
    copytree(llama_folder, folder)
    for seed, name in enumerate("ab", 1):
        save_adapter(folder / "adapters" / name, reference.model, seed)
    loaded = load_model(folder, max_batch=8, prefill_chunk=24, speculative_tokens=3, cache_memory=0.0006)
    yield loaded
    asyncio.run(loaded.close())


def _calls(model: LanguageModel) -> list[Generate]:
    rng = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {},
        {"adapter": "a"},
        {"adapter": "b", "do_sample": True, "seed": 3},
        {"do_sample": True, "seed": 9, "temperature": 0.7},
        {"grammar": Grammar("regex", "([a-e ]{1,9}){1,9}")},
        {"stop": ("e t",)},
        {"repetition_penalty": 1.2, "top_logprobs": 2},
        {"n": 2, "do_sample": True, "seed": 1},
    ]
    longest = int(model.details()["max_context"]) - 40
    words: list[Prompt] = [*prompts(STREAMS - 4, 40, seed=8), *[(5 + i,) * longest for i in range(4)]]
    return [
        Generate(
            prompts=(prompt,),
            sampling=Sampling(max_new_tokens=rng.randint(4, 24), **kinds[i % len(kinds)]),
            stream=True,
        )
        for i, prompt in enumerate(words)
    ]


async def _generate(model: LanguageModel, call: Generate, chunks: int | None = None) -> tuple[Text, ...]:
    """Return the completions of a call; cancel it after a number of chunks."""
    received = []
    async with aclosing(model.generate(call)) as stream:
        async for chunk in stream:
            received.append(chunk)
            if len(received) == chunks:
                break
    return merge_chunks(received).texts


async def test_streams_beside_cancelled_and_failing_ones_are_as_if_alone(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, engine = _calls(model), text_engine(model).engine
    alone = [await _generate(model, call) for call in calls]
    run, steps, fails = engine._runner.run, 0, 0

    def failing(cache: Any, rows: Any) -> Any:
        nonlocal steps, fails
        steps += 1
        if len(rows) > 1 and steps % 7 == 0:
            fails += 1
            raise RuntimeError("a step fails")
        return run(cache, rows)

    monkeypatch.setattr(engine._runner, "run", failing)
    rng = random.Random(6)
    cancelled_after = [rng.randint(1, 6) if i % 2 else None for i in range(STREAMS)]
    crowd = await asyncio.gather(*map(_generate, [model] * STREAMS, calls, cancelled_after))
    assert fails
    assert [_contents(crowd[i]) for i in range(0, STREAMS, 2)] == [_contents(alone[i]) for i in range(0, STREAMS, 2)]
    await _check_memory_is_free(model)


def _contents(texts: tuple[Text, ...]) -> list[tuple[str, str, list[int]]]:
    return [(text.whole, text.finish, ids(text)) for text in texts]


async def _check_memory_is_free(model: LanguageModel) -> None:
    local = text_engine(model)
    engine = local.engine
    await asyncio.wrap_future(local.service.execute(lambda _: None))  # after the commands of closed streams
    assert (local.active, engine.has_work, local.service._jobs, engine._waiting) == (0, False, set(), [])
    assert (engine.scheduler.active, engine.scheduler._slots.lowest(9)) == (0, list(range(8)))
    assert len(engine._memory.prefixes) <= engine._memory.prefixes._capacity
    await asyncio.wrap_future(local.service.execute(lambda each: each.release_memory()))
    assert engine.is_idle
    assert not any(each.uses for each in local.adapters._in_memory.values())
    for name in "ab":
        await model.unload_adapter(UnloadAdapter(name))
    await asyncio.wrap_future(local.service.execute(lambda _: None))
    assert not engine._runner.adapters.keys


async def test_commands_of_a_closed_engine_fail(llama_folder: Path) -> None:
    model = load_model(llama_folder)
    service = text_engine(model).service
    await model.close()
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(asyncio.wrap_future(service.execute(lambda _: None)), 60)


async def test_cancelled_commands_are_not_executed(llama: LanguageModel) -> None:
    service, is_busy, executed = text_engine(llama).service, threading.Event(), list[int]()
    first = service.execute(lambda _: is_busy.wait(60))  # until then, the next command is queued
    second = service.execute(lambda _: executed.append(1))
    assert second.cancel()
    is_busy.set()
    await asyncio.wrap_future(first)
    await asyncio.wrap_future(service.execute(lambda _: None))
    assert not executed
