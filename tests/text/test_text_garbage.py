"""Whatever is sent to a text API, the answer is the protocol's own, and never a fault of ours."""

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dragoman.protocols.lmi.parameters import PARAMETERS as LMI
from dragoman.protocols.text_common.chat import PARAMETERS as OPENAI
from dragoman.protocols.tgi.request import PARAMETERS as TGI

from .text_house import House, speaking

HELLO = [{"role": "user", "content": "hello"}]
PATHS: dict[str, tuple[str, Any]] = {
    "/invocations": ("inputs", "a b"),
    "/predictions/Speaker": ("inputs", ["a", "b c"]),
    "/generate": ("inputs", "a b"),
    "/generate_stream": ("inputs", "a b"),
    "/": ("inputs", "a b"),
    "/tokenize": ("inputs", "a b"),
    "/chat_tokenize": ("messages", HELLO),
    "/detokenize": ("tokens", [1, 2]),
    "/v1/completions": ("prompt", "a b"),
    "/v1/chat/completions": ("messages", HELLO),
    "/v1/embeddings": ("input", "a b"),
    "/v2/models/Speaker/generate": ("text_input", "a b"),
    "/v2/models/Speaker/generate_stream": ("text_input", "a b"),
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
async def house() -> AsyncIterator[House]:
    async with speaking() as made:
        yield made


@pytest.mark.parametrize("seed", range(3))
async def test_no_fault_of_ours(house: House, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(150):
        path = chance.choice(list(PATHS))
        name, good = PATHS[path]
        given = {chance.choice(NAMES): chance.choice(VALUES) for _ in range(chance.randrange(4))}
        body: dict[str, Any] = {name: good if chance.random() < 0.8 else chance.choice(VALUES)}
        if name in ("inputs", "text_input"):
            body |= {"parameters": given if chance.random() < 0.9 else chance.choice(VALUES)}
            body |= {"stream": chance.choice(VALUES)} if chance.random() < 0.2 else {}
        else:
            body = {**given, **body}
        answer = await house.post(path, body)
        told = f"{path} {json.dumps(body)}: {answer.status} {answer.body!r}"
        assert answer.status < 500, told
        assert b"internal error" not in answer.body, told
        if answer.status != 200:
            assert answer.json["error"], told


@pytest.mark.parametrize("path", PATHS)
async def test_broken_bodies(house: House, path: str) -> None:
    for body in (b"", b" ", b"{", b"null", b"[]", b"5", b'"a"', b"\xff\xfe", b'{"a": NaN}', b"[" * 5000, b'"\\ud800"'):
        answer = await house.post(path, body)
        assert answer.status in (200, 400, 422, 424), (body, answer)
        assert b"error" in answer.body, (body, answer)
        if answer.status == 200:
            assert answer.headers["content-type"] == "text/event-stream"
