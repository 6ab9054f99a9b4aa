"""Custom text models: plain methods, and errors for invalid return values."""

from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman.core.calls import Embed, Embedded, Generate
from dragoman.core.tensor import Tensor
from dragoman.core.text import Generation, Text, Token
from text_server import events, lines, serve


class Plain(dragoman.Model):
    """Return each completion in one chunk, without information about the prompt."""

    def generate(self, call: Generate) -> Generation:
        completions = [
            Text(i, 0, "yes", (Token(5, "yes", -0.5),), 1, "eos_token", whole="yes") for i in range(len(call.prompts))
        ]
        return Generation(tuple(completions))


async def test_a_plain_method_streams_one_chunk() -> None:
    async with serve(Plain) as server:  # in a worker process
        assert (await server.post("/generate", {"inputs": "a", "parameters": {"details": True}})).status == 200
        (event,) = events((await server.post("/generate_stream", {"inputs": "a"})).body)
        assert event["generated_text"] == "yes"
        (line,) = lines((await server.post("/invocations", {"inputs": "a", "stream": True})).body)
        assert line["generated_text"] == "yes"
        both = await server.post("/v1/completions", {"model": "Plain", "prompt": ["a", "b"], "echo": True})
        assert [c["text"] for c in both.json["choices"]] == ["ayes", "byes"]


class Encoder(dragoman.Model):
    placement = "inline"

    def embed(self, call: Embed) -> Embedded:
        return Embedded(Tensor.of(np.ones((len(call.inputs), 2), np.float32)), 1)


async def test_the_only_capable_model_answers_if_the_default_cannot() -> None:
    async with serve(Plain, Encoder, default_model="Plain") as server:
        assert (await server.post("/v1/completions", {"prompt": "a"})).json["model"] == "Plain"
        assert (await server.post("/v1/embeddings", {"input": "a"})).json["model"] == "Encoder"
    async with serve(Plain, default_model="Plain") as server:
        response = await server.post("/v1/embeddings", {"input": "a"})
        assert (response.status, response.json["error"]["code"]) == (400, "unsupported")


class Invalid(dragoman.Model):
    placement = "inline"

    def generate(self, call: Generate) -> Any:
        match call.prompts[0]:
            case "none":
                return None
            case "text":
                return "text"
            case "other":
                return Generation((Text(7),))
            case "half":
                return Generation((Text(0.5),))  # type: ignore[arg-type]
            case "nothing":
                return Generation(())
        raise ValueError("not even that")

    def embed(self, call: Embed) -> Any:
        return Embedded(Tensor.of(np.zeros((3, 2), np.float32)), 1)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("none", "expected a Generation, got NoneType"),
        ("text", "expected a Generation, got str"),
        ("other", "expected completions of prompts 0 to 0, got prompt 7"),
        ("half", "expected completions of prompts 0 to 0, got prompt 0.5"),
        ("nothing", "expected completions of 1 prompts, got 0"),
        ("fault", "ValueError: not even that"),
    ],
)
async def test_invalid_return_values_are_model_errors(prompt: str, message: str) -> None:
    async with serve(Invalid) as server:
        response = await server.post("/v1/completions", {"model": "Invalid", "prompt": prompt})
        assert (response.status, response.json["error"]["type"]) == (500, "server_error")
        assert message in response.json["error"]["message"]
        assert (await server.post("/invocations", {"inputs": prompt})).status == 424
        vectors = await server.post("/v1/embeddings", {"input": "a"})
        assert "expected vectors of shape [1, dimension], got [3, 2]" in vectors.json["error"]["message"]
