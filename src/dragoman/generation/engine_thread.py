"""Run an engine in its own thread, and notify coroutines that wait for it."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

E = TypeVar("E")
log = logging.getLogger("dragoman.generation")


class Waiter(Protocol):
    """A coroutine's wait for results."""

    updated: asyncio.Event


def start_thread(make: Callable[[], E], live: Callable[[E], None], name: str) -> threading.Thread:
    """Create an engine in a new thread, which then runs `live`. Raises the exception of `make`."""
    ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            engine = make()
        except BaseException as error:
            ready.put(error)
            return
        ready.put(None)
        live(engine)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    error = ready.get()
    if error is not None:
        raise error
    return thread


def notify(loop: asyncio.AbstractEventLoop, waiters: Collection[Waiter]) -> None:
    """Wake waiters on an event loop; thread-safe."""
    try:
        loop.call_soon_threadsafe(_wake, waiters)
    except RuntimeError:  # the loop is closed
        log.debug("event loop closed with %d waiters", len(waiters))


def _wake(waiters: Collection[Waiter]) -> None:
    for waiter in waiters:
        waiter.updated.set()
