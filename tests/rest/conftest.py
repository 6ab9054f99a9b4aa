"""What tests of the wire itself run on: our own HTTP server and uvicorn, and which event loop."""

import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop

from rest.rest_house import DEFAULTS

Loops = Mapping[str, Callable[[], asyncio.AbstractEventLoop]]
_ASYNCIO: Loops = {"asyncio": asyncio.new_event_loop}
_UVLOOP: Loops = {"uvloop": uvloop.new_event_loop}
# By what a module uses; others run on asyncio's own loop. Servers run on uvloop.
_LOOPS = {"http_server": _UVLOOP, "both_loops": {**_ASYNCIO, **_UVLOOP}}


@pytest.fixture(scope="module", params=["own", "uvicorn"])
def http_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test of a module that uses this runs on each."""
    DEFAULTS["http_server"] = request.param
    yield request.param
    del DEFAULTS["http_server"]


@pytest.fixture
def both_loops() -> None:
    """Every test of a module that uses this runs on each event loop."""


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Loops:
    used = [name for mark in item.iter_markers("usefixtures") for name in mark.args if name in _LOOPS]
    return _LOOPS[used[0]] if used else _ASYNCIO
