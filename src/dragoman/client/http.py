"""HTTP/1.1 to one server: requests as bytes, the parser of responses, and keep-alive connections."""

import os
import select
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import httptools

from dragoman.client import errors
from dragoman.client.messages import Address, Deadline, RestRequest, RestResponse
from dragoman.core.errors import ServerError
from dragoman.core.sizes import INLINE
from dragoman.formats.policy import Buffer

# Size of one read. Longer bodies, up to _LARGEST, are read into one preallocated buffer.
_CHUNK = 1 << 16
_LARGEST = 1 << 32
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def compress(body: list[Buffer], encoding: str) -> list[Buffer]:
    """Compress a body with the fastest level of zlib."""
    stream = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS[encoding])
    return [b"".join([*(stream.compress(part) for part in body), stream.flush()])]


def serialize(request: RestRequest, authority: str) -> Iterator[Buffer]:
    """Yield the buffers of a request; large ones are the memory of the arrays."""
    size = sum(len(part) for part in request.body)
    lines = [f"{request.method} {request.path} HTTP/1.1", f"host: {authority}"]
    lines += [f"{name}: {value}" for name, value in request.headers]
    if request.method != "GET":
        lines.append(f"content-length: {size}")
    small: list[Buffer] = ["\r\n".join([*lines, "", ""]).encode("latin-1", "replace")]
    for part in request.body:
        if len(part) > INLINE:
            yield b"".join(small)
            small = []
            yield part
        else:
            small.append(part)
    if small:
        yield b"".join(small)


class ResponseParser:
    """Parser of one response: write received bytes into `buffer()`, then call `bytes_received`.

    has_headers: status and headers are complete. done: the response is complete. keep_alive: the connection can be
    used again. With `streams` the body is read in chunks by `take`.
    """

    # Of HTTP/2 only: frames between calls, frames to be sent, and a request that waits for them.
    is_duplex = False
    replies = False
    is_blocked = False

    def __init__(self, *, streams: bool = False) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.has_headers = self.done = self.keep_alive = False
        self._whole = not streams
        self._chunks: list[Buffer] = []
        self._body: bytearray | None = None
        self._at = 0
        self._scratch = memoryview(bytearray(_CHUNK))
        self._parser = httptools.HttpResponseParser(self)

    def next(self, *, streams: bool) -> "ResponseParser":
        """Return the parser of the next response on a connection."""
        return ResponseParser(streams=streams)

    def body(self) -> Sequence[Buffer]:
        return ()

    def buffer(self) -> memoryview:
        """Return the buffer for the next bytes; those of a large body are received in place."""
        return self._scratch if self._body is None or self.done else memoryview(self._body)[self._at :]

    def bytes_received(self, count: int) -> None:
        """Parse `count` received bytes. Raises ServerError if they are not HTTP."""
        if self.done:  # unexpected data after the response
            self.keep_alive = False
            return
        if self._body is not None:
            self._at += count
            self.done = self._at == len(self._body)
            return
        try:
            self._parser.feed_data(self._scratch[:count])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ServerError(f"the response is not HTTP/1.1: {error}") from error
        length = self.headers.get("content-length", "")
        is_long = length.isdecimal() and _CHUNK < int(length) <= _LARGEST
        if is_long and self.has_headers and not self.done and self._whole:
            self._body = bytearray(int(length))
            received = self.take()
            self._at = len(received)
            self._body[: self._at] = received

    def end(self) -> bool:
        """Handle a closed connection; return whether the response is complete, as one without a length then is."""
        until_close = not {"content-length", "transfer-encoding"} & set(self.headers)
        self.done = self.done or (self.has_headers and until_close)
        return self.done

    def take(self) -> Buffer:
        """Return the bytes of the body received since the last call."""
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def response(self) -> RestResponse:
        body = self.take() if self._body is None else self._body
        self._body = None  # an idle connection keeps no response in memory
        encoding = self.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            body = _decompress(body, encoding)
        return RestResponse(self.status, self.headers, body)

    # --- callbacks of httptools ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.done:  # an unexpected second response
            self.keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.done:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.done:
            return
        self.status = self._parser.get_status_code()
        self.has_headers = self.status >= 200
        self.keep_alive = self._parser.should_keep_alive()
        if not self.has_headers:  # 1xx: the final response follows
            self.headers = {}

    def on_body(self, data: bytes) -> None:
        if not self.done:
            self._chunks.append(data)

    def on_message_complete(self) -> None:
        if self.has_headers and not self.done:
            self.done = True


def _decompress(body: Buffer, encoding: str) -> bytes:
    if encoding not in _WINDOW_BITS:
        raise ServerError(f"the response has the content-encoding '{encoding}'; expected gzip or deflate")
    try:
        return zlib.decompress(body, _WINDOW_BITS[encoding])
    except zlib.error as error:
        raise ServerError(f"the response is not valid {encoding}: {error}") from error


_MAX_IDLE = 32


class Parser(Protocol):
    """What connections call of a parser: `ResponseParser`, or that of HTTP/2."""

    @property
    def is_duplex(self) -> bool: ...
    @property
    def done(self) -> bool: ...
    @property
    def keep_alive(self) -> bool: ...
    @property
    def replies(self) -> bool: ...
    @property
    def is_blocked(self) -> bool: ...
    def next(self, *, streams: bool) -> Any: ...
    def body(self) -> Sequence[Buffer]: ...
    def buffer(self) -> memoryview: ...
    def bytes_received(self, count: int) -> None: ...
    def end(self) -> bool: ...
    def take(self) -> Buffer: ...


class Connection(Protocol):
    """A connection and the parser of its current response."""

    parser: Any

    def begin(self, *, streams: bool) -> None:
        """Prepare for the next response."""

    async def send(self, parts: Iterable[Buffer], deadline: Deadline) -> None: ...

    async def more(self, deadline: Deadline) -> None:
        """Wait for more of the response, or its end."""

    def take(self) -> Buffer:
        """Return the bytes of the body received since the last call."""

    def idle(self) -> None:
        """Mark the connection as idle after a complete response."""

    async def is_usable(self) -> bool:
        """Return whether the connection is open and the server has not announced its end, nor sent too much."""

    def abort(self) -> None: ...

    def interrupt(self) -> None:
        """End a call in progress from another thread."""

    async def wait_closed(self) -> None:
        """Wait until it is closed."""


Connect = Callable[[Address, Deadline], Awaitable[Connection]]


class ConnectionPool:
    """Calls to one server, each over a connection of `connect`, which is kept for later ones.

    For several threads, or for one event loop.
    """

    def __init__(self, address: Address, connect: Connect) -> None:
        self._address = address
        self._connect = connect
        self._idle: list[Connection] = []
        self._active: set[Connection] = set()
        self._is_interrupted = False

    async def close(self) -> None:
        while self._idle:
            with suppress(IndexError):  # another thread took the last one
                connection = self._idle.pop()
                connection.abort()
                await connection.wait_closed()

    def interrupt(self) -> None:
        """End the calls of all threads, and any later one, with an error."""
        self._is_interrupted = True
        for connection in list(self._active):
            connection.interrupt()

    @asynccontextmanager
    async def _call(self, request: Any, deadline: Deadline, *, streams: bool) -> AsyncIterator[Connection]:
        """Send a request and yield its connection; keep the connection if the response was read completely."""
        try:
            connection = await self._idle_connection() or await self._connect(self._address, deadline)
            connection.begin(streams=streams)
            self._active.add(connection)
            try:
                if self._is_interrupted:
                    raise ConnectionAbortedError("the client was closed")
                await self._send(connection, request, deadline)
                yield connection
            finally:
                self._active.discard(connection)
                if connection.parser.done and connection.parser.keep_alive and len(self._idle) < _MAX_IDLE:
                    connection.idle()
                    self._idle.append(connection)
                    if self._is_interrupted:
                        await self.close()
                else:
                    connection.abort()
        except OSError as error:
            raise system_error(error, deadline, self._address) from error

    async def _send(self, connection: Connection, request: Any, deadline: Deadline) -> None:
        """Send a request."""
        raise NotImplementedError

    async def _idle_connection(self) -> Connection | None:
        while self._idle:
            with suppress(IndexError):
                connection = self._idle.pop()
                if await connection.is_usable():
                    return connection
                connection.abort()
        return None


class HttpTransport(ConnectionPool):
    """Transport to one server over HTTP/1.1."""

    async def send(self, request: RestRequest, deadline: Deadline) -> RestResponse:
        """Return the response of any status. Raises ServerUnreachable, DeadlineExceeded or ServerError."""
        async with self._call(request, deadline, streams=False) as connection:
            while not connection.parser.done:
                await connection.more(deadline)
            response: RestResponse = connection.parser.response()
            return response

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

    async def _send(self, connection: Connection, request: Any, deadline: Deadline) -> None:
        await connection.send(serialize(request, self._address.authority), deadline)


def system_error(error: OSError, deadline: Deadline, address: Address) -> Exception:
    if isinstance(error, TimeoutError) and error.errno is None:  # raised by us; the system sets errno
        return deadline.deadline_error()
    why = getattr(error, "verify_message", "") or error.strerror or error
    if isinstance(error, ConnectionError) and error.errno:  # asyncio writes a longer message
        why = os.strerror(error.errno)
    return errors.server_unreachable(address.name, why, refused=isinstance(error, ConnectionRefusedError))


def is_stale(descriptor: int) -> bool:
    """Return whether the server closed an idle connection or sent unexpected data."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
