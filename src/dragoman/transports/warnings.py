"""Warnings about clients, of which a hostile one may cause any number: one line of each kind in a while."""

import asyncio
import logging

_INTERVAL_S = 10.0


class Warnings:
    """Logs the first warning of a kind at once, and those of the next `interval_s` as one line with their number."""

    def __init__(
        self, logger: logging.Logger, loop: asyncio.AbstractEventLoop, interval_s: float = _INTERVAL_S
    ) -> None:
        self._log = logger
        self._loop = loop
        self._interval_s = interval_s
        self._suppressed: dict[str, int] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def log(self, message: str, *arguments: object) -> None:
        """Log a warning; `message`, before its arguments are put in, is its kind."""
        if message in self._timers:
            self._suppressed[message] += 1
            return
        self._log.warning(message, *arguments)
        self._wait(message, arguments)

    def _wait(self, message: str, arguments: tuple[object, ...]) -> None:
        self._suppressed[message] = 0
        self._timers[message] = self._loop.call_later(self._interval_s, self._report, message, arguments)

    def _report(self, message: str, arguments: tuple[object, ...]) -> None:
        del self._timers[message]
        count = self._suppressed.pop(message)
        if count:
            self._log.warning(f"{message} (%d times in the last %g s)", *arguments, count, self._interval_s)
            self._wait(message, arguments)

    def close(self) -> None:
        """Report no more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
