"""Metrics of the engine's steps and queue."""

import asyncio
from contextlib import aclosing
from pathlib import Path

from dragoman.core.calls import Generate
from dragoman.core.text import Sampling
from features.text.generation.helpers import engine_metrics, generation, load_model


async def test_steps_are_counted_by_method_and_outcome(llama_folder: Path) -> None:
    model = load_model(llama_folder, prefill_chunk=8)
    try:
        info = (await generation(model, "a b c d e f g h i j", max_new_tokens=4, ignore_eos=True)).prompts[0]
        async with asyncio.timeout(60):  # a step counts once it has sent its tokens
            while engine_metrics(model)["steps_total", "decode", "ok"] < 3:
                await asyncio.sleep(0.01)
        metrics = engine_metrics(model)
        chunks = -(-info.tokens // 8)
        assert chunks > 1
        assert info.max_new == 4
        assert metrics["steps_total", "prefill", "ok"] == metrics["step_seconds_count", "prefill"] == chunks
        # The last chunk of a prompt gives the first token; the last token is not computed further.
        assert metrics["steps_total", "decode", "ok"] == metrics["step_seconds_count", "decode"] == 3
        assert metrics["forward_seconds_count", "prefill"] == chunks
        assert 0 < metrics["forward_seconds_sum", "decode"] <= metrics["step_seconds_sum", "decode"]
        assert metrics["steps_total", "decode", "failed"] == 0
    finally:
        await model.close()


async def test_queue_and_batch_sizes(llama_folder: Path) -> None:
    model = load_model(llama_folder, max_batch=2)
    call = Generate(prompts=("a b",), sampling=Sampling(max_new_tokens=400, ignore_eos=True, n=2), stream=True)
    try:
        async with aclosing(model.generate(call)) as first, aclosing(model.generate(call)) as second:
            info = (await anext(first)).prompts[0]
            waiting = asyncio.ensure_future(anext(second))
            while not engine_metrics(model)[("queue_size",)]:
                assert not waiting.done()
                await asyncio.sleep(0)
            metrics = engine_metrics(model)
            assert (metrics[("queue_size",)], metrics[("batch_size",)]) == (1, 2)
            assert metrics[("batch_max_tokens",)] == 2 * (info.tokens + 400)
            await first.aclose()
            waited_s = (await waiting).prompts[0].waited_s
            assert waited_s is not None
            assert waited_s > 0
        while engine_metrics(model)[("batch_size",)]:
            await asyncio.sleep(0)
        assert engine_metrics(model)[("queue_size",)] == engine_metrics(model)[("batch_max_tokens",)] == 0
    finally:
        await model.close()
