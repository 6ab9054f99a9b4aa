"""Grammars that take too much time or memory, or that no text satisfies: each is rejected without delaying others."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel

from dragoman.core.calls import Generate
from dragoman.core.errors import InvalidInput, Overloaded
from dragoman.core.text import Generation, Grammar, Sampling
from dragoman_text.generation import grammar as following
from dragoman_text.generation import grammar_compiler, grammar_worker
from dragoman_text.generation.grammar import GrammarService
from dragoman_text.generation.grammar_compiler import GrammarCompiler, GrammarLimits, GrammarVocabulary
from dragoman_text.generation.memory import release_memory
from dragoman_text.runtimes.llm.model import LanguageModel

from .helpers import engine_load, grammar_service, ids, load_model, text, text_engine

NESTED_REPETITION = "((b{1000}){1000}){1000}"
REFERENCES = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(6000)}


def _schema(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


@contextmanager
def _compiler(llama: LanguageModel, make: Callable[[str], str], **limits: Any) -> Iterator[GrammarCompiler[str]]:
    tokenizer, size = text_engine(llama).intake.vocabulary.tokenizer, text_engine(llama).intake.vocabulary.size
    vocabulary = GrammarVocabulary(tokenizer.backend_tokenizer.to_str(), size, [1])
    compiler = GrammarCompiler(lambda: vocabulary, GrammarLimits(**limits), make)
    try:
        yield compiler
    finally:
        compiler.close()


# --- compilation -----------------------------------------------------------------------------------------------


@pytest.mark.alone  # the bound on the clock is ten times that on CPU time
@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", NESTED_REPETITION), "too many expressions"),
        (Grammar("lark", f"start: /{NESTED_REPETITION}/"), "too many expressions"),
        (_schema({"type": "string", "pattern": NESTED_REPETITION + "(c{1000}){1000}"}), None),
        (_schema({"type": "integer", "multipleOf": 99_999_989}), "too complex: expected at most 1 s of CPU time"),
        (_schema({"$ref": "#/$defs/d0", "$defs": {**REFERENCES, "d6000": {"type": "null"}}}), "too deeply nested"),
        (
            Grammar("lark", "start: T0\n" + "".join(f'T{i}: "a" T{i + 1}\n' for i in range(5000))),
            "deeply|undefined|rule",
        ),
        (Grammar("regex", "a" * 300_000), "expected at most 262144 characters .*, got 300000"),
        (
            _schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}),
            "too (large|big|complex)|row",
        ),
        (_schema({"enum": [f"value {i}" for i in range(9000)]}), None),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_compilation_time_is_limited(grammars: GrammarService, grammar: Grammar, message: str | None) -> None:
    if message is None:
        grammars.guide(grammar)
        return
    with pytest.raises(InvalidInput, match=f"^grammar: .*({message})"):
        grammars.guide(grammar)
    assert grammars.guide(Grammar("choice", '["yes"]')).next_mask().any()


def test_compilation_memory_is_limited(llama: LanguageModel) -> None:
    large = _schema({"enum": [f"v{i}" for i in range(20_000)]})
    with grammar_service(llama, grammar_memory=16) as service:
        with pytest.raises(InvalidInput, match=r"too large: expected at most 16 MiB to compile it \(grammar_memory\)"):
            service.guide(large)
        service.guide(Grammar("regex", "a+"))


def test_memory_does_not_grow_with_rejected_grammars(grammars: GrammarService) -> None:
    grammars.guide(Grammar("regex", "a+"))
    before = _resident_mib()
    for i in range(4):
        with pytest.raises(InvalidInput):
            grammars.guide(Grammar("regex", f"((b{{1000}}){{1000}}){{{900 + i}}}"))
    assert _resident_mib() - before < 20  # each takes some 60 MiB, of which a part would stay


def _tokenizer(*words: str) -> LLTokenizer:
    """A tokenizer of single bytes and some words, whose token 0 ends a text."""
    vocabulary = ["<end>", *sorted(ByteLevel.alphabet()), *words]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<end>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.add_special_tokens(["<end>"])
    return LLTokenizer(tokenizer.to_str(), n_vocab=len(vocabulary), eos_token=[0])


def test_lexer_states_are_limited() -> None:
    matcher = grammar_worker.matcher(_tokenizer(), LLMatcher.grammar_from_regex("(a|b)*a(a|b){18}"))
    a, b = (1 + sorted(ByteLevel.alphabet()).index(letter) for letter in "ab")
    letters = np.random.default_rng(1).choice([a, b], 60_000).tolist()
    with pytest.raises(ValueError, match="too many states: 50000"):
        for letter in letters:
            grammar_worker.allowed_tokens(matcher, 300)
            matcher.consume_token(letter)


def test_parser_items_of_a_step_are_limited() -> None:
    rules = [f'r{i}: "a" "b{i}"?' for i in range(300)]
    text = "\n".join([f"start: ({'|'.join(f'r{i}' for i in range(300))})+", *rules])
    short, long = _tokenizer("aa"), _tokenizer(*("a" * n for n in range(2, 41)))
    assert grammar_worker.allowed_tokens(grammar_worker.matcher(short, text), 300).any()
    with pytest.raises(ValueError, match="Too many items"):
        grammar_worker.allowed_tokens(grammar_worker.matcher(long, text), 300)


def test_results_and_errors_are_cached(llama: LanguageModel) -> None:
    compiled: list[str] = []

    def make(text: str) -> str:
        compiled.append(text)
        return text

    with _compiler(llama, make, grammar_cache=2) as compiler:
        for letter in "aab":
            compiler.compile(Grammar("regex", letter)).result()
        assert len(compiled) == 2
        compiler.compile(Grammar("regex", "c")).result()  # evicts "a", least recently used
        compiler.compile(Grammar("regex", "b")).result()
        assert len(compiled) == 3
        compiler.compile(Grammar("regex", "a")).result()
        assert len(compiled) == 4
        invalid = Grammar("regex", "(")
        first, second = compiler.compile(invalid), None
        with pytest.raises(InvalidInput):
            first.result()
        second = compiler.compile(invalid)
        assert second.done()
        with pytest.raises(InvalidInput, match=r"^grammar: "):
            second.result()


def test_the_cache_is_limited_in_bytes(llama: LanguageModel) -> None:
    compiled: list[str] = []

    def make(text: str) -> str:
        compiled.append(text)
        return text

    def large(letter: str) -> Grammar:  # about 3.5 MiB
        return _schema({"enum": [f"{letter}{i}" for i in range(10_000)]})

    with _compiler(llama, make, grammar_memory=24) as compiler:
        for letter in "abcdefghi":
            compiler.compile(large(letter)).result()
        assert len(compiled) == 9
        compiler.compile(large("i")).result()
        assert len(compiled) == 9, "the last one is cached"
        compiler.compile(large("a")).result()
        assert len(compiled) == 10, "the first one was evicted"


def test_concurrent_requests_share_one_compilation(llama: LanguageModel) -> None:
    gate = threading.Event()

    def make(text: str) -> str:
        gate.wait(60)
        return text

    with _compiler(llama, make) as compiler:
        first = compiler.compile(Grammar("regex", "a"))
        assert compiler.compile(Grammar("regex", "a")) is first
        others = [compiler.compile(Grammar("regex", f"a{i}")) for i in range(31)]
        with pytest.raises(Overloaded, match="32 other grammars"):
            compiler.compile(Grammar("regex", "b"))
        gate.set()
        for each in (first, *others):
            assert each.result(60)
        assert compiler.compile(Grammar("regex", "b")).result(60)


def test_a_slow_grammar_does_not_delay_others(llama: LanguageModel) -> None:
    slow = _schema({"type": "integer", "multipleOf": 99_999_989})
    with _compiler(llama, str, grammar_compile_s=300.0, grammar_memory=4096) as compiler:
        waiting = compiler.compile(slow)
        assert compiler.compile(Grammar("regex", "a")).result(60)
        assert not waiting.done()
    with pytest.raises(Overloaded):
        waiting.result(0)


def test_the_number_of_waiting_slow_grammars_is_limited(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "QUICK_S", 0.01)

    def slow(i: int) -> Grammar:
        return _schema({"type": "integer", "multipleOf": 99_999_989, "title": str(i)})

    with _compiler(llama, str, grammar_compile_s=60.0, grammar_memory=4096) as compiler:
        waiting = [compiler.compile(slow(i)) for i in range(8)]
        with pytest.raises(Overloaded, match="8 other slow grammars are waiting"):
            compiler.compile(slow(8)).result(60)
        assert not any(each.done() for each in waiting)
    for each in waiting:
        with pytest.raises(Overloaded):
            each.result(0)


def test_a_slow_grammar_frees_its_place_in_the_queue(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "QUICK_S", 0.01)
    with _compiler(llama, str, grammar_compile_s=0.05, grammar_memory=4096) as compiler:
        for i in range(9):  # one more than may wait at a time
            slow = _schema({"type": "integer", "multipleOf": 99_999_989, "title": str(i)})
            with pytest.raises(InvalidInput, match=r"too complex: expected at most 0\.05 s"):
                compiler.compile(slow).result(60)


HANGING_WORKER = """
import ctypes, signal, sys
sys.path[:] = sys.argv[1:]
from dragoman_text.generation import grammar_worker

def compile_and_check(kind, text, *rest, original=grammar_worker.compile_and_check, **more):
    if text != "hang":
        return original(kind, text, *rest, **more)
    ends = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(ends))  # PR_GET_PDEATHSIG
    if not any(signal.getitimer(signal.ITIMER_REAL)) or ends.value != signal.SIGKILL:
        raise ValueError(f"no timer, or it outlives the helper: {ends.value}")
    while True:
        signal.pause()

grammar_worker.compile_and_check = compile_and_check
grammar_worker.main()
"""


def test_a_fork_that_uses_no_cpu_time_is_killed(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "START", HANGING_WORKER)
    monkeypatch.setattr(grammar_compiler, "_WALL", 0.0)
    monkeypatch.setattr(grammar_compiler, "_WALL_S", 0.05)
    with grammar_service(llama) as service:
        before = _children()
        with pytest.raises(Overloaded, match="could not be compiled in time"):
            service.guide(Grammar("regex", "hang"))
        assert len(_children() - before) == 1


def test_a_dead_helper_process_is_replaced(llama: LanguageModel) -> None:
    with grammar_service(llama) as service:
        before = _children()
        service.guide(Grammar("regex", "a+"))
        (helper,) = _children() - before
        os.kill(helper, signal.SIGKILL)
        service.guide(Grammar("regex", "b+"))
    assert not _children() - before, "the helper ends with the service"


def test_the_helper_process_gets_no_secrets(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_CONTROL_TOKEN", "hidden")
    with grammar_service(llama) as service:
        before = _children()
        service.guide(Grammar("regex", "a+"))
        (helper,) = _children() - before
        assert b"hidden" not in Path(f"/proc/{helper}/environ").read_bytes()


def test_evicted_grammars_free_their_memory(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    monkeypatch.setattr(grammar_compiler, "release_memory", lambda: released.append("compiler"))
    monkeypatch.setattr(following, "release_memory", lambda: released.append("text"))
    with grammar_service(llama, grammar_cache=1) as service:
        service.guide(Grammar("regex", "a"))
        assert not released
        service.guide(Grammar("regex", "b"))
        service.close()  # its thread has ended
        assert released == ["compiler"]
    with grammar_service(llama) as service:
        guide = service.guide(Grammar("lark", 'start: "a" %json {"$ref": "#"}'))
        (token, *_) = np.setdiff1d(np.flatnonzero(guide.next_mask()), [1])
        with pytest.raises(InvalidInput, match="no text was found that satisfies the grammar"):
            guide.accept(int(token))
    assert released == ["compiler", "text"]


def test_freed_memory_is_returned_to_the_system() -> None:
    blocks = [bytearray(b"x") * 65_000 for _ in range(640)]  # each too small for its own mapping
    before = _resident_mib()
    rest = blocks[::16]  # without a release, the memory between them stays allocated
    del blocks
    release_memory()
    assert before - _resident_mib() > 25
    del rest


def _children() -> set[int]:
    """Return the processes that threads of this one have started. A thread may end while its file is opened."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found.update(map(int, path.read_text().split()))
    return found


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


_REGEX = st.recursive(
    st.sampled_from(["a", "[a-z]", ".", r"\d", r"\p{L}", "a|b", ""]),
    lambda inner: st.one_of(
        st.builds("({}){{{}}}".format, inner, st.integers(0, 10_000)),
        st.builds("({}){{0,{}}}".format, inner, st.integers(0, 10_000)),
        st.builds("({})*{}".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
    ),
    max_leaves=6,
)
_NAMES = st.sampled_from(["a", "b", "c"])
_SCHEMA = st.recursive(
    st.one_of(
        st.sampled_from([{}, {"type": "string"}, {"type": "null"}, {"$ref": "#"}, {"$ref": "#/$defs/x"}, {"enum": []}]),
        st.builds(lambda n: {"type": "integer", "multipleOf": n}, st.integers(-5, 10**12)),
        st.builds(lambda regex: {"type": "string", "pattern": f"^{regex}$"}, _REGEX),
        st.builds(lambda n: {"enum": [f"v{i}" for i in range(n)]}, st.integers(0, 20_000)),
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda properties, required: {"type": "object", "properties": properties, "required": required},
            st.dictionaries(_NAMES, inner, max_size=3),
            st.lists(_NAMES, max_size=2),
        ),
        st.builds(lambda items, n: {"type": "array", "items": items, "minItems": n}, inner, st.integers(0, 10**9)),
        st.builds(lambda name, options: {name: options}, st.sampled_from(["anyOf", "allOf", "oneOf"]), st.lists(inner)),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def bounded(llama: LanguageModel) -> Iterator[GrammarService]:
    with grammar_service(llama, grammar_compile_s=0.1, grammar_memory=64) as service:
        yield service


@settings(max_examples=25)
@given(
    st.one_of(
        _REGEX.map(lambda regex: Grammar("regex", regex)),
        st.builds(lambda schema, x: _schema({**schema, "$defs": {"x": x}}), _SCHEMA, _SCHEMA),
        st.builds(lambda a, b: Grammar("lark", f"start: a* b\na: /{a}/ b?\nb: /{b}/ | a"), _REGEX, _REGEX),
    )
)
def test_any_grammar_is_compiled_or_rejected(bounded: GrammarService, grammar: Grammar) -> None:
    try:
        guide = bounded.guide(grammar)
    except InvalidInput:
        return
    assert guide.next_mask().any()
    for _ in range(3):
        tokens = np.setdiff1d(np.flatnonzero(guide.next_mask()), [1])
        if guide.is_ended or not len(tokens):
            return
        try:
            guide.accept(int(tokens[len(tokens) // 2]))
        except InvalidInput:
            return


# --- schemas and texts -------------------------------------------------------------------------------------

_X = {"$defs": {"x": {"$ref": "#/$defs/x"}, "y": {"anyOf": [{"$ref": "#/$defs/y"}, {"type": "null"}]}}}
_LIST = {"type": "object", "properties": {"next": {"$ref": "#"}, "v": {"type": "integer"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/x", **_X},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/x"}], **_X},
        {"allOf": [{"$ref": "#/$defs/y"}, {"$ref": "#/$defs/x"}], **_X},
        {**_LIST, "required": ["next"]},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"], **_X},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/x"}, "required": ["b"], **_X},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2},
        {"type": ["array", "object"], "items": {"$ref": "#"}, "minItems": 1, **_LIST, "required": ["next"]},
    ],
    ids=json.dumps,
)
def test_schemas_without_a_finite_instance_are_rejected(grammars: GrammarService, schema: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^grammar: no finite JSON text satisfies the schema"):
        grammars.guide(_schema(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/y", **_X},
        {**_LIST, "required": ["v"]},
        {"properties": _LIST["properties"], "required": ["next"]},
        {"type": ["object", "null"], **{k: v for k, v in _LIST.items() if k != "type"}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1},
        {"type": "object", "properties": {"a": {"const": 1, "type": "integer"}}, "required": ["a"]},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}},
    ],
    ids=json.dumps,
)
def test_recursive_schemas_are_supported(grammars: GrammarService, schema: Any) -> None:
    assert grammars.guide(_schema(schema)).next_mask().any()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (_schema({"enum": []}), "Unsatisfiable schema"),
        (_schema({"x-guidance": {"item_separator": ";"}, "type": "array"}), "would allow text that is not JSON"),
        (_schema({"x-guidance": {"key_separator": "="}, "type": "array"}), "would allow text that is not JSON"),
        (_schema({"x-guidance": {"whitespace_pattern": "x+"}, "type": "array"}), "would allow text that is not JSON"),
        (_schema({"x-guidance": {"whitespace_flexible": 1}}), "expected true or false"),
        (_schema({"x-guidance": []}), "expected an object, got list"),
        (_schema({"x-guidance": {"lexer": True}}), 'expected one of whitespace_flexible, .*, got "lexer"'),
        (Grammar("json_schema", "[]"), "expected a JSON schema as an object"),
        (Grammar("regex", r"[^\s\S]"), "no text was found that satisfies the grammar"),
        (Grammar("lark", "start: start"), "no text was found that satisfies the grammar"),
        (Grammar("lark", 'start: %json {"$ref": "#"}'), "no text was found that satisfies the grammar"),
    ],
    ids=lambda value: value.text if isinstance(value, Grammar) else "",
)
def test_unsatisfiable_grammars_and_invalid_json_are_rejected(
    grammars: GrammarService, grammar: Grammar, message: str
) -> None:
    with pytest.raises(InvalidInput, match=f"^grammar: .*{message}"):
        grammars.guide(grammar)


def test_the_empty_text_satisfies_an_empty_expression(grammars: GrammarService) -> None:
    guide = grammars.guide(Grammar("regex", "()"))
    assert np.flatnonzero(guide.next_mask()).tolist() == [1]


async def test_a_dead_end_of_a_grammar_is_an_error(llama: LanguageModel) -> None:
    with pytest.raises(InvalidInput, match=r"^grammar: no text was found that satisfies the grammar"):
        await text(llama, "Say", max_new_tokens=20, grammar=Grammar("lark", 'start: "a" %json {"$ref": "#"}'))


# --- masks -----------------------------------------------------------------------------------------------------


class Gated:
    """A guide that allows every token; each mask is ready once the gate is open."""

    is_ended = False

    def __init__(self, size: int, gate: threading.Event, limit: int = 10**9) -> None:
        self.size, self.gate, self.limit, self.pending = size, gate, limit, False

    def next_mask(self) -> Any:
        return np.ones(self.size, np.bool_)

    def begin(self, token: int) -> None:
        self.pending = True

    def wait(self, until_s: float) -> bool:
        if not self.pending:
            return True
        self.limit -= 1
        if self.limit < 0:
            raise InvalidInput("grammar: too complex to follow")
        return self.gate.wait(max(0.0, until_s - time.monotonic()))

    def accept(self, token: int) -> None:
        assert self.gate.is_set(), "the engine must not wait for it here"
        self.pending = False

    def copy(self) -> "Gated":
        return self


def _parse_prompt(model: LanguageModel, guides: Any, **sampling: Any) -> Any:
    call = Generate(prompts=("The import",), sampling=Sampling(max_new_tokens=6, **sampling))
    (prompt,) = text_engine(model).split_call(call)
    return replace(prompt, guides=guides)


async def _generate(model: LanguageModel, prompt: Any) -> list[Generation]:
    async with aclosing(text_engine(model).generate([prompt])) as chunks:
        return [chunk async for chunk in chunks]


@pytest.mark.parametrize("sampling", [{}, {"n": 2, "do_sample": True, "seed": 3}, {"num_beams": 2, "n": 2}], ids=str)
async def test_other_sequences_continue_while_a_mask_is_computed(
    llama: LanguageModel, sampling: dict[str, Any]
) -> None:
    size, gate = text_engine(llama).intake.vocabulary.size, threading.Event()
    expected = await _generate(llama, _parse_prompt(llama, None, **sampling))
    task = asyncio.create_task(_generate(llama, _parse_prompt(llama, lambda: Gated(size, gate), **sampling)))
    for _ in range(2):
        assert (await text(llama, "Another", max_new_tokens=12, ignore_eos=True)).generated == 12
    assert not task.done()
    gate.set()
    result = await task
    assert _tokens(result) == _tokens(expected)


def _tokens(chunks: list[Generation]) -> list[tuple[int, list[int]]]:
    return sorted((each.choice, ids(each)) for chunk in chunks for each in chunk.texts)


async def test_a_slow_mask_fails_only_its_request(llama: LanguageModel) -> None:
    size, gate = text_engine(llama).intake.vocabulary.size, threading.Event()
    slow = asyncio.create_task(_generate(llama, _parse_prompt(llama, lambda: Gated(size, gate, limit=5))))
    other = await text(llama, "Another", max_new_tokens=12, ignore_eos=True)
    with pytest.raises(InvalidInput, match="too complex to follow"):
        await slow
    assert other.generated == 12


async def test_cancelling_while_a_mask_is_computed_frees_everything(llama: LanguageModel) -> None:
    size, gate = text_engine(llama).intake.vocabulary.size, threading.Event()
    task = asyncio.create_task(_generate(llama, _parse_prompt(llama, lambda: Gated(size, gate))))
    await text(llama, "Another", max_new_tokens=12, ignore_eos=True)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await text(llama, "Another", max_new_tokens=2)
    assert engine_load(llama) == (0, 0)


async def test_a_sequence_preempted_while_a_mask_is_computed_continues(llama_folder: Path) -> None:
    """The cache has room for the beginning of both sequences, not for their ends."""
    model = load_model(llama_folder, cache_memory=112 / 1024**2, prefix_cache=0)
    try:
        size, gate = text_engine(model).intake.vocabulary.size, threading.Event()
        expected = await text(model, "The import", max_new_tokens=6)
        other = asyncio.create_task(text(model, "Another one", max_new_tokens=120, ignore_eos=True))
        while not any(engine_load(model)):
            assert not other.done()
            await asyncio.sleep(0)
        task = asyncio.create_task(_generate(model, _parse_prompt(model, lambda: Gated(size, gate))))
        assert (await other).generated == 120
        preempted = text_engine(model).engine.scheduler.preempted
        gate.set()
        assert _tokens(await task) == [(0, ids(expected))]
        assert preempted == 1
    finally:
        await model.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grammar_compile_s": 0.0}, "'grammar_compile_s': expected at least 0.01, got 0.0"),
        ({"grammar_memory": 1.5}, "'grammar_memory': expected an integer, got 1.5"),
        ({"grammar_cache": 0}, "'grammar_cache': expected at least 1, got 0"),
    ],
)
def test_limits_are_settings(options: dict[str, Any], message: str) -> None:
    from dragoman.core.errors import ModelFailed
    from dragoman_text.generation import loading

    with pytest.raises(ModelFailed, match=message):
        loading.parse_options(options)


async def test_a_slow_step_is_bounded_by_its_setting(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request fails while the mask is still being computed; another one does not."""
    gate, allowed_tokens = threading.Event(), grammar_worker.allowed_tokens

    def slow(matcher: Any, size: int) -> Any:
        if threading.current_thread().name.startswith("grammar-step"):
            gate.wait(60)
        return allowed_tokens(matcher, size)

    monkeypatch.setattr(grammar_worker, "allowed_tokens", slow)
    model = load_model(llama_folder, grammar_step_s=0.01)
    try:
        task = asyncio.create_task(text(model, "Say", max_new_tokens=6, grammar=Grammar("regex", "[a-z ]{99}")))
        assert (await text(model, "Another", max_new_tokens=12, ignore_eos=True)).generated == 12
        with pytest.raises(InvalidInput, match=r"tokens that may come next within 0\.01 s \(grammar_step_s\)"):
            await task
        assert not gate.is_set()
    finally:
        gate.set()
        await model.close()


async def test_the_length_of_a_grammar_is_bounded_by_its_setting(llama_folder: Path) -> None:
    model = load_model(llama_folder, grammar_max_chars=10)
    try:
        with pytest.raises(InvalidInput, match=r"at most 10 characters \(grammar_max_chars\), got 11"):
            await text(model, "Say", max_new_tokens=2, grammar=Grammar("regex", "abcdefghijk"))
    finally:
        await model.close()
