"""Model control without a token: cross-origin requests are rejected, and public addresses logged."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from dragoman import Server
from rest.rest_server import Identity, RawResponse, RestServer, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[RestServer]:
    async with serving(Identity, control_open=True, model_folders="/srv/none") as server:
        yield server


async def send_simple_request(server: RestServer, method: str, path: str, host: str, **headers: str) -> RawResponse:
    """Send a request as browsers do without a preflight request: the body is text."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", "content-type: text/plain", "content-length: 2"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    response: RawResponse = await server.send("\r\n".join([*lines, "", "{}"]).encode())
    return response


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2/repository/models/Identity/unload"),
        ("POST", "/v2/repository/models/Identity/load"),
        ("POST", "/v2/repository/index"),
        ("POST", "/models?url=/srv/none/m"),
        ("PUT", "/models/Identity?min_worker=1"),
        ("DELETE", "/models/Identity"),
    ],
)
@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:8080", "http://evil.example"),  # a form on a page of another site
        ("evil.example:8080", "http://evil.example:8080"),  # a name bound to the address of this machine
        ("127.0.0.1:8080", "http://127.0.0.1:3000"),
        ("127.0.0.1:8080", "null"),
        ("127.0.0.1:8080", "http://["),
        ("localhost.evil.example", "http://localhost.evil.example"),
    ],
)
async def test_cross_origin_pages_cannot_control_models(
    server: RestServer, method: str, path: str, host: str, origin: str
) -> None:
    response = await send_simple_request(server, method, path, host, origin=origin)
    assert response.status == 403
    assert "a web page needs a control token" in str(response.json)
    assert (await server.request("GET", "/v2/models/Identity/ready")).status == 200


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "[::1]:8080", "localhost:8080"])
async def test_same_origin_pages_can_control_models(server: RestServer, host: str) -> None:
    assert (
        await send_simple_request(server, "POST", "/v2/repository/index", host, origin=f"http://{host}")
    ).status == 200


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "model-server:8080", ""])
async def test_requests_without_origin_are_accepted_for_any_host(server: RestServer, host: str) -> None:
    assert (await send_simple_request(server, "POST", "/v2/repository/index", host)).status == 200


async def test_a_page_with_the_token_can_control_models() -> None:
    async with serving(Identity, control_token="sesame") as server:
        headers = {"origin": "http://evil.example", "authorization": "Bearer sesame"}
        assert (await send_simple_request(server, "POST", "/v2/repository/index", "x", **headers)).status == 200


@pytest.mark.parametrize(
    ("host", "settings", "warned"),
    [
        ("192.0.2.1", {"control_open": True}, True),  # an address for documentation, which no machine has
        ("192.0.2.1", {"control_open": True, "control_token": "sesame"}, False),
        ("192.0.2.1", {}, False),
        ("127.0.0.1", {"control_open": True}, False),
        ("127.0.0.1", {"control_open": True, "http_also": "192.0.2.1:0"}, True),
    ],
)
async def test_open_control_on_a_public_address_logs_a_warning(
    host: str, settings: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    public_server = Server(Identity, host=host, http_port=0, grpc_port=-1, **settings)
    try:
        await public_server.listen()
    except OSError:
        pass
    finally:
        await public_server.stop(0.0)
    assert ("every client of 192.0.2.1 may load and unload models" in caplog.text) == warned
