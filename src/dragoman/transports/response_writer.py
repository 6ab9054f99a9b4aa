"""Sends the response of one request, whichever transport carries it."""

from typing import Protocol

from dragoman.protocols.wire import Buffer, Headers, HttpResponse


class ResponseWriter(Protocol):
    """Who waits for the answer of one request: it is sent whole, or started, written piece by piece, and ended.

    The methods return when there is room for more, and raise CancelledError where the caller has `left`, or does not
    read for too long.
    """

    @property
    def left(self) -> bool:
        """Whether nobody is there any more."""

    @property
    def started(self) -> bool:
        """Whether the head of an answer is under way already."""

    async def send(self, response: HttpResponse) -> None:
        """The whole answer; the transport adds the length."""

    async def start(self, status: int, headers: Headers) -> None:
        """The head of an answer whose length is not known."""

    async def write(self, part: Buffer) -> None: ...

    async def end(self, part: Buffer) -> None:
        """The last part, which may be empty."""

    def hang_up(self) -> None:
        """Cut the connection, or the stream in it, so that nobody takes what was sent for the whole."""


class CorsResponseWriter:
    """A caller that is a page of another site: every answer says what its browser may let it read."""

    def __init__(self, caller: ResponseWriter, added: Headers) -> None:
        self._caller = caller
        self._added = added

    @property
    def left(self) -> bool:
        return self._caller.left

    @property
    def started(self) -> bool:
        return self._caller.started

    async def send(self, response: HttpResponse) -> None:
        known = {name for name, _ in response.headers}
        added = tuple(h for h in self._added if h[0] == "vary" or h[0] not in known)
        await self._caller.send(HttpResponse(response.status, response.body, (*response.headers, *added)))

    async def start(self, status: int, headers: Headers) -> None:
        await self._caller.start(status, (*headers, *self._added))

    async def write(self, part: Buffer) -> None:
        await self._caller.write(part)

    async def end(self, part: Buffer) -> None:
        await self._caller.end(part)

    def hang_up(self) -> None:
        self._caller.hang_up()
