"""Requests of web pages of other sites to a server that needs no key: by host name and by origin."""

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
import httpx2
import pytest

import dragoman
from access.access_models import BODY, Doubler, KeyFile, bearer
from dragoman.access.sites import SiteRules
from dragoman.core.errors import Forbidden
from dragoman.formats import grpc_messages as m
from rest.rest_server import RestServer, serving

INFER = "/v2/models/Doubler/infer"
INDEX = "/v2/repository/index"
TEXT = {"content-type": "text/plain"}
FOREIGN_HOST, FOREIGN_PAGE = "host 'evil.example", "rejects requests of pages of other sites"


async def post(server: RestServer, **headers: str) -> Any:
    fields = {"host": "localhost", "content-length": str(len(BODY)), **headers}
    lines = [f"POST {INFER} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items())]
    return await server.send("\r\n".join([*lines, "", ""]).encode() + BODY)


# --- host names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8080", "LOCALHOST", "localhost.", "a.localhost", "127.0.0.1", "127.0.0.1:8080", ""),
        *("[::1]:8080", "[fe80::1]", "192.168.1.5:80", "0.0.0.0", "model-server", "testserver:80", "printer.local"),
        *("host.docker.internal:8080", "model.ns.svc.cluster.local"),
    ],
)
def test_names_that_no_site_can_have_are_local(host: str) -> None:
    SiteRules(allowed_hosts=()).check("POST", {"host": host})


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8080", "EVIL.example.", "localhost.evil.example", "127.0.0.1.evil.example"),
        *("internal.evil.example", "a.localhost.evil.example", "1.2.3.4.5", "evil.example:local", "[::1", "xlocal.org"),
    ],
)
def test_other_names_could_be_of_any_site(host: str) -> None:
    with pytest.raises(Forbidden, match="--allowed-hosts"):
        SiteRules(allowed_hosts=()).check("GET", {"host": host})
    SiteRules().check("GET", {"host": host})


def test_allowed_hosts_are_patterns() -> None:
    rules = SiteRules(allowed_hosts=("Models.example.org", "*.lab.example"))
    for host in ("models.example.org", "MODELS.example.org:8080", "a.lab.example", "a.b.lab.example", "localhost"):
        rules.check("GET", {"host": host})
    for host in ("example.org", "x.models.example.org", "lab.example", "a.lab.example.org"):
        with pytest.raises(Forbidden):
            rules.check("GET", {"host": host})


@pytest.mark.parametrize("http2", [False, True])
async def test_a_server_for_this_machine_rejects_names_that_are_bound_to_its_address(http2: bool) -> None:
    async with serving(Doubler) as server, httpx2.AsyncClient(http1=not http2, http2=http2) as client:
        url = f"http://127.0.0.1:{server.port}"
        for method, path in (
            ("POST", INFER),
            ("GET", "/v2/models"),
            ("GET", "/metrics"),
            ("GET", "/docs"),
        ):
            for host, status in (("evil.example", 403), ("localhost", 200), ("evil.example", 403)):
                response = await client.request(method, url + path, headers={"host": host}, content=BODY)
                assert (response.status_code, response.http_version) == (status, "HTTP/2" if http2 else "HTTP/1.1"), (
                    path
                )
                if status == 403:
                    assert FOREIGN_HOST in response.text
        assert (await client.get(f"{url}/v2/health/ready", headers={"host": "evil.example"})).status_code == 200


async def test_an_absolute_target_does_not_replace_the_host() -> None:
    async with serving(Doubler) as server:
        for target, host, status in (
            ("http://evil.example", "localhost", 200),
            ("http://localhost", "evil.example", 403),
        ):
            head = f"GET {target}/v2/models HTTP/1.1\r\nhost: {host}\r\n\r\n"
            assert (await server.send(head.encode())).status == status


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({"host": "0.0.0.0"}, "evil.example", 200),  # its clients have names of their own for it
        ({"host": "0.0.0.0", "allowed_hosts": "models.example"}, "evil.example", 403),
        ({"host": "0.0.0.0", "allowed_hosts": "models.example"}, "models.example", 200),
        ({"allowed_hosts": "models.example"}, "models.example", 200),
        ({"allowed_hosts": "models.example"}, "evil.example", 403),
        ({"allowed_hosts": "*"}, "evil.example", 200),
        ({"http_also": "0.0.0.0:0"}, "evil.example", 200),
        ({"admin_port": 0, "admin_host": "0.0.0.0"}, "evil.example", 200),
        ({"control_token": "sesame"}, "evil.example", 403),
    ],
)
async def test_which_hosts_are_allowed(settings: Mapping[str, Any], host: str, status: int) -> None:
    async with serving(Doubler, **settings) as server:
        assert (await post(server, host=host)).status == status
        assert (await post(server, host="localhost")).status == 200


async def test_with_keys_any_host_is_served(keys: KeyFile) -> None:
    async with serving(Doubler, api_keys=str(keys.path)) as server:
        headers = {**bearer(keys.keys["user"]), "host": "models.example"}
        assert (await post(server, **headers)).status == 200
        assert (await post(server, **headers, **TEXT, origin="http://evil.example")).status == 200
        assert (await post(server, host="evil.example")).status == 401


async def test_grpc_is_out_of_reach_of_pages() -> None:
    request = m.ServerMetadataRequest().SerializeToString()
    async with serving(Doubler, grpc_port=0) as server:
        for port in (server.port, server.dragoman.grpc_port):
            options = [("grpc.default_authority", "models.example")]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
                found = await channel.unary_unary(f"/{m.SERVICE}/ServerMetadata")(request)
                assert m.ServerMetadataResponse.FromString(found).name == "dragoman"


# --- origins -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "is_foreign"),
    [
        ({}, False),
        ({"origin": "http://localhost:8080"}, False),
        ({"origin": "http://LOCALHOST:8080"}, False),
        ({"origin": "http://localhost:3000"}, True),
        ({"origin": "http://localhost"}, True),
        ({"origin": "https://evil.example"}, True),
        ({"origin": "https://localhost:8080.evil.example"}, True),
        ({"origin": "null"}, True),
        ({"origin": ""}, True),
        ({"origin": "http://["}, True),
        ({"origin": "chrome-extension://abcdef"}, True),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "same-site", "origin": "http://localhost:3000"}, True),
        ({"sec-fetch-site": "same-origin", "origin": "https://models.example"}, False),  # behind a proxy
        ({"sec-fetch-site": "none"}, False),  # the user has typed the address
        ({"sec-fetch-site": "strange"}, True),
        ({"origin": "https://a.org"}, False),  # allowed by CORS
        ({"sec-fetch-site": "cross-site", "origin": "https://a.org"}, False),
    ],
)
def test_which_pages_are_of_other_sites(headers: Mapping[str, str], is_foreign: bool) -> None:
    rules = SiteRules(allows_origin=lambda origin: origin == "https://a.org")
    host = {"host": "localhost:8080"}
    for media_type in ("text/plain", "Text/Plain; charset=utf-8", "multipart/form-data; boundary=x", None):
        sent = {**host, **headers, **({} if media_type is None else {"content-type": media_type})}
        if is_foreign:
            with pytest.raises(Forbidden, match=FOREIGN_PAGE):
                rules.check("POST", sent)
        else:
            rules.check("POST", sent)
    for method in ("GET", "HEAD", "OPTIONS"):  # pages cannot read the response
        rules.check(method, {**host, **headers})
    for media_type in ("application/json", "application/octet-stream", "application/json, text/plain"):
        rules.check("POST", {**host, **headers, "content-type": media_type})  # only after a preflight request


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ({"origin": "null"}, "Origin 'null'"),
        ({"origin": "https://" + "a" * 300}, f"Origin 'https://{'a' * 248}'"),
        ({"sec-fetch-site": "cross-site"}, "Sec-Fetch-Site 'cross-site'"),
        ({"sec-fetch-site": "s" * 300}, f"Sec-Fetch-Site '{'s' * 256}'"),
        ({"sec-fetch-site": "cross-site", "origin": "https://b.org"}, "Origin 'https://b.org'"),
    ],
)
def test_the_sender_of_a_rejected_request_is_named(headers: Mapping[str, str], shown: str) -> None:
    with pytest.raises(Forbidden) as found:
        SiteRules().check("POST", headers)
    assert f"got one of {shown}; allowed ones are in the setting 'cors_origins'" in found.value.message


@pytest.mark.parametrize("http2", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_pages_of_other_sites_cannot_compute(http2: bool, host: str) -> None:
    async with serving(Doubler, host=host) as server, httpx2.AsyncClient(http1=not http2, http2=http2) as client:
        url = f"http://127.0.0.1:{server.port}"
        for path in (INFER, "/invocations", "/v1/chat/completions", "/Evaluate"):
            sent = await client.post(url + path, headers={**TEXT, "origin": "http://evil.example"}, content=BODY)
            assert sent.status_code == 403
            assert FOREIGN_PAGE in sent.text
            assert "access-control-allow-origin" not in sent.headers
        own = await client.post(url + INFER, headers={**TEXT, "origin": url}, content=BODY)
        assert (own.status_code, own.json()["outputs"][0]["data"]) == (200, [3.0])
        assert (await client.post(url + INFER, headers=TEXT, content=BODY)).status_code == 200  # curl and the like
        asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
        preflight = await client.options(
            url + INFER, headers={**asked, "access-control-request-headers": "content-type"}
        )
        assert (preflight.status_code, "access-control-allow-origin" in preflight.headers) == (204, False)


async def test_pages_that_cors_allows_may_send_text() -> None:
    async with serving(Doubler, cors_origins="https://a.org", cors_origin_regex=r"https://.*\.b\.org") as server:
        for origin, status in (("https://a.org", 200), ("https://x.b.org", 200), ("https://c.org", 403)):
            assert (await post(server, **TEXT, origin=origin)).status == status
    async with serving(Doubler, cors_origins="*") as server:
        assert (await post(server, **TEXT, origin="null")).status == 200


async def test_a_rejected_page_does_not_change_what_its_connection_may_do() -> None:
    async with serving(Doubler, control_open=True) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        statuses = []
        page = "content-type: text/plain\r\norigin: http://evil.example\r\n"
        for path, more in [(INFER, ""), (INFER, page), (INFER, ""), (INDEX, ""), (INFER, "")] * 2:
            body = BODY if path == INFER else b"{}"
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n{more}\r\n"
            writer.write(head.encode() + body)
            line = await reader.readline()
            statuses.append(int(line.split()[1]))
            length = 0
            while (field := await reader.readline()) != b"\r\n":
                if field.lower().startswith(b"content-length:"):
                    length = int(field.split(b":")[1])
            await reader.readexactly(length)
        writer.close()
        assert statuses == [200, 403, 200, 200, 200] * 2


async def test_refusals_are_counted() -> None:
    async with serving(Doubler) as server:
        assert (await post(server, host="evil.example")).status == 403
        assert (await post(server, **TEXT, origin="null")).status == 403
        metrics = (await server.request("GET", "/metrics")).body.decode()
        assert 'dragoman_access_denied_total{reason="foreign_site"} 2' in metrics


# --- ASGI --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("allowed", "statuses"), [("", [200, 200]), ("models.example", [403, 200])])
async def test_asgi_applications_have_the_same_rules(allowed: str, statuses: list[int]) -> None:
    settings: Any = {"allowed_hosts": allowed} if allowed else {}
    app: Any = dragoman.asgi(Doubler, **settings)
    async with app, httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as client:
        for host, status in zip(("evil.example", "models.example"), statuses, strict=True):
            assert (await client.post(f"http://{host}{INFER}", content=BODY)).status_code == status
        page = {**TEXT, "origin": "http://evil.example"}
        assert (await client.post(f"http://models.example{INFER}", content=BODY, headers=page)).status_code == 403


async def test_several_processes_have_the_same_rules() -> None:
    async with serving(Doubler, processes=2) as server:
        for _ in range(6):
            assert (await post(server, host="evil.example")).status == 403
            assert (await post(server, **TEXT, origin="http://evil.example")).status == 403
            assert (await post(server)).status == 200
