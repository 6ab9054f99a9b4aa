"""Errors, cancellation and limits of the text engine."""

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dragoman.core.calls import Generate
from dragoman.core.errors import DragomanError, InvalidInput, ModelFailed, Overloaded, WorkerLost
from dragoman.core.spec import ModelSpec
from dragoman.core.text import Grammar, Sampling
from dragoman_text.generation.cache import KeyValueCache
from dragoman_text.generation.job import BatchRow
from dragoman_text.generation.runner import Runner
from dragoman_text.runtimes.llm.model import LanguageModel
from features.text.generation.helpers import engine_load, generation, ids, load_model, prompts, text, text_engine

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def model(llama_folder: Path) -> Iterator[LanguageModel]:
    model = load_model(llama_folder, max_batch=8)
    yield model
    asyncio.run(model.close())


async def _use_all_slots(model: LanguageModel) -> None:
    """Generate in all slots of the batch at once, which never ends if one was not freed."""
    async with asyncio.timeout(60):
        assert len((await generation(model, "The", max_new_tokens=4, n=8, do_sample=True)).texts) == 8


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.0, "do_sample": True}, "temperature: expected more than 0, got 0.0"),
    ({"temperature": float("nan")}, "temperature: expected more than 0, got nan"),
    ({"top_p": 1.5}, "top_p: expected more than 0 and at most 1, got 1.5"),
    ({"top_k": -1}, "top_k: expected at least 0"),
    ({"n": 9}, "n, best_of and num_beams: expected at most 8, got 9"),
    ({"n": 3, "best_of": 2}, "best_of: expected at least n"),
    ({"num_beams": 2, "do_sample": True}, "num_beams: beam search does not sample"),
    ({"stop_token_ids": (9999,)}, "stop_token_ids: expected token ids from 0 to 699, got 9999"),
    ({"max_new_tokens": 600}, "at most 512, the model's maximum context limit"),
    ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1"),
    ({"min_new_tokens": 9, "max_new_tokens": 5}, "min_new_tokens: expected at most max_new_tokens, 5"),
    ({"adapter": "x"}, "adapter: unknown adapter 'x'"),
    ({"num_beams": 2, "length_penalty": 2000.0}, "length_penalty: expected from -100 to 100, got 2000.0"),
    ({"top_logprobs": 101}, "top_logprobs: expected from 0 to 100"),
]


async def test_one_invalid_request_does_not_affect_seven_others(model: LanguageModel) -> None:
    prompts_ = prompts(7, 20)
    expected = [await text(model, prompt, max_new_tokens=10) for prompt in prompts_]
    for parameters, message in INVALID:
        invalid = asyncio.create_task(text(model, "The", **parameters))
        valid = await asyncio.gather(*(text(model, prompt, max_new_tokens=10) for prompt in prompts_))
        assert [ids(each) for each in valid] == [ids(each) for each in expected]
        with pytest.raises(InvalidInput) as caught:
            await invalid
        assert message in caught.value.message


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "at least one token"),
        ((1, 5000), "token ids from 0 to 699, got 5000"),
        ("word " * 600, "expected less than 512 tokens, the model's maximum context limit"),
    ],
    ids=["empty", "unknown", "long"],
)
async def test_invalid_prompts_are_rejected(model: LanguageModel, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        await text(model, prompt, max_new_tokens=3)


async def test_an_invalid_grammar_is_invalid_input(model: LanguageModel) -> None:
    invalid: list[tuple[Any, str]] = [("regex", "("), ("json_schema", "{"), ("choice", "[]"), ("lark", "start: x")]
    for kind, source in invalid:
        with pytest.raises(InvalidInput, match=r"^grammar: "):
            await text(model, "The", max_new_tokens=3, grammar=Grammar(kind, source))


async def test_a_failed_computation_ends_only_its_request(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Runner.run

    def failing(runner: Runner, cache: Any, rows: list[BatchRow]) -> Any:
        if any(999 in row.tokens or 13 in row.tokens for row in rows):
            raise RuntimeError("out of memory")
        return run(runner, cache, rows)

    encode = text_engine(model).intake.vocabulary.encode
    prompts_ = [prompt for prompt in prompts(12, 20) if 13 not in encode(prompt)[1]][:5]
    expected = [await text(model, prompt, max_new_tokens=8, logit_bias={13: -1000.0}) for prompt in prompts_]
    monkeypatch.setattr(Runner, "run", failing)
    valid = [asyncio.create_task(text(model, p, max_new_tokens=8, logit_bias={13: -1000.0})) for p in prompts_]
    with pytest.raises(ModelFailed, match="out of memory"):
        await text(model, (0, 13, 20), max_new_tokens=8)
    assert [ids(each) for each in await asyncio.gather(*valid)] == [ids(each) for each in expected]


async def test_a_disconnected_client_frees_its_slots(model: LanguageModel) -> None:
    async def disconnect(number: int) -> None:
        call = Generate(prompts=(prompts(1, 10, number)[0],), sampling=Sampling(max_new_tokens=200), stream=True)
        stream = model.generate(call)
        async for _ in stream:
            break
        await stream.aclose()

    await asyncio.gather(*(disconnect(number) for number in range(200)))
    await text(model, "The", max_new_tokens=1)  # after another step
    assert engine_load(model) == (0, 0)
    await _use_all_slots(model)


async def test_cancelling_a_waiting_request(model: LanguageModel) -> None:
    tasks = [asyncio.create_task(text(model, "The", max_new_tokens=100)) for _ in range(40)]
    while not any(engine_load(model)):
        assert not tasks[-1].done()
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    assert all(
        isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*tasks, return_exceptions=True)
    )
    assert (await text(model, "The", max_new_tokens=2)).generated == 2
    assert engine_load(model) == (0, 0)


async def test_a_full_queue_rejects_requests(llama_folder: Path) -> None:
    options = {"threads": 1, "max_batch": 1}
    model = LanguageModel(ModelSpec(name="m", uri=str(llama_folder), parameters=options, max_queue=3))
    model.load()
    result = await asyncio.gather(*(text(model, "The", max_new_tokens=200) for _ in range(5)), return_exceptions=True)
    assert sorted(type(each).__name__ for each in result) == ["Overloaded"] * 2 + ["Text"] * 3
    with pytest.raises(Overloaded, match="maximum queue size of 3"):
        async for _ in model.generate(Generate(prompts=("a",) * 4)):
            pass
    await model.close()


async def test_closing_ends_running_requests(llama_folder: Path) -> None:
    model = load_model(llama_folder)
    running = asyncio.create_task(text(model, "The", max_new_tokens=400))
    await text(model, "The", max_new_tokens=2)
    await model.close()
    with pytest.raises(WorkerLost, match="stopped"):
        await running
    with pytest.raises(WorkerLost):
        await text(model, "The", max_new_tokens=2)


async def test_several_prompts_in_one_call(model: LanguageModel) -> None:
    call = Generate(prompts=("The", (5, 6, 7)), sampling=Sampling(max_new_tokens=4, n=2, do_sample=True, seed=2))
    (result,) = [chunk async for chunk in model.generate(call)]
    assert [(each.prompt, each.choice) for each in result.texts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [info.tokens for info in result.prompts] == [2, 3]
    assert all(each.whole == each.text for each in result.texts)


def test_parameters_are_checked(llama_folder: Path) -> None:
    invalid: list[tuple[dict[str, Any], str]] = [
        ({"batch": 3}, "unknown parameter 'batch'; a text model knows .*max_batch, max_context, dtype"),
        ({"max_batch": 0}, "'max_batch': expected at least 1, got 0"),
        ({"max_batch": "8"}, "'max_batch': expected an integer, got '8'"),
        ({"dtype": "int4"}, "'dtype': expected one of auto, float32, bfloat16, float16"),
        ({"max_context": 10_000}, "max_context: expected at most 512"),
    ]
    for parameters, message in invalid:
        with pytest.raises(DragomanError, match=message):
            load_model(llama_folder, **parameters)


async def test_models_can_be_loaded_concurrently(
    folders: Path, llama_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folders_ = [llama_folder, folders / "tiny-gpt2"] * 2
    models = await asyncio.gather(*(asyncio.to_thread(load_model, folder) for folder in folders_))
    completions = [await text(each, "The", max_new_tokens=3) for each in models]
    assert completions[:2] == completions[2:]
    assert "LOAD REPORT" not in capfd.readouterr().err
    for each in models:
        await each.close()


def test_folders_without_a_text_model_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with pytest.raises(ModelFailed, match="no weights found in"):
        load_model(tmp_path)


def test_missing_weights_are_not_initialized_at_random(llama_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "lacking")
    weights = load_file(folder / "model.safetensors")
    missing = next(name for name in weights if name.endswith("mlp.up_proj.weight"))
    save_file({k: v for k, v in weights.items() if k != missing}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFailed, match=f"the files of weights lack {missing}$"):
        load_model(folder)


async def test_tokens_and_offsets_of_a_prompt(model: LanguageModel) -> None:
    from dragoman.core.calls import Tokenize

    result = await model.tokenize(Tokenize("Grüße, 世界"))
    assert result.text == "Grüße, 世界"
    inner = [token for token in result.tokens if token.stop > token.start]
    assert {result.text[token.start : token.stop] for token in inner} == {token.text for token in inner}
    assert [token.id for token in result.tokens] == text_engine(model).intake.vocabulary.encode("Grüße, 世界")[1]
    same = await model.tokenize(Tokenize(tuple(token.id for token in result.tokens)))
    assert same.text.endswith("Grüße, 世界")


async def test_long_prompts_do_not_starve_a_decoding_sequence(llama_folder: Path) -> None:
    model = load_model(llama_folder, prefill_chunk=8, prefix_cache=0)
    stream = model.generate(Generate(prompts=("The",), sampling=Sampling(max_new_tokens=60), stream=True))
    first = await anext(stream)
    long_prompt = asyncio.create_task(generation(model, tuple(range(7, 407)), max_new_tokens=1))
    count = len(first.texts[0].tokens)
    async for chunk in stream:
        count += len(chunk.texts[0].tokens)
        if count >= 40:
            break
    assert not long_prompt.done(), "400 tokens in chunks of 8 take 50 steps, each of which also decodes a token"
    await stream.aclose()
    assert (await long_prompt).prompts[0].tokens == 400
    await model.close()


# --- beam searches end with a result or an error --------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"num_beams": 2, "min_new_tokens": 15, "stop": ("\n", "s", "e")}, None),
        ({"num_beams": 3, "n": 3, "stop": ("e",), "min_new_tokens": 4, "skip_special_tokens": False}, None),
        ({"num_beams": 2, "min_new_tokens": 15, "grammar": Grammar("choice", '["yes"]')}, None),
        ({"num_beams": 2, "ignore_eos": True, "grammar": Grammar("choice", '["yes", "no"]')}, None),
        ({"num_beams": 2, "n": 2, "length_penalty": -100.0}, None),
        ({"num_beams": 2, "n": 2, "length_penalty": 100.0}, None),
        ({"num_beams": 2, "n": 2, "grammar": Grammar("choice", '["yes"]')}, "n: expected at most 1"),
        ({"num_beams": 3, "n": 3, "grammar": Grammar("regex", "a")}, "n: expected at most 1"),
        ({"num_beams": 2, "grammar": Grammar("choice", '["a"]'), "bad_words": ("a",)}, "no token is left"),
    ],
)
async def test_beam_searches_end(model: LanguageModel, parameters: dict[str, Any], message: str | None) -> None:
    async with asyncio.timeout(60):
        if message is None:
            result = await generation(model, "The", max_new_tokens=20, **parameters)
            assert [bool(each.finish) for each in result.texts] == [True] * parameters.get("n", 1)
        else:
            with pytest.raises(DragomanError, match=message):
                await generation(model, "The", max_new_tokens=20, **parameters)
    assert engine_load(model) == (0, 0)


async def test_beams_end_where_single_sequences_do(model: LanguageModel) -> None:
    full = (await text(model, "The import", max_new_tokens=24, num_beams=3)).whole
    assert len(full) > 8
    stop = full[5:7]
    for min_new_tokens in (0, 3):
        result = await text(
            model, "The import", max_new_tokens=24, num_beams=3, stop=(stop,), min_new_tokens=min_new_tokens
        )
        assert result.finish in ("stop_sequence", "length")
        assert result.finish == "length" or (result.stop == stop and stop not in result.whole[min_new_tokens * 8 :])


# --- NaN and lack of memory -----------------------------------------------------------------------------------


def _copy_with_nan(folder: Path, target: Path, token: int) -> Path:
    """Copy a model and set the embedding of one token to NaN."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    name = next(name for name in weights if "embed_tokens" in name or "wte" in name)
    weights.setdefault("lm_head.weight", weights[name].clone())
    weights[name][token] = float("nan")
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return target


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
async def test_nan_of_one_sequence_does_not_reach_others(folders: Path, tmp_path: Path, name: str) -> None:
    model = load_model(_copy_with_nan(folders / name, tmp_path / name, 650), max_batch=2, prefix_cache=0)
    valid = ids(await text(model, (5, 6, 7), max_new_tokens=6))
    for parameters in ({}, {"num_beams": 2}, {"n": 2, "do_sample": True}):
        with pytest.raises(ModelFailed, match="are NaN"):
            await text(model, (*[5] * 10, 650, *[5] * 10), max_new_tokens=3, **parameters)
        for _ in range(3):
            assert ids(await text(model, (5, 6, 7), max_new_tokens=6)) == valid
    await model.close()


async def test_a_prompt_that_fails_is_not_computed_further(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, slots, failed = Runner.run, list[int](), list[int]()
    has_both, proceed = threading.Event(), threading.Event()

    def failing(runner: Runner, cache: Any, rows: list[BatchRow]) -> Any:
        if len({row.slot for row in rows}) == 2 and not has_both.is_set():
            has_both.set()
            proceed.wait(60)
        slots.extend(row.slot for row in rows)
        if -1 not in failed and any(row.start > 20 and row.slot == 0 for row in rows):
            failed.append(-1 if len(rows) == 1 else 0)  # first in a batch, then alone; its slot can be reused
            raise RuntimeError("out of memory")
        return run(runner, cache, rows)

    prompts_ = prompts(3, 12, seed=8)
    expected = [ids(await text(model, prompt, max_new_tokens=30)) for prompt in prompts_]
    monkeypatch.setattr(Runner, "run", failing)
    several = asyncio.create_task(text(model, "The", max_new_tokens=60, n=2, do_sample=True, seed=1))
    assert await asyncio.to_thread(has_both.wait, 60)
    valid = [asyncio.create_task(text(model, prompt, max_new_tokens=30)) for prompt in prompts_]
    await asyncio.sleep(0.05)
    proceed.set()
    with pytest.raises(ModelFailed, match="out of memory"):
        await several
    monkeypatch.setattr(Runner, "run", run)
    assert [ids(each) for each in await asyncio.gather(*valid)] == expected
    assert min(slots) == 0


async def test_beams_without_memory_free_their_slots(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(KeyValueCache, "gather", fail)
        with pytest.raises(ModelFailed, match="out of memory"):
            await text(model, "The import", max_new_tokens=20, num_beams=4)
    await _use_all_slots(model)


async def test_requests_during_close_get_an_error(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(llama_folder)
    service = text_engine(model).service
    commands = service.commands

    class ClosingQueue:
        """Close the engine between its check that it is open and the first command."""

        is_closed = False

        def put(self, command: Any) -> None:
            if command is not None and not self.is_closed:
                self.is_closed = True
                service.close()
            commands.put(command)

        def __getattr__(self, name: str) -> Any:
            return getattr(commands, name)

    monkeypatch.setattr(service, "commands", ClosingQueue())
    async with asyncio.timeout(60):
        with pytest.raises(WorkerLost, match="stopped"):
            await text(model, "The", max_new_tokens=2)


async def test_very_low_temperatures_choose_the_argmax(model: LanguageModel) -> None:
    greedy = ids(await text(model, "The", max_new_tokens=8))
    for temperature in (1e-29, 1e-39, 1e-60):
        result = await text(model, "The", max_new_tokens=8, do_sample=True, seed=1, temperature=temperature)
        assert ids(result) == greedy
