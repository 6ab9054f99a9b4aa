"""HTTP/1.1 transport to one server with keep-alive connections."""

import os
import select
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from dragoman.client import errors
from dragoman.client.http1 import ResponseParser, serialize
from dragoman.client.messages import Address, Deadline, RestRequest, RestResponse
from dragoman.formats.policy import Buffer

_MAX_IDLE = 32


class Connection(Protocol):
    """A connection and the parser of its current response."""

    parser: ResponseParser

    def begin(self, *, streams: bool) -> None:
        """Prepare for the next response."""

    async def send(self, parts: Iterable[Buffer], deadline: Deadline) -> None: ...

    async def more(self, deadline: Deadline) -> None:
        """Wait for more of the response, or its end."""

    def take(self) -> Buffer:
        """Return the bytes of the body received since the last call."""

    def idle(self) -> None:
        """Mark the connection as idle after a complete response."""

    def is_usable(self) -> bool:
        """Return whether the connection is open and nothing was received after its response."""

    def abort(self) -> None: ...

    async def closed(self) -> None:
        """Wait until it is closed."""


class HttpTransport:
    """Transport to one server over the connections of `connect`; for several threads or one event loop."""

    def __init__(self, address: Address, connect: Callable[[Address, Deadline], Awaitable[Connection]]) -> None:
        self._address = address
        self._connect = connect
        self._idle: list[Connection] = []

    async def send(self, request: RestRequest, deadline: Deadline) -> RestResponse:
        """Return the response of any status. Raises ServerUnreachable, DeadlineExceeded or ServerError."""
        async with self._call(request, deadline, streams=False) as connection:
            while not connection.parser.done:
                await connection.more(deadline)
            return connection.parser.response()

    async def stream(self, request: RestRequest, deadline: Deadline) -> AsyncGenerator[Buffer, None]:
        """Yield the body as it arrives. Raises the error of a status other than 200."""
        async with self._call(request, deadline, streams=True) as connection:
            parser = connection.parser
            while not parser.has_headers or (parser.status != 200 and not parser.done):
                await connection.more(deadline)
            if parser.status != 200:
                response = parser.response()
                raise errors.error_of_status(response.status, response.headers, response.body)
            while not parser.done:
                yield connection.take()
                await connection.more(deadline)
            yield connection.take()

    async def close(self) -> None:
        while self._idle:
            with suppress(IndexError):  # another thread took the last one
                connection = self._idle.pop()
                connection.abort()
                await connection.closed()

    @asynccontextmanager
    async def _call(self, request: RestRequest, deadline: Deadline, *, streams: bool) -> AsyncIterator[Connection]:
        """Send a request and yield its connection; keep the connection if the response was read completely."""
        try:
            connection = self._idle_connection() or await self._connect(self._address, deadline)
            connection.begin(streams=streams)
            try:
                await connection.send(serialize(request, self._address.authority), deadline)
                yield connection
            finally:
                if connection.parser.done and connection.parser.keep_alive and len(self._idle) < _MAX_IDLE:
                    connection.idle()
                    self._idle.append(connection)
                else:
                    connection.abort()
        except OSError as error:
            raise system_error(error, deadline, self._address) from error

    def _idle_connection(self) -> Connection | None:
        while self._idle:
            with suppress(IndexError):
                connection = self._idle.pop()
                if connection.is_usable():
                    return connection
                connection.abort()
        return None


def system_error(error: OSError, deadline: Deadline, address: Address) -> Exception:
    """Convert an OSError into an error of the client."""
    if isinstance(error, TimeoutError) and error.errno is None:  # raised by us; the system sets errno
        return deadline.expired()
    why = getattr(error, "verify_message", "") or error.strerror or error
    if isinstance(error, ConnectionError) and error.errno:  # asyncio writes a longer message
        why = os.strerror(error.errno)
    return errors.server_unreachable(address.name, why, refused=isinstance(error, ConnectionRefusedError))


def is_stale(descriptor: int) -> bool:
    """Return whether the server closed an idle connection or sent unexpected data."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
