"""Clients of a server: their addresses, warnings about them, and room for health checks when it is full."""

import asyncio
import logging
import re
from collections import Counter
from typing import Any, Protocol

from dragoman.access.addresses import address_group, without_mapping
from dragoman.protocols.wire import HttpError
from dragoman.system.request_context import variables_of
from dragoman.transports.limits import Limits

# RFC 3986, 3.2
_HOST = re.compile(r"(?:\[[0-9A-Za-z:.%_~-]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?", re.ASCII)


def client_host(transport: Any) -> str:
    """Return the address of a client; "" if it is not known."""
    peer = transport.get_extra_info("peername")
    return without_mapping(peer[0]) if isinstance(peer, tuple) and peer and isinstance(peer[0], str) else ""


def client_address(transport: Any) -> str:
    """Return a text that is equal for all connections of one client; "" if the address is not known."""
    return address_group(client_host(transport))


def is_host(text: str) -> bool:
    """Return whether a Host header or an authority is `host`, `host:port` or empty (RFC 9110, 7.2), without user."""
    return _HOST.fullmatch(text) is not None


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
        self._timers[message] = self._loop.call_later(
            self._interval_s, self._report, message, arguments, context=variables_of(())
        )

    def _report(self, message: str, arguments: tuple[object, ...]) -> None:
        del self._timers[message]
        count = self._suppressed.pop(message)
        if count:
            self._log.warning(f"{message} (%d times in the last %g s)", *arguments, count, self._interval_s)
            self._wait(message, arguments)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


# Connections beyond the limits that are open for health checks at a time; a further one replaces the oldest of the
# client that has most of them.
RESERVED_CONNECTIONS = 32
# File descriptors that other connections leave: the last of them, but no more than this part of all.
_RESERVED_FILES = 64
_LARGEST_PART = 8
# Listeners of a process that share these: HTTP and gRPC; as much again is left for files.
_LISTENERS = 4


# The error of any other request on such a connection.
TOO_MANY_CONNECTIONS = HttpError(
    503,
    "the server has too many connections: this one is for health checks alone",
    (("retry-after", "1"), ("connection", "close")),
)


class Abortable(Protocol):
    """A connection that can be cut off at once."""

    def abort(self) -> None: ...


class Reserve:
    """Decides whether a new connection is an ordinary one, and keeps those that are not few.

    The system gives a connection the lowest free descriptor, so its number says how many are taken, by whatever part of
    the process: no counting is needed.
    """

    def __init__(self, limits: Limits, warnings: Warnings) -> None:
        self._max_connections = limits.max_connections
        self._max_files = limits.max_open_files
        self._reserved_files = min(_RESERVED_FILES, limits.max_open_files // _LARGEST_PART)
        self._most = RESERVED_CONNECTIONS
        if self._max_files:
            self._most = max(1, min(self._most, self._reserved_files // _LISTENERS))
        self._warnings = warnings
        self._addresses: dict[Abortable, str] = {}  # of the client, the oldest connection first

    def admits(self, connection: Abortable, transport: Any, open_connections: int) -> bool:
        """Return whether a new connection may send any request. If not, it is for health checks alone.

        `open_connections` is the number of connections, this one included.
        """
        if 0 < self._max_connections < open_connections:
            self._warnings.log(
                "too many connections: new ones are for health checks alone, max_connections=%d", self._max_connections
            )
        elif self.is_out_of_files(_descriptor(transport)):
            self._warnings.log(
                "running out of file descriptors: new connections are for health checks alone, limit=%d (ulimit -n)",
                self._max_files,
            )
        else:
            return True
        self._addresses[connection] = client_address(transport)
        if len(self._addresses) > self._most:
            counts = Counter(self._addresses.values())
            replaced = max(self._addresses, key=lambda each: counts[self._addresses[each]])  # the first of equals
            del self._addresses[replaced]
            replaced.abort()
        return False

    def is_out_of_files(self, descriptor: int) -> bool:
        """Return whether a descriptor is among those that ordinary connections leave."""
        return 0 < self._max_files <= descriptor + self._reserved_files

    def forget(self, connection: Abortable) -> None:
        """This connection is gone."""
        self._addresses.pop(connection, None)


def _descriptor(transport: Any) -> int:
    """Return the descriptor of a transport's socket; -1 if it has none."""
    socket = transport.get_extra_info("socket")
    return -1 if socket is None else int(socket.fileno())
