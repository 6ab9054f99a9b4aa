"""What an engine in a thread of its own needs: to be made there, and to wake those who wait for it on event loops."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

E = TypeVar("E")
log = logging.getLogger("dragoman.generation")


class Waiting(Protocol):
    """Who waits on a loop, for news."""

    news: asyncio.Event


def living(make: Callable[[], E], live: Callable[[E], None], name: str) -> threading.Thread:
    """A thread in which an engine has been made, and that lives with it from now on. Raises what making it raised."""
    ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            engine = make()
        except BaseException as fault:
            ready.put(fault)
            return
        ready.put(None)
        live(engine)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    fault = ready.get()
    if fault is not None:
        raise fault
    return thread


def wake(loop: asyncio.AbstractEventLoop, waiting: Collection[Waiting]) -> None:
    """Tell those who wait on a loop that there is news, from any thread."""
    try:
        loop.call_soon_threadsafe(_wake, waiting)
    except RuntimeError:  # the loop is closed: nobody waits any more
        log.debug("a loop has gone with %d who waited", len(waiting))


def _wake(waiting: Collection[Waiting]) -> None:
    for each in waiting:
        each.news.set()
