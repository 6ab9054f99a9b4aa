"""Routes of all protocols on one port: no duplicates, and errors of unknown paths."""

from collections import Counter
from typing import Any

import pytest

from dragoman import plugins
from dragoman.protocols.wire import Policy
from dragoman.settings import Settings

from .text_server import serve


def test_routes_are_unique() -> None:
    # KServe's V1 protocol answers for models that have no card of OpenAI's API; see kserve_v1.
    shared = ("GET", "/v1/models/{model}")
    tables: list[Any] = [plugins.find("protocols", name)(Policy()) for name in Settings().protocols.split(",")]
    rows = [
        (route.method, route.pattern.replace("{name}", "{model}"))
        for table in tables
        for route in getattr(table, "routes", ())
    ]
    assert [row for row, count in Counter(rows).items() if count > 1] == [shared]
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
        assert (response.status, response.body) == (404, b"no such path: /server/logging")
