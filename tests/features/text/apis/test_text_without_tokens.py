"""Models that generate text without tokens, durations or prompts: each API answers with what there is."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import dragoman
from dragoman.core.calls import Generate
from dragoman.core.text import Generation, Text, merge_chunks
from text_server import TextServer, events, lines, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES = [{"role": "user", "content": "x"}]


class Plain(dragoman.Model):
    """Generate the text "a b" in two chunks."""

    placement = "inline"

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        chunks = [
            Generation((Text(0, 0, "a ", (), 1),)),
            Generation((Text(0, 0, "b", (), 2, finish="eos_token", whole="a b"),)),
        ]
        for chunk in chunks if call.stream else [merge_chunks(chunks)]:
            yield chunk


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[TextServer]:
    async with serve(Plain) as server:
        yield server


async def post(server: TextServer, path: str, body: dict[str, Any]) -> bytes:
    response = await server.post(path, body)
    assert response.status == 200, response
    return bytes(response.body)


async def test_lmi(server: TextServer) -> None:
    whole = json.loads(await post(server, "/invocations", {"inputs": "x"}))
    assert whole == {"generated_text": "a b"}
    first, last = (
        json.loads(line)
        for line in (await post(server, "/invocations", {"inputs": "x", "stream": True})).split(b"\n")
        if line
    )
    assert first == {"token": {"id": -1, "text": "a ", "log_prob": 0.0}}
    assert last == {
        "token": {"id": -1, "text": "b", "log_prob": 0.0},
        "generated_text": "a b",
        "details": {"finish_reason": "eos_token", "generated_tokens": 2, "inputs": "x"},
    }


async def test_tgi(server: TextServer) -> None:
    first, last = events(await post(server, "/generate_stream", {"inputs": "x"}))
    assert (first["token"]["text"], first["generated_text"], first["details"]) == ("a ", None, None)
    assert (last["token"]["text"], last["generated_text"]) == ("b", "a b")
    assert last["details"] == {"finish_reason": "eos_token", "generated_tokens": 2, "seed": None, "input_length": 0}
    body = {"inputs": "x", "parameters": {"details": True}}
    whole = json.loads(await post(server, "/generate", body))
    assert whole["generated_text"] == "a b"
    assert (whole["details"]["tokens"], whole["details"]["prefill"]) == ([], [])


async def test_openai(server: TextServer) -> None:
    found = events(await post(server, "/v1/completions", {"prompt": "x", "stream": True}))
    assert [(each["choices"][0]["text"], each["choices"][0]["finish_reason"]) for each in found[:-1]] == [
        ("a ", None),
        ("b", "stop"),
    ]
    found = events(await post(server, "/v1/chat/completions", {"messages": MESSAGES, "stream": True}))
    assert [each["choices"][0]["delta"].get("content") for each in found[:-1]] == ["", "a ", "b"]
    response = json.loads(await post(server, "/v1/responses", {"input": "x"}))
    assert response["output"][0]["content"] == [
        {"type": "output_text", "text": "a b", "annotations": [], "logprobs": []}
    ]
    assert (response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == (0, 2)


async def test_anthropic(server: TextServer) -> None:
    message = json.loads(await post(server, "/v1/messages", {"max_tokens": 5, "messages": MESSAGES}))
    assert message["content"] == [{"type": "text", "text": "a b"}]
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("end_turn", 2)


async def test_ollama_measures_what_the_engine_does_not_tell(server: TextServer) -> None:
    """The first chunk of a stream comes after the prompt."""
    for path, body in (("/api/generate", {"prompt": "x"}), ("/api/chat", {"messages": MESSAGES})):
        *_, last = lines(await post(server, path, body))
        assert (last["load_duration"], last["eval_count"], last["done"]) == (0, 2, True)
        assert last["prompt_eval_duration"] > 0
        assert last["eval_duration"] > 0
        assert last["prompt_eval_duration"] + last["eval_duration"] == last["total_duration"]
        whole = json.loads(await post(server, path, {**body, "stream": False}))
        assert (whole["prompt_eval_duration"], whole["eval_duration"]) == (0, whole["total_duration"])
