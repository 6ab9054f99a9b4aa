"""The limits that docs/text-limits.md lists: requests at a limit are accepted, requests above it are rejected."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import dragoman
from dragoman.core import text_limits
from dragoman.core.calls import Embed, Embedded, Generate
from dragoman.core.tensor import Tensor
from dragoman.core.text import Generation, PromptInfo, Text, Token
from dragoman_text import limits
from dragoman_text.apis.common.python_calls import parse_python_calls
from text_server import TextServer, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")
PAGE = Path(__file__).parents[4] / "docs" / "text-limits.md"
HELLO: list[Any] = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class OneWord(dragoman.Model):
    """Completes every prompt with one word, however long it is."""

    placement = "inline"

    def generate(self, call: Generate) -> Generation:
        word = Token(5, "a", -0.5)
        places = [(p, c) for p in range(len(call.prompts)) for c in range(max(1, call.sampling.n))]
        texts = tuple(Text(p, c, "a", (word,), 1, "length", whole="a") for p, c in places)
        return Generation(texts, tuple(PromptInfo("", 1) for _ in call.prompts))

    def embed(self, call: Embed) -> Embedded:
        return Embedded(Tensor.of(np.ones((len(call.inputs), 2), np.float32)), 1)


def chat(**fields: Any) -> tuple[str, Any]:
    return "/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, **fields}


def generate(**parameters: Any) -> tuple[str, Any]:
    return "/generate", {"inputs": "a", "parameters": parameters}


# A request with so many, for each limit; requests over the last ones are tested where images and calls are.
REQUESTS: dict[str, Callable[[int], tuple[str, Any]]] = {
    "messages": lambda n: chat(messages=[{"role": "user", "content": ""}] * n),
    "items of `input` of `/v1/responses`, with those of earlier responses": lambda n: (
        "/v1/responses",
        {"input": [{"role": "user", "content": "a"}] * n, "store": False},
    ),
    "prompts of `/v1/completions`": lambda n: ("/v1/completions", {"prompt": ["a"] * n, "max_tokens": 1}),
    "token ids of a `prompt` that is one list": lambda n: ("/v1/completions", {"prompt": [1] * n, "max_tokens": 1}),
    "`inputs` of LMI": lambda n: ("/invocations", {"inputs": ["a"] * n, "parameters": {"max_new_tokens": 1}}),
    "`inputs` of TGI": lambda n: ("/generate", {"inputs": ["a"] * n}),
    "texts of embeddings, rerank and score": lambda n: ("/v1/embeddings", {"input": ["a"] * n}),
    "tools": lambda n: chat(tools=[TOOL] * n),
    "stop strings": lambda n: chat(stop=["b"] * n),
    "stop strings of TGI": lambda n: generate(stop=["b"] * n),
    "characters of a stop string or forbidden word": lambda n: chat(stop=["b" * n]),
    "forbidden words": lambda n: chat(bad_words=["b"] * n),
    "`stop_token_ids`, `allowed_token_ids`": lambda n: chat(stop_token_ids=[5] * n),
    "entries of `logit_bias`": lambda n: chat(logit_bias={str(i): 1 for i in range(n)}),
    "top log-probabilities of a token": lambda n: chat(logprobs=True, top_logprobs=n),
    "top log-probabilities of a token in TGI": lambda n: generate(top_n_tokens=n, details=True),
    "`best_of` of TGI": lambda n: generate(best_of=n, do_sample=True),
    "characters of `chat_template`": lambda n: chat(chat_template="a" * n),
}
# Constants of those that the tests of images and of tool calls exceed.
OTHERS = {
    "ratio of the sides of an image": limits.MAX_IMAGE_RATIO,
    "scans of a JPEG": text_limits.MAX_JPEG_SCANS,
    "characters before the arguments of a tool call; a longer text is not a call": (limits.MAX_CALL_START_CHARACTERS),
    "characters of tool calls in Python syntax; a longer text is not a call": limits.MAX_PYTHON_CALL_CHARACTERS,
}


def documented() -> dict[str, int]:
    """Return the rows of the first table of the page's section about limits."""
    table = PAGE.read_text().split("## Limits\n")[1].split("\n\n")[1]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {name: int(maximum.replace(",", "")) for name, maximum in rows}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[TextServer]:
    async with serve(OneWord, trust_request_chat_template=True) as server:
        yield server


async def test_the_table_has_every_limit() -> None:
    found = documented()
    assert found.keys() == REQUESTS.keys() | OTHERS.keys()
    assert {name: found[name] for name in OTHERS} == OTHERS
    del found["items of `input` of `/v1/responses`, with those of earlier responses"]  # the constant of messages
    assert sorted(found.values()) == sorted(
        value for module in (text_limits, limits) for name, value in vars(module).items() if name.isupper()
    )


@pytest.mark.parametrize("name", REQUESTS)
async def test_requests_at_a_limit_and_above_it(server: TextServer, name: str) -> None:
    limit = documented()[name]
    path, body = REQUESTS[name](limit)
    response = await server.post(path, body)
    assert response.status == 200, response.body
    path, body = REQUESTS[name](limit + 1)
    response = await server.post(path, body)
    assert response.status == {"/generate": 422, "/invocations": 424}.get(path, 400), response.body
    assert str(limit) in response.body.decode()


async def test_calls_in_python_syntax_have_a_limit() -> None:
    longest = limits.MAX_PYTHON_CALL_CHARACTERS - len('[f(a="")]')
    assert parse_python_calls(f'[f(a="{"x" * longest}")]') == [("f", json.dumps({"a": "x" * longest}))]
    assert parse_python_calls(f'[f(a="{"x" * (longest + 1)}")]') is None
