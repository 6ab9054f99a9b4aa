"""Which clients get the console, and that its files refer to each other only."""

import re
from pathlib import Path

import httpx2
import pytest

import dragoman
from access.access_models import Doubler, KeyFile
from access.conftest import keys as keys
from dragoman.protocols.console import routes
from rest.rest_server import serving

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
STATIC = Path(routes.__file__).parent / "static"


async def test_browsers_get_the_console_at_the_root_and_other_clients_the_health_check() -> None:
    async with serving(Doubler) as server:
        page = await server.request("GET", "/", None, HTML)
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        plain = await server.request("GET", "/", None, {"accept": "*/*"})
        assert (plain.status, plain.body) == (200, b'{"status":"alive"}')
        assert (await server.request("GET", "/console")).body == page.body
        redirect = await server.request("GET", "/console/")
        assert (redirect.status, redirect.headers["location"]) == (308, "../console")


async def test_the_root_without_tgi() -> None:
    async with serving(Doubler, protocols="oip_rest") as server:
        assert (await server.request("GET", "/", None, HTML)).status == 200
        assert (await server.request("GET", "/")).status == 404


async def test_without_web_pages_there_is_no_console() -> None:
    async with serving(Doubler, web_pages=False) as server:
        assert (await server.request("GET", "/", None, HTML)).body == b'{"status":"alive"}'
        assert (await server.request("GET", "/console")).status == 404


async def test_pages_need_no_key_and_the_models_do(keys: KeyFile) -> None:
    async with serving(Doubler, api_keys=str(keys.path)) as server:
        for path in ("/", "/console", "/console/assets/app.js"):
            assert (await server.request("GET", path, None, HTML)).status == 200
        assert (await server.request("GET", "/v2")).status == 401


async def test_each_file_that_a_file_needs_is_served() -> None:
    async with serving(Doubler) as server:
        page = (await server.request("GET", "/console")).body.decode()
        waiting = [link.rpartition("/")[2] for link in re.findall(r'(?:src|href)="(console/assets/[^"]+)"', page)]
        found: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            found.add(name)
            response = await server.request("GET", f"/console/assets/{name}")
            assert response.status == 200, name
            text = response.body.decode()
            if name.endswith("js"):
                assert response.headers["content-type"] == "text/javascript; charset=utf-8"
                imported = re.findall(r'(?:^|;)\s*(?:import|export)[^;"]*?from\s*"([^"]+)"', text, re.MULTILINE)
                imported += re.findall(
                    r'(?:new URL|import)\("(\./[^"]+)"', text
                )  # a worker, and what is loaded when it is shown
                assert all(path.startswith("./") for path in imported), (name, imported)
                waiting += [path.removeprefix("./") for path in imported]
    assert {path.name for path in STATIC.glob("*.*s")} <= found, "files that nothing loads"


async def test_the_console_is_small() -> None:
    """The page with all of its files, as they are sent."""
    async with serving(Doubler) as server:
        compressed = {"accept-encoding": "gzip"}
        names = ["/console", *(f"/console/assets/{name}" for name in routes._FILES)]
        sizes = [len((await server.request("GET", name, None, compressed)).body) for name in names]
    assert sum(sizes) < 120 * 1024


@pytest.mark.parametrize("path", sorted(STATIC.glob("*.*")), ids=lambda path: path.name)
def test_own_files_name_no_other_host_and_never_parse_markup(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"https?://", text.replace("http://www.w3.org/2000/svg", ""))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySet|eval\(|style=\"", text)


async def test_an_asgi_application_has_the_console_below_its_prefix() -> None:
    app = dragoman.asgi(Doubler)
    async with app, httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test") as client:
        page = await client.get("/", headers=HTML)
        assert 'src="console/assets/app.js"' in page.text
        assert (await client.get("/console/assets/app.js")).status_code == 200


async def test_the_content_security_policy_allows_no_inline_code_and_no_other_host() -> None:
    async with serving(Doubler) as server:
        for path in ("/", "/docs"):
            policy = (await server.request("GET", path, None, HTML)).headers["content-security-policy"]
            sources = dict(part.strip().split(" ", 1) for part in policy.split(";"))
            assert sources["default-src"] == "'none'"
            assert sources["script-src"] == sources["style-src"] == sources["connect-src"] == "'self'"
            assert not re.search(r"unsafe|\*|https?:", policy)
