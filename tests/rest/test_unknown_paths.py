"""Paths that no route has: the error names the path that the client may have meant, in the format of its API."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from rest.rest_server import RestServer, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[RestServer]:
    async with serving() as server:
        yield server


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1//chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/v1/embeddings", "/v1/embeddings"),
        ("POST", "/openai/v1/completions", "/v1/completions"),
        ("DELETE", "/responses/resp_1", "/v1/responses/resp_1"),
    ],
)
async def test_openai(server: RestServer, method: str, path: str, meant: str) -> None:
    response = await server.request(method, path, {} if method == "POST" else None)
    assert response.status == 404
    message = f"no such path: {path}; did you mean {meant}?"
    assert response.json == {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    }


async def test_other_apis(server: RestServer) -> None:
    response = await server.request("POST", "/v1/v1/messages", {})
    assert (response.status, response.json["error"]["type"]) == (404, "not_found_error")
    assert response.json["error"]["message"] == "no such path: /v1/v1/messages; did you mean /v1/messages?"
    assert response.json["request_id"] == response.headers["x-request-id"]
    response = await server.request("POST", "/v1/generate", {})
    assert (response.status, response.json["error"]) == (404, "no such path: /v1/generate; did you mean /generate?")
    for path in ("/v1/api/chat", "/chat"):
        response = await server.request("POST", path, {})
        assert (response.status, response.json) == (404, {"error": f"no such path: {path}; did you mean /api/chat?"})
    response = await server.request("GET", "/health/ready")
    assert response.error == "no such path: /health/ready; did you mean /v2/health/ready?"


@pytest.mark.parametrize(
    "path",
    [
        "/v2/generate",
        "/models/a/b/c/d",
        "/nothing",
        "/v1/nothing",
        "/nothing/x/y",
        "/v1/chat/completions/x/y",
        "/a" * 50,
    ],
)
async def test_no_path_is_invented(server: RestServer, path: str) -> None:
    response = await server.request("POST", path, {})
    assert response.status == 404
    error: Any = response.json.get("error", response.json)
    message = error if isinstance(error, str) else error["message"]
    assert message == f"no such path: {path}"


async def test_clients_of_anthropic_get_its_errors(server: RestServer) -> None:
    response = await server.request("GET", "/v1/skills", None, {"anthropic-version": "2023-06-01"})
    assert response.status == 404
    assert response.json["error"] == {"type": "not_found_error", "message": "no such path: /v1/skills"}
