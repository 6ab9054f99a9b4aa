"""The console behind a proxy whose addresses begin with a prefix."""

from typing import Any

import pytest

from console.browser import Browser, needs_chromium, serve_page
from console.console_models import Table

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]


@pytest.mark.parametrize("address", ["/behind/it", "/behind/it/", "/behind/it/console"])
async def test_behind_a_proxy_that_passes_its_prefix_on(chromium: Any, address: str) -> None:
    async with serve_page(chromium, Table, root_path="/behind/it") as browser:
        await use(browser, address)


async def test_behind_a_proxy_that_strips_its_prefix(chromium: Any) -> None:
    async with serve_page(chromium, Table) as browser:

        async def strip(route: Any) -> None:
            response = await route.fetch(url=route.request.url.replace("/behind/it", "", 1))
            await route.fulfill(response=response)

        await browser.page.route("**/behind/it/**", strip)
        await use(browser, "/behind/it/")


async def use(browser: Browser, address: str) -> None:
    """Open views of a console, all of whose requests have to be below the prefix."""
    page, outside = browser.page, list[str]()
    page.on("request", lambda r: outside.append(r.url) if not r.url.startswith(f"{browser.url}/behind/it") else None)
    await page.goto(browser.url + address)
    await page.get_by_role("link", name="Table").click()
    await browser.press("Run")
    await page.get_by_label("Output sum").wait_for()
    await page.get_by_role("tab", name="Code").click()
    assert f"curl {browser.url}/behind/it/v2/models/Table/infer" in await page.inner_text("pre.code")
    await page.get_by_role("link", name="Live").click()
    await page.wait_for_selector(".chart svg")
    await page.get_by_role("link", name="API").click()
    await page.wait_for_selector(".opblock-tag")
    assert outside == []
    assert browser.problems == []
