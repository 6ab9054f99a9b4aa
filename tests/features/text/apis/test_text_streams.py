"""Text streams: chunks in time, disconnected clients, and isolation of concurrent requests."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dragoman
from dragoman.core.calls import Generate
from dragoman.core.text import Generation, PromptInfo, Text, Token
from dragoman.protocols.parameters import split_by_token
from text_server import TextServer, events, lines, read_chunks, read_headers, read_response, serve

CHAT: dict[str, Any] = {"model": "ReverseModel", "messages": [{"role": "user", "content": "!wait now"}], "stream": True}
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/invocations", {"inputs": "!wait now", "stream": True}),
    ("/generate_stream", {"inputs": "!wait now"}),
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"model": "ReverseModel", "prompt": "!wait now", "stream": True}),
    ("/v2/models/ReverseModel/generate_stream", {"text_input": "!wait now"}),
]


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve() as server:
        yield server


async def _wait_until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_chunks_arrive_as_they_are_generated(server: TextServer, path: str, body: Any) -> None:
    reader, writer = await server.send("POST", path, body)
    status, headers = await read_headers(reader)
    assert (status, headers["transfer-encoding"]) == (200, "chunked")
    chunks = read_chunks(reader)
    text = b""
    while b"now" not in text:  # it arrives while the model waits before the next
        text += await asyncio.wait_for(anext(chunks), 60)
    assert b"!wait" not in text
    assert server.model().active == 1
    server.model().gate.set()
    text += b"".join([chunk async for chunk in chunks])
    assert b"!wait" in text
    writer.close()


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_a_disconnect_cancels_a_stream(server: TextServer, path: str, body: Any) -> None:
    model = server.model()
    _, writer = await server.send("POST", path, body)
    await _wait_until(lambda: model.active)
    writer.close()
    await _wait_until(lambda: not model.active)
    assert model.cancelled == 1


async def test_a_disconnect_cancels_a_plain_request(server: TextServer) -> None:
    model = server.model()
    for path in ("/generate", "/invocations"):
        _, writer = await server.send("POST", path, {"inputs": "!wait now"})
        await _wait_until(lambda: model.active)
        writer.close()
        await _wait_until(lambda: not model.active)
    assert model.cancelled == 2


async def test_two_hundred_clients_disconnect() -> None:
    async with serve(max_queue=0, replicas=4) as server:
        model = server.model()

        async def disconnect(i: int) -> None:
            path, body = STREAMS[i % len(STREAMS)]
            reader, writer = await server.send("POST", path, body)
            await read_headers(reader)
            await reader.read(1)
            writer.close()

        await asyncio.gather(*map(disconnect, range(200)))
        await _wait_until(lambda: not model.active)
        assert model.cancelled == 200
        response = await server.post("/generate", {"inputs": "still here"})
        assert response.json == {"generated_text": "here still"}


INVALID: list[tuple[str, dict[str, Any]]] = [
    ("/invocations", {"inputs": "a", "parameters": {"temperature": -1}}),
    ("/generate", {"inputs": "a " * 99}),
    ("/v1/completions", {"model": "ReverseModel", "prompt": "a b c !fault d"}),
    ("/generate_stream", {"inputs": "a b !fault c"}),
    ("/invocations", {"inputs": "x !fault y", "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), INVALID)
async def test_one_failed_request_does_not_affect_seven_others(server: TextServer, path: str, body: Any) -> None:
    valid: list[tuple[str, Any]] = [
        ("/invocations", {"inputs": "one two three", "parameters": {"details": True}}),
        ("/invocations", {"inputs": "four five", "stream": True}),
        ("/generate", {"inputs": "six seven eight", "parameters": {"details": True}}),
        ("/generate_stream", {"inputs": "nine ten"}),
        ("/invocations", {"inputs": ["a b", "c d"]}),
        ("/v2/models/ReverseModel/generate", {"text_input": "eleven twelve"}),
        ("/v2/models/ReverseModel/generate_stream", {"text_input": "thirteen"}),
    ]
    sequential = [(await server.post(*each)).body for each in valid]
    failed, *concurrent = await asyncio.gather(server.post(path, body), *(server.post(*each) for each in valid))
    assert [response.body for response in concurrent] == sequential
    assert b"rror" in failed.body


async def test_a_request_pipelined_after_a_stream(server: TextServer) -> None:
    reader, writer = await server.send("POST", "/generate_stream", {"inputs": "a b"})
    body = b'{"inputs":"c"}'
    writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    assert events((await read_response(reader)).body)[-1]["generated_text"] == "b a"
    assert (await read_response(reader)).json == {"generated_text": "c"}
    writer.close()


# --- the generate extension of Open Inference ----------------------------------------------------------------


async def test_open_inference_generates(server: TextServer) -> None:
    response = await server.post(
        "/v2/models/ReverseModel/generate", {"text_input": "a b", "parameters": {"max_tokens": 1}}
    )
    assert response.body == b'{"model_name":"ReverseModel","text_output":"b"}'
    response = await server.post("/v2/models/ReverseModel/generate_stream", {"text_input": "a b", "id": "7"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.body == (
        b'data: {"id":"7","model_name":"ReverseModel","text_output":"b","done":false}\n\n'
        b'data: {"id":"7","model_name":"ReverseModel","text_output":" a","done":false}\n\n'
        b'data: {"id":"7","model_name":"ReverseModel","text_output":"","done":true}\n\n'
    )
    assert server.model().calls[-1].sampling.max_new_tokens == 20
    none = {"text_input": "a b", "parameters": {"max_tokens": 0}}
    response = await server.post("/v2/models/ReverseModel/generate", none)
    assert response.json == {"model_name": "ReverseModel", "text_output": ""}
    response = await server.post("/v2/models/ReverseModel/generate_stream", none)
    assert events(response.body) == [{"model_name": "ReverseModel", "text_output": "", "done": True}]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 422, "not valid JSON"),
        ({"text_input": ""}, 422, "`text_input` must be a non-empty string"),
        (
            {"text_input": "a", "parameters": {"max_tokens": -1}},
            422,
            "`max_tokens` must be an integer >= 0",
        ),
        ({"text_input": "a", "parameters": {"temperature": -1}}, 422, "`temperature`"),
        ({"text_input": "a", "parameters": {"top_p": 1.5}}, 422, "`top_p`"),
        (
            {"text_input": "a", "parameters": {"num_beams": 2, "best_of": 4}},
            422,
            "`best_of` must be <= `num_beams`; got 4 and 2",
        ),
        ({"text_input": "a", "parameters": {"logit_bias": {"1" * 5000: 1}}}, 422, "`logit_bias` must be an object of"),
        ({"text_input": "a", "parameters": {"stop": ["a"] * 65}}, 422, "`stop` must be a list of at most 64"),
        ({"text_input": "a !fault"}, 424, "generated !fault"),
        ({"text_input": "a", "max_tokens": "5"}, 422, "`max_tokens` must be an integer >= 0"),
        (
            {"text_input": "a", "sampling_parameters": {}},
            422,
            "`sampling_parameters` must be a JSON object as a string",
        ),
        ({"text_input": "a", "sampling_parameters": "[1]"}, 422, "must be a JSON object; got a list"),
    ],
)
async def test_open_inference_rejects(server: TextServer, body: Any, status: int, message: str) -> None:
    for path in ("generate", "generate_stream"):
        response = await server.post(f"/v2/models/ReverseModel/{path}", body)
        assert response.status == status
        assert set(response.json) == {"error"}
        assert message in response.json["error"]
    streamed = await server.post("/v2/models/ReverseModel/generate_stream", {"text_input": "!fault a"})
    assert set(events(streamed.body)[-1]) == {"error"}
    missing = await server.post("/v2/models/missing/generate", {"text_input": "a"})
    assert missing.status == 404


async def test_triton_names_of_parameters(server: TextServer) -> None:
    path = "/v2/models/ReverseModel/generate"
    body = {"text_input": "a b c", "max_tokens": 2, "bad_words": "", "stop_words": "", "stream": False, "other": 1}
    response = await server.post(path, body)
    assert response.json["text_output"] == "c b"
    assert response.headers["x-ignored-parameters"] == "other"
    options = {"exclude_input_in_output": False, "sampling_parameters": '{"max_tokens": 600, "seed": 3}'}
    response = await server.post(path, {"text_input": "a b", "random_seed": 5, "stop_words": ["x", ""], **options})
    assert response.json["text_output"] == "a bb a"
    sampling = server.model().calls[-1].sampling
    assert (sampling.max_new_tokens, sampling.stop, sampling.seed) == (600, ("x",), 5)


async def test_details_of_a_completion(server: TextServer) -> None:
    body = {"text_input": "a b", "parameters": {"details": True, "max_tokens": 1}}
    response = await server.post("/v2/models/ReverseModel/generate", body)
    details = response.json["details"]
    assert details["finish_reason"] == "length"
    assert [token["text"] for token in details["logprobs"]] == ["b"]
    assert details["logprobs"][0].keys() == {"id", "text", "logprob", "special"}
    response = await server.post("/v2/models/ReverseModel/generate_stream", body)
    streamed = [each["details"] for each in events(response.body)]
    assert [each.get("finish_reason") for each in streamed][-1] == "length"
    assert [token["text"] for each in streamed for token in each["logprobs"]] == ["b"]


# --- texts and their tokens ----------------------------------------------------------------------------------


@given(st.text(max_size=20), st.lists(st.text(max_size=4), max_size=6))
def test_text_split_by_tokens_joins_to_the_text(text: str, tokens: list[str]) -> None:
    parts = split_by_token(text, [Token(i, token) for i, token in enumerate(tokens)])
    assert len(parts) == len(tokens)
    assert "".join(parts) == (text if tokens else "")


@given(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=6))
def test_text_is_split_exactly_by_its_tokens(tokens: list[str]) -> None:
    assert split_by_token("".join(tokens), [Token(i, token) for i, token in enumerate(tokens)]) == tokens


@pytest.mark.parametrize(
    ("text", "tokens", "parts"),
    [
        ("héy", ["h", "\ufffd", "\ufffd", "y"], ["h", "", "é", "y"]),
        ("a 水 b", ["a", " \ufffd", "\ufffd", "\ufffd", " b"], ["a", "", "", " 水", " b"]),
        ("one two", ["one", "two"], ["one", " two"]),
        ("a w", ["a", " wor", "ld"], ["a", "", " w"]),
        ("", ["", "\ufffd"], ["", ""]),
        ("ab", ["x"], ["ab"]),
    ],
)
def test_split_characters_belong_to_their_last_token(text: str, tokens: list[str], parts: list[str]) -> None:
    assert split_by_token(text, [Token(i, token) for i, token in enumerate(tokens)]) == parts


async def test_json_lines_join_to_the_text(server: TextServer) -> None:
    result = lines((await server.post("/invocations", {"inputs": "ü 水 🦆", "stream": True})).body)
    assert "".join(line["token"]["text"] for line in result) == result[-1]["generated_text"] == "🦆 水 ü"


PIECES = ("a", '"x"', 'é"\n', "", "}]}\u2028", "\U0001f600")


class Quotes(dragoman.Model):
    """Two choices of texts with characters that JSON escapes."""

    placement = "inline"

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        prompts: tuple[PromptInfo, ...] = (PromptInfo("p", 1),)
        for number, piece in enumerate(PIECES, 1):
            for choice in (1, 0):
                yield Generation((Text(choice=choice, text=piece + str(choice), generated=number),), prompts)
                prompts = ()
        for choice in (0, 1):
            yield Generation((Text(choice=choice, generated=len(PIECES), finish="length"),))


@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
async def test_chunks_of_completions_differ_in_their_text_only(usage: Any) -> None:
    async with serve(Quotes) as server:
        body = {"model": "Quotes", "prompt": "p", "n": 2, "stream": True}
        *found, done = events((await server.post("/v1/completions", body | {"stream_options": usage or {}})).body)
    assert done == "[DONE]"
    if usage:
        assert found.pop()["usage"]["completion_tokens"] == 2 * len(PIECES)
    for choice in (0, 1):
        chunks = [chunk for chunk in found if chunk["choices"][0]["index"] == choice]
        texts = [chunk["choices"][0].pop("text") for chunk in chunks]
        assert texts == [*(piece + str(choice) for piece in PIECES), ""]
        assert chunks.pop()["choices"][0]["finish_reason"] == "length"
        assert all(chunk == chunks[0] for chunk in chunks)
        assert ("usage" in chunks[0]) == bool(usage)
