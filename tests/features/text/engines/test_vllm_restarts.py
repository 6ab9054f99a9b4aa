"""vLLM in a worker process, which is started again when vLLM's engine dies; `vllm_stand_in` takes vLLM's place."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import text_models
from dragoman.core.calls import Generate, Index, Request
from dragoman.core.chunks import ChunkStream
from dragoman.core.errors import WorkerLost
from dragoman.core.text import Generation, Sampling
from dragoman.engine.engine import Engine
from dragoman.engine_setup import open_engine

STAND_IN = Path(__file__).with_name("vllm_stand_in")


def request(prompt: str, tokens: int = 8) -> Request[Generation]:
    sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
    return Request(Generate(prompts=(prompt,), sampling=sampling, stream=True), "story")


async def text(stream: ChunkStream[Any]) -> str:
    chunks = [chunk.answer async for chunk in stream]
    return str(chunks[-1].texts[0].whole)


async def state(engine: Engine) -> tuple[str, str]:
    (entry,) = (await engine.call(Request(Index("")))).answer
    return entry.state, entry.reason


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "story"
    train = text_models.training()
    tokenizer = train.tokenizer(train.corpus(), train.TINY)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 1, "vocab_size": 700}')
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (folder / "dragoman.toml").write_text('[model]\nruntime = "vllm"\nheartbeat_s = 0.5\n')
    monkeypatch.syspath_prepend(STAND_IN)  # worker processes have the same path
    return folder


async def test_an_engine_that_does_not_start_says_where_the_reason_is_and_what_helps(folder: Path) -> None:
    with (folder / "dragoman.toml").open("a") as file:
        file.write("[model.parameters]\ncache_memory = 1_000_000\n")
    async with open_engine(str(folder), control_open=True) as engine:
        condition, reason = await state(engine)
    assert condition == "UNAVAILABLE"
    assert "vLLM's engine did not start; its process has written the reason to the log above." in reason
    assert "set the parameter 'cache_memory'" in reason


async def test_a_dead_engine_is_started_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Calls of the engine that died fail with WorkerLost, all others are answered; so is the death of an idle one.

    It starts only with a limit of its cache: by default vLLM demands nearly all memory of a machine.
    """
    async with open_engine(str(folder), control_open=True) as engine:
        prompt = "The same words"
        expected = await text(engine.stream(request(prompt)))
        assert expected
        running = engine.stream(request(prompt, 400))
        await anext(running)
        outcomes = await asyncio.gather(text(running), text(engine.stream(request("!"))), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [WorkerLost] * 2
        assert str(outcomes[1]) == "vLLM's engine has ended; its log says why"
        waiting = [asyncio.create_task(text(engine.stream(request(prompt)))) for _ in range(3)]
        assert await asyncio.gather(*waiting) == [expected] * 3  # by the next engine
        assert await state(engine) == ("READY", "")
        (folder / "die").touch()  # while it is idle
        async with asyncio.timeout(60):
            while await state(engine) == ("READY", "") or len(died(caplog)) < 2:
                await asyncio.sleep(0.01)
        reason = "its worker has failed: vLLM's engine has ended; its log says why"
        assert len(died(caplog)) == 2
        for line in died(caplog):
            assert re.fullmatch(rf"model 'story': worker process \d+ died \({re.escape(reason)}\)", line)


def died(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "died" in record.getMessage()]
