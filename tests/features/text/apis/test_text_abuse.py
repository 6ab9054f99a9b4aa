"""Excessive requests to a real text engine are rejected quickly and do not delay other clients."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("torch")
pytest.importorskip("transformers")

import text_models
from text_server import TextServer, read_headers, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TextServer]:
    models = tmp_path_factory.mktemp("models")
    text_models.make_model(models / "tiny-llama")
    parameters = 'threads = 1\ndtype = "float32"\nprompt_s = 600.0\n'
    (models / "dragoman.toml").write_text(f"[models.tiny-llama.parameters]\n{parameters}")
    async with serve(str(models)) as server:
        yield server


def _lmi(**parameters: Any) -> tuple[str, Any]:
    return "/invocations", {"inputs": "The", "parameters": {"max_new_tokens": 5, **parameters}}


def _tgi(**parameters: Any) -> tuple[str, Any]:
    return "/generate", {"inputs": "The", "parameters": {"max_new_tokens": 5, **parameters}}


def _openai(**fields: Any) -> tuple[str, Any]:
    return "/v1/completions", {"model": "tgi", "prompt": "The", "max_tokens": 5, **fields}


DEEP_SCHEMA = '{"properties":{"a":' * 3000 + "{}" + "}}" * 3000
TOO_LONG_SCHEMA = {
    "type": "object",
    "properties": {f"k{i}": {"type": "string", "pattern": "^(a+)+$"} for i in range(9000)},
}
WIDE_SCHEMA = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(2500)}}
EXCESSIVE: list[tuple[tuple[str, Any], str]] = [
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
    (("/v1/responses", {"input": "word " * 1_000_000}), "`input`: expected less than 512 tokens"),
    (
        (
            "/v1/messages",
            {"max_tokens": 5, "system": "word " * 1_000_000, "messages": [{"role": "user", "content": "x"}]},
        ),
        "expected less than 512 tokens",
    ),
    (("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "word " * 1_000_000}]}), "less than 512"),
    (("/api/generate", {"model": "tiny-llama", "prompt": "word " * 1_000_000}), "expected less than 512 tokens"),
    (("/v2/models/tiny-llama/generate", {"text_input": "word " * 1_000_000}), "`text_input`: expected less than 512"),
    (("/tokenize", {"inputs": "word " * 1_000_000}), "`inputs`: expected less than 512 tokens, .* 5000000 characters"),
    (("/tokenize", {"prompt": "word " * 1_000_000}), "expected less than 512 tokens, .* 5000000 characters"),
    (("/tokenize", {"inputs": "🦆" * 600}), "`inputs`: expected at most 2048 tokens, got 24"),
    (
        ("/chat_tokenize", {"messages": [{"role": "user", "content": "word " * 1_000_000}]}),
        "`messages`: expected less than 512 tokens, .* characters",
    ),
    (
        _lmi(stop_sequences=[f"s{i}" for i in range(1000)]),
        "`stop_sequences` must be a list of at most 64 non-empty strings",
    ),
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
    (("/generate", b'{"inputs":"\xff\xfe"}'), "expected text in UTF-8, got the byte 0xff"),
    (("/invocations", b'{"inputs":"\\ud800"}'), "no low surrogate"),
    (("/v1/completions", b'{"prompt":' + b"[" * 9999 + b"]" * 9999 + b"}"), "JSON nests too deep"),
    (_lmi(guided_json=DEEP_SCHEMA), "`guided_json` must be a JSON schema"),
    (_lmi(guided_json=TOO_LONG_SCHEMA), "expected at most 262144 characters"),
    (_lmi(guided_json=WIDE_SCHEMA), "`guided_json`: "),
    (_lmi(guided_choice=[f"v{i}" for i in range(100_000)]), "expected at most 262144 characters"),
    (_lmi(guided_grammar="start: " + '("a"?) ' * 20_000), "`guided_grammar`: too (large|complex)"),
    (_tgi(grammar={"type": "regex", "value": "a|" * 500_000 + "b"}), "expected at most 262144 characters"),
    (_tgi(grammar={"type": "regex", "value": "((a{1,99}){1,99}){1,99}"}, max_new_tokens=99), "too complex"),
    (_tgi(grammar={"type": "regex", "value": "("}), "invalid regex"),
]


async def answer_to(server: TextServer, request: tuple[str, Any]) -> Any:
    """Return the response; a request whose grammar a busy machine does not compile in time is sent again."""
    for _ in range(20):
        response = await server.post(*request)
        if response.status != 503 or b"the machine is too busy" not in response.body:
            break
    return response


async def test_excessive_requests_are_rejected(server: TextServer) -> None:
    assert len(json.dumps(TOO_LONG_SCHEMA)) > 1 << 18 > len(json.dumps(WIDE_SCHEMA))
    for request, message in EXCESSIVE:
        response = await answer_to(server, request)
        error = response.json["error"]
        error = error if isinstance(error, str) else error["message"]
        assert 400 <= response.status < 500, (message, response.status)
        assert re.search(message, error), (message, error)
        assert (await server.post(*_tgi())).status == 200


CHAT = {"messages": [{"role": "user", "content": "x"}]}


def _messages(**fields: Any) -> tuple[str, Any]:
    return "/v1/messages", {"model": "tiny-llama", "max_tokens": 5, **CHAT, **fields}


NESTED_REPETITION = "((b{1000}){1000}){1000}"
RECURSIVE_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
PATTERN_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "string", "pattern": f"^{NESTED_REPETITION}$"}},
}
RECURSIVE_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
SLOW_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 99_999_989}}}
RECURSIVE_CHAT = {"messages": [{"role": "user", "content": "x"}], "tools": [RECURSIVE_TOOL], "tool_choice": "required"}
GRAMMARS: list[tuple[tuple[str, Any], int, str]] = [
    (_lmi(guided_regex=NESTED_REPETITION), 424, "`guided_regex`: .*too many expressions"),
    (_tgi(grammar={"type": "regex", "value": NESTED_REPETITION}), 422, "`grammar`: .*too many expressions"),
    (_openai(structured_outputs={"regex": NESTED_REPETITION}), 400, "`structured_outputs`: .*too many expressions"),
    (_openai(guided_grammar=f"start: /{NESTED_REPETITION}/"), 400, "`guided_grammar`: .*too many expressions"),
    (
        _openai(guided_json=SLOW_SCHEMA),
        400,
        r"`guided_json`: too complex: expected at most 1 s of CPU time .*grammar_compile_s",
    ),
    (_openai(structured_outputs={"json": {"$ref": "#"}}), 400, "`structured_outputs`: no finite JSON text"),
    (_openai(response_format=PATTERN_FORMAT), 400, "`response_format`: .*too many expressions"),
    (_openai(response_format=RECURSIVE_FORMAT), 400, "`response_format`: no finite JSON text"),
    (_tgi(grammar={"type": "json", "value": {"$ref": "#"}}), 422, "`grammar`: no finite JSON text"),
    (_lmi(guided_json={"$ref": "#"}), 424, "`guided_json`: no finite JSON text"),
    (("/v1/chat/completions", RECURSIVE_CHAT), 400, "no finite JSON text"),
    (
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "#"}}}},
        ),
        400,
        "`text.format`: no finite",
    ),
    (_messages(output_config={"format": {"type": "json_schema", "schema": {"$ref": "#"}}}), 400, "no finite JSON text"),
    (
        _messages(tools=[{"name": "f", "input_schema": {"$ref": "#"}}], tool_choice={"type": "tool", "name": "f"}),
        400,
        "no finite JSON text",
    ),
    (("/api/chat", {"model": "tiny-llama", **CHAT, "format": {"$ref": "#"}}), 400, "`format`: no finite"),
    (("/api/generate", {"model": "tiny-llama", "prompt": "x", "format": {"$ref": "#"}}), 400, "no finite JSON text"),
    (
        (
            "/v2/models/tiny-llama/generate",
            {"text_input": "x", "parameters": {"grammar": {"type": "regex", "value": NESTED_REPETITION}}},
        ),
        422,
        "`grammar`: .*too many expressions",
    ),
]


async def test_grammar_errors_of_each_api(server: TextServer) -> None:
    for request, status, message in GRAMMARS:
        response = await answer_to(server, request)
        assert response.status == status, (message, response.body)
        error = response.json["error"]
        error = error if isinstance(error, str) else error["message"]
        assert re.search(message, error), (message, error)


UNUSUAL: list[tuple[str, Any]] = [
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


async def test_too_long_texts_are_not_tokenized(server: TextServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman_text.generation.vocabulary.Vocabulary.tokenize", None)
    long_text = "word " * 1_000_000
    chat = {"messages": [{"role": "user", "content": long_text}]}
    for path, body in (
        ("/generate", {"inputs": long_text}),
        ("/v1/chat/completions", chat),
        ("/tokenize", {"inputs": long_text}),
        ("/tokenize", chat),
        ("/chat_tokenize", chat),
    ):
        assert (await server.post(path, body)).status in (400, 422), path


async def test_unusual_requests_within_limits_are_accepted(server: TextServer) -> None:
    for request in UNUSUAL:
        response = await server.post(*request)
        assert response.status == 200, (str(request)[:100], response.body[:200])


async def test_a_tiny_temperature_is_greedy(server: TextServer) -> None:
    greedy = await server.post(*_lmi())
    assert (await server.post(*_lmi(do_sample=True, temperature=1e-300))).json == greedy.json


async def test_a_long_prompt_does_not_delay_others(server: TextServer) -> None:
    """The prompt is tokenized in a thread, without the interpreter lock."""
    body = {"inputs": "word " * 400_000, "parameters": {"truncate": 5, "max_new_tokens": 2}}
    answered: list[int] = []  # meanwhile, in each attempt: a busy machine may run one of the threads first
    while len(answered) < 5 and max(answered, default=0) < 3:
        answered.append(0)
        long_request = asyncio.create_task(server.post("/generate", body))
        while not long_request.done():
            assert (await server.post(*_tgi(max_new_tokens=1))).status == 200
            answered[-1] += not long_request.done()
        assert (await long_request).status == 200
    assert max(answered) >= 3, answered


@pytest.mark.alone
async def test_memory_of_a_long_prompt_is_returned(server: TextServer) -> None:
    """Tokenization of these 2 MB takes 160 MiB."""
    long_prompt = {"inputs": "word " * 400_000, "parameters": {"truncate": 5, "max_new_tokens": 2}}
    assert (await server.post(*_tgi())).status == 200
    before = _private_mib()
    assert (await server.post("/generate", long_prompt)).status == 200
    async with asyncio.timeout(60):  # a thread may keep its result for a moment
        while _private_mib() - before >= 64:
            await asyncio.sleep(0.01)


def _private_mib() -> float:
    """Memory of this process that no other shares, which the server is part of."""
    sizes = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in sizes if line.startswith("Private_Dirty")) / 1024


MANY = {"model": "tiny-llama", "max_tokens": 480, "ignore_eos": True, "stream": True}
STREAMS: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {**MANY, **CHAT}),
    ("/v1/completions", {**MANY, "prompt": "The"}),
    ("/v1/responses", {"input": "The", "max_output_tokens": 480, "ignore_eos": True, "stream": True}),
    ("/v1/messages", {**MANY, **CHAT}),
    ("/api/chat", {"model": "tiny-llama", **CHAT, "options": {"num_predict": 480}}),
    ("/api/generate", {"model": "tiny-llama", "prompt": "The", "options": {"num_predict": 480}}),
    ("/generate_stream", {"inputs": "The", "parameters": {"max_new_tokens": 480}}),
    ("/v2/models/tiny-llama/generate_stream", {"text_input": "The", "parameters": {"max_tokens": 480}}),
    ("/invocations", {"inputs": "The", "stream": True, "parameters": {"max_new_tokens": 480}}),
]


async def test_disconnects_in_streams_of_every_api(server: TextServer) -> None:
    """Each stream is left after its first bytes; another client has the same text before, meanwhile and after."""
    expected = (await server.post(*_tgi())).body
    for path, body in STREAMS:
        left = [await server.send("POST", path, body) for _ in range(4)]
        for reader, _ in left:
            status, _ = await read_headers(reader)
            assert status == 200, path
            assert await reader.read(20), path
        others = [asyncio.create_task(server.post(*_tgi())) for _ in range(3)]
        for _, writer in left:
            writer.transport.abort()
        assert {(await other).body for other in others} == {expected}, path
    await server.wait_until_idle()
    assert (await server.post(*_tgi())).body == expected


async def test_unread_streams_free_their_slots(server: TextServer) -> None:
    """A completion that is not read ends, and its slot is used by others."""
    writers = []
    for _ in range(4):
        _, writer = await server.send("POST", *_stream(480))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writers.append(writer)
    async with asyncio.timeout(60):
        while not await server.engine_load():
            await asyncio.sleep(0.005)
        assert (await server.post(*_tgi())).status == 200
        for writer in writers:
            writer.transport.abort()
    await server.wait_until_idle()


async def test_two_hundred_clients_disconnect(server: TextServer) -> None:
    async def disconnect(i: int) -> None:
        reader, writer = await server.send("POST", *_stream(400 + i))
        status, _ = await read_headers(reader)
        assert status in (200, 503, 429)
        writer.close()

    for first in range(0, 200, 50):
        await asyncio.gather(*(disconnect(i) for i in range(first, first + 50)))
    await server.wait_until_idle()
    assert (await server.post(*_tgi())).status == 200


def _stream(tokens: int) -> tuple[str, Any]:
    count = min(tokens, 500)
    return "/invocations", {
        "inputs": "The",
        "stream": True,
        "parameters": {"max_new_tokens": count, "ignore_eos_token": True},
    }
