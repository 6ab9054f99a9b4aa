"""The console in a real browser: Debian's Chromium, if it is installed, driven by Playwright."""

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import dragoman
from access.access_models import KeyFile
from access.conftest import keys as keys
from console.console_models import Parrot, Table, energy
from rest.rest_server import DEFAULTS

playwright = pytest.importorskip("playwright.async_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
# Set this variable to a folder to keep a picture of each view.
PICTURES = os.environ.get("DRAGOMAN_TEST_PICTURES", "")
WAIT_MS = 20_000


class Browser:
    """A page of a server, and what went wrong in it."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.problems: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda m: self.problems.append(m.text) if "Content Security Policy" in m.text else None)
        page.on("request", self._check_host)

    def _check_host(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.problems.append(f"request to {request.url}")

    async def open(self, address: str) -> None:
        await self.page.goto(self.url + address)

    async def panel(self) -> str:
        text: str = await self.page.inner_text("[role=tabpanel]")
        return text

    async def keep(self, name: str) -> None:
        if PICTURES:
            await self.page.screenshot(path=Path(PICTURES) / f"{name}.png")


async def open_browser(server: dragoman.Server) -> AsyncIterator[Browser]:
    async with playwright.async_playwright() as driver:
        chromium = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        context = await chromium.new_context(viewport={"width": 1200, "height": 850})
        browser = Browser(await context.new_page(), server.http_url)
        yield browser
        await chromium.close()
        assert browser.problems == []


async def test_the_views_of_the_console() -> None:
    """One test for all views: a browser takes longer to start than to show them."""
    async with dragoman.Server(Table, energy, Parrot, **{**DEFAULTS, "control_open": True}) as server:
        async for browser in open_browser(server):
            await check_models(browser)
            await check_try_it(browser)
            await check_values(browser)
            await check_chat(browser)
            await check_simulator(browser)
            await check_live(browser)


async def check_models(browser: Browser) -> None:
    page = browser.page
    await browser.open("/")
    await page.wait_for_selector("table.models")
    assert await page.locator("table.models tbody tr").count() == 3
    await browser.keep("models")
    row = page.locator("tr", has_text="Table")
    await row.get_by_role("button", name="Unload").click()
    await row.get_by_text("unavailable").wait_for()
    await row.get_by_role("button", name="Load", exact=True).click()
    await row.get_by_text("ready").wait_for()


async def check_try_it(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Table")
    await page.wait_for_selector("textarea")
    await page.fill("textarea", "a,b,c\n1,2,3.5\n-1,.5,1e1")
    await page.get_by_role("button", name="Run").click()
    await page.wait_for_selector("text=FP64 [2]")
    text = await browser.panel()
    assert "the first line, of names, was not sent" in text
    assert "6.5" in text
    assert "9.5" in text
    assert "9007199254740994" in text, "an integer beyond 2^53 was rounded"
    await browser.keep("try_it")
    await page.fill("textarea", "1,2")
    await page.get_by_role("button", name="Run").click()
    await page.wait_for_selector("text=expected shape")
    await page.get_by_role("tab", name="Code").click()
    assert "/v2/models/Table/infer" in await browser.panel()
    await browser.keep("code")


# Text, datatype and rank; the JSON of the elements and the shape, or the error.
VALUES: list[tuple[str, str, int, str, list[int] | None]] = [
    ("1, 2\n3, 4", "FP32", 2, "[1, 2, 3, 4]", [2, 2]),
    ("1 2 3", "INT64", 1, "[1, 2, 3]", [3]),
    ("9007199254740993", "INT64", 1, "[9007199254740993]", [1]),
    ("18446744073709551615", "UINT64", 1, "[18446744073709551615]", [1]),
    ("0.1000000000000000055", "FP64", 1, "[0.1000000000000000055]", [1]),
    ("+1\t-.5\t2.\t007", "FP32", 1, "[1, -0.5, 2, 7]", [4]),
    ("nan, 1e-3", "FP64", 1, "[null, 1e-3]", [2]),
    ("true, 0", "BOOL", 1, "[true, false]", [2]),
    ("one, two\nthree", "BYTES", 1, '["one, two", "three"]', [2]),
    ('"a,b",c\nd,e', "BYTES", 2, '["a,b", "c", "d", "e"]', [2, 2]),
    ("[[1, 2], [3, 4]]", "FP32", 2, "[[1, 2], [3, 4]]", [2, 2]),
    ("5", "FP64", 0, "[5]", []),
    ("1.5", "INT32", 1, "expected INT32, got '1.5'", None),
    ("1,2\n3", "FP32", 2, "the rows differ in length", None),
    ("[[1, 2], [3]]", "FP32", 2, "the lists differ in length", None),
    ("1e5", "INT8", 1, "expected INT8, got '1e5'", None),
]


async def check_values(browser: Browser) -> None:
    """Text of the form becomes a tensor without a change of value."""
    script = """async (cases) => {
        const { parseValues } = await import("/console/assets/tensors.js");
        return cases.map(([text, datatype, rank]) => {
            try { const { data, shape } = parseValues(text, datatype, rank); return [data, shape]; }
            catch (error) { return [error.message, null]; }
        });
    }"""
    found = await browser.page.evaluate(script, [list(case[:3]) for case in VALUES])
    assert found == [list(case[3:]) for case in VALUES]


async def check_chat(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Parrot")
    await page.fill("#draft", "say <b>hello</b> <img src=x>")
    await page.keyboard.press("Enter")
    await page.wait_for_selector(".message.assistant")
    assert await page.inner_text(".message.assistant p") == "say <b>hello</b> <img src=x>"
    await page.wait_for_selector("text=finished by stop")
    assert await page.locator(".messages img").count() == 0
    await browser.keep("chat")


async def check_simulator(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/energy")
    await page.get_by_role("tab", name="Simulator").click()
    await page.get_by_label("value of x0[0]").fill("2")
    await page.keyboard.press("Enter")
    await page.wait_for_selector("td.number:text-is('7')")  # 2^2 + 3
    assert await page.locator("td.number").all_inner_texts() == ["7", "4", "3"]
    await page.get_by_role("button", name="Check").click()
    await page.wait_for_selector("text=differs from central differences")
    assert "too much" not in await browser.panel()
    await browser.keep("simulator")


async def check_live(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/live")
    await page.wait_for_selector("figure canvas")
    await page.get_by_role("button", name="Table").first.click()
    assert await page.locator("figure").first.locator("tbody tr").count() >= 1
    await browser.keep("live")
    script = """async () => {
        const { parseMetrics, quantile } = await import("/console/assets/live.js");
        const [sample] = parseMetrics('# HELP a\\na_total{model="x\\\\"y",le="+Inf"} 3\\n');
        const [before, after] = [[[1, 0], [2, 0], [Infinity, 0]], [[1, 1], [2, 3], [Infinity, 4]]];
        const quantiles = [quantile(0.5, before, after), quantile(0.99, before, after), quantile(0.5, after, after)];
        return [sample.labels.model, sample.value, ...quantiles];
    }"""
    assert await page.evaluate(script) == ['x\\"y', 3, 1.5, 2, None]


async def test_a_key_opens_the_console(keys: KeyFile) -> None:
    settings = {**DEFAULTS, "api_keys": str(keys.path)}
    async with dragoman.Server(Table, **settings) as server:
        async for browser in open_browser(server):
            page = browser.page
            await browser.open("/")
            await page.fill("#key", "wrong")
            await page.get_by_role("button", name="Open").click()
            await page.wait_for_selector("text=This key is not accepted")
            await page.fill("#key", keys.keys["user"])
            await page.get_by_role("button", name="Open").click()
            await page.wait_for_selector("table.models")
            await browser.keep("models_with_key")
            await browser.open("/v2/models/Table/docs")
            await page.wait_for_selector(".opblock")
            await browser.keep("api")
