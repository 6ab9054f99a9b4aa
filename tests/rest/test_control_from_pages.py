"""Model control that asks for no token is not for web pages of other sites, nor announced to other machines unsaid."""

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


async def asked(server: RestServer, method: str, path: str, host: str, **headers: str) -> RawResponse:
    """A request as a browser sends it without asking first: its body is text."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", "content-type: text/plain", "content-length: 2"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    answer: RawResponse = await server.send("\r\n".join([*lines, "", "{}"]).encode())
    return answer


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
async def test_pages_of_other_sites_control_nothing(
    server: RestServer, method: str, path: str, host: str, origin: str
) -> None:
    answer = await asked(server, method, path, host, origin=origin)
    assert answer.status == 403
    assert "a web page needs a control token" in str(answer.json)
    assert (await server.request("GET", "/v2/models/Identity/ready")).status == 200


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "[::1]:8080", "localhost:8080"])
async def test_pages_of_this_server_do(server: RestServer, host: str) -> None:
    assert (await asked(server, "POST", "/v2/repository/index", host, origin=f"http://{host}")).status == 200


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "model-server:8080", ""])
async def test_programs_do_whatever_the_name_of_the_host(server: RestServer, host: str) -> None:
    assert (await asked(server, "POST", "/v2/repository/index", host)).status == 200


async def test_a_page_with_the_token_may_do_as_others_with_it() -> None:
    async with serving(Identity, control_token="sesame") as server:
        given = {"origin": "http://evil.example", "authorization": "Bearer sesame"}
        assert (await asked(server, "POST", "/v2/repository/index", "x", **given)).status == 200


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
async def test_open_control_on_a_public_address_is_warned_of(
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
