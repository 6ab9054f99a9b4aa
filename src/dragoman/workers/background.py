"""Functions that run in a thread, off the event loop."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dragoman.workers.job import settle

Discard = Callable[[Any], None]


async def run_here(function: Callable[..., Any], *arguments: Any, discard: Discard) -> Any:
    """Run a function in this thread, with the interface of `run_in_thread`."""
    return function(*arguments)


async def run_in_thread(function: Callable[..., Any], *arguments: Any, discard: Discard) -> Any:
    """Run a function in a daemon thread, which does not keep the process from exiting, and return its result.

    A thread cannot be stopped: if this coroutine is cancelled, `discard` is called with the result, in a thread.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = function(*arguments), None
        except StopIteration as error:  # a future cannot carry it
            outcome = None, RuntimeError(f"StopIteration: {error}")
        except BaseException as error:
            outcome = None, error
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(settle, future, *outcome)

    def discard_result(done: asyncio.Future[Any]) -> None:
        if done.exception() is None:
            threading.Thread(target=discard, args=(done.result(),), name="discard", daemon=True).start()

    threading.Thread(target=run, name="load", daemon=True).start()
    try:
        await asyncio.wait({future})  # does not cancel the future when the caller is cancelled
    except asyncio.CancelledError:
        future.add_done_callback(discard_result)
        raise
    return future.result()
