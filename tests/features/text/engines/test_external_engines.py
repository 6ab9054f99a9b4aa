"""External engines without their packages: the code around their tokens, and how parameters reach them.

Small fakes implement their documented interfaces; the other modules test the engines themselves.
"""

import asyncio
import dataclasses
import json
import sys
import threading
import types
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.calls import Generate
from dragoman.core.errors import InvalidInput, ModelFailed, Overloaded, WorkerLost
from dragoman.core.spec import ModelSpec
from dragoman.core.text import Grammar, Sampling
from dragoman_text.generation.completion_writer import EndConditions
from dragoman_text.generation.external_engine import ExternalEngine, ExternalRequest, TokenChunk
from dragoman_text.generation.generation_config import end_tokens
from dragoman_text.generation.input_processor import EngineLimits, InputProcessor
from dragoman_text.generation.job import PromptRequest
from dragoman_text.generation.token_sampler import TokenChoice
from dragoman_text.generation.vocabulary import Vocabulary
from dragoman_text.runtimes.openvino_genai import model as openvino_model
from dragoman_text.runtimes.openvino_genai.model import OpenVinoTextModel, OpenVinoTokens
from dragoman_text.runtimes.vllm import model as vllm_model
from dragoman_text.runtimes.vllm.model import VllmModel, VllmTokens
from e2e.foreign_errors import ERRORS

# Every parameter with a value that is not neutral.
EACH: dict[str, Any] = {
    "max_new_tokens": 7,
    "shorten": True,
    "min_new_tokens": 2,
    "do_sample": True,
    "seed": 3,
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.5,
    "min_p": 0.1,
    "typical_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "n": 2,
    "best_of": 3,
    "num_beams": 2,
    "length_penalty": 2.0,
    "early_stopping": True,
    "stop": ("x",),
    "stop_token_ids": (5,),
    "include_stop": True,
    "ignore_eos": True,
    "bad_words": ("word",),
    "logit_bias": {5: 1.0},
    "allowed_token_ids": (5,),
    "top_logprobs": 2,
    "prompt_logprobs": 0,
    "truncate": 3,
    "truncation_side": "right",
    "prompt_token_ids": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "grammar": Grammar("regex", "a+"),
    "adapter": "x",
    "cache_salt": "s",
}
# Parameters that our own code implements, those that vLLM gets with the prompt, and those of beam search, which is
# rejected.
OURS = {"shorten", "n", "best_of", "stop", "include_stop", "truncate", "skip_special_tokens"}
OURS |= {
    "truncation_side",
    "prompt_token_ids",
    "spaces_between_special_tokens",
    "adapter",
    "cache_salt",
    "length_penalty",
    "early_stopping",
}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    import text_models

    folder = tmp_path_factory.mktemp("words")
    train = text_models.training()
    train.tokenizer(train.corpus(), train.TINY).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 1, "vocab_size": 700}')
    return Vocabulary(folder, 700)


def wanted(sampling: Sampling, tokens: tuple[int, ...] = (5, 6), length: int = 9) -> ExternalRequest:
    prompt = PromptRequest(0, "", tokens, sampling, sampling.max_new_tokens or length)
    own = frozenset() if sampling.ignore_eos else frozenset({1})
    return ExternalRequest(prompt, EndConditions(own, frozenset(sampling.stop_token_ids), prompt.length), sampling.seed)


@pytest.mark.parametrize("name", EACH)
def test_no_parameter_is_dropped_by_vllm(vocabulary: Vocabulary, name: str) -> None:
    sets = {name: EACH[name]}
    if name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed"):
        sets["do_sample"] = True
    sampling, neutral = Sampling(**sets), Sampling(**{k: v for k, v in sets.items() if k != name})
    if name in ("num_beams", "typical_p"):
        with pytest.raises(InvalidInput, match=name):
            vllm_model.check_supported(sampling, vocabulary.tokenize)
    elif name == "grammar":
        assert vllm_model.grammar_parameters(sampling.grammar or Grammar("lark")) == {"regex": "a+"}
    else:
        same = vllm_model.sampling_parameters(wanted(sampling)) == vllm_model.sampling_parameters(wanted(neutral))
        assert same == (name in OURS)


@pytest.mark.parametrize("name", EACH)
def test_no_parameter_is_dropped_by_openvino(name: str) -> None:
    sets = {name: EACH[name]}
    if name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed"):
        sets["do_sample"] = True
    sampling, neutral = Sampling(**sets), Sampling(**{k: v for k, v in sets.items() if k != name})
    lacks = {
        "num_beams",
        "typical_p",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "top_logprobs",
        "prompt_logprobs",
    }
    lacks |= {"grammar"}
    if name in lacks:
        with pytest.raises(InvalidInput, match=name):
            openvino_model.check_supported(sampling)
    else:
        openvino_model.check_supported(sampling)
        same = openvino_model.generation_config(wanted(sampling)) == openvino_model.generation_config(wanted(neutral))
        assert same == (name in OURS)


@pytest.mark.parametrize("caches", [True, False])
async def test_openvino_has_no_prefix_cache_where_owners_would_share_it(caches: bool) -> None:
    def make(_folder: str, schedule: Any, _device: str, _properties: Any) -> Any:
        return schedule

    genai = types.SimpleNamespace(SchedulerConfig=types.SimpleNamespace, ContinuousBatchingPipeline=make)
    pipeline = openvino_model._pipeline(genai, Path(), openvino_model.OpenVinoOptions(), caches)
    assert pipeline.enable_prefix_caching is caches
    tokens = OpenVinoTokens(FakePipeline, "fake", has_prefix_cache=caches)
    salted = Sampling(cache_salt="s")
    if caches:
        with pytest.raises(InvalidInput, match=r"^cache_salt: OpenVINO's prefix cache has no salts"):
            tokens.check(salted)
    else:
        tokens.check(salted)
    await tokens.close()


def test_every_parameter_is_listed() -> None:
    assert set(EACH) == {each.name for each in dataclasses.fields(Sampling)} - {"adapters", "model_defaults"}


def test_values_that_vllm_would_change_are_rejected(vocabulary: Vocabulary) -> None:
    for sampling, named in (
        (Sampling(do_sample=True, temperature=0.001), "temperature"),
        (Sampling(do_sample=True, temperature=3.0), "temperature"),
        (Sampling(bad_words=(" the",)), "bad_words"),
        (Sampling(min_new_tokens=2, ignore_eos=True, stop_token_ids=(4,)), "min_new_tokens"),
        (Sampling(presence_penalty=3.0), "presence_penalty"),
    ):
        with pytest.raises(InvalidInput, match=f"^{named}: .*got|^{named}: .*expected"):
            vllm_model.check_supported(sampling, vocabulary.tokenize)
    vllm_model.check_supported(Sampling(temperature=0.001), vocabulary.tokenize)  # it has no effect without sampling


# --- around the tokens -----------------------------------------------------------------------------------------


class FakeTokens:
    """A token engine with given outputs, one token per chunk."""

    ended = ""

    def __init__(self, outputs: dict[int | None, list[int]]) -> None:
        self.outputs = outputs
        self.left = 0
        self.wanted: list[ExternalRequest] = []

    def check(self, sampling: Sampling) -> None:
        if sampling.typical_p < 1:
            raise InvalidInput("typical_p: expected 1")

    async def tokens(self, wanted: ExternalRequest) -> AsyncGenerator[TokenChunk, None]:
        self.wanted.append(wanted)
        try:
            for number, token in enumerate(self.outputs.get(wanted.seed, self.outputs[None])):
                if token < 0:
                    raise ModelFailed("it fails at this token")
                await asyncio.sleep(0)
                prefill = [TokenChoice(each, -1.0) for each in wanted.prompt.tokens[1:]] if number == 0 else ()
                yield TokenChunk([TokenChoice(token, -0.1 * (wanted.seed or 1))], prefill, 3)
        finally:
            self.left += 1

    async def close(self) -> None:
        pass


def engine(vocabulary: Vocabulary, outputs: dict[int | None, list[int]], capacity: int = 0) -> Any:
    intake = InputProcessor(vocabulary, EngineLimits(8, 64), 2**62, frozenset({1}), frozenset())
    return ExternalEngine(FakeTokens(outputs), intake, frozenset({1}), capacity, {})


async def chunks(engine: Any, *prompts: str, stream: bool = True, **sampling: Any) -> list[Any]:
    call = Generate(prompts=prompts, sampling=Sampling(**{"max_new_tokens": 20, **sampling}), stream=stream)
    return [chunk async for chunk in engine.generate(engine.split_call(call))]


async def test_completions_are_written_as_by_our_own_engine(vocabulary: Vocabulary) -> None:
    tokens = vocabulary.tokenize("Grüße, 世界 and more")
    created = engine(vocabulary, {None: [*tokens, 1]})
    found = await chunks(created, "x", prompt_logprobs=0)
    assert "".join(chunk.texts[0].text for chunk in found) == "Grüße, 世界 and more" == found[-1].texts[0].whole
    assert not any("\ufffd" in chunk.texts[0].text for chunk in found)
    assert found[-1].texts[0].finish == "eos_token"
    assert found[0].prompts[0].prefill[0].logprob is None
    assert (found[0].prompts[0].cached, len(found[0].prompts), found[1].prompts) == (3, 1, ())
    found = await chunks(created, "x", stop=("世界",))
    assert found[-1].texts[0].whole == "Grüße, "
    assert (found[-1].texts[0].finish, found[-1].texts[0].stop) == ("stop_sequence", "世界")
    (whole,) = await chunks(created, "x", stream=False, max_new_tokens=2)
    assert (whole.texts[0].finish, len(whole.texts[0].tokens)) == ("length", 2)


async def test_completions_have_their_own_seeds_and_the_best_are_returned(vocabulary: Vocabulary) -> None:
    word = vocabulary.tokenize("word")[0]
    created = engine(vocabulary, {None: [word, 1], 6: [word, word, 1]})
    found = await chunks(created, "x", "y", n=2, do_sample=True, seed=5, stream=False)
    texts = sorted((text for chunk in found for text in chunk.texts), key=lambda t: (t.prompt, t.choice))
    assert [(text.prompt, text.choice, text.seed) for text in texts] == [(0, 0, 5), (0, 1, 6), (1, 0, 5), (1, 1, 6)]
    best = await chunks(created, "x", n=1, best_of=3, do_sample=True, seed=5, stream=False)
    assert [(text.choice, text.seed) for chunk in best for text in chunk.texts] == [(0, 5)]


async def test_cancellation_and_errors_end_the_completions(vocabulary: Vocabulary) -> None:
    word = vocabulary.tokenize("word")[0]
    created = engine(vocabulary, {None: [word] * 50, 7: [word, -1]}, capacity=2)
    call = Generate(prompts=("x", "y"), sampling=Sampling(max_new_tokens=50, n=2), stream=True)
    running = created.generate(created.split_call(call))
    await anext(running)
    assert created.active == 2
    with pytest.raises(Overloaded):
        await chunks(created, "z")
    await running.aclose()
    assert (created.active, created.engine.left) == (0, 4)
    with pytest.raises(ModelFailed, match="fails at this token"):
        await chunks(created, "x", n=3, do_sample=True, seed=6)
    assert (created.active, created.engine.left) == (0, 7)
    with pytest.raises(ModelFailed, match="ended a completion early"):
        await chunks(engine(vocabulary, {None: [word]}), "x")
    with pytest.raises(InvalidInput, match="typical_p"):
        await chunks(created, "x", typical_p=0.5)


async def test_a_grammar_ends_a_completion_also_with_ignore_eos(vocabulary: Vocabulary) -> None:
    created = engine(vocabulary, {None: [*vocabulary.tokenize("a"), 1]})
    found = await chunks(created, "x", grammar=Grammar("regex", "a"), ignore_eos=True)
    assert found[-1].texts[0].finish == "eos_token"


def test_end_tokens(vocabulary: Vocabulary, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 4}')
    assert end_tokens(tmp_path, vocabulary) == {1, 4}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert end_tokens(tmp_path, vocabulary) == {1, 4, 5}
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    assert end_tokens(tmp_path, vocabulary) == {1}


# --- the documented interfaces ---------------------------------------------------------------------------------


# https://docs.vllm.ai: the arguments of SamplingParams and StructuredOutputsParams that are used here.
VLLM_SAMPLING = "max_tokens min_tokens ignore_eos stop_token_ids temperature top_k top_p min_p seed repetition_penalty "
VLLM_SAMPLING += (
    "presence_penalty frequency_penalty logprobs prompt_logprobs bad_words logit_bias allowed_token_ids detokenize "
)
VLLM_SAMPLING += "output_kind structured_outputs"


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake of the part of vLLM's interface that is used."""
    fake: Any = types.ModuleType("vllm")
    sampling: Any = types.ModuleType("vllm.sampling_params")
    errors: Any = types.ModuleType("vllm.v1.engine.exceptions")
    fake.SamplingParams = dataclasses.make_dataclass(
        "SamplingParams", [(name, Any, None) for name in VLLM_SAMPLING.split()]
    )
    sampling.StructuredOutputsParams = dataclasses.make_dataclass(
        "StructuredOutputsParams", [(name, Any, None) for name in ("json", "regex", "choice", "grammar", "json_object")]
    )
    sampling.RequestOutputKind = types.SimpleNamespace(FINAL_ONLY="final", DELTA="delta")
    sampling.VLLMValidationError = type("VLLMValidationError", (ValueError,), {})
    errors.EngineDeadError = type("EngineDeadError", (Exception,), {})
    names = {"vllm": fake, "vllm.sampling_params": sampling, "vllm.v1": types.ModuleType("vllm.v1")}
    names |= {"vllm.v1.engine": types.ModuleType("vllm.v1.engine"), "vllm.v1.engine.exceptions": errors}
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, name, module)
    return types.SimpleNamespace(sampling=sampling, errors=errors)


class FakeAsyncLLM:
    """A fake of vLLM's AsyncLLM: two tokens, or a error."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.aborted, self.down = error, 0, False
        self.requests: list[Any] = []

    async def generate(self, prompt: Any, params: Any, name: str, *, lora_request: Any) -> AsyncGenerator[Any, None]:
        self.requests.append((prompt, params, name))
        if self.error is not None:
            raise self.error
        seen = types.SimpleNamespace
        try:
            for token in (8, 9):
                beside = {token: seen(logprob=-2.0, rank=3), 4: seen(logprob=-1.5, rank=2), 3: seen(logprob=-1, rank=1)}
                text = seen(token_ids=[token], logprobs=[beside])
                first = [None, {6: seen(logprob=-4.0, rank=9)}] if token == 8 else None
                yield seen(outputs=[text], prompt_logprobs=first, num_cached_tokens=2)
        except GeneratorExit:
            self.aborted += 1
            raise

    def shutdown(self) -> None:
        self.down = True


async def test_requests_to_vllm_and_its_chunks(fake_vllm: Any, vocabulary: Vocabulary) -> None:
    fake = FakeAsyncLLM()
    tokens = VllmTokens(fake, vocabulary, {})
    sampling = Sampling(top_logprobs=2, prompt_logprobs=0, grammar=Grammar("choice", '["a"]'))
    found = [chunk async for chunk in tokens.tokens(wanted(sampling))]
    assert found == [
        TokenChunk([TokenChoice(8, -2.0, ((3, -1), (4, -1.5)))], [TokenChoice(6, -4.0)], 2),
        TokenChunk([TokenChoice(9, -2.0, ((3, -1), (4, -1.5)))]),
    ]
    prompt, params, _ = fake.requests[0]
    assert prompt == {"prompt_token_ids": [5, 6]}
    assert (params.output_kind, params.structured_outputs.choice) == ("final", ["a"])
    assert (params.temperature, params.seed, params.stop_token_ids, params.detokenize) == (0.0, None, [1], False)
    leaving = tokens.tokens(wanted(Sampling(stop=("x",), cache_salt="s")))
    await anext(leaving)
    await leaving.aclose()
    assert fake.aborted == 1
    assert fake.requests[1][0] == {"prompt_token_ids": [5, 6], "cache_salt": "s"}
    assert fake.requests[1][1].output_kind == "delta"
    await tokens.close()
    assert fake.down


async def test_errors_of_vllm(fake_vllm: Any, vocabulary: Vocabulary) -> None:
    for error, kind in (
        (fake_vllm.sampling.VLLMValidationError("too long"), InvalidInput),
        (fake_vllm.errors.EngineDeadError("dead"), WorkerLost),
        (RuntimeError("odd"), ModelFailed),
    ):
        with pytest.raises(kind):
            await anext(VllmTokens(FakeAsyncLLM(error), vocabulary, {}).tokens(wanted(Sampling())))
    for make in ERRORS:
        with pytest.raises(ModelFailed, match=r"^generation failed: "):
            await anext(VllmTokens(FakeAsyncLLM(make()), vocabulary, {}).tokens(wanted(Sampling())))


# https://docs.openvino.ai, GenerationConfig.
OPENVINO = (
    "apply_chat_template max_new_tokens logprobs do_sample repetition_penalty presence_penalty min_p temperature "
)
OPENVINO += "temperature frequency_penalty ignore_eos eos_token_id stop_token_ids min_new_tokens top_p top_k rng_seed"


class FakeHandle:
    def __init__(self, tokens: list[int]) -> None:
        self.left, self.status, self.ready = tokens, "RUNNING", False

    def can_read(self) -> bool:
        return self.ready

    def read(self) -> Any:
        self.ready = False
        token = self.left.pop(0)
        return {0: types.SimpleNamespace(generated_ids=[token], generated_log_probs=[-1.0])}

    def get_status(self) -> Any:
        return types.SimpleNamespace(name=self.status) if self.status != "FINISHED" else "FINISHED"

    def cancel(self) -> None:
        self.status = "CANCEL"


class FakePipeline:
    """A fake of OpenVINO GenAI's ContinuousBatchingPipeline: says 8, 9, 10; a prompt that begins with 99 is refused,
    and one that begins with 98 fails in a step."""

    def __init__(self) -> None:
        self.error: Any = lambda: RuntimeError("it breaks")
        self.handles: list[tuple[list[int], FakeHandle]] = []
        self.configs: list[Any] = []

    def add_request(self, number: int, tokens: Any, config: Any) -> FakeHandle:
        if tokens[0][0] == 99:
            raise RuntimeError("Check 'x > 0' failed at /somewhere:3:\nx must be strictly positive\n")
        self.configs.append(config)
        self.handles.append((list(tokens[0]), FakeHandle([8, 9, 10])))
        return self.handles[-1][1]

    def has_non_finished_requests(self) -> bool:
        self.handles = [(tokens, each) for tokens, each in self.handles if each.status == "RUNNING"]
        return bool(self.handles)

    def step(self) -> None:
        for tokens, handle in self.handles:
            if handle.status == "RUNNING" and tokens[0] == 98:
                raise self.error()
            handle.ready = True
            handle.status = "FINISHED" if len(handle.left) == 1 else handle.status


@pytest.fixture
def openvino(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[OpenVinoTokens, FakePipeline]]:
    fake: Any = types.ModuleType("openvino_genai")
    tensors: Any = types.ModuleType("openvino")
    fake.GenerationConfig = type("GenerationConfig", (), {"__slots__": OPENVINO.split()})
    fake.GenerationStatus = types.SimpleNamespace(RUNNING="RUNNING", FINISHED="FINISHED")
    tensors.Tensor = lambda array: array.tolist()
    monkeypatch.setitem(sys.modules, "openvino_genai", fake)
    monkeypatch.setitem(sys.modules, "openvino", tensors)
    monkeypatch.setattr(FakeHandle, "get_status", lambda handle: _Status(handle.status))
    pipeline = FakePipeline()
    tokens = OpenVinoTokens(lambda: pipeline, "fake")
    yield tokens, pipeline
    asyncio.run(tokens.close())
    assert "fake" not in [thread.name for thread in threading.enumerate()]


class _Status(str):
    @property
    def name(self) -> str:
        return str(self)


async def test_requests_to_openvino_and_its_chunks(openvino: tuple[OpenVinoTokens, FakePipeline]) -> None:
    tokens, pipeline = openvino
    several = [
        asyncio.create_task(_all(tokens, Sampling(do_sample=True, temperature=0.5, top_k=4, seed=number)))
        for number in range(8)
    ]
    assert await asyncio.gather(*several) == [[8, 9, 10]] * 8
    assert sorted(config.rng_seed for config in pipeline.configs) == list(range(8))
    assert {(config.top_k, config.temperature, config.stop_token_ids == {1}) for config in pipeline.configs} == {
        (4, 0.5, True)
    }


async def _all(tokens: OpenVinoTokens, sampling: Sampling, prompt: tuple[int, ...] = (5, 6)) -> list[int]:
    return [choice.token async for chunk in tokens.tokens(wanted(sampling, prompt)) for choice in chunk.choices]


async def test_errors_of_openvino(openvino: tuple[OpenVinoTokens, FakePipeline]) -> None:
    tokens, _ = openvino
    with pytest.raises(InvalidInput, match=r"^OpenVINO rejects the request: x must be strictly positive$"):
        await _all(tokens, Sampling(), (99,))
    with pytest.raises(ModelFailed, match="it breaks"):
        await _all(tokens, Sampling(), (98,))
    assert await _all(tokens, Sampling()) == [8, 9, 10]
    leaving = tokens.tokens(wanted(Sampling()))
    await anext(leaving)
    await leaving.aclose()
    assert await _all(tokens, Sampling()) == [8, 9, 10]
    assert not tokens.sequences


async def test_openvino_goes_on_after_errors_of_every_kind(openvino: tuple[OpenVinoTokens, FakePipeline]) -> None:
    tokens, pipeline = openvino
    for pipeline.error in ERRORS:
        async with asyncio.timeout(60):
            with pytest.raises(ModelFailed, match="generation failed"):
                await _all(tokens, Sampling(), (98,))
            assert await _all(tokens, Sampling()) == [8, 9, 10]
    assert not tokens.ended


async def test_an_engine_whose_thread_has_ended_cannot_answer(openvino: tuple[OpenVinoTokens, FakePipeline]) -> None:
    tokens, pipeline = openvino
    model = OpenVinoTextModel(ModelSpec(name="m"))
    model.text_engine = types.SimpleNamespace(ended="")
    assert not model.unavailable()
    pipeline.has_non_finished_requests = lambda: bool(1 / 0)  # type: ignore[method-assign]
    tokens.commands.put(lambda: None)
    for _ in range(2):
        async with asyncio.timeout(60):
            with pytest.raises(WorkerLost, match="reloaded"):
                await _all(tokens, Sampling())
    model.text_engine = tokens
    with pytest.raises(WorkerLost, match="reloaded"):
        model.unavailable()


async def test_a_closed_engine_rejects_requests(openvino: tuple[OpenVinoTokens, FakePipeline]) -> None:
    tokens, _ = openvino
    await tokens.close()
    with pytest.raises(WorkerLost):
        await _all(tokens, Sampling())


class ClosedDuringPut:
    """A queue of commands; the engine is closed from another thread just before the first command is added."""

    def __init__(self, tokens: OpenVinoTokens) -> None:
        self._commands = tokens.commands
        self._closing = threading.Thread(target=lambda: asyncio.run(tokens.close()))

    def put(self, command: Any) -> None:
        if command is not None and self._closing.ident is None:
            self._closing.start()
            self._closing.join()
        self._commands.put(command)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._commands, name)


async def test_a_request_during_closing_fails(
    openvino: tuple[OpenVinoTokens, FakePipeline],
) -> None:
    tokens, _ = openvino
    commands: Any = ClosedDuringPut(tokens)
    tokens.commands = commands
    with pytest.raises(WorkerLost, match="the text engine is stopped"):
        await asyncio.wait_for(_all(tokens, Sampling()), 60)


# --- loading ---------------------------------------------------------------------------------------------------


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with pytest.raises(ModelFailed, match="optimum-cli export openvino --task text-generation-with-past"):
        OpenVinoTextModel(ModelSpec(name="m", uri=str(tmp_path))).load()
    with pytest.raises(ModelFailed, match="no weights"):
        VllmModel(ModelSpec(name="m", uri=str(tmp_path))).load()
    (tmp_path / "openvino_model.xml").write_text("<net/>")
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    with pytest.raises(ModelFailed, match=r"pip install 'dragoman\[openvino\]'"):
        OpenVinoTextModel(ModelSpec(name="m", uri=str(tmp_path))).load()


def test_an_adapter_that_does_not_exist(tmp_path: Path) -> None:
    from dragoman_text.runtimes.vllm.model import find_adapters, max_rank

    for name, rank in (("one", 4), ("two", 20)):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
    found = find_adapters(tmp_path, {"three": str(tmp_path / "adapters" / "one")})
    assert list(found) == ["one", "two", "three"]
    assert max_rank(found) == 32
