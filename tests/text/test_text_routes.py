"""One port for every protocol: no path is claimed twice, and what is nowhere is told in the nearest one's words."""

from collections import Counter
from typing import Any

import pytest

from dragoman import plugins
from dragoman.protocols.wire import Policy
from dragoman.settings import Settings

from .text_house import speaking


def test_no_path_is_claimed_twice() -> None:
    tables: list[Any] = [plugins.find("protocols", name)(Policy()) for name in Settings().protocols.split(",")]
    rows = [
        (route.method, route.pattern.replace("{name}", "{model}"))
        for table in tables
        for route in getattr(table, "routes", ())
    ]
    assert [row for row, count in Counter(rows).items() if count > 1] == []
    assert {("POST", "/"), ("POST", "/invocations"), ("GET", "/info"), ("POST", "/v1/completions")} <= {*rows}


@pytest.mark.parametrize(
    ("method", "path", "status", "keys"),
    [
        ("GET", "/nothing", 404, {"error"}),
        ("GET", "/v2/nothing", 404, {"error"}),
        ("GET", "/v1/nothing", 404, {"error"}),
        ("GET", "/models/Speaker/invoke/nothing", 404, {"code", "type", "message"}),
        ("PUT", "/generate", 405, {"error", "error_type"}),
        ("PUT", "/ping", 405, {"code", "type", "message"}),
        ("GET", "/models/Speaker/nothing/at/all", 404, {"code", "type", "message"}),
    ],
)
async def test_what_is_nowhere(method: str, path: str, status: int, keys: set[str]) -> None:
    async with speaking() as house:
        answer = await house.ask(method, path)
        assert (answer.status, set(answer.json)) == (status, keys)
        if path.startswith("/v1"):
            assert set(answer.json["error"]) == {"message", "type", "param", "code"}
            assert (answer.json["error"]["param"], answer.json["error"]["code"]) == (None, None)
        if status == 404 and "type" in answer.json:
            assert answer.json["type"] == "ResourceNotFoundException"


async def test_no_path_of_what_is_measured() -> None:
    async with speaking() as house:
        answer = await house.ask("GET", "/server/logging")
        assert (answer.status, answer.body) == (404, b"no such path: /server/logging")
