"""A function run aside from the event loop."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dragoman.workers.settled import settle

Unwanted = Callable[[Any], None]


async def here(function: Callable[..., Any], *arguments: Any, unwanted: Unwanted) -> Any:
    return function(*arguments)


async def aside(function: Callable[..., Any], *arguments: Any, unwanted: Unwanted) -> Any:
    """The function's result, from a daemon thread: one that hangs must not keep the process from ending.

    A thread cannot be stopped: where nobody waits any more when the result comes, `unwanted` gets it, in a thread too.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = function(*arguments), None
        except StopIteration as fault:  # a future cannot carry it
            outcome = None, RuntimeError(f"StopIteration: {fault}")
        except BaseException as fault:
            outcome = None, fault
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, future, *outcome)

    def left(done: asyncio.Future[Any]) -> None:
        if done.exception() is None:
            threading.Thread(target=unwanted, args=(done.result(),), name="unwanted", daemon=True).start()

    threading.Thread(target=run, name="load", daemon=True).start()
    try:
        await asyncio.wait({future})  # unlike awaiting it, leaves it alone when the caller is cancelled
    except asyncio.CancelledError:
        future.add_done_callback(left)
        raise
    return future.result()
