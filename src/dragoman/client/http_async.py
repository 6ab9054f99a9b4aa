"""Connections over asyncio, whose event loop writes into the parser's buffer."""

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

from dragoman.client.http import Connection, HttpTransport, ResponseParser, is_stale
from dragoman.client.messages import Address, Deadline
from dragoman.formats.policy import Buffer

_MAX_UNREAD = 1 << 20


def connect_transport(address: Address) -> HttpTransport:
    """Return a transport for one event loop."""
    tls = address.tls_context()
    options: dict[str, Any] = {} if tls is None else {"ssl": tls, "server_hostname": address.host}

    async def connect(address: Address, deadline: Deadline) -> Connection:
        """Connect to the first address of the host that accepts."""
        loop, last_error = asyncio.get_running_loop(), OSError("its name has no address")
        async with asyncio.timeout(deadline.left_s()):
            addresses = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            for family, _, _, _, target in addresses:
                try:
                    connection = await loop.create_connection(_AsyncConnection, *target[:2], family=family, **options)
                except OSError as error:
                    last_error = error
                else:
                    return connection[1]
        raise last_error

    return HttpTransport(address, connect)


class _AsyncConnection(asyncio.BufferedProtocol):
    """Writes received bytes into the parser of the current response and wakes its reader."""

    def __init__(self) -> None:
        self._lost = asyncio.get_running_loop().create_future()
        self._progress = asyncio.Event()
        self.begin(streams=False)

    def begin(self, *, streams: bool) -> None:
        """Prepare for the next response; with `streams` every chunk wakes the reader."""
        self.parser = ResponseParser(streams=streams)
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
        return self.parser.take()

    def idle(self) -> None:
        """Resume reading after a pause."""
        if self._paused and not self._lost.done():
            self.transport.resume_reading()
        self._paused = False

    def is_usable(self) -> bool:
        has_more = not self.parser.keep_alive
        return not (self._lost.done() or has_more or is_stale(self.transport.get_extra_info("socket").fileno()))

    def abort(self) -> None:
        self.transport.abort()

    interrupt = abort

    async def wait_closed(self) -> None:
        await self._lost

    # --- callbacks of the event loop --------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.parser.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self.parser.bytes_received(nbytes)
        except Exception as error:
            self._error = error
        self._unread += nbytes
        if self._streams and self._unread > _MAX_UNREAD and not self._paused:
            self._paused = True
            self.transport.pause_reading()  # the reader of the stream is slower than the server
        if self._streams or self.parser.done or self._error is not None:
            self._progress.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.parser.end():
            self._error = exc or ConnectionResetError("the connection was closed before the response was complete")
        self._progress.set()
        self._lost.set_result(None)
