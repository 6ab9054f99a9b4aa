"""The console's form of a model in a browser: what it shows of the answer to the prefilled request, or to a photo."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_WAIT_MS = 60_000
_ANSWER = "section.output, [role=tabpanel] [role=alert]"
# What counts as numbers and not as a picture.
_NUMBERS = ("Table", "Values")


@contextmanager
def open_console(url: str, pictures: Path | None) -> Iterator["Console | None"]:
    """Open the console of a server; None if Playwright or Chromium is not installed. The browser ends with the context.

    pictures: folder for a picture of each answer.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None or importlib.util.find_spec("playwright") is None:
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(_WAIT_MS)
        yield Console(page, url, pictures)
        browser.close()


class Console:
    """The console of a server in a browser."""

    def __init__(self, page: Any, url: str, pictures: Path | None) -> None:
        self._page, self._url, self._pictures = page, url, pictures

    def run(self, name: str, *, photo: bool) -> str:
        """Send the form of a model; return how the outputs are shown at first, "" as numbers.

        Raises RuntimeError if there is no answer.
        """
        page = self._page
        page.goto("about:blank")  # the page keeps nothing of the last model
        page.goto(f"{self._url}/#/models/{name}")
        page.get_by_role("button", name="Run", exact=True).wait_for()
        if photo:
            page.locator("input[type=file]").first.set_input_files(_photo())
            page.locator("[role=tabpanel] figure canvas").first.wait_for()
        page.get_by_role("button", name="Run", exact=True).click()
        page.locator(_ANSWER).first.wait_for()
        if self._pictures is not None:
            self._pictures.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=self._pictures / f"{name}.png", full_page=True)
        if page.locator("section.output").count() == 0:
            raise RuntimeError(f"console: {page.locator('[role=tabpanel] [role=alert]').first.inner_text()}")
        if page.get_by_label("Boxes on the photo").count():
            return "boxes"
        views = page.locator("section.output button[aria-pressed=true]").all_inner_texts()
        return ", ".join(dict.fromkeys(view.lower() for view in views if view not in _NUMBERS))


def _photo() -> Path:
    """Return a photo of a package that the tests need anyway."""
    spec = importlib.util.find_spec("sklearn")
    return Path((spec and spec.origin) or "").parent / "datasets" / "images" / "flower.jpg"
