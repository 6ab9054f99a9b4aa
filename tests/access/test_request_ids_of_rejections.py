"""A request that is rejected before its handler runs has an id of its own, in headers, body and log lines."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import httpx2
import pytest
import pytest_asyncio

import dragoman
from access.access_models import Doubler, KeyFile, bearer
from dragoman.access.control import AccessControl
from dragoman.core.calls import Generate
from dragoman.core.text import Generation, PromptInfo, Text, Token
from dragoman.formats import grpc_messages as m
from dragoman.system.request_context import log_fields
from rest.rest_server import RestServer, serving

GENERATED = re.compile(r"[0-9a-f]{16}-[0-9]{10}")
OTHER = "order-4711"  # the id that another client has chosen
MESSAGE = {"model": "Waits", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
MODES: dict[str, Any] = {"http1": {}, "http2": {"http1": False, "http2": True}}


class Waits(dragoman.Model):
    """Generate one word after a turn of the event loop, so that a task answers."""

    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP32, (-1,)),)

    async def infer(self, call: Any) -> dict[str, Any]:
        await asyncio.sleep(0.001)
        return {"y": call.inputs["x"].data}

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        await asyncio.sleep(0.001)
        text = Text(0, 0, "word", (Token(10, "word", -0.5),), 1, finish="eos_token", whole="word")
        yield Generation((text,), (PromptInfo("", 1),))


@pytest_asyncio.fixture
async def server(keys: KeyFile) -> AsyncIterator[RestServer]:
    options: dict[str, Any] = {"max_body_bytes": 4096, "auth_failures_per_minute": 8, "max_connections": 3}
    async with serving(Waits, grpc_port=0, api_keys=str(keys.path), **options) as server:
        yield server


def url_of(server: RestServer) -> str:
    return f"http://127.0.0.1:{server.port}"


async def _answer_other(client: httpx2.AsyncClient, key: str) -> None:
    """Answer a message and a stream of another client, which a proxy sends over the same connection."""
    for stream in (False, True):
        headers = {"x-request-id": OTHER, **bearer(key)}
        response = await client.post("/v1/messages", json={**MESSAGE, "stream": stream}, headers=headers)
        assert (response.status_code, response.headers["request-id"]) == (200, OTHER)


REJECTED: dict[str, tuple[str, str, dict[str, str], bytes, int]] = {
    "no key": ("POST", "/v1/messages", {}, b"{}", 401),
    "wrong key": ("POST", "/v1/messages", {"x-api-key": "w"}, b"{}", 401),
    "method": ("GET", "/v1/messages", {}, b"", 405),
    "unknown path": ("POST", "/v1/messages/other", {"authorization": "KEY"}, b"{}", 404),
    "too large": ("POST", "/v1/messages", {"authorization": "KEY"}, b"x" * 5000, 413),
    "encoding": ("POST", "/v1/messages", {"authorization": "KEY", "content-encoding": "odd"}, b"{}", 415),
    "not JSON": ("POST", "/v1/messages", {"authorization": "KEY"}, b"{", 400),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REJECTED)
async def test_a_rejected_request_has_its_own_id(server: RestServer, keys: KeyFile, mode: str, name: str) -> None:
    method, path, headers, body, status = REJECTED[name]
    headers = {n: v if v != "KEY" else f"Bearer {keys.keys['user']}" for n, v in headers.items()}
    async with httpx2.AsyncClient(base_url=url_of(server), **MODES[mode]) as client:
        await _answer_other(client, keys.keys["user"])
        response = await client.request(method, path, headers=headers, content=body)
        assert response.status_code == status
        _check_ids(response, GENERATED.fullmatch)
        response = await client.request(method, path, headers={**headers, "x-request-id": "mine"}, content=body)
        _check_ids(response, lambda found: found == "mine")


def _check_ids(response: httpx2.Response, is_right: Callable[[str], Any]) -> None:
    found = {response.headers["x-request-id"], response.headers["request-id"], response.json()["request_id"]}
    assert len(found) == 1
    assert is_right(found.pop())


async def test_too_many_wrong_keys(server: RestServer, keys: KeyFile) -> None:
    async with httpx2.AsyncClient(base_url=url_of(server)) as client:
        await _answer_other(client, keys.keys["user"])
        statuses = []
        for _ in range(20):
            response = await client.post("/v1/messages", json={}, headers={"x-api-key": "w"})
            statuses.append(response.status_code)
            _check_ids(response, GENERATED.fullmatch)
        assert statuses[-1] == 429


async def test_too_many_connections(server: RestServer, keys: KeyFile) -> None:
    async with httpx2.AsyncClient(base_url=url_of(server)) as client:
        await _answer_other(client, keys.keys["user"])
    idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
    async with httpx2.AsyncClient(base_url=url_of(server)) as client:
        response = await client.post("/v1/messages", json={}, headers=bearer(keys.keys["user"]))
        assert response.status_code == 503
        _check_ids(response, GENERATED.fullmatch)
    for _, writer in idle:
        writer.close()


async def test_the_check_of_a_request_logs_no_id_of_another(
    server: RestServer, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    authorize = AccessControl.authorize

    def record(self: AccessControl, *arguments: Any) -> Any:
        found.append(log_fields().get("request_id"))
        return authorize(self, *arguments)

    monkeypatch.setattr(AccessControl, "authorize", record)
    for mode in MODES:
        async with httpx2.AsyncClient(base_url=url_of(server), **MODES[mode]) as client:
            await _answer_other(client, keys.keys["user"])
            found.clear()
            assert (await client.post("/v1/messages", json={})).status_code == 401
            assert (await client.post("/v1/messages", json={}, headers={"x-api-key": "w"})).status_code == 401
            assert len(found) == 2
            assert OTHER not in found
    body = m.ModelInferRequest(model_name="Waits")
    body.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(1.5)
    sent = body.SerializeToString()
    metadata = (("authorization", f"Bearer {keys.keys['user']}"), ("x-request-id", OTHER))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.dragoman.grpc_port}") as channel:
        unary = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        await unary(sent, metadata=metadata)
        assert len([response async for response in stream(iter([sent]), metadata=metadata)]) == 1
        found.clear()
        with pytest.raises(grpc.aio.AioRpcError) as denied:
            await unary(sent, metadata=(("x-request-id", "mine"),))
        assert denied.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert len(found) == 1
        assert OTHER not in found


async def test_asgi_leaves_no_id_behind(keys: KeyFile) -> None:
    key = bearer(keys.keys["user"])
    async with (
        dragoman.asgi(Waits, api_keys=str(keys.path), load_at_start=False) as app,
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost") as client,
    ):
        response = await client.post("/v1/messages", json=MESSAGE, headers={"x-request-id": OTHER, **key})
        assert response.headers["request-id"] == OTHER
        assert log_fields() == {}  # the transport runs in this very task
        denied = await client.post("/v1/messages", json={})
        assert denied.status_code == 401
        _check_ids(denied, GENERATED.fullmatch)


@pytest.mark.parametrize("is_logged", [False, True])
async def test_asgi_leaves_no_id_of_an_answered_request_behind(is_logged: bool, tmp_path: Path) -> None:
    access_log = str(tmp_path / "access.log") if is_logged else ""
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [2.0]}]}
    async with (
        dragoman.asgi(Doubler, access_log=access_log) as app,
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost") as client,
    ):
        response = await client.post("/v2/models/Doubler/infer", json=body, headers={"x-request-id": OTHER})
        assert (response.status_code, response.headers["x-request-id"]) == (200, OTHER)
        assert log_fields() == {}
