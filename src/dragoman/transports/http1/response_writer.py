"""The response writer of an HTTP/1.1 connection."""

import asyncio
import logging
from typing import Any

from dragoman.protocols.wire import Buffer, Headers, HttpResponse
from dragoman.transports.http1.headers import Http1Headers
from dragoman.transports.http1.response_headers import CONTINUE, ResponseHeaderWriter

log = logging.getLogger("dragoman.http")

# Parts up to this size are put together, which is cheaper than to send several.
_SMALL = 1 << 14
# So much of a stream, and of so many parts, is written before others have a turn of the loop.
_TURN, _TURN_PARTS = 1 << 16, 48
# Over TLS each byte is copied on its way, so large answers go in pieces.
_PIECE = 1 << 18


class Http1ResponseWriter:
    """Writes answers. `close` tells that the one that was written last says it is the last.

    It is `choked` while the transport has no room; `left` once nobody is there, or was hung up on.
    """

    __slots__ = (
        "_head",
        "_loop",
        "_marked",
        "_outgoing",
        "_parts",
        "_parts_size",
        "_read_s",
        "_room",
        "_transport",
        "choked",
        "close",
        "draining",
        "left",
        "size",
        "started",
    )

    def __init__(self, outgoing: ResponseHeaderWriter, loop: asyncio.AbstractEventLoop) -> None:
        self.left = False
        self.started = False
        self.choked = False
        self.close = False
        self.draining = False
        self.size = 0  # bytes that were written last
        self._outgoing = outgoing
        self._loop = loop
        self._transport: Any = None
        self._head: Http1Headers | None = None
        self._room: asyncio.Future[None] | None = None
        self._parts: list[Buffer] = []  # of a stream that go out at the end of this turn of the loop
        self._parts_size = 0
        self._marked = 0  # bytes that were unread when the reader was last looked at,
        self._read_s = 0.0  # and when that was

    def open(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def begin(self, head: Http1Headers | None) -> None:
        """What is written from now on answers this head."""
        self._head = head
        self.started = False

    # --- a whole answer -----------------------------------------------------------------------------------------

    async def send(self, response: HttpResponse) -> None:
        self._check_there()
        parts, head = response.body, self._head
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        if size <= _SMALL and head is not None and head.plain:
            self.write_plain(head, response)
        elif size > _PIECE and not self._transport.can_write_eof():  # TLS
            await self._send_in_pieces(response, size)
            return
        else:
            self.write_whole(response, size, close=False)
        if self.choked:
            await self._has_room()

    def write_whole(self, response: HttpResponse, size: int, *, close: bool) -> None:
        """The whole answer at once, whatever room there is."""
        text = self._start(response.status, response.headers, size, close)
        self.size = size
        parts, transport = response.body, self._transport
        if not size or (self._head is not None and self._head.method == "HEAD"):
            transport.write(text)
        elif size <= _SMALL:
            transport.write(b"".join((text, *parts)))
        else:
            transport.writelines((text, *parts))

    def write_plain(self, head: Http1Headers, response: HttpResponse) -> None:
        """The answer to a head that is `plain`, in the fewest steps."""
        parts = response.body
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        few = size <= _SMALL and not self.draining
        text = self._outgoing.plain(response.status, response.headers) if few else b""
        if not text:
            self.begin(head)
            self.write_whole(response, size, close=False)
            return
        self.started = True
        self.close = False
        self.size = size
        body: Any = parts[0] if len(parts) == 1 else b"".join(parts)
        self._transport.write(b"%b%d\r\n\r\n%b" % (text, size, body))

    async def _send_in_pieces(self, response: HttpResponse, size: int) -> None:
        self._transport.write(self._start(response.status, response.headers, size, False))
        self.size = size
        if self._head is not None and self._head.method == "HEAD":
            return
        for part in response.body:
            view = memoryview(part)
            for at in range(0, len(view), _PIECE):
                self._transport.write(view[at : at + _PIECE])
                if self.choked:
                    await self._has_room()

    def _start(self, status: int, headers: Headers, size: int | None, close: bool) -> bytes:
        head = self._head
        http10 = head is not None and head.http10
        close = close or self.draining or (head is not None and not head.keep_alive) or (http10 and size is None)
        text = self._outgoing.head(status, headers, size, close=close, http10=http10)
        self.close = close or (bool(headers) and ("connection", "close") in headers)
        self.started = True
        return text

    def go_on(self) -> None:
        """Tell a client that it may send its body."""
        self._transport.write(CONTINUE)

    # --- an answer in parts -------------------------------------------------------------------------------------

    async def start(self, status: int, headers: Headers) -> None:
        self._check_there()
        self._put(self._start(status, headers, None, False))

    async def write(self, part: Buffer) -> None:
        self._check_there()
        if part:
            self._chunk(part, b"\r\n")
        if self.choked:
            await self._has_room()
        elif part and not 0 < len(self._parts) < _TURN_PARTS:
            await asyncio.sleep(0)  # a model that never waits would not let anybody else

    async def end(self, part: Buffer) -> None:
        self._check_there()
        if part:
            self._chunk(part, b"\r\n0\r\n\r\n")
        elif self._chunked:
            self._put(b"0\r\n\r\n")
        self._flush()
        if self.choked:
            await self._has_room()

    @property
    def _chunked(self) -> bool:
        head = self._head
        return head is not None and head.method != "HEAD" and not head.http10

    def _chunk(self, part: Buffer, end: bytes) -> None:
        if self._chunked:
            self._put(b"%x\r\n" % len(part), part, end)
        elif self._head is not None and self._head.method != "HEAD":
            self._put(part)

    def _put(self, *parts: Buffer) -> None:
        """Send these soon: what a stream says in one turn of the loop is one write."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts += parts
        self._parts_size += sum(map(len, parts))
        if self._parts_size > _TURN:
            self._flush()

    def _flush(self) -> None:
        parts, size = self._parts, self._parts_size
        self.size = size
        if not parts:
            return
        self._parts, self._parts_size = [], 0
        if self.left or self._transport.is_closing():
            return
        if size <= _SMALL:
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)

    # --- whether somebody is there, and reads -------------------------------------------------------------------

    def hang_up(self) -> None:
        self.left = True
        self._transport.abort()

    def _check_there(self) -> None:
        """Whoever writes on without ever waiting is told nothing else than this."""
        if self.left or self._transport.is_closing():
            self.left = True
            raise asyncio.CancelledError

    async def _has_room(self) -> None:
        """Returns when the client has read; patience with it is the connection's business."""
        self._room = self._loop.create_future()
        try:
            await self._room
        finally:
            self._room = None

    def pause(self) -> None:
        self.choked = True
        self._marked = self._transport.get_write_buffer_size()
        self._read_s = self._loop.time()

    def resume(self) -> None:
        self.choked = False
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def overdue(self, now_s: float, patience_s: float) -> float:
        """Hang up on a client that reads nothing for so long; gives when to look again. It may take long otherwise."""
        unread = self._transport.get_write_buffer_size()
        if unread < self._marked:
            self._marked, self._read_s = unread, now_s
        elif now_s >= self._read_s + patience_s:
            log.warning("a client did not read its answer for %s s", patience_s)
            self._transport.abort()
            return 0.0
        return self._read_s + patience_s
