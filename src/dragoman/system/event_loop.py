"""The event loop that servers run in: uvloop if it is installed."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_SWITCH_INTERVAL_S = 0.0005


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop and return its result."""
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)


def shorten_switch_interval() -> None:
    """Let threads that parse large requests hand over to the event loop sooner.

    This concerns every thread of the process, so only programs call it that own their process: the command line and
    front ends.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
