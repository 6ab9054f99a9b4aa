"""What tests of the wire itself run on: our own HTTP server and uvicorn, on the event loop that servers have."""

import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop
from rest_house import DEFAULTS


@pytest.fixture(scope="module", params=["own", "uvicorn"])
def http_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test of a module that uses this runs on each."""
    DEFAULTS["http_server"] = request.param
    yield request.param
    del DEFAULTS["http_server"]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Such modules on uvloop, all others on asyncio's own."""
    marks = item.iter_markers("usefixtures")
    if any("http_server" in mark.args for mark in marks):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
