"""The requests of the console: its own are not counted, those of a person are."""

import re
from pathlib import Path
from typing import Any

import pytest

import dragoman
from console.browser import Browser, needs_chromium, open_page
from console.console_models import Parrot, Table, decay, write_graphs
from rest.rest_server import DEFAULTS, RestServer

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]
COUNTED = ("dragoman_requests_total", "dragoman_calls_total", "dragoman_rejected_total", "dragoman_access_denied_total")


def counters(text: str) -> dict[str, float]:
    """Return the counters of requests, calls and errors that are not 0, without those of the metrics themselves."""
    found = re.findall(r"^(\w+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
    return {
        name: float(value)
        for name, value in found
        if name.startswith(COUNTED) and 'protocol="metrics"' not in name and float(value)
    }


async def count(server: dragoman.Server) -> dict[str, float]:
    port = int(str(server.http_url).rpartition(":")[2])
    return counters((await RestServer(port, None).request("GET", "/metrics")).body.decode())


async def listed(server: dragoman.Server) -> list[str]:
    port = int(str(server.http_url).rpartition(":")[2])
    found = (await RestServer(port, None).request("GET", "/console/requests")).json["requests"]
    # `/` is the health check of an API as well, and counted as such.
    return [f"{each['method']} {each['path']}" for each in found if each["path"] not in ("/", "/metrics")]


async def visit_all(browser: Browser) -> None:
    """Open every page of the console and every tab of three models, and look at each for a while."""
    page = browser.page
    for address in ("/", "/#/live", "/#/requests", "/console"):
        await browser.open(address)
        await page.get_by_role("heading", level=1).wait_for()
    await page.wait_for_timeout(2500)  # longer than the intervals of all pages
    for name, tabs in (("Table", ("Code",)), ("Parrot", ("Code",)), ("kinetics", ("Graph", "Code"))):
        await browser.open(f"/#/models/{name}")
        await page.get_by_role("tab").first.wait_for()
        for tab in tabs:
            await page.get_by_role("tab", name=tab, exact=True).click()
    await browser.open("/#/models/none")
    await page.locator("p.error").wait_for()
    await browser.open("/#/requests/none")
    await page.locator("p.error").wait_for()


async def test_looking_at_pages_moves_no_counter(tmp_path: Path, chromium: Any) -> None:
    settings = {**DEFAULTS, "recent_requests": 50}
    async with dragoman.Server(Table, Parrot, decay, write_graphs(tmp_path)[0], **settings) as server:
        before = await count(server)
        browser = await open_page(chromium, str(server.http_url))
        asked: list[str] = []
        browser.page.on("request", lambda request: asked.append(request.url))
        await visit_all(browser)
        assert await count(server) == before
        assert await listed(server) == []
        assert len(asked) > 50
        await browser.open("/#/models/Table")
        await browser.press("Run")
        await browser.page.get_by_label("Output sum").wait_for()
        after = await count(server)
        assert await listed(server) == ["POST /v2/models/Table/infer"]
    added = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    assert added == {
        'dragoman_requests_total{protocol="oip_rest",status="200"}': 1,
        'dragoman_calls_total{model="Table",version="",call="Infer",outcome="ok"}': 1,
    }
    assert browser.problems == []
