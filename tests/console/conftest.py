"""One Chromium for all tests of the console, and the page of a module."""

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def chromium() -> AsyncIterator[Any]:
    from console.browser import open_chromium  # skips the tests of modules that import it if Playwright is missing

    async with open_chromium() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="package")
async def browser(opened: Any) -> AsyncIterator[Any]:
    """Return the page that the module has `opened`, and check after the test that nothing went wrong in it."""
    opened.problems.clear()
    yield opened
    assert opened.problems == []
