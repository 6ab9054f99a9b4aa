"""The console of a server that needs keys."""

import asyncio
from typing import Any

import pytest

from access.access_models import KeyFile
from access.conftest import keys as keys
from console.browser import needs_chromium, serve_page
from console.chat_models import Talker
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


async def until(browser: Any, key: str, status: int) -> None:
    """Wait until the server, which reads its keys from time to time, answers a key like this."""
    headers = {"authorization": f"Bearer {key}"}
    while (await browser.page.request.get(f"{browser.url}/v2/models", headers=headers)).status != status:
        await asyncio.sleep(0.05)


async def enter(browser: Any, key: str) -> None:
    await browser.page.fill("#key", key)
    await browser.press("Open")
    await browser.page.wait_for_selector("#key", state="detached")


@pytest.mark.parametrize("address", ["/", "/#/models/Table", "/#/models/Talker", "/#/live", "/#/requests"])
async def test_a_key_that_is_revoked_is_asked_for_again(keys: KeyFile, chromium: Any, address: str) -> None:
    """Whatever is open, and nothing else is shown; with another key it goes on, in a chat with what was said."""
    keys.add("first")
    async with serve_page(chromium, Table, Talker, api_keys=str(keys.path), recent_requests=10) as browser:
        page = browser.page
        await browser.open(address)
        await enter(browser, keys.keys["first"])
        if address.endswith("Talker"):
            await page.fill("#draft", "hello there")
            await browser.press("Send")
            await page.locator(".message.assistant .facts").wait_for()
        keys.delete("first")
        await until(browser, keys.keys["first"], 401)
        if address.endswith("Table"):
            await browser.press("Run")
        elif address.endswith("Talker"):
            await page.fill("#draft", "hello again")
            await browser.press("Send")
        await page.locator("main > form #key:focus[aria-invalid]").wait_for()
        assert await page.locator("main").evaluate("(main) => main.children.length") == 1
        assert (await page.locator("[role=alert]").inner_text()).startswith(
            "This key is not accepted: this key is not valid"
        )
        await browser.keep(f"revoked-{address.rpartition('/')[2]}")
        await until(browser, keys.add("second"), 200)
        await enter(browser, keys.keys["second"])
        if address.endswith("Talker"):
            await browser.has_texts(page.locator(".message.user .bubble"), ["hello there", "hello again"])
        else:
            await page.get_by_text(
                "READY" if address == "/" else {"e": "Run", "s": "Requests"}.get(address[-1], "Requests")
            ).first.wait_for()


async def test_a_late_answer_to_an_earlier_key_asks_for_none(keys: KeyFile, chromium: Any) -> None:
    script = """async () => {
        const { NEEDS_KEY, read, storeKey } = await import("/console/assets/api.js");
        let count = 0;
        addEventListener(NEEDS_KEY, () => count++);
        storeKey("old");
        const late = read("/v2").catch(() => {});
        storeKey("new");
        await late;
        const before = count;
        await read("/v2").catch(() => {});
        return [before, count];
    }"""
    async with serve_page(chromium, Table, api_keys=str(keys.path)) as browser:
        await browser.open("/")
        await browser.page.wait_for_selector("#key")
        assert await browser.page.evaluate(script) == [0, 1]


async def test_a_wrong_key_can_be_followed_by_another(keys: KeyFile, chromium: Any) -> None:
    async with serve_page(chromium, Table, api_keys=str(keys.path)) as browser:
        await browser.open("/")
        await browser.page.fill("#key", "schl\u00fcssel")
        await browser.press("Open")
        await browser.page.get_by_text("A key has only letters, digits and signs of ASCII, without spaces.").wait_for()
        await browser.page.fill("#key", "wrong")
        await browser.press("Open")
        await browser.page.get_by_text("This key is not accepted").wait_for()
        await enter(browser, keys.keys["user"])


@pytest.mark.parametrize("width", [1200, 390])
async def test_the_key_is_forgotten_from_a_chat(keys: KeyFile, chromium: Any, width: int) -> None:
    async with serve_page(chromium, Talker, api_keys=str(keys.path)) as browser:
        page = browser.page
        await page.set_viewport_size({"width": width, "height": 800})
        await browser.open("/#/models/Talker")
        await enter(browser, keys.keys["user"])
        await page.fill("#draft", "hello")
        await browser.press("Send")
        await page.locator(".message.assistant .facts").wait_for()
        assert await browser.find_violations() == []
        assert await page.evaluate("() => document.documentElement.scrollWidth") <= width
        await browser.keep(f"chat-with-key-{width}")
        await browser.press("Forget the key")
        await page.locator("#key:focus").wait_for()
        assert await page.evaluate("() => sessionStorage.length") == 0


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
