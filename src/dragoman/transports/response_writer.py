"""Sends the response of one request, whichever transport carries it."""

from collections.abc import Awaitable
from typing import Protocol

from dragoman.protocols.wire import Buffer, Headers, HttpResponse


class ResponseWriter(Protocol):
    """Sends the response of one request: at once with `send`, or as a stream with `start`, `write` and `end`.

    The coroutines return when more can be written. All methods raise CancelledError if the client has disconnected or
    does not read.
    """

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has disconnected."""

    @property
    def started(self) -> bool:
        """Whether the headers of a response have been sent."""

    async def send(self, response: HttpResponse) -> None:
        """Send a complete response; the transport adds the length."""

    async def start(self, status: int, headers: Headers) -> None:
        """Send the headers of a response of unknown length."""

    def write(self, chunk: Buffer) -> Awaitable[None] | None:
        """Send a chunk; return what to await before the next one, None if it can be written at once."""

    async def end(self, chunk: Buffer) -> None:
        """Send the last chunk, which may be empty."""

    def abort(self) -> None:
        """Close the connection or stream, so that an incomplete response is not taken for a complete one."""


def with_headers(response: HttpResponse, added: Headers) -> HttpResponse:
    """Return a response with further headers, unless it has them; `vary` may be repeated."""
    known = {name for name, _ in response.headers}
    missing = tuple(h for h in added if h[0] == "vary" or h[0] not in known)
    return HttpResponse(response.status, response.body, (*response.headers, *missing))


class ForwardingWriter:
    """Passes everything to another writer; subclasses change or observe a part of it."""

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer

    @property
    def is_disconnected(self) -> bool:
        return self._writer.is_disconnected

    @property
    def started(self) -> bool:
        return self._writer.started

    async def send(self, response: HttpResponse) -> None:
        await self._writer.send(response)

    async def start(self, status: int, headers: Headers) -> None:
        await self._writer.start(status, headers)

    def write(self, chunk: Buffer) -> Awaitable[None] | None:
        return self._writer.write(chunk)

    async def end(self, chunk: Buffer) -> None:
        await self._writer.end(chunk)

    def abort(self) -> None:
        self._writer.abort()


class CorsResponseWriter(ForwardingWriter):
    """Adds CORS headers to each response."""

    def __init__(self, writer: ResponseWriter, added: Headers) -> None:
        super().__init__(writer)
        self._added = added

    async def send(self, response: HttpResponse) -> None:
        await super().send(with_headers(response, self._added))

    async def start(self, status: int, headers: Headers) -> None:
        await super().start(status, (*headers, *self._added))


class CollectingWriter:
    """A response writer that keeps the response."""

    is_disconnected = False

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = ()
        self.body = bytearray()

    @property
    def started(self) -> bool:
        return self.status > 0

    async def send(self, response: HttpResponse) -> None:
        await self.start(response.status, response.headers)
        for part in response.body:
            self.body += part

    async def start(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers

    def write(self, chunk: Buffer) -> None:
        self.body += chunk

    async def end(self, chunk: Buffer) -> None:
        self.body += chunk

    def abort(self) -> None:
        self.status = 500
