"""Fixtures that choose the event loop on which the tests of a module run."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

Loops = Mapping[str, Callable[[], asyncio.AbstractEventLoop]]
_ASYNCIO: Loops = {"asyncio": asyncio.new_event_loop}
_UVLOOP: Loops = {"uvloop": uvloop.new_event_loop}
# By the fixture that a module uses; other modules run on asyncio's own loop.
_LOOPS = {"on_uvloop": _UVLOOP, "both_loops": {**_ASYNCIO, **_UVLOOP}}


@pytest.fixture
def on_uvloop() -> None:
    """Run every test of a module that uses this on uvloop, as servers do."""


@pytest.fixture
def both_loops() -> None:
    """Run every test of a module that uses this on each event loop."""


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Loops:
    used = [name for mark in item.iter_markers("usefixtures") for name in mark.args if name in _LOOPS]
    return _LOOPS[used[0]] if used else _ASYNCIO
