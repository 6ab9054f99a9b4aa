"""Routes of all protocols on one port: no duplicates, and errors of unknown paths."""

from collections import Counter
from typing import Any

import pytest

from dragoman import plugins
from dragoman.protocols.wire import Policy
from dragoman.settings import Settings
from text_server import serve


def test_routes_are_unique() -> None:
    # Clients of Anthropic's API send a header. KServe's V1 protocol answers for models that have no card of OpenAI's
    # API; see kserve_v1.
    shared = {("GET", "/v1/models"), ("GET", "/v1/models/{model}")}
    tables: list[Any] = [plugins.find("protocols", name)(Policy()) for name in Settings().protocols.split(",")]
    rows = [
        (route.method, route.pattern.replace("{name}", "{model}"))
        for table in tables
        for route in getattr(table, "routes", ())
    ]
    assert {row for row, count in Counter(rows).items() if count > 1} == shared
    assert {("POST", "/"), ("POST", "/invocations"), ("GET", "/info"), ("POST", "/v1/completions")} <= {*rows}


@pytest.mark.parametrize(
    ("method", "path", "status", "keys"),
    [
        ("GET", "/nothing", 404, {"error"}),
        ("GET", "/v2/nothing", 404, {"error"}),
        ("GET", "/v1/nothing", 404, {"error"}),
        ("GET", "/models/ReverseModel/invoke/nothing", 404, {"code", "type", "message"}),
        ("PUT", "/generate", 405, {"error", "error_type"}),
        ("PUT", "/ping", 405, {"code", "type", "message"}),
        ("GET", "/models/ReverseModel/nothing/at/all", 404, {"code", "type", "message"}),
    ],
)
async def test_unknown_paths_and_methods(method: str, path: str, status: int, keys: set[str]) -> None:
    async with serve() as server:
        response = await server.request(method, path)
        assert (response.status, set(response.json)) == (status, keys)
        if path.startswith("/v1"):
            assert set(response.json["error"]) == {"message", "type", "param", "code"}
            assert (response.json["error"]["param"], response.json["error"]["code"]) == (None, None)
        if status == 404 and "type" in response.json:
            assert response.json["type"] == "ResourceNotFoundException"


async def test_server_logging_is_not_a_path() -> None:
    async with serve() as server:
        response = await server.request("GET", "/server/logging")
        body = {"code": 404, "type": "ResourceNotFoundException", "message": "no such path: /server/logging"}
        assert (response.status, response.json) == (404, body)


_UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
_USER = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "name", "fields"),
    [
        (
            "/v1/responses",
            "text.format",
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": _UNIQUE}}},
        ),
        (
            "/v1/messages",
            "output_config.format",
            {
                "messages": _USER,
                "max_tokens": 5,
                "output_config": {"format": {"type": "json_schema", "schema": _UNIQUE}},
            },
        ),
        ("/api/chat", "format", {"messages": _USER, "format": _UNIQUE}),
        (
            "/v1/responses",
            "tools",
            {
                "input": "a",
                "tools": [{"type": "function", "name": "f", "parameters": {**_UNIQUE, "type": "object"}}],
                "tool_choice": "required",
            },
        ),
    ],
)
async def test_formats_of_all_apis_are_enforced_as_far_as_possible(path: str, name: str, fields: Any) -> None:
    async with serve() as server:
        for stream in (False, True):
            response = await server.post(path, {"model": "ReverseModel", "stream": stream, **fields})
            assert response.status == 200, response.body
            assert response.headers["x-ignored-parameters"] == f"{name}.uniqueItems"
            assert "uniqueItems" not in server.model().calls[-1].sampling.grammar.text
    async with serve(strict_parameters=True) as server:
        response = await server.post(path, {"model": "ReverseModel", **fields})
        assert response.status == 400
        assert f"`{name}` must not contain keywords".encode() in response.body


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": _UNIQUE, "strict": True}}},
        ),
        (
            "/v1/messages",
            {
                "messages": _USER,
                "max_tokens": 5,
                "tools": [{"name": "f", "input_schema": {**_UNIQUE, "type": "object"}, "strict": True}],
                "tool_choice": {"type": "any"},
            },
        ),
    ],
)
async def test_strict_formats_are_enforced_or_rejected(path: str, fields: Any) -> None:
    async with serve() as server:
        response = await server.post(path, {"model": "ReverseModel", **fields})
        assert response.status == 400
        assert "with strict validation; got" in response.json["error"]["message"]
