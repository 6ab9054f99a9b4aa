"""The requests of the console: its own are not counted, those of a person are."""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import dragoman
from access.access_models import KeyFile
from access.conftest import keys as keys
from console.browser import Browser, needs_chromium, open_page, playwright, serve_page
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
        async with open_page(chromium, str(server.http_url)) as browser:
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


async def test_a_request_of_this_tab_is_sent_again_and_copied(chromium: Any) -> None:
    async with (
        dragoman.Server(Table, Parrot, **{**DEFAULTS, "recent_requests": 50}) as server,
        open_page(chromium, str(server.http_url)) as browser,
    ):
        page = browser.page
        await browser.open("/#/models/Table")
        await page.fill("textarea", "1, 2, 9007199254740993")
        await browser.press("Run")
        await page.locator("a[href^='#/requests/']").click()
        await browser.press("Replay")
        answer = page.locator("section", has=page.get_by_role("heading", name="Send it again"))
        await answer.get_by_text('"data": [9007199254740993]').wait_for()  # the count, beyond the integers of a double
        assert await listed(server) == ["POST /v2/models/Table/infer"] * 2
        code = page.locator("section", has=page.get_by_role("heading", name="From elsewhere")).locator("pre")
        assert json.loads(await run("bash", "-c", (await code.inner_text()).replace("curl", "curl -s", 1)))["outputs"]
        for name in ("Python: requests", "Python: dragoman"):
            await browser.press(name)
            text = (await code.inner_text()).replace("import requests\n", FAKE_REQUESTS)
            assert "9007199254740993" in await run(sys.executable, "-c", text), name
        await browser.press("JavaScript")
        script = (await code.inner_text()).replace("console.log(await response.text())", "return await response.text()")
        assert '"sum"' in await page.evaluate(f"async () => {{ {script} }}")
        assert await browser.find_violations() == []
        assert len(await listed(server)) == 7  # of which the Python client asks for the metadata once
        await page.get_by_role("link", name="All requests").click()
        await page.get_by_label("Search requests").fill("nothing")
        await page.get_by_text("No request matches.").wait_for()
        await page.get_by_label("Search requests").fill("table")
        await playwright.expect(page.locator("table.requests tbody tr")).to_have_count(7)
        await page.get_by_label("Status").select_option("errors")
        await page.get_by_text("No request matches.").wait_for()
        await browser.keep("requests")
        assert browser.problems == []


async def test_without_recent_requests_those_of_the_tab_are_listed_without_keys(keys: KeyFile, chromium: Any) -> None:
    async with serve_page(chromium, Table, api_keys=str(keys.path)) as browser:
        page, key = browser.page, keys.keys["user"]
        await browser.open("/")
        await page.fill("#key", key)
        await browser.press("Open")
        await page.get_by_role("link", name="Table").click()
        await browser.press("Run")
        await page.get_by_label("Output sum").wait_for()
        await page.goto(f"{browser.url}/#/requests")
        await page.locator("td.id a").click()
        for name in ("curl", "Python: requests", "Python: dragoman", "JavaScript"):
            await browser.press(name)
            assert key not in await page.content()
        sent = "async () => JSON.stringify((await import('/console/assets/api.js')).sent)"
        assert (key in await page.evaluate(sent), "rows" in await page.evaluate(sent)) == (False, True)
        await browser.press("Forget the key")
        assert await page.evaluate(sent) == "[]"


async def test_the_code_of_a_request_has_all_of_its_values(chromium: Any) -> None:
    async with serve_page(chromium, Table) as browser:
        await browser.open("/")
        tensor = {"name": "rows", "datatype": "FP32", "shape": [100, 3], "data": [*range(300)]}
        request = {
            "method": "POST",
            "path": "/v2/models/Table/infer",
            "body": json.dumps({"inputs": [tensor]}),
            "headers": {},
        }
        script = "async (request) => (await import('/console/assets/replay.js')).snippetsOf(request, 'http://host')"
        for name, text in await browser.page.evaluate(script, request):
            assert "297" in text, name


# The package of that name, as far as the code of the page uses it.
FAKE_REQUESTS = """
import json as JSON, types, urllib.request
def request(method, url, headers, json=None):
    found = urllib.request.urlopen(urllib.request.Request(url, JSON.dumps(json).encode(), headers, method=method))
    return types.SimpleNamespace(raise_for_status=lambda: None, text=found.read().decode())
requests = types.SimpleNamespace(request=request)
"""


async def run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return output.decode()
