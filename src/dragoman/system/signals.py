"""Signals that stop a server."""

import asyncio
import logging
import os
import signal
from typing import Self

log = logging.getLogger("dragoman.server")

_STOP = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """SIGTERM and SIGINT stop a server: the first sets `stop`, the second `hurry`.

    After `release` another one ends the process at once. SIGHUP is logged and ignored, unless the terminal of the
    server was
    closed: then it stops the server like SIGTERM.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._has_terminal = _is_terminal()
        self._hears_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # `nohup` has it ignored

    def __enter__(self) -> Self:
        for number in _STOP:
            self._loop.add_signal_handler(number, self._stop)
        if self._hears_hangup:
            self._loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        if self._hears_hangup:
            self._loop.remove_signal_handler(signal.SIGHUP)

    def release(self) -> None:
        """Restore the default handling of SIGTERM and SIGINT."""
        for number in _STOP:
            self._loop.remove_signal_handler(number)

    def _stop(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()

    def _hang_up(self) -> None:
        if self._has_terminal and not _is_terminal():
            self.stop.set()
        else:
            log.info("SIGHUP is ignored: settings are read when the server starts; SIGTERM stops it")


def _is_terminal() -> bool:
    """Return True if standard input is an open terminal."""
    return os.isatty(0)
