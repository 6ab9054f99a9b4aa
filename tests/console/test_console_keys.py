"""The console of a server that needs keys."""

import dragoman
from access.access_models import KeyFile
from access.conftest import keys as keys
from console.browser import needs_chromium, open_chromium, open_page
from console.console_models import Table
from rest.rest_server import DEFAULTS

pytestmark = [needs_chromium]


async def test_a_key_opens_the_console(keys: KeyFile) -> None:
    keys.add("caller", ["infer"])
    settings = {**DEFAULTS, "api_keys": str(keys.path)}
    async with dragoman.Server(Table, **settings) as server, open_chromium() as chromium:
        browser = await open_page(chromium, str(server.http_url))
        page, requested = browser.page, list[str]()
        page.on("request", lambda request: requested.append(request.url))
        await browser.open("/")
        await page.fill("#key", "wrong")
        await browser.press("Open")
        await page.wait_for_selector("text=This key is not accepted")
        await page.fill("#key", keys.keys["user"])
        await browser.press("Open")
        await page.wait_for_selector("table.models")
        await browser.keep("models-with-key")
        await browser.open("/v2/models/Table/docs")
        await page.wait_for_selector(".opblock")
        await browser.keep("api")
        assert not any(key in url for key in keys.keys.values() for url in requested)
        assert browser.problems == []
