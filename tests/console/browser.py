"""Debian's Chromium, driven by Playwright, for tests of the console."""

import os
import shutil
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import dragoman
from rest.rest_server import DEFAULTS

playwright = pytest.importorskip("playwright.async_api")
axe = pytest.importorskip("axe_playwright_python.async_playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
# Set this variable to a folder to keep a picture of each view.
PICTURES = os.environ.get("DRAGOMAN_TEST_PICTURES", "")
WAIT_MS = 20_000
# A microphone that beeps, and that pages may use.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]


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

    async def open(self, address: str, tab: str = "") -> None:
        is_open = self.page.url == self.url + address
        await (self.page.reload() if is_open else self.page.goto(self.url + address))
        if tab:
            await self.page.get_by_role("tab", name=tab, exact=True).click()

    async def press(self, name: str) -> None:
        """Click the button of a name."""
        await self.page.get_by_role("button", name=name, exact=True).click()

    async def has_texts(self, locator: Any, texts: list[str]) -> None:
        """Wait until the elements of a locator have these texts."""
        await playwright.expect(locator).to_have_text(texts, timeout=WAIT_MS)

    async def draws(self, picture: Any, script: str, expected: Any) -> None:
        """Wait until a script has the expected value for a canvas, which is drawn some time after the page shows it."""
        for _ in range(200):
            if await picture.evaluate(script) == expected:
                return
            await self.page.wait_for_timeout(50)
        assert await picture.evaluate(script) == expected

    async def find_violations(self) -> list[str]:
        """Return what axe-core reports about the page, and about its colours in dark."""
        found: list[str] = []
        if not await self.page.evaluate("() => 'axe' in window"):
            await self.page.evaluate(axe.Axe().axe_script)
        for scheme, options in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
            await self.page.emulate_media(color_scheme=scheme)
            script = "async (options) => (await axe.run(options)).violations"
            violations = await self.page.evaluate(script, {"resultTypes": ["violations"], **options})
            for violation in violations:
                nodes = [node["html"] + " " + str(node.get("failureSummary")) for node in violation["nodes"]]
                found += [f"{self.page.url} {scheme}: {violation['id']}: {node}" for node in nodes]
        await self.page.emulate_media(color_scheme="light")
        return found

    async def focused(self) -> str:
        """Return the tag and the text or label of the element with the keyboard focus."""
        text: str = await self.page.evaluate(
            """() => {
                const e = document.activeElement;
                const label = e.getAttribute("aria-label") ?? (e.labels?.[0]?.innerText || e.innerText);
                return `${e.tagName.toLowerCase()} ${label.trim()}`;
            }"""
        )
        return text

    async def marked(self) -> tuple[str, str]:
        """Return the element with the focus, which has to be marked as wrong, and the text that describes it."""
        element = self.page.locator("[aria-invalid=true]:focus")
        await element.wait_for()
        name = await element.get_attribute("aria-describedby")
        return await self.focused(), await self.page.locator(f"#{name}").inner_text()

    async def panel(self) -> str:
        panel = self.page.get_by_role("tabpanel")
        await playwright.expect(panel).not_to_have_text("Loading …")  # its code is loaded when it is shown
        text: str = await panel.inner_text()
        return text

    async def keep(self, name: str) -> None:
        if PICTURES:
            await self.page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)


@asynccontextmanager
async def open_chromium() -> AsyncIterator[Any]:
    """Start Chromium; it is ended with the context."""
    async with playwright.async_playwright() as driver:
        chromium = await driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield chromium
        finally:
            await chromium.close()


@asynccontextmanager
async def open_page(chromium: Any, url: str) -> AsyncIterator[Browser]:
    """Open a page in a context of its own, without the keys of others. It is closed with the context."""
    context = await chromium.new_context(viewport={"width": 1200, "height": 850})
    try:
        yield Browser(await context.new_page(), url)
    finally:  # an open page asks its server every few seconds
        await context.close()


@asynccontextmanager
async def serve_page(chromium: Any, *models: Any, **settings: Any) -> AsyncIterator[Browser]:
    """Serve models with these settings besides DEFAULTS, and open a page of the server."""
    async with (
        dragoman.Server(*models, **{**DEFAULTS, **settings}) as server,
        open_page(chromium, str(server.http_url)) as browser,
    ):
        yield browser


def png(width: int, height: int, color: Callable[[int, int], tuple[int, int, int]]) -> bytes:
    """Return a PNG file with these colours, by column and row."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"".join(bytes(color(x, y)) for x in range(width)) for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    image = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"".join(rows))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + image
