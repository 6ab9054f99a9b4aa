"""Requests that ask too much of a real engine are refused, quickly and clearly, and nobody else waits for them."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import text_models

from .text_house import House, read_head, speaking


@pytest.fixture(scope="module")
def models() -> Iterator[Path]:
    with text_models.made("llama") as folder:
        yield folder


@pytest.fixture
async def house(models: Path) -> AsyncIterator[House]:
    (models / "dragoman.toml").write_text('[models.tiny-llama.parameters]\nthreads = 1\ndtype = "float32"\n')
    async with speaking(str(models)) as made:
        yield made


def _lmi(**parameters: Any) -> tuple[str, Any]:
    return "/invocations", {"inputs": "The", "parameters": {"max_new_tokens": 5, **parameters}}


def _tgi(**parameters: Any) -> tuple[str, Any]:
    return "/generate", {"inputs": "The", "parameters": {"max_new_tokens": 5, **parameters}}


def _openai(**fields: Any) -> tuple[str, Any]:
    return "/v1/completions", {"model": "tgi", "prompt": "The", "max_tokens": 5, **fields}


DEEP = '{"properties":{"a":' * 3000 + "{}" + "}}" * 3000
WIDE = {"type": "object", "properties": {f"k{i}": {"type": "string", "pattern": "^(a+)+$"} for i in range(9000)}}
ROWS = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(2500)}}
REFUSED: list[tuple[tuple[str, Any], str]] = [
    (("/invocations", {"inputs": "word " * 1_000_000}), "expected less than 512 tokens, .* got 5000000 characters"),
    (("/generate", {"inputs": "🦆" * 1_000_000}), "expected less than 512 tokens, .* got 1000000 characters"),
    (
        ("/v1/chat/completions", {"model": "tgi", "messages": [{"role": "user", "content": "a b " * 9000}]}),
        "less than 512",
    ),
    (
        ("/v1/chat/completions", {"model": "tgi", "messages": [{"role": "user", "content": "word " * 1_000_000}]}),
        "expected less than 512 tokens, .* got 5000031 characters",
    ),
    (("/tokenize", {"inputs": "word " * 1_000_000}), "`inputs`: expected less than 512 tokens, .* 5000000 characters"),
    (("/tokenize", {"prompt": "word " * 1_000_000}), "expected less than 512 tokens, .* 5000000 characters"),
    (("/tokenize", {"inputs": "🦆" * 600}), "`inputs`: expected at most 2048 tokens, got 24"),
    (
        ("/chat_tokenize", {"messages": [{"role": "user", "content": "word " * 1_000_000}]}),
        "`messages`: expected less than 512 tokens, .* characters",
    ),
    (_lmi(stop_sequences=[f"s{i}" for i in range(1000)]), "`stop_sequences` must be a list of at most 64 texts"),
    (_openai(stop=["a" * 5_000_000]), "`stop` must be a list"),
    (
        _openai(logit_bias={str(i): 1 for i in range(100_000)}),
        "`logit_bias` must be an object of at most 1024 token ids",
    ),
    (_openai(logit_bias={"5": 1e308}), "each with a number from -100 to 100"),
    (_openai(logit_bias={"99999": 1}), "expected token ids from 0 to 699"),
    (_openai(allowed_token_ids=[1, 99999]), "expected token ids from 0 to 699"),
    (_openai(n=128), "`n` must be <= 16; got 128"),
    (_lmi(num_beams=10**9), "`num_beams` must be <= 16; got 1000000000"),
    (_lmi(repetition_penalty=1e-300), "`repetition_penalty` must be a number that is strictly positive, from 0.0001"),
    (_lmi(num_beams=2, length_penalty=1e308), "`length_penalty` must be a number >= -100.0 and <= 100.0"),
    (_tgi(temperature=1e300), "`temperature` must be a number that is strictly positive"),
    (("/generate", b'{"inputs":"\xff\xfe"}'), "not valid UTF-8"),
    (("/invocations", b'{"inputs":"\\ud800"}'), "no low surrogate"),
    (("/v1/completions", b'{"prompt":' + b"[" * 9999 + b"]" * 9999 + b"}"), "JSON nests too deep"),
    (_lmi(guided_json=DEEP), "`guided_json` must be a JSON schema"),
    (_lmi(guided_json=WIDE), "expected at most 262144 characters"),
    (_lmi(guided_json=ROWS), "`guided_json`: "),
    (_lmi(guided_choice=[f"v{i}" for i in range(100_000)]), "expected at most 262144 characters"),
    (_lmi(guided_grammar="start: " + '("a"?) ' * 20_000), "`guided_grammar`: too (large|complex)"),
    (_tgi(grammar={"type": "regex", "value": "a|" * 500_000 + "b"}), "expected at most 262144 characters"),
    (_tgi(grammar={"type": "regex", "value": "((a{1,99}){1,99}){1,99}"}, max_new_tokens=99), "too complex"),
    (_tgi(grammar={"type": "regex", "value": "("}), "invalid regex"),
]


async def test_too_much_is_refused(house: House) -> None:
    for asked, message in REFUSED:
        answer = await house.post(*asked)
        told = answer.json["error"]
        told = told if isinstance(told, str) else told["message"]
        assert 400 <= answer.status < 500, (message, answer.status)
        assert re.search(message, told), (message, told)
        assert (await house.post(*_tgi())).status == 200


BOMB = "((b{1000}){1000}){1000}"
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
PATTERN = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": f"^{BOMB}$"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
LOOP = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 99_999_989}}}
CHAT = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "tool_choice": "required"}
GRAMMARS: list[tuple[tuple[str, Any], int, str]] = [
    (_lmi(guided_regex=BOMB), 424, "`guided_regex`: .*too many expressions"),
    (_tgi(grammar={"type": "regex", "value": BOMB}), 422, "`grammar`: .*too many expressions"),
    (_openai(structured_outputs={"regex": BOMB}), 400, "`structured_outputs`: .*too many expressions"),
    (_openai(guided_grammar=f"start: /{BOMB}/"), 400, "`guided_grammar`: .*too many expressions"),
    (
        _openai(guided_json=LOOP),
        400,
        r"`guided_json`: too complex: expected at most 1 s of CPU time .*grammar_compile_s",
    ),
    (_openai(structured_outputs={"json": {"$ref": "#"}}), 400, "`structured_outputs`: no finite JSON text"),
    (_openai(response_format=PATTERN), 400, "`response_format`: .*too many expressions"),
    (_openai(response_format=FORM), 400, "`response_format`: no finite JSON text"),
    (_tgi(grammar={"type": "json", "value": {"$ref": "#"}}), 422, "`grammar`: no finite JSON text"),
    (_lmi(guided_json={"$ref": "#"}), 424, "`guided_json`: no finite JSON text"),
    (("/v1/chat/completions", CHAT), 400, "no finite JSON text"),
]


async def test_grammars_are_refused_as_each_api_refuses(house: House) -> None:
    for asked, status, message in GRAMMARS:
        answer = await house.post(*asked)
        assert answer.status == status, (message, answer.body)
        told = answer.json["error"]
        told = told if isinstance(told, str) else told["message"]
        assert re.search(message, told), (message, told)


ODD: list[tuple[str, Any]] = [
    _lmi(do_sample=True, temperature=1e-300, details=True),
    _lmi(do_sample=True, temperature=1e6),
    _lmi(do_sample=True, top_k=2**31 - 1),
    _lmi(max_new_tokens=2**31 - 1, stop_sequences=["\n", "a", "e"]),
    _lmi(bad_sequences=[f"word {i}" for i in range(256)]),
    _openai(logit_bias={str(i): -100 for i in range(700)}),
    _tgi(grammar={"type": "regex", "value": "(a+)+$"}),
    _tgi(grammar={"type": "regex", "value": ".{1000000000}"}),
    ("/generate", {"inputs": "word " * 100_000, "parameters": {"truncate": 5, "max_new_tokens": 2}}),
    ("/generate", {"inputs": "\x00\x01", "parameters": {"max_new_tokens": 2}}),
    _openai(guided_choice=["\x7f\x01"]),
    ("/invocations", {"inputs": ["a"] * 256, "parameters": {"max_new_tokens": 1}}),
]


async def test_what_is_too_large_is_not_cut_into_tokens(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = house.model("tiny-llama")._loaded.intake.vocabulary
    monkeypatch.setattr(vocabulary, "cut", None)
    huge = "word " * 1_000_000
    chat = {"messages": [{"role": "user", "content": huge}]}
    for path, body in (
        ("/generate", {"inputs": huge}),
        ("/v1/chat/completions", chat),
        ("/tokenize", {"inputs": huge}),
        ("/tokenize", chat),
        ("/chat_tokenize", chat),
    ):
        assert (await house.post(path, body)).status in (400, 422), path


async def test_what_is_odd_and_within_limits_is_answered(house: House) -> None:
    for asked in ODD:
        answer = await house.post(*asked)
        assert answer.status == 200, (str(asked)[:100], answer.body[:200])


async def test_hardly_any_temperature_is_none(house: House) -> None:
    greedy = await house.post(*_lmi())
    assert (await house.post(*_lmi(do_sample=True, temperature=1e-300))).json == greedy.json


async def test_nobody_waits_while_a_long_prompt_is_cut(house: House) -> None:
    """The prompt is cut in a thread, by a library that lets others go on."""
    body = {"inputs": "word " * 400_000, "parameters": {"truncate": 5, "max_new_tokens": 2}}
    long = asyncio.create_task(house.post("/generate", body))
    begun_s, answered = time.monotonic(), 0
    while not long.done():
        assert (await house.post(*_tgi(max_new_tokens=1))).status == 200
        answered += not long.done()
    took_s = time.monotonic() - begun_s
    assert (await long).status == 200
    assert answered >= 3, f"{answered} answers in {took_s} s"


async def test_who_never_reads_a_stream_holds_no_more_than_its_text(house: House) -> None:
    """The engine goes on without its reader, and gives its place to others when the text is written."""
    service = house.model("tiny-llama")._loaded.service
    held = []
    for _ in range(4):
        reader, writer = await house.send("POST", *_stream(480))
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        held.append(writer)
    async with asyncio.timeout(60):
        while service.active == 0:
            await asyncio.sleep(0.005)
        assert (await house.post(*_tgi())).status == 200
        for writer in held:
            writer.transport.abort()
        while service.active:
            await asyncio.sleep(0.005)


async def test_two_hundred_leave_a_real_engine(house: House) -> None:
    service, engine = house.model("tiny-llama")._loaded.service, house.model("tiny-llama")._loaded.engine

    async def leave(i: int) -> None:
        reader, writer = await house.send("POST", *_stream(400 + i))
        status, _ = await read_head(reader)
        assert status in (200, 503, 429)
        writer.close()

    for first in range(0, 200, 50):
        await asyncio.gather(*(leave(i) for i in range(first, first + 50)))
    async with asyncio.timeout(60):
        while service.active or engine.has_work:
            await asyncio.sleep(0.005)
    assert (await house.post(*_tgi())).status == 200


def _stream(tokens: int) -> tuple[str, Any]:
    count = min(tokens, 500)
    return "/invocations", {
        "inputs": "The",
        "stream": True,
        "parameters": {"max_new_tokens": count, "ignore_eos_token": True},
    }


def test_the_schemas_are_json() -> None:
    assert len(json.dumps(WIDE)) > 1 << 18 > len(json.dumps(ROWS))
