"""Random requests to the text APIs get responses of the protocol, never an internal error."""

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dragoman_text.apis.common.chat import PARAMETERS as OPENAI
from dragoman_text.apis.lmi.parameters import PARAMETERS as LMI
from dragoman_text.apis.tgi.request import PARAMETERS as TGI
from text_server import TextServer, serve

HELLO = [{"role": "user", "content": "hello"}]
PATHS: dict[str, tuple[str, Any]] = {
    "/invocations": ("inputs", "a b"),
    "/predictions/ReverseModel": ("inputs", ["a", "b c"]),
    "/generate": ("inputs", "a b"),
    "/generate_stream": ("inputs", "a b"),
    "/": ("inputs", "a b"),
    "/tokenize": ("inputs", "a b"),
    "/chat_tokenize": ("messages", HELLO),
    "/detokenize": ("tokens", [1, 2]),
    "/v1/completions": ("prompt", "a b"),
    "/v1/chat/completions": ("messages", HELLO),
    "/v1/embeddings": ("input", "a b"),
    "/v2/models/ReverseModel/generate": ("text_input", "a b"),
    "/v2/models/ReverseModel/generate_stream": ("text_input", "a b"),
}
NAMES = sorted({*LMI, *TGI, *OPENAI, "no such thing", "né", "a\nb"})
NUMBERS: list[Any] = [0, 1, 2, 3, -1, 0.5, 1.0, 1.5, 1e300, -0.0, 2**31, 2**64, 2**70]
TEXTS: list[Any] = ["", "a", " ", "é水🦆", "\u0000", "json", "sse", "auto", "required", "none"]
LISTS: list[Any] = [[], ["a"], ["a", 1], [""], [1, 2], [[1]], [[]], [None], HELLO, ["x"] * 70, [{"type": "function"}]]
OBJECTS: list[Any] = [
    {},
    {"a": 1},
    {"5": 1.5},
    {"type": "regex", "value": "a+"},
    {"type": "json", "value": {}},
    {"type": "json_object"},
    {"json": {}, "regex": "a"},
    {"include_usage": True},
    {"function": {"name": "f"}},
]
VALUES = [None, True, False, *NUMBERS, *TEXTS, *LISTS, *OBJECTS]


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve() as server:
        yield server


@pytest.mark.parametrize("seed", range(3))
async def test_random_requests(server: TextServer, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        path = rng.choice(list(PATHS))
        name, good = PATHS[path]
        parameters = {rng.choice(NAMES): rng.choice(VALUES) for _ in range(rng.randrange(4))}
        body: dict[str, Any] = {name: good if rng.random() < 0.8 else rng.choice(VALUES)}
        if name in ("inputs", "text_input"):
            body |= {"parameters": parameters if rng.random() < 0.9 else rng.choice(VALUES)}
            body |= {"stream": rng.choice(VALUES)} if rng.random() < 0.2 else {}
        else:
            body = {**parameters, **body}
        response = await server.post(path, body)
        description = f"{path} {json.dumps(body)}: {response.status} {response.body!r}"
        assert response.status < 500, description
        assert b"internal error" not in response.body, description
        if response.status != 200:
            assert response.json["error"], description


@pytest.mark.parametrize("path", PATHS)
async def test_invalid_bodies(server: TextServer, path: str) -> None:
    for body in (b"", b" ", b"{", b"null", b"[]", b"5", b'"a"', b"\xff\xfe", b'{"a": NaN}', b"[" * 5000, b'"\\ud800"'):
        response = await server.post(path, body)
        assert response.status in (200, 400, 422, 424), (body, response)
        assert b"error" in response.body, (body, response)
        if response.status == 200:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
