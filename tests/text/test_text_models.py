"""Text models of one's own: plain functions will do, and what makes no sense is told as the model's fault."""

from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman.core.calls import Embed, Embedded, Generate
from dragoman.core.tensor import Tensor
from dragoman.core.text import Generation, Text, Token

from .text_house import events, lines, speaking


class Plain(dragoman.Model):
    """Gives its whole text at once, and tells nothing of prompts."""

    def generate(self, call: Generate) -> Generation:
        said = [
            Text(i, 0, "yes", (Token(5, "yes", -0.5),), 1, "eos_token", whole="yes") for i in range(len(call.prompts))
        ]
        return Generation(tuple(said))


async def test_a_plain_method_streams_in_one_piece() -> None:
    async with speaking(Plain) as house:  # in a process of its own
        assert (await house.post("/generate", {"inputs": "a", "parameters": {"details": True}})).status == 200
        (event,) = events((await house.post("/generate_stream", {"inputs": "a"})).body)
        assert event["generated_text"] == "yes"
        (line,) = lines((await house.post("/invocations", {"inputs": "a", "stream": True})).body)
        assert line["generated_text"] == "yes"
        both = await house.post("/v1/completions", {"model": "Plain", "prompt": ["a", "b"], "echo": True})
        assert [c["text"] for c in both.json["choices"]] == ["ayes", "byes"]


class Encoder(dragoman.Model):
    placement = "inline"

    def embed(self, call: Embed) -> Embedded:
        return Embedded(Tensor.of(np.ones((len(call.inputs), 2), np.float32)), 1)


async def test_where_the_default_cannot_answer_the_only_one_that_can_does() -> None:
    async with speaking(Plain, Encoder, default_model="Plain") as house:
        assert (await house.post("/v1/completions", {"prompt": "a"})).json["model"] == "Plain"
        assert (await house.post("/v1/embeddings", {"input": "a"})).json["model"] == "Encoder"
    async with speaking(Plain, default_model="Plain") as house:
        answer = await house.post("/v1/embeddings", {"input": "a"})
        assert (answer.status, answer.json["error"]["code"]) == (400, "unsupported")


class Wrong(dragoman.Model):
    placement = "inline"

    def generate(self, call: Generate) -> Any:
        match call.prompts[0]:
            case "none":
                return None
            case "text":
                return "text"
            case "other":
                return Generation((Text(7),))
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
        ("nothing", "expected completions of 1 prompts, got 0"),
        ("fault", "ValueError: not even that"),
    ],
)
async def test_what_makes_no_sense_is_the_models_fault(prompt: str, message: str) -> None:
    async with speaking(Wrong) as house:
        answer = await house.post("/v1/completions", {"model": "Wrong", "prompt": prompt})
        assert (answer.status, answer.json["error"]["type"]) == (500, "server_error")
        assert message in answer.json["error"]["message"]
        assert (await house.post("/invocations", {"inputs": prompt})).status == 424
        vectors = await house.post("/v1/embeddings", {"input": "a"})
        assert "expected vectors of shape [1, dimension], got [3, 2]" in vectors.json["error"]["message"]
