"""The OpenAPI document of the text APIs: which bodies its schemas allow, and how responses may be sent."""

import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from text_server import serve

pytestmark = pytest.mark.asyncio(loop_scope="module")

SUMMARY = re.compile(r"[A-Z][a-z]+ [^.]*[a-z]")
JSON, EVENTS, TEXT, LINES = "application/json", "text/event-stream", "text/plain", "application/x-ndjson"
USER = {"role": "user", "content": "a"}
CHATS: list[Any] = [[USER], [{"role": "user", "content": None}, {"role": "x", "content": [{}]}]]
NO_CHATS: list[Any] = [
    [],
    {},
    "a",
    [{"content": "a"}],
    [{"role": "user"}],
    [{"role": "", "content": ""}],
    [{"role": 5, "content": ""}],
    [5],
]
TEXTS: list[Any] = ["a", ["a", "b"]]


def bodies(name: str, values: list[Any], **more: Any) -> list[dict[str, Any]]:
    return [{name: value, **more} for value in values]


# By path: types of responses, bodies that are allowed, and bodies that are not.
CASES: Mapping[str, tuple[list[str], list[Any], list[Any]]] = {
    "/v1/chat/completions": ([JSON, EVENTS], bodies("messages", CHATS, model="m"), [{}, *bodies("messages", NO_CHATS)]),
    "/chat_tokenize": ([JSON], bodies("messages", CHATS), [{}, *bodies("messages", NO_CHATS)]),
    "/v1/messages": (
        [JSON, EVENTS],
        bodies("messages", CHATS, max_tokens=1),
        [{"messages": [USER]}, {"max_tokens": 1}, *bodies("messages", NO_CHATS, max_tokens=1)],
    ),
    "/v1/messages/count_tokens": ([JSON], bodies("messages", CHATS), [{}, *bodies("messages", NO_CHATS)]),
    "/v1/completions": ([JSON, EVENTS], bodies("prompt", [*TEXTS, "", [1]]), [{}, {"prompt": 5}, {"prompt": {}}]),
    "/v1/embeddings": ([JSON], bodies("input", [*TEXTS, [1]]), [{}, {"input": ""}, {"input": []}, {"input": 5}]),
    "/v1/responses": ([JSON, EVENTS], bodies("input", TEXTS), [{}, {"input": ""}, {"input": []}, {"input": 5}]),
    "/v1/responses/input_tokens": ([JSON], bodies("input", TEXTS), [{}, {"input": ""}, {"input": []}]),
    "/detokenize": (
        [JSON],
        bodies("tokens", [[], [0, 2**31 - 1]]),
        [{}, {"tokens": [-1]}, {"tokens": [2**31]}, {"tokens": "a"}, {"tokens": [1], "model": 5}],
    ),
    "/v1/load_lora_adapter": (
        [TEXT],
        [{"lora_name": "a", "lora_path": "b"}],
        [{}, {"lora_name": "a"}, {"lora_path": "b"}, {"lora_name": 5, "lora_path": "b"}],
    ),
    "/v1/unload_lora_adapter": ([TEXT], [{"lora_name": "a"}], [{}, {"lora_name": 5}]),
    "/embed": ([JSON], bodies("inputs", TEXTS), [{}]),
    "/score": ([JSON], [{"text_1": "a", "text_2": "b"}], ["a"]),
    "/rerank": (
        [JSON],
        [{"query": "q", "documents": ["a"]}, {"query": "q", "texts": ["a"]}],
        [{}, {"query": "q"}, {"documents": ["a"]}],
    ),
    "/": ([JSON, EVENTS], bodies("inputs", TEXTS), [{}, {"inputs": ""}, {"inputs": []}, {"inputs": ["a"] * 5}]),
    "/generate": ([JSON], [*bodies("inputs", TEXTS), {"inputs": "a", "parameters": None}], [{}, {"inputs": 5}]),
    "/generate_stream": ([EVENTS], [{"inputs": "a"}], [{}, {"inputs": ""}, {"inputs": ["a"]}]),
    "/tokenize": ([JSON], [{"inputs": "a"}, {"prompt": "a"}, {"messages": [USER]}], [{}]),
    "/api/chat": ([LINES, JSON], [{"model": "m", "messages": [USER]}, {"model": None}], [{"model": 5}]),
    "/api/generate": ([LINES, JSON], [{"model": "m", "prompt": "a"}], [{"model": 5}, {"prompt": 5}]),
    "/api/embed": ([JSON], bodies("input", TEXTS), [5]),
    "/api/embeddings": ([JSON], [{"prompt": "a"}], [5]),
    "/api/show": ([JSON], [{"model": "m"}], [{"model": 5}]),
    "/api/pull": ([LINES, JSON], [{"model": "m"}], [5]),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def document() -> AsyncIterator[Any]:
    async with serve() as server:
        yield (await server.request("GET", "/openapi.json")).json


@pytest.mark.parametrize("path", CASES)
async def test_bodies_and_responses(document: Any, path: str) -> None:
    types, allowed, rejected = CASES[path]
    operation = document["paths"][path]["post"]
    assert list(operation["responses"]["200"]["content"]) == types
    assert SUMMARY.fullmatch(operation["summary"])
    assert operation["requestBody"]["required"] is True
    schema = {**operation["requestBody"]["content"][JSON]["schema"], "components": document["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    assert [(body, [e.message for e in validator.iter_errors(body)]) for body in allowed] == [(b, []) for b in allowed]
    assert [body for body in rejected if validator.is_valid(body)] == []


async def test_routes_of_one_model_are_described_as_those_of_all(document: Any) -> None:
    for path in CASES:
        of_model = f"/models/{{model}}{path}"
        if of_model in document["paths"] and "post" in document["paths"][of_model] and path != "/":
            one, other = (document["paths"][each]["post"] for each in (path, of_model))
            assert one["requestBody"] == other["requestBody"]
            assert one["responses"]["200"] == other["responses"]["200"]
