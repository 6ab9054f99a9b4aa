"""Asynchronous responses, fetched with a token as by clients of LMI and SageMaker."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rest.rest_server import RawResponse
from text_server import TextServer, lines, serve

ASYNCHRONOUS = {"x-synchronous": "false"}
ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve() as server:
        yield server


async def _start(server: TextServer, body: Any, headers: dict[str, str] = ASYNCHRONOUS) -> str:
    response = await server.post("/invocations", body, headers)
    assert (response.status, response.body) == (200, b"")
    token = response.headers["x-next-token"]
    assert response.headers[ATTRIBUTES] == f"x-next-token={token}"
    return token


async def _fetch(server: TextServer, token: str, **more: str) -> RawResponse:
    headers = {"x-starting-token": token, **{name.replace("_", "-"): value for name, value in more.items()}}
    return await server.post("/invocations", b"", headers)


async def _fetch_when_ready(server: TextServer, token: str, **more: str) -> RawResponse:
    async with asyncio.timeout(60):
        while (response := await _fetch(server, token, **more)).status == 202:
            await asyncio.sleep(0.001)
    return response


async def test_fetch_a_response(server: TextServer) -> None:
    token = await _start(server, {"inputs": "!wait now"})
    pending = await _fetch(server, token)
    assert pending.status == 202
    assert pending.json == {"code": 202, "message": "The model result is not yet available"}
    server.model().gate.set()
    response = await _fetch_when_ready(server, pending.headers["x-next-token"])
    assert (response.status, response.json) == (200, {"generated_text": "now !wait"})
    assert response.headers["content-type"] == "application/json"
    assert "x-next-token" not in response.headers
    assert (await _fetch(server, token)).json == response.json  # any number of times


async def test_fetch_a_stream_in_parts(server: TextServer) -> None:
    token = await _start(server, {"inputs": "d c !wait b a", "stream": True})
    async with asyncio.timeout(60):
        while not server.model().active or (response := await _fetch(server, token)).status == 202:
            await asyncio.sleep(0.001)
    assert response.headers["content-type"] == "application/jsonlines"
    received, next_token = lines(response.body), response.headers["x-next-token"]
    while len(received) < 2:
        more = await _fetch(server, next_token)
        received, next_token = received + (lines(more.body) if more.body else []), more.headers["x-next-token"]
    server.model().gate.set()
    while next_token:
        more = await _fetch(server, next_token, x_max_items="1")
        assert len(more.body.splitlines()) <= 1
        received += lines(more.body) if more.body else []
        next_token = more.headers.get("x-next-token", "")
    assert "".join(line["token"]["text"] for line in received) == "a b !wait c d"
    assert received[-1]["generated_text"] == "a b !wait c d"


async def test_tokens_in_sagemaker_custom_attributes(server: TextServer) -> None:
    token = await _start(server, {"inputs": "a b"}, {ATTRIBUTES: "x-synchronous=false"})
    async with asyncio.timeout(60):
        while True:
            response = await server.post("/invocations", b"", {ATTRIBUTES: f"x-starting-token={token}"})
            if response.status == 200:
                break
    assert response.json == {"generated_text": "b a"}


@pytest.mark.parametrize(
    ("body", "message"),
    [({"inputs": "a", "parameters": {"temperature": -1}}, "temperature"), (b"{", "not valid JSON")],
)
async def test_fetch_an_error(server: TextServer, body: Any, message: str) -> None:
    response = await _fetch_when_ready(server, await _start(server, body))
    assert response.status == 424
    assert message in response.json["error"]
    failed = await _fetch_when_ready(server, await _start(server, {"inputs": "!fault"}))
    assert failed.json["details"]["finish_reason"] == "error"


async def test_invalid_tokens_are_rejected(server: TextServer) -> None:
    token = await _start(server, {"inputs": "a"})
    for invalid in ("x", f"{token}.99", f"{token}.x", "."):
        response = await _fetch(server, invalid)
        assert (response.status, response.json["type"]) == (400, "BadRequestException")
        assert response.json["message"] == f"Invalid x-starting-token: {invalid}"
    for most, status in (("many", 424), ("9" * 10, 424), ("9" * 9, 200), ("-1", 200)):
        token = await _start(server, {"inputs": "a"})
        assert (await _fetch_when_ready(server, token)).status == 200
        assert (await _fetch(server, token, x_max_items=most)).status == status, most


async def test_synchronous_requests_get_the_response(server: TextServer) -> None:
    response = await server.post("/invocations", {"inputs": "a b"}, {"x-synchronous": "true"})
    assert response.json == {"generated_text": "b a"}


async def test_the_number_of_stored_results_is_limited(server: TextServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.transports.async_results.MAX_RESULTS", 2)
    for _ in range(2):
        await _start(server, {"inputs": "a"})
    full = await server.post("/invocations", {"inputs": "a"}, ASYNCHRONOUS)
    assert (full.status, full.json["type"]) == (503, "WlmCapacityException")


async def test_the_bytes_of_stored_results_are_limited(server: TextServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await _fetch_when_ready(server, await _start(server, {"inputs": "a b"}))
    monkeypatch.setattr("dragoman.transports.async_results._MAX_BYTES", 2 * len(first.body))
    second = await _fetch_when_ready(server, await _start(server, {"inputs": "c d"}))
    assert second.json == {"generated_text": "d c"}
    full = await server.post("/invocations", {"inputs": "a"}, ASYNCHRONOUS)
    assert (full.status, full.json["type"]) == (503, "WlmCapacityException")


async def test_stored_results_expire(server: TextServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.transports.async_results.KEEP_S", 0.01)
    token = await _start(server, {"inputs": "!wait", "stream": True})
    async with asyncio.timeout(60):
        while (await _fetch(server, token)).status != 400 or server.model().active:
            await asyncio.sleep(0.05)
    assert server.model().cancelled == 1


async def test_positions_in_tokens_are_validated(server: TextServer) -> None:
    token = await _start(server, {"inputs": "a"})
    await _fetch_when_ready(server, token)
    assert (await _fetch(server, f"{token}.0")).status == 200
    for position in ("2", "0" * 12 + "1", "1" * 5000):
        assert (await _fetch(server, f"{token}.{position}")).status == 400
