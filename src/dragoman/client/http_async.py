"""HTTP over asyncio: connections that are kept for the next call, the parser fed by the event loop itself."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dragoman.client import faults
from dragoman.client.address import Address
from dragoman.client.exchange import Deadline, HttpAnswer, HttpQuestion
from dragoman.client.http1 import AnswerReader, written
from dragoman.client.http_sync import stale, told
from dragoman.payload.policy import Buffer

_MAX_IDLE = 32
_MAX_UNREAD = 1 << 20


class _Connection(asyncio.BufferedProtocol):
    """Feeds what comes to the reader of the answer under way, and tells whoever waits for it."""

    def __init__(self) -> None:
        self.lost = asyncio.get_running_loop().create_future()
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

    def usable(self) -> bool:
        """Whether an idle connection may take the next question: it lives, and said nothing since its answer."""
        said_more = not self.reader.keep_alive
        return not (self.lost.done() or said_more or stale(self.transport.get_extra_info("socket").fileno()))

    async def news(self) -> None:
        """Wait until more of the answer, or its end, is there."""
        await self._news.wait()
        self._news.clear()
        if self._fault is not None and not self.reader.done:
            raise self._fault

    def taken(self) -> Buffer:
        """What came of the body since the last time."""
        self._unread = 0
        self.listen()
        return self.reader.taken()

    def listen(self) -> None:
        """Read on, where a stream was too fast."""
        if self._paused and not self.lost.done():
            self.transport.resume_reading()
        self._paused = False

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
        self.lost.set_result(None)


class HttpTransport:
    """Sends questions to one server, from one event loop."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._tls = address.tls_context()
        self._idle: list[_Connection] = []

    async def ask(self, question: HttpQuestion, deadline: Deadline) -> HttpAnswer:
        """The answer, whatever its status. Raises ServerUnreachable, DeadlineExceeded and ServerError."""
        async with self._connection(deadline, streams=False) as connection:
            self._send(connection, question)
            while not connection.reader.done:
                await _more(connection, deadline)
            return connection.reader.answer()

    async def stream(self, question: HttpQuestion, deadline: Deadline) -> AsyncGenerator[Buffer, None]:
        """The body as it comes; a status other than 200 is raised."""
        async with self._connection(deadline, streams=True) as connection:
            self._send(connection, question)
            reader = connection.reader
            while not reader.begun or (reader.status != 200 and not reader.done):
                await _more(connection, deadline)
            if reader.status != 200:
                answer = reader.answer()
                raise faults.of_status(answer.status, answer.headers, answer.body)
            while not reader.done:
                yield connection.taken()
                await _more(connection, deadline)
            yield connection.taken()

    async def close(self) -> None:
        connections, self._idle = self._idle, []
        for connection in connections:
            connection.transport.abort()
            await connection.lost

    @asynccontextmanager
    async def _connection(self, deadline: Deadline, *, streams: bool) -> AsyncIterator[_Connection]:
        """A connection that is ready for an answer; kept afterwards if that was read to its end."""
        try:
            connection = self._kept() or await self._connected(deadline)
            connection.begin(streams=streams)
            try:
                yield connection
            finally:
                if connection.reader.done and connection.reader.keep_alive and len(self._idle) < _MAX_IDLE:
                    connection.listen()
                    self._idle.append(connection)
                else:
                    connection.transport.abort()
        except OSError as fault:
            raise told(fault, deadline, self._address) from fault

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable():
                return connection
            connection.transport.abort()
        return None

    async def _connected(self, deadline: Deadline) -> _Connection:
        """A new connection, to the first address of the host that takes it."""
        loop, host = asyncio.get_running_loop(), self._address.host
        tls: Any = {} if self._tls is None else {"ssl": self._tls, "server_hostname": host}
        fault: OSError | None = None
        async with asyncio.timeout(deadline.left_s()):
            found = await loop.getaddrinfo(host, self._address.port, type=socket.SOCK_STREAM)
            for family, _, _, _, place in found:
                try:
                    made = await loop.create_connection(_Connection, *place[:2], family=family, **tls)
                except OSError as refused:
                    fault = refused
                else:
                    return made[1]
        raise fault or OSError("its name has no address")

    def _send(self, connection: _Connection, question: HttpQuestion) -> None:
        for part in written(question, self._address.authority):
            connection.transport.write(part)


async def _more(connection: _Connection, deadline: Deadline) -> None:
    async with asyncio.timeout(deadline.left_s()):
        await connection.news()
