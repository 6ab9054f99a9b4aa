"""The signals that stop a server, for the process whose main thread runs it."""

import asyncio
import logging
import os
import signal
from typing import Self

log = logging.getLogger("dragoman.server")

_STOP = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """SIGTERM and SIGINT stop a server: `stop` is set by the first, `hurry` by the second.

    After `release` a further one ends the process at once. SIGHUP is ignored with a line in the log, unless it says
    that the terminal was closed in which the server was started: then it stops the server as SIGTERM does.
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
        """Leave SIGTERM and SIGINT to the system again."""
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
    """Whether standard input is a terminal that is there."""
    return os.isatty(0)
