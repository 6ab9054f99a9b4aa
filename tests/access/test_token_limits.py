"""Limits of tokens and usage of keys, as clients see them: status, headers, and `GET /v1/usage`."""

import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from access.access_models import BODY, Doubler, KeyFile, bearer
from dragoman import hooks
from dragoman.access.control import AccessControl, AccessRules
from dragoman.core.errors import InvalidInput
from dragoman.system.cpus import cores
from rest.rest_server import RestServer, serving
from text_server import ReverseModel

CHAT: list[Any] = [{"role": "user", "content": "a b"}]  # 3 tokens, answered with 4


async def usage(server: RestServer, key: str, query: str = "") -> list[tuple[Any, ...]]:
    """Return name of the key, model, requests, input and output tokens of today."""
    response = await server.request("GET", f"/v1/usage{query}", headers=bearer(key))
    assert response.status == 200, response.body
    assert (response.json["object"], response.json["has_more"]) == ("page", False)
    names = ("api_key_id", "model", "num_model_requests", "input_tokens", "output_tokens")
    return [tuple(row[name] for name in names) for day in response.json["data"] for row in day["results"]]


async def test_an_openai_client_sees_its_limits(keys: KeyFile) -> None:
    key = keys.add("chat", tokens_per_minute=14, tokens_per_day=1000, calls_per_s=50.0)
    async with serving(ReverseModel, api_keys=str(keys.path)) as server:
        base_url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            chat = client.chat.completions.with_raw_response
            first = await chat.create(model="ReverseModel", messages=CHAT)
            assert first.headers["x-ratelimit-limit-tokens"] == "14"
            assert first.headers["x-ratelimit-remaining-tokens"] == "7"
            assert first.headers["x-ratelimit-reset-tokens"].endswith("s")
            assert first.headers["x-ratelimit-limit-requests"] == "50"
            assert first.headers["x-ratelimit-remaining-requests"] == "49"
            streamed = await chat.create(model="ReverseModel", messages=CHAT, stream=True)
            assert streamed.headers["x-ratelimit-remaining-tokens"] == "7", "a stream is debited at its end"
            assert [chunk async for chunk in streamed.parse()]
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(model="ReverseModel", messages=CHAT)
            error: Any = caught.value
            assert error.body["message"] == "key 'chat' has reached its limit of 14 tokens per minute"
            assert error.body["type"] == "rate_limit_error"
            headers: Mapping[str, str] = error.response.headers
            assert 1 <= int(headers["retry-after"]) <= 5
            assert headers["x-ratelimit-remaining-tokens"] == "0"
            assert (await client.models.list()).data, "limits are those of calls to models"
        assert await usage(server, key) == [("chat", "ReverseModel", 2, 6, 8)]
        other = await server.request("POST", "/v1/completions", {"prompt": "a"}, bearer(keys.keys["user"]))
        assert other.status == 200
        assert not any(name.startswith("x-ratelimit") for name in other.headers)


async def test_a_stream_that_its_client_leaves_is_debited(keys: KeyFile) -> None:
    key = keys.add("chat", tokens_per_day=1000)
    async with serving(ReverseModel, api_keys=str(keys.path)) as server:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key) as client:
            stream = await client.completions.create(model="ReverseModel", prompt="!wait two three", stream=True)
            assert [(await anext(stream)).choices[0].text for _ in range(2)] == ["three", " two"]
            await stream.close()
        while server.model("ReverseModel").cancelled < 1:
            await asyncio.sleep(0.01)
        assert await usage(server, key) == [("chat", "ReverseModel", 1, 3, 2)]


async def test_keys_see_their_own_usage_and_administrators_all(keys: KeyFile) -> None:
    first, second = keys.add("first"), keys.add("second", models=["Doubler"])
    admin = keys.add("root", ["admin"])
    async with serving(ReverseModel, Doubler, api_keys=str(keys.path)) as server:
        for _ in range(3):
            assert (await server.infer("Doubler", BODY, bearer(second))).status == 200
        assert (await server.infer("Doubler", b"{}", bearer(second))).status == 400, "not counted: no model began"
        embedded = await server.request("POST", "/v1/embeddings", {"input": ["a b", "c"]}, bearer(first))
        assert embedded.status == 200
        assert await usage(server, first) == [("first", "ReverseModel", 1, 3, 0)]
        assert await usage(server, second) == [("second", "Doubler", 3, 0, 0)]
        assert await usage(server, admin) == [("first", "ReverseModel", 1, 3, 0), ("second", "Doubler", 3, 0, 0)]
        assert await usage(server, admin, "?api_key_id=second") == [("second", "Doubler", 3, 0, 0)]
        assert await usage(server, admin, "?model=ReverseModel") == [("first", "ReverseModel", 1, 3, 0)]
        assert await usage(server, admin, "?end_time=86400") == []
        now_s = int(time.time())
        week = await server.request("GET", f"/v1/usage?start_time={now_s - 6 * 86400}", headers=bearer(first))
        assert [bucket["end_time"] - bucket["start_time"] for bucket in week.json["data"]] == [86400] * 7
        for query, message in (
            ("?start_time=-1", "query parameter 'start_time': expected a Unix time in seconds, got '-1'"),
            ("?end_time=1e9", "query parameter 'end_time'"),
            ("?start_time=5&end_time=5", "expected start_time before end_time"),
            ("?start_time=0", "expected at most 400 days"),
            ("?bucket=1d", "query parameter 'bucket': expected one of start_time"),
        ):
            response = await server.request("GET", f"/v1/usage{query}", headers=bearer(first))
            assert (response.status, message in response.error) == (400, True), response.error
        assert (await server.request("GET", "/v1/usage")).status == 401


async def test_usage_outlives_the_server(keys: KeyFile, tmp_path: Path) -> None:
    key = keys.add("chat", tokens_per_day=7)
    settings = {"api_keys": str(keys.path), "state": str(tmp_path / "state")}
    body = {"messages": CHAT}
    async with serving(ReverseModel, **settings) as server:
        assert (await server.request("POST", "/v1/chat/completions", body, bearer(key))).status == 200
    async with serving(ReverseModel, **settings) as server:
        assert await usage(server, key) == [("chat", "ReverseModel", 1, 3, 4)]
        refused = await server.request("POST", "/v1/chat/completions", body, bearer(key))
        assert (refused.status, "7 tokens per day" in refused.body.decode()) == (429, True)


@pytest.mark.skipif(sys.platform != "linux" or cores() < 2, reason="one process per core of Linux")
async def test_usage_is_exact_over_processes(keys: KeyFile) -> None:
    key, limited = keys.add("plain"), keys.add("limited", tokens_per_day=20, priority="low")
    async with serving(ReverseModel, Doubler, processes=2, api_keys=str(keys.path)) as server:
        for _ in range(10):  # connections of both processes
            assert (await server.infer("Doubler", BODY, bearer(key))).status == 200
        statuses, remaining = [], []
        for _ in range(5):
            response = await server.request("POST", "/v1/chat/completions", {"messages": CHAT}, bearer(limited))
            assert "x-ratelimit-remaining-tokens" in response.headers, response
            statuses.append(response.status)
            remaining.append(response.headers["x-ratelimit-remaining-tokens"])
        assert (statuses, remaining) == ([200, 200, 200, 429, 429], ["13", "6", "0", "0", "0"])
        assert await usage(server, key) == [("plain", "Doubler", 10, 0, 0)]
        assert await usage(server, limited) == [("limited", "ReverseModel", 3, 9, 12)]


async def test_without_keys_nothing_is_counted() -> None:
    async with serving(Doubler) as server:
        response = await server.request("GET", "/v1/usage")
        assert "expected a server with --api-keys" in response.error


def test_limits_of_tokens_need_what_counts_them(keys: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    keys.add("chat", tokens_per_minute=5)
    AccessControl(AccessRules(keys_file=str(keys.path)))
    monkeypatch.setattr(hooks, "entry", lambda group, name: None)
    with pytest.raises(InvalidInput, match="key 'chat': limits of tokens need the feature dragoman_usage"):
        AccessControl(AccessRules(keys_file=str(keys.path)))
