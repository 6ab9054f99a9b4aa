"""Exceptions of every kind in the code that the text engine runs: each call is answered, and the thread goes on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dragoman
from dragoman.core.errors import ModelFailed, WorkerLost
from dragoman.core.text import Grammar
from dragoman.workers.executor import Executor
from dragoman_text.generation import grammar_worker
from dragoman_text.generation.engine import GenerationEngine
from dragoman_text.generation.job import BatchRow
from dragoman_text.generation.runner import Runner
from dragoman_text.generation.scheduler import Scheduler
from dragoman_text.runtimes.llm.model import LanguageModel
from e2e.foreign_errors import ERRORS, NAMES
from features.text.generation.helpers import ids, load_model, text

pytestmark = pytest.mark.filterwarnings("ignore")
LIMIT_S = 60.0


@pytest.fixture
def model(llama_folder: Path) -> Iterator[LanguageModel]:
    model = load_model(llama_folder, max_batch=8)
    yield model
    asyncio.run(model.close())


class Failing:
    """Replaces a function: the next call raises the error of `number`, later ones call the function."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.number: int | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        number, self.number = self.number, None
        if number is not None:
            raise ERRORS[number]()
        return self._function(*arguments, **named)


async def test_errors_in_a_step_end_its_generations(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(await text(model, "The", max_new_tokens=4))
    for owner, name in ((Runner, "run"), (Scheduler, "plan"), (GenerationEngine, "_write")):
        failing = Failing(getattr(owner, name))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *arguments, failing=failing: failing(*arguments))
            for failing.number, error in NAMES.items():
                async with asyncio.timeout(LIMIT_S):
                    with pytest.raises(ModelFailed, match=f"^generation failed: {error}"):
                        await text(model, "The", max_new_tokens=4)
                    assert ids(await text(model, "The", max_new_tokens=4)) == expected, (name, error)
    assert model.unavailable() == ""


async def test_an_error_of_one_row_ends_only_its_generation(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, expected, number = Runner.run, ids(await text(model, "The", max_new_tokens=4)), 0

    def failing(runner: Runner, cache: Any, rows: list[BatchRow]) -> Any:
        if any(699 in row.tokens for row in rows):
            raise ERRORS[number]()
        return run(runner, cache, rows)

    monkeypatch.setattr(Runner, "run", failing)
    for number in NAMES:
        async with asyncio.timeout(LIMIT_S):
            wrong = asyncio.create_task(text(model, (0, 699, 20), max_new_tokens=4))
            right = await asyncio.gather(*(text(model, "The", max_new_tokens=4) for _ in range(3)))
            with pytest.raises(ModelFailed, match=NAMES[number]):
                await wrong
        assert [ids(each) for each in right] == [expected] * 3


async def test_errors_of_the_grammar_library_fail_the_call(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(grammar_worker.matcher)
    monkeypatch.setattr(grammar_worker, "matcher", failing)
    executor = Executor(model, model.spec)
    for failing.number, error in NAMES.items():
        request: Any = dragoman_request(Grammar("regex", f"a{{1,{failing.number + 1}}}"))
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(ModelFailed, match=f"grammar: it cannot be compiled: {error}"):
                await executor.call_async(request)
            assert (await executor.call_async(request)).texts[0].whole


def dragoman_request(grammar_: Grammar) -> Any:
    from dragoman.core.calls import Generate, Request
    from dragoman.core.text import Sampling

    return Request(Generate(prompts=("The",), sampling=Sampling(max_new_tokens=4, grammar=grammar_)), "m")


async def test_a_model_whose_engine_has_ended_is_not_ready(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with dragoman.Server(str(llama_folder), http_port=0, grpc_port=-1, placement="inline") as server:
        (deployment,) = server.engine.deployments()
        model: Any = deployment._pool.executor.model  # type: ignore[union-attr]
        assert (await text(model, "The", max_new_tokens=2)).generated == 2
        with monkeypatch.context() as patch:
            patch.setattr(GenerationEngine, "is_idle", property(lambda _: 1 / 0))
            running = asyncio.create_task(text(model, "The", max_new_tokens=400))
            model.text_engine.service.commands.put(lambda _: None)
            async with asyncio.timeout(LIMIT_S):
                with pytest.raises(WorkerLost, match="has ended"):
                    await running
                    await text(model, "The", max_new_tokens=2)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(WorkerLost, match="has ended"):
                await text(model, "The", max_new_tokens=2)
            while server.engine.ready():
                await asyncio.sleep(0.05)
        assert "has ended" in deployment.reported_reason
