"""The console of a server that needs keys."""

from typing import Any

import pytest

from access.access_models import KeyFile
from access.conftest import keys as keys
from console.browser import needs_chromium, serve_page
from console.console_models import Table, Wage

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]


async def test_a_key_opens_the_console(keys: KeyFile, chromium: Any) -> None:
    keys.add("caller", ["infer"])
    async with serve_page(chromium, Table, api_keys=str(keys.path)) as browser:
        page, requested = browser.page, list[str]()
        page.on("request", lambda request: requested.append(request.url))
        await browser.open("/")
        await page.fill("#key", "wrong")
        await browser.press("Open")
        await page.wait_for_selector("text=This key is not accepted")
        await page.fill("#key", keys.keys["caller"])
        await browser.press("Open")
        await page.wait_for_selector("text=This key has not the role that the console needs")
        await page.fill("#key", keys.keys["user"])
        await browser.press("Open")
        await page.get_by_text("ready").wait_for()
        assert await page.get_by_label("Control Table").count() == 0, "only the role admin may control models"
        await browser.keep("models-with-key")
        await browser.open("/#/models/Table")
        await browser.press("Run")
        await page.wait_for_selector("text=FP64 [1]")
        await browser.open("/#/requests")
        await page.wait_for_selector("text=--recent-requests 1000")
        assert await page.evaluate("() => [localStorage.length, sessionStorage.length, document.cookie]") == [0, 1, ""]
        await browser.open("/v2/models/Table/docs")
        await page.wait_for_selector(".opblock")
        await browser.keep("api")
        await browser.open("/")
        await browser.press("Forget the key")
        await page.wait_for_selector("#key")
        assert await page.evaluate("() => sessionStorage.length") == 0
        assert not any(key in url for key in keys.keys.values() for url in requested)
        assert browser.problems == []


async def test_errors_of_a_key_are_shown_where_they_occur(keys: KeyFile, chromium: Any) -> None:
    """A key for one model: its list, and that what is of the whole server is not for it."""
    keys.add("one", ["infer", "read"], ["Table"])
    async with serve_page(chromium, Table, Wage, api_keys=str(keys.path), recent_requests=10) as browser:
        page = browser.page
        await browser.open("/")
        await page.fill("#key", keys.keys["one"])
        await browser.press("Open")
        await page.get_by_text("ready").wait_for()
        await browser.has_texts(page.locator("li.model h2"), ["Table"])
        for address in ("/#/live", "/#/requests"):
            await browser.open(address)
            await page.locator("p.error", has_text="this key is for some models only: Table").wait_for()
        assert browser.problems == []
