"""Every field of every text API, as /openapi.json describes it, with values of wrong types: never an internal error."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import pytest

from text_server import ReverseModel, TextServer, serve

from .test_scoring import SharedWords

CHAT = [{"role": "user", "content": "a b"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GENERATE = {"text_input": "a b", "parameters": {"max_tokens": 2}}
TGI = {"inputs": "a b", "parameters": {"max_new_tokens": 2}}
RERANK = {"model": "SharedWords", "query": "a", "documents": ["a", "b"]}
# A valid request of each route. /openapi.json does not describe bodies of /invocations: those are TGI's fields.
ROUTES: Mapping[str, Any] = {
    "/v1/chat/completions": {"model": "ReverseModel", "messages": CHAT, "max_tokens": 2},
    "/v1/completions": {"model": "ReverseModel", "prompt": "a b", "max_tokens": 2},
    "/v1/responses": {"model": "ReverseModel", "input": "a b", "max_output_tokens": 2},
    "/v1/embeddings": {"model": "ReverseModel", "input": "a b"},
    "/embed": {"model": "ReverseModel", "inputs": "a b"},
    "/v1/messages": {"model": "ReverseModel", "messages": CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "ReverseModel", "messages": CHAT},
    "/api/chat": {"model": "ReverseModel", "messages": CHAT, "options": {"num_predict": 2}},
    "/api/generate": {"model": "ReverseModel", "prompt": "a b", "options": {"num_predict": 2}},
    "/api/embed": {"model": "ReverseModel", "input": "a b"},
    "/api/embeddings": {"model": "ReverseModel", "prompt": "a b"},
    "/api/show": {"model": "ReverseModel"},
    "/rerank": RERANK,
    "/models/SharedWords/rerank": {"query": "a", "texts": ["a", "b"]},
    "/score": {"model": "SharedWords", "text_1": "a", "text_2": ["a", "b"]},
    "/generate": TGI,
    "/generate_stream": TGI,
    "/": TGI,
    "/tokenize": {"inputs": "a b"},
    "/chat_tokenize": {"messages": CHAT},
    "/detokenize": {"tokens": [1, 2]},
    "/invocations": {**TGI, "stream": False},
    "/v2/models/ReverseModel/generate": GENERATE,
}
_DESCRIBED = {"/invocations": "/generate"}
DEEP: Any = json.loads("[" * 40 + "]" * 40)
# Values of each type of JSON. Schemas and choices are nearly valid where they are expected.
VALUES: Sequence[Sequence[Any]] = (
    (0, -1, 1, 2**31, 2**63, 2**70, 0.5, -0.0, 1e308, True, None),
    ("", "a", " ", "\u0000", "\U0001f600", "auto", "none"),
    ([], [1], ["a"], [None], [[]], [{}], ["a", 1], DEEP, CHAT, [TOOL]),
    (
        {},
        {"a": 1},
        {"a": DEEP},
        {"type": "function"},
        {"type": "json_schema", "json_schema": {}},
        {"type": 5},
        {"": None},
    ),
)
Path = tuple[str | int, ...]


def fields(schema: Any, schemas: Mapping[str, Any], depth: int = 6) -> Iterator[Path]:
    """Yield the paths of all fields of a JSON schema; 0 is an item of a list."""
    if not isinstance(schema, dict) or not depth:
        return
    reference = schema.get("$ref")
    if reference is not None:
        yield from fields(schemas[reference.rpartition("/")[2]], schemas, depth)
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from fields(part, schemas, depth)
    for name, part in schema.get("properties", {}).items():
        yield (name,)
        yield from ((name, *rest) for rest in fields(part, schemas, depth - 1))
    if "items" in schema:
        yield (0,)
        yield from ((0, *rest) for rest in fields(schema["items"], schemas, depth - 1))


def replaced(body: Any, path: Path, value: Any) -> Any:
    """Return the body with a value at a path, which is created where it is missing."""
    if not path:
        return value
    if path[0] == 0:
        items = body if isinstance(body, list) and body else [{}]
        return [replaced(items[0], path[1:], value), *items[1:]]
    known = body if isinstance(body, dict) else {}
    return {**known, path[0]: replaced(known.get(path[0]), path[1:], value)}


async def invalid_requests(server: TextServer, every: bool) -> list[tuple[str, Path, Any]]:
    """Requests with values of wrong types, as (route, path of the field, body).

    Every field of every route has one value of each type, another one than the field before; or all of them.
    """
    document = (await server.request("GET", "/openapi.json")).json
    found = []
    for route, body in ROUTES.items():
        name = _DESCRIBED.get(route, route).replace("ReverseModel", "{model}").replace("SharedWords", "{model}")
        content = document["paths"][name]["post"]["requestBody"]["content"]["application/json"]
        paths = dict.fromkeys(fields(content["schema"], document["components"]["schemas"]))
        assert paths, route
        for at, path in enumerate(paths):
            values = [value for group in VALUES for value in (group if every else [group[at % len(group)]])]
            found += [(route, path, replaced(body, path, value)) for value in values]
    return found


async def check(server: TextServer, route: str, path: Path, body: Any) -> str:
    """Send a request; return what is wrong with its response, or an empty string."""
    response = await server.post(route, body)
    about = f"{route} {'.'.join(map(str, path))} {json.dumps(body)[:300]}: {response.status} {response.body[:300]!r}"
    if response.status >= 500 or b"internal error" in response.body or b"Traceback" in response.body:
        return about
    if response.status >= 400 and not any(name in response.json for name in ("error", "message")):
        return f"no error: {about}"
    return ""


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve(ReverseModel, SharedWords, default_model="ReverseModel") as server:
        yield server


async def test_fields_with_values_of_any_type(server: TextServer) -> None:
    """Meanwhile another caller gets all of its responses."""
    requests = await invalid_requests(server, every="DRAGOMAN_TEST_FIELDS" in os.environ)
    for first in range(0, len(requests), 16):
        group = [check(server, *each) for each in requests[first : first + 16]]
        other = asyncio.create_task(server.post("/generate", TGI))
        assert [problem for problem in await asyncio.gather(*group) if problem] == []
        assert (await other).json == {"generated_text": "b a"}
