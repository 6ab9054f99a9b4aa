"""The event loop that servers run in, and the signals that stop a server."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Self, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop and return its result."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        import uvloop

        loop_factory = uvloop.new_event_loop
    except ImportError:
        pass
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main)


log = logging.getLogger("dragoman.server")


class LoopThread:
    """A thread with an event loop of its own, in which an asynchronous context is open from `start` until `stop`.

    At the end of the program the thread ends without closing it: executors accept no work then.
    """

    def __init__(self, context: AbstractAsyncContextManager[Any], name: str) -> None:
        self._context = context
        self._entered: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._error: BaseException | None = None

    def start(self) -> None:
        """Return once the context is open. Raises its error."""
        self._thread.start()
        try:
            self._entered.result()
        except BaseException:  # Ctrl-C, too
            self.stop()
            raise

    def stop(self) -> None:
        """Close the context and wait until the loop has ended. Raises the error of the context's exit."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            run(self._keep_open())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            if self._entered.done():
                self._error = error
            else:
                self._entered.set_exception(error)

    async def _keep_open(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        async with self._context:
            self._entered.set_result(None)
            await self._loop.create_future()


class StopSignals:
    """SIGTERM and SIGINT stop a server: the first sets `stop`, the second `hurry`.

    After `release` another one ends the process at once. SIGHUP calls `reload`, unless the server's terminal was
    closed: then it stops the server like SIGTERM. On exit of the context the process has its previous handlers again.
    Raises RuntimeError outside of the main thread, which alone can handle signals.
    """

    def __init__(self, reload: Callable[[], None]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("signals can be handled in the main thread only: expected handle_signals=False")
        self._reload = reload
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._has_terminal = _is_terminal()
        self._previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        if (hangup := signal.getsignal(signal.SIGHUP)) is not signal.SIG_IGN:  # `nohup` ignores it
            self._previous[signal.SIGHUP] = hangup

    def __enter__(self) -> Self:
        for number in self._previous:
            self._loop.add_signal_handler(number, self._hang_up if number == signal.SIGHUP else self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            self._loop.remove_signal_handler(number)
            if handler is not None:  # None: not set by Python
                signal.signal(number, handler)

    def release(self) -> None:
        """Restore the system's handling of SIGTERM and SIGINT: another one ends the process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    def _stop(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()

    def _hang_up(self) -> None:
        if self._has_terminal and not _is_terminal():
            self.stop.set()
        else:
            log.info("SIGHUP: keys, certificates, log level and models are reloaded; other settings need a restart")
            self._reload()


def _is_terminal() -> bool:
    """Return True if standard input is an open terminal."""
    return os.isatty(0)
