"""Connections over asyncio, whose event loop writes into the parser's buffer."""

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Any

from dragoman.client.http import Connect, Connection, HttpTransport, Parser, ResponseParser, is_stale
from dragoman.client.messages import Address, Deadline
from dragoman.formats.policy import Buffer

_MAX_UNREAD = 1 << 20
_TURNS = 3


def connect_transport(address: Address) -> HttpTransport:
    """Return a transport for one event loop."""
    return HttpTransport(address, connector(address, ResponseParser))


def connector(address: Address, parser: Callable[[], Parser]) -> Connect:
    """Return a function that connects to a server; `parser` returns that of a connection."""
    tls = address.tls_context()
    options: dict[str, Any] = {} if tls is None else {"ssl": tls, "server_hostname": address.host}

    async def connect(address: Address, deadline: Deadline) -> Connection:
        """Connect to the first address of the host that accepts."""
        loop, last_error = asyncio.get_running_loop(), OSError("its name has no address")
        async with asyncio.timeout(deadline.left_s()):
            addresses = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            for family, _, _, _, target in addresses:
                try:
                    made = await loop.create_connection(
                        lambda: _AsyncConnection(parser()), *target[:2], family=family, **options
                    )
                except OSError as error:
                    last_error = error
                else:
                    return made[1]
        raise last_error

    return connect


class _AsyncConnection(asyncio.BufferedProtocol):
    """Writes received bytes into the parser of the current response and wakes its reader."""

    def __init__(self, parser: Parser) -> None:
        self.parser: Any = parser
        self._lost = asyncio.get_running_loop().create_future()
        self._progress = asyncio.Event()
        self.begin(streams=False)

    def begin(self, *, streams: bool) -> None:
        """Prepare for the next response; with `streams` every chunk wakes the reader."""
        self.parser = self.parser.next(streams=streams)
        self._streams = streams
        self._error: Exception | None = None
        self._unread = 0
        self._paused = False
        self._progress.clear()

    async def send(self, parts: Iterable[Buffer], deadline: Deadline) -> None:
        for part in parts:
            self.transport.write(part)

    async def more(self, deadline: Deadline) -> None:
        async with asyncio.timeout(deadline.left_s()):
            await self._progress.wait()
        self._progress.clear()
        if self._error is not None and not self.parser.done:
            raise self._error

    def take(self) -> Buffer:
        self._unread = 0
        self.idle()
        data: Buffer = self.parser.take()
        return data

    def idle(self) -> None:
        """Resume reading after a pause."""
        if self._paused and not self._lost.done():
            self.transport.resume_reading()
        self._paused = False

    async def is_usable(self) -> bool:
        for _ in range(_TURNS if self.parser.is_duplex else 0):
            if not self._is_stale():
                break
            await asyncio.sleep(0)  # frames that have arrived are handled in a later turn of the loop
        return bool(self.parser.keep_alive) and not self._is_stale()

    def _is_stale(self) -> bool:
        return self._lost.done() or is_stale(self.transport.get_extra_info("socket").fileno())

    def abort(self) -> None:
        self.transport.abort()

    interrupt = abort

    async def wait_closed(self) -> None:
        await self._lost

    # --- callbacks of the event loop --------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer: memoryview = self.parser.buffer()
        return buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self.parser.bytes_received(nbytes)
        except Exception as error:
            self._error = error
        if self.parser.replies:
            for part in self.parser.body():
                self.transport.write(part)
        self._unread += nbytes
        if self._streams and self._unread > _MAX_UNREAD and not self._paused:
            self._paused = True
            self.transport.pause_reading()  # the reader of the stream is slower than the server
        if self._streams or self.parser.done or self.parser.is_blocked or self._error is not None:
            self._progress.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.parser.end():
            self._error = exc or ConnectionResetError("the connection was closed before the response was complete")
        self._progress.set()
        self._lost.set_result(None)
