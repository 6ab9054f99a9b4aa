"""The first moments of a page: parts that are loaded when they are shown, and the view that its address names."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from console.browser import Browser, needs_chromium, serve_page
from console.console_models import Table

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]


@pytest_asyncio.fixture(loop_scope="package")
async def browser(chromium: Any) -> AsyncIterator[Browser]:
    async with serve_page(chromium, Table) as browser:
        yield browser
        assert browser.problems == []


async def test_a_part_that_another_use_loads_before_its_effect_is_shown(browser: Browser) -> None:
    """Effects run in a task of their own after a rendering, and promises before it."""
    await browser.open("/")
    script = """async () => {
        const { html, lazy, render } = await import("/console/assets/html.js");
        let finish, begin;
        const loading = new Promise((resolve) => (begin = resolve));
        const loaded = new Promise((resolve) => (finish = resolve));
        const Part = lazy(() => (begin(), loaded), "Part");
        const add = () => {
            const holder = document.body.appendChild(document.createElement("section"));
            holder.className = "use";
            render(html`<${Part} />`, holder);
            return holder.textContent;
        };
        add();
        await loading; // by the effect of the first use
        const before = add();
        finish({ Part: () => html`<b>loaded</b>` });
        return before;
    }"""
    assert await browser.page.evaluate(script) == "Loading …"
    await browser.has_texts(browser.page.locator(".use"), ["loaded", "loaded"])


async def test_an_address_that_changes_after_the_first_rendering_is_shown(browser: Browser) -> None:
    """Observers of the page run after the first rendering and before its effects; `replaceState` sends no event."""
    await browser.page.add_init_script(
        """new MutationObserver((_, observer) => {
            if (!document.querySelector("#app header")) return;
            observer.disconnect();
            history.replaceState(null, "", "#/requests");
        }).observe(document, { childList: true, subtree: true });"""
    )
    await browser.open("/")
    await browser.has_texts(browser.page.locator("h1"), ["Requests"])
    await browser.has_texts(browser.page.locator("nav [aria-current]"), ["Requests"])
