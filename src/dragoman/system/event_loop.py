"""The event loop that servers run in: the fastest that is installed."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# How soon a thread that reads a large request lets the event loop answer others.
_SWITCH_S = 0.0005


def run(main: Coroutine[Any, Any, T]) -> T:
    """What the coroutine gives, from a new event loop."""
    sys.setswitchinterval(_SWITCH_S)
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
