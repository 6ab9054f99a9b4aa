"""Connections over asyncio, whose parser is fed by the event loop itself."""

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

from dragoman.client.address import Address
from dragoman.client.exchange import Deadline
from dragoman.client.http import Connection, HttpTransport, stale
from dragoman.client.http1 import AnswerReader
from dragoman.formats.policy import Buffer

_MAX_UNREAD = 1 << 20


def transport(address: Address) -> HttpTransport:
    """For one event loop."""
    tls = address.tls_context()
    options: dict[str, Any] = {} if tls is None else {"ssl": tls, "server_hostname": address.host}

    async def connected(address: Address, deadline: Deadline) -> Connection:
        """To the first of its host's addresses that takes it."""
        loop, refusal = asyncio.get_running_loop(), OSError("its name has no address")
        async with asyncio.timeout(deadline.left_s()):
            for family, _, _, _, place in await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
                try:
                    made = await loop.create_connection(_Connection, *place[:2], family=family, **options)
                except OSError as fault:
                    refusal = fault
                else:
                    return made[1]
        raise refusal

    return HttpTransport(address, connected)


class _Connection(asyncio.BufferedProtocol):
    """Feeds what comes to the reader of the answer under way, and tells whoever waits for it."""

    def __init__(self) -> None:
        self._lost = asyncio.get_running_loop().create_future()
        self._news = asyncio.Event()
        self.begin(streams=False)

    def begin(self, *, streams: bool) -> None:
        """Get ready for the next answer; of one that streams, each part is news."""
        self.reader = AnswerReader(streams=streams)
        self._streams = streams
        self._fault: Exception | None = None
        self._unread = 0
        self._paused = False
        self._news.clear()

    async def send(self, parts: Iterable[Buffer], deadline: Deadline) -> None:
        for part in parts:
            self.transport.write(part)

    async def more(self, deadline: Deadline) -> None:
        async with asyncio.timeout(deadline.left_s()):
            await self._news.wait()
        self._news.clear()
        if self._fault is not None and not self.reader.done:
            raise self._fault

    def taken(self) -> Buffer:
        self._unread = 0
        self.idle()
        return self.reader.taken()

    def idle(self) -> None:
        """Read on, where a stream was too fast."""
        if self._paused and not self._lost.done():
            self.transport.resume_reading()
        self._paused = False

    def usable(self) -> bool:
        said_more = not self.reader.keep_alive
        return not (self._lost.done() or said_more or stale(self.transport.get_extra_info("socket").fileno()))

    def abort(self) -> None:
        self.transport.abort()

    async def closed(self) -> None:
        await self._lost

    # --- what the event loop calls -----------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.reader.room()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self.reader.wrote(nbytes)
        except Exception as fault:
            self._fault = fault
        self._unread += nbytes
        if self._streams and self._unread > _MAX_UNREAD and not self._paused:
            self._paused = True
            self.transport.pause_reading()  # whoever reads the stream is slower than the server
        if self._streams or self.reader.done or self._fault is not None:
            self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.reader.end():
            self._fault = exc or ConnectionResetError("the connection was closed before the whole answer was there")
        self._news.set()
        self._lost.set_result(None)
