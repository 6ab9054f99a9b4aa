"""Small parts of the text engine, as tables: stop strings, defaults of models, options, limits and images."""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dragoman.core.errors import ModelFailed, Overloaded
from dragoman.core.sampling import MODEL_DEFAULTS
from dragoman.core.text import Chat, Sampling
from dragoman_text.generation import byte_alphabet, gpu, grammar_worker, memory, rounding
from dragoman_text.generation.completion_writer import EndConditions, StopStrings
from dragoman_text.generation.generation_config import apply_defaults, default_sampling, end_tokens, stated_sampling
from dragoman_text.generation.grammar_compiler import MINIMA, GrammarLimits
from dragoman_text.generation.image_queue import DEFAULT_MIB, ImageQueue, feature_bytes, image_bytes
from dragoman_text.generation.text_engine import check_options, notify, start_thread

# --- ends of a completion --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strings", "keep", "chunks", "released", "rest", "found"),
    [
        ((), False, ["a", "b"], ["a", "b"], "", ""),
        (("",), False, ["a"], ["a"], "", ""),
        (("end",), False, ["a e", "n", "x", "e"], ["a ", "", "enx", ""], "e", ""),
        (("end",), False, ["a en", "d b", "c"], ["a ", "", ""], "", "end"),
        (("end",), True, ["a en", "d b", "c"], ["a en", "d", ""], "", "end"),
        (("end",), True, ["a e", "x", "y"], ["a e", "x", "y"], "", ""),
        (("b", "bc"), False, ["abcd"], ["a"], "", "bc"),
        (("cd", "bc"), False, ["abcd"], ["a"], "", "bc"),
        (("b",), False, ["abab", "c"], ["a", ""], "", "b"),
        (("aab",), False, ["aaa", "b"], ["a", ""], "", "aab"),
        (("aab",), False, ["aaa", "c"], ["a", "aac"], "", ""),
        (("x",), False, ["y"], ["y"], "", ""),
        (("\n\n",), False, ["a\n", "\nb"], ["a", ""], "", "\n\n"),
        (("abc", "c"), True, ["ab", "c"], ["ab", "c"], "", "abc"),
    ],
)
def test_stop_strings(
    strings: Sequence[str], keep: bool, chunks: list[str], released: list[str], rest: str, found: str
) -> None:
    stops = StopStrings(strings, keep)
    assert [stops.add(chunk) for chunk in chunks] == released
    assert (stops.rest(), stops.found) == (rest, found)
    assert stops.rest() == ""


def test_tokens_that_end_a_completion() -> None:
    ends = EndConditions(frozenset({1, 2}), frozenset({2, 3}), 9)
    assert [ends.of(token) for token in range(5)] == ["", "eos_token", "eos_token", "stop_sequence", ""]


# --- defaults of a model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "of_tokenizer", "expected"),
    [
        ({}, {}, None, set()),
        ({}, {}, 7, {7}),
        ({"eos_token_id": 1}, {"eos_token_id": 2}, 7, {1, 7}),
        ({"eos_token_id": [1, 3, None]}, {"eos_token_id": 2}, None, {1, 3}),
        ({"eos_token_id": 0}, {"eos_token_id": 2}, None, {0}),
        ({}, {"eos_token_id": 2, "text_config": {"eos_token_id": 5}}, None, {2}),
        ({}, {"text_config": {"eos_token_id": 5}}, None, {5}),
        ({}, {"text_config": 5}, None, set()),
        ([1], "text", None, set()),
    ],
)
def test_end_tokens(tmp_path: Path, generation: Any, config: Any, of_tokenizer: Any, expected: set[int]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    vocabulary: Any = SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=of_tokenizer))
    assert end_tokens(tmp_path, vocabulary) == expected


NEUTRAL = {
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "typical_p": 1.0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "penalty_alpha": None,
    "watermarking_config": None,
    "stop_strings": None,
    "min_length": 0,
    "min_new_tokens": None,
}


def test_fields_of_a_generation_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "generation_config.json"
    assert default_sampling(tmp_path) == {}
    file.write_text("{")
    assert default_sampling(tmp_path) == {}
    file.write_text(json.dumps({**NEUTRAL, "temperature": 0.5, "top_k": None, "own": 1}))
    assert default_sampling(tmp_path) == {"temperature": 0.5}
    assert caplog.records == []
    for name, neutral in NEUTRAL.items():
        file.write_text(json.dumps({name: 5 if neutral != 5 else 6}))
        assert default_sampling(tmp_path) == {}
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage() == f"generation_config.json of '{tmp_path.name}': not applied: {name}"
        caplog.clear()
    file.write_text(json.dumps({"num_beams": 2, "min_length": 3, "temperature": -1}))
    assert default_sampling(tmp_path) == {}
    first, second = (record.getMessage() for record in caplog.records)
    where = f"generation_config.json of '{tmp_path.name}'"
    assert first.startswith(f"{where} is not applied: `temperature` must be ")
    assert second == f"{where}: not applied: num_beams, min_length"


ALL = frozenset(MODEL_DEFAULTS)
GIVEN = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "max_new_tokens": 9}


@pytest.mark.parametrize(
    ("sampling", "defaults", "changed"),
    [
        (Sampling(), GIVEN, {}),
        (Sampling(model_defaults=ALL), {}, {}),
        (
            Sampling(model_defaults=ALL),
            GIVEN,
            {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "max_new_tokens": 9, "shorten": True},
        ),
        (Sampling(model_defaults=frozenset({"top_k"})), GIVEN, {"top_k": 3}),
        (Sampling(model_defaults=ALL, max_new_tokens=2), GIVEN, {"temperature": 0.5, "top_p": 0.25, "top_k": 3}),
        (Sampling(model_defaults=ALL, num_beams=2), GIVEN, {"max_new_tokens": 9, "shorten": True}),
        (Sampling(model_defaults=ALL, num_beams=2, max_new_tokens=2), GIVEN, {}),
        (
            Sampling(model_defaults=ALL, do_sample=True),
            {"temperature": 0.0, "top_k": 3},
            {"do_sample": False, "top_k": 3},
        ),
        (Sampling(model_defaults=ALL, do_sample=True), {"top_p": 0, "temperature": 0.5}, {"do_sample": False}),
        (Sampling(model_defaults=ALL, do_sample=True), {"top_p": 0.5}, {"top_p": 0.5}),
    ],
)
def test_defaults_of_the_model_where_the_request_leaves_them(
    sampling: Sampling, defaults: Mapping[str, Any], changed: Mapping[str, Any]
) -> None:
    found = apply_defaults(sampling, defaults)
    names = [f.name for f in fields(Sampling) if getattr(found, f.name) != getattr(sampling, f.name)]
    assert {name: getattr(found, name) for name in names} == changed
    assert (found is sampling) is (not changed)


# --- options ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    count: int = 1
    share: float = 0.5
    name: str = "a"
    on: bool = False


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Options()),
        ({"count": 2, "share": 1, "name": "b", "on": True}, Options(2, 1.0, "b", True)),
        ({"other": 1}, "unknown parameter 'other'; the engine knows count, share, name, on"),
        ({"count": 1.0}, "parameter 'count': expected an integer, got 1.0"),
        ({"count": True}, "parameter 'count': expected an integer, got True"),
        ({"share": True}, "parameter 'share': expected a number, got True"),
        ({"share": "1"}, "parameter 'share': expected a number, got '1'"),
        ({"on": 1}, "parameter 'on': expected true or false, got 1"),
        ({"count": 0}, "parameter 'count': expected at least 1, got 0"),
        ({"share": 0.25}, "parameter 'share': expected at least 0.5, got 0.25"),
        ({"name": "c"}, "parameter 'name': expected one of a, b, got 'c'"),
    ],
)
def test_options_of_an_engine(given: Mapping[str, Any], expected: Any) -> None:
    def check() -> Options:
        return check_options(Options, given, {"count": 1, "share": 0.5}, {"name": ("a", "b")}, "the engine")

    if isinstance(expected, str):
        with pytest.raises(ModelFailed) as error:
            check()
        assert error.value.message == expected
    else:
        found = check()
        assert found == expected
        assert [type(value) for value in asdict(found).values()] == [int, float, str, bool]


def test_limits_of_grammars() -> None:
    limits = GrammarLimits()
    assert asdict(limits) == {
        "grammar_max_chars": 262_144,
        "grammar_compile_s": 1.0,
        "grammar_memory": 256,
        "grammar_step_s": 1.0,
        "grammar_cache": 64,
        "compact_json": False,
    }
    assert MINIMA == {
        "grammar_max_chars": 1,
        "grammar_compile_s": 0.01,
        "grammar_memory": 16,
        "grammar_step_s": 0.01,
        "grammar_cache": 1,
    }
    assert {field.name for field in fields(GrammarLimits)} - MINIMA.keys() == {"compact_json"}


def test_a_thread_of_an_engine() -> None:
    lived: list[Any] = []
    thread = start_thread(lambda: "engine", lambda engine: lived.append((engine, threading.current_thread())), "text-x")
    thread.join()
    assert lived == [("engine", thread)]
    assert (thread.name, thread.daemon) == ("text-x", True)

    def fail() -> str:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        start_thread(fail, lived.append, "text-y")
    assert len(lived) == 1


async def test_waiters_are_woken() -> None:
    events = [asyncio.Event() for _ in range(2)]
    waiters = [SimpleNamespace(wake=event.set) for event in events]
    notify(asyncio.get_running_loop(), waiters)
    await asyncio.gather(*(event.wait() for event in events))
    closed = asyncio.new_event_loop()
    closed.close()
    notify(closed, waiters)  # of a call whose loop has ended


# --- grammars --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("one\ntwo", "one"),
        ("x" * 400, "x" * 300),
        ("one\nerror: because\nerror: later", "one because"),
        (f"one\n  error: no\nerror: {'y' * 400}", f"one {'y' * 300}"),
        ("NoExtension here\nerror: a", grammar_worker.UNSATISFIABLE),
        ("panic at\nerror: a", "too large to compile"),
        ("\nerror: a", "a"),
    ],
)
def test_errors_of_the_compiler_in_one_line(error: str, expected: str) -> None:
    assert grammar_worker.first_line(error) == expected


@pytest.mark.parametrize("text", ["{}", "[]", '["a", ""]', '["a", 5]', '"a"'])
def test_invalid_choices(text: str) -> None:
    with pytest.raises(ValueError, match=r"^expected a list of non-empty strings$"):
        grammar_worker.grammar_text("choice", text)


def test_unknown_kinds_of_grammars() -> None:
    with pytest.raises(ValueError, match=r"^unknown kind of grammar: 'verse'$"):
        grammar_worker.grammar_text("verse", "a")


# --- images, memory and bytes ----------------------------------------------------------------------------------------


def test_memory_of_images_that_wait() -> None:
    images = ImageQueue(10 << 20)
    full = r"^images: too many are waiting: expected at most 10 MiB \(image_memory\)$"
    with images.reserve(6 << 20) as add:
        with pytest.raises(Overloaded, match=full), images.reserve((4 << 20) + 1):
            pass
        with images.reserve(4 << 20):  # up to the limit
            with pytest.raises(Overloaded, match=full):
                add(1)
            with images.reserve(0):  # without images nothing is refused
                pass
        add(4 << 20)
        with pytest.raises(Overloaded, match=full), images.reserve(1):
            pass
    with images.reserve(11 << 20) as add:  # a call alone has any size
        add(11 << 20)
    with images.reserve(10 << 20):
        pass
    images.close()
    assert DEFAULT_MIB == 1024


def test_sizes_of_images() -> None:
    part = {"type": "image", "base64": "abcd"}
    chat = Chat(({"role": "user", "content": [part, {"type": "text", "text": "t"}, {**part, "base64": "ab"}]},))
    assert image_bytes([chat, "text", (1, 2)]) == 6
    features: list[Any] = [SimpleNamespace(features={"a": torch.zeros(3), "b": 5}), SimpleNamespace(features={})]
    assert feature_bytes(features) == 12


def test_memory_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert memory.share_of_free_memory() == 1_024_000
    monkeypatch.setattr(os, "sysconf_names", {})
    assert memory.share_of_free_memory() == 1 << 30
    memory.release_memory()


def test_the_alphabet_of_bytes() -> None:
    words = byte_alphabet.as_word(bytes(range(256)))
    assert (len(words), len(set(words)), len(byte_alphabet.BYTES)) == (256, 256, 256)
    assert words[33:127] == "".join(map(chr, range(33, 127)))
    assert words[161:173] + words[174:] == "".join(map(chr, (*range(161, 173), *range(174, 256))))
    assert words[:33] == "".join(map(chr, range(256, 289)))
    assert words[127:161] == "".join(map(chr, range(289, 323)))
    assert words[173] == chr(323)
    assert byte_alphabet.as_bytes(words) == bytes(range(256))
    for word, content in (
        ("\u0120a", b" a"),
        ("", b""),
        ("\u4e2d", "\u4e2d".encode()),
        ("\u0120\u4e2d", "\u0120\u4e2d".encode()),
    ):
        assert byte_alphabet.as_bytes(word) == content


def test_data_to_compare_implementations() -> None:
    assert rounding.check_tokens(4, 10_000) == [11, 7930, 5849, 3768]
    columns, rows = rounding.cancelling(3, 2, 33, torch.float64)
    assert (columns.shape, rows.shape, columns.dtype) == ((3, 33), (2, 33), torch.float64)
    assert (columns[:, -1] == 0).all()
    half = columns[:, :16]
    assert torch.equal(half.abs().sort().values, columns[:, 16:32].abs().sort().values)
    sizes = half.abs().max() / half.abs().min()
    assert sizes > 100  # the terms differ
    again, _ = rounding.cancelling(3, 2, 33, torch.float64)
    assert torch.equal(columns, again)
    products = torch.einsum("ri,ci->rc", rows, columns)
    assert (products.abs() < 1e-9 * rows.abs().max() * columns.abs().max() * 33).all()


def test_no_kernels_for_a_gpu_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    assert gpu.kernels(torch.device("cpu"), torch.float32) is None
    assert caplog.records == []


def test_sampling_in_the_settings_of_a_model() -> None:
    assert stated_sampling({"temperature": 1, "top_k": 5}) == {"temperature": 1.0, "top_k": 5}
    with pytest.raises(ModelFailed, match=r"'sampling': expected frequency_penalty, .*, got 'temp'"):
        stated_sampling({"temp": 1})
    with pytest.raises(ModelFailed, match="'sampling': `temperature` must be "):
        stated_sampling({"temperature": -1})
