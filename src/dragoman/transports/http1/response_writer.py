"""The response writer of an HTTP/1.1 connection.

A complete response is one write: `write_plain` for small ones of plain requests, `write_whole` for others. The
application's coroutine calls `send`, or `start`, `write` and `end` for a stream, whose chunks in an iteration of the
event loop are collected and written together (`StreamFlushes`). It waits while the client does not read.

    the response is  by                       known by
    begun            `begin`                  `_head` is of its request; `started` is false: it may still be an error
    started          its headers are written  `started`; a stream with `_is_chunked` has its own end
    complete                                  the connection begins the next one; `close`: it was the last one

Independent of the response: `draining`, by which every response is the last one; `is_paused`, while the transport
accepts no more; `is_disconnected`, once nothing can be written.
"""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

from dragoman.core.foreign_code import ClientDisconnected
from dragoman.core.sizes import INLINE
from dragoman.protocols.wire import Buffer, Headers, HttpResponse
from dragoman.system.request_context import request_id, variables_of
from dragoman.transports.clients import Warnings
from dragoman.transports.counters import TransportCounters
from dragoman.transports.http1.headers import Http1Headers
from dragoman.transports.http1.response_headers import CONTINUE, ResponseHeaderWriter

log = logging.getLogger("dragoman.http")

# Bytes and chunks of a stream that are collected in an iteration of the event loop before they are written.
_MAX_COLLECTED_BYTES, _MAX_COLLECTED = 1 << 16, 16
# TLS copies each byte, so large responses are written in chunks of this size.
_TLS_CHUNK = 1 << 18


_NO_PARTS: list[Buffer] = []  # of all writers without a stream; never changed


class StreamFlushes:
    """Writers with chunks that are not written yet: all are written after the tasks of this iteration, in one callback.

    A step of a text engine gives a token to each of thousands of streams; a callback for each would cost 1 us more.
    """

    def __init__(self) -> None:
        self._writers: list[Http1ResponseWriter] = []

    def add(self, writer: "Http1ResponseWriter", loop: asyncio.AbstractEventLoop) -> None:
        if not self._writers:
            loop.call_soon(self._run, context=variables_of(()))
        self._writers.append(writer)

    def _run(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            try:
                writer.flush()
            except Exception:
                log.exception("HTTP/1.1 connection failed")
                writer.abort()


class Http1ResponseWriter:
    """Writes the responses of a connection, one after the other.

    `close`: the last response announced the end of the connection.
    `is_paused`: the transport accepts no more.
    `is_disconnected`: the client has disconnected, or the connection was aborted.
    `context`: of the current request.
    `client`: address of the client if requests are observed.
    """

    __slots__ = (
        "_can_write",
        "_counters",
        "_flushes",
        "_head",
        "_is_chunked",
        "_loop",
        "_outgoing",
        "_parts",
        "_parts_size",
        "_read_s",
        "_transport",
        "_unread",
        "client",
        "close",
        "context",
        "draining",
        "is_disconnected",
        "is_paused",
        "size",
        "started",
    )

    def __init__(
        self,
        outgoing: ResponseHeaderWriter,
        flushes: StreamFlushes,
        counters: TransportCounters,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._flushes = flushes
        self._counters = counters
        self.is_disconnected = False
        self.started = False
        self.is_paused = False
        self.close = False
        self.draining = False
        self.size = 0  # of the last response or chunk
        self.context: Any = ()
        self.client = ""
        self._outgoing = outgoing
        self._loop = loop
        self._transport: Any = None
        self._head: Http1Headers | None = None
        self._can_write: asyncio.Future[None] | None = None
        self._is_chunked = False
        self._parts = _NO_PARTS  # of a stream, written at the end of this iteration of the event loop
        self._parts_size = 0
        self._unread = 0  # bytes that the client had not read at the last check
        self._read_s = 0.0  # when it last read anything

    def open(self, transport: asyncio.BaseTransport, client: str) -> None:
        self._transport, self.client = transport, client

    def begin(self, head: Http1Headers | None) -> None:
        """Begin the response to the request with these headers."""
        self._head = head
        self.started = False

    # --- complete responses -------------------------------------------------------------------------------------

    async def send(self, response: HttpResponse) -> None:
        self._check_connected()
        parts, head = response.body, self._head
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        if size <= INLINE and head is not None and head.plain:
            self.write_plain(head, response, self._loop.time())
            self.started = True
        elif size > _TLS_CHUNK and not self._transport.can_write_eof():  # TLS
            await self._send_in_chunks(response, size)
            return
        else:
            self.write_whole(response, size, close=False)
        if self.is_paused:
            await self._wait_until_drained()

    def write_whole(self, response: HttpResponse, size: int, *, close: bool) -> None:
        """Write a complete response without waiting."""
        text = self._start(response.status, response.headers, size, close)
        self.size = size
        parts, transport = response.body, self._transport
        if self._head is not None and self._head.method == "HEAD":
            size = 0
        self._counters.sent += len(text) + size
        if not size:
            transport.write(text)
        elif size <= INLINE:
            transport.write(b"".join((text, *parts)))
        else:
            transport.writelines((text, *parts))

    def write_plain(self, head: Http1Headers, response: HttpResponse, now_s: float) -> None:
        """Write the response to a plain request on the shortest path. `now_s`: time of the event loop."""
        parts, status, headers, context = response.body, response.status, response.headers, self.context
        if len(parts) == 1:
            body: Any = parts[0]
            size = len(body)
        else:
            size = sum(map(len, parts))
            body = b"".join(parts) if size <= INLINE else b""
        last_status, last_headers, until_s, text = self._outgoing.last_plain
        if headers is not last_headers or status != last_status or now_s >= until_s:
            text = self._outgoing.plain(status, headers, now_s)
        if size > INLINE or self.draining or type(context) is not int or not text:
            self.begin(head)
            self.write_whole(response, size, close=False)
            return
        self.size = size
        message = b"%b%d\r\ncontent-length: %d\r\n\r\n%b" % (text, context, size, body)
        self._transport.write(message)
        head.match.statuses[status] += 1  # type: ignore[union-attr]  # a plain request has an endpoint
        self._counters.sent += len(message)

    async def _send_in_chunks(self, response: HttpResponse, size: int) -> None:
        text = self._start(response.status, response.headers, size, False)
        self._transport.write(text)
        self._counters.sent += len(text)
        self.size = size
        if self._head is not None and self._head.method == "HEAD":
            return
        self._counters.sent += size
        for part in response.body:
            view = memoryview(part)
            for at in range(0, len(view), _TLS_CHUNK):
                self._transport.write(view[at : at + _TLS_CHUNK])
                if self.is_paused:
                    await self._wait_until_drained()

    def _start(self, status: int, headers: Headers, size: int | None, close: bool) -> bytes:
        head = self._head
        http10 = head is not None and head.http10
        close = close or self.draining or (head is not None and not head.keep_alive) or (http10 and size is None)
        text = self._outgoing.head(
            status, headers, size, close=close, http10=http10, request_id=request_id(self.context)
        )
        self.close = close or (bool(headers) and ("connection", "close") in headers)
        self.started = True
        match = None if head is None else head.match
        (self._counters.unmatched if match is None else match.statuses)[status] += 1
        return text

    def write_upgrade(self, response: HttpResponse) -> None:
        """Write the headers of a response 101, which has neither body nor length (RFC 9110, 8.6)."""
        number = request_id(self.context)
        text = self._outgoing.head(response.status, response.headers, 0, close=False, http10=False, request_id=number)
        if self._head is not None and self._head.match is not None:
            self._head.match.statuses[response.status] += 1
        self._counters.sent += len(text)
        self._transport.write(text)

    def send_continue(self) -> None:
        """Send `100 Continue`."""
        self._transport.write(CONTINUE)
        self._counters.sent += len(CONTINUE)

    # --- streamed responses -------------------------------------------------------------------------------------

    async def start(self, status: int, headers: Headers) -> None:
        self._check_connected()
        head = self._head
        self._is_chunked = head is not None and head.method != "HEAD" and not head.http10
        self._put(self._start(status, headers, None, False))

    def write(self, part: Buffer) -> Awaitable[None] | None:
        self._check_connected()
        if part:
            self._chunk(part, b"\r\n")
        if self.is_paused:
            return self._wait_until_drained()
        if part and not 0 < len(self._parts) < _MAX_COLLECTED:
            return asyncio.sleep(0)  # a model that never waits would block the event loop
        return None

    async def end(self, part: Buffer) -> None:
        self._check_connected()
        if part:
            self._chunk(part, b"\r\n0\r\n\r\n")
        elif self._is_chunked:
            self._put(b"0\r\n\r\n")
        self.flush()
        if self.is_paused:
            await self._wait_until_drained()

    def _chunk(self, part: Buffer, end: bytes) -> None:
        size = len(part)
        if self._is_chunked and size <= INLINE:
            self._put(b"".join((b"%x\r\n" % size, part, end)))
        elif self._is_chunked:
            for buffer in (b"%x\r\n" % size, part, end):
                self._put(buffer)
        elif self._head is not None and self._head.method != "HEAD":
            self._put(part)

    def _put(self, part: Buffer) -> None:
        """Collect this part for one write at the end of this iteration of the event loop."""
        if self._parts:
            self._parts.append(part)
        else:
            self._flushes.add(self, self._loop)
            self._parts = [part]
        self._parts_size += len(part)
        if self._parts_size > _MAX_COLLECTED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the chunks that were collected."""
        parts, size = self._parts, self._parts_size
        self.size = size
        if not parts:
            return
        self._counters.sent += size
        self._parts, self._parts_size = _NO_PARTS, 0
        transport = self._transport
        if self.is_disconnected or transport.is_closing():
            return
        if len(parts) == 1:
            transport.write(parts[0])
        elif size <= INLINE:
            transport.write(b"".join(parts))
        else:
            transport.writelines(parts)

    # --- flow control and disconnection -------------------------------------------------------------------------

    def abort(self) -> None:
        self.flush()
        self.is_disconnected = True
        self._loop.call_soon(self._transport.abort)  # uvloop writes at the end of this iteration of the event loop

    def _check_connected(self) -> None:
        """Raise CancelledError if the client has disconnected."""
        if self.is_disconnected or self._transport.is_closing():
            self.is_disconnected = True
            raise ClientDisconnected

    async def _wait_until_drained(self) -> None:
        """Wait until the client has read; the connection checks the timeout."""
        if not self.is_paused:  # it has read since this was called: the reader of a stream awaits it later
            return
        self._can_write = self._loop.create_future()
        try:
            await self._can_write
        finally:
            self._can_write = None

    def pause(self) -> None:
        self.is_paused = True
        self._unread = self._transport.get_write_buffer_size()
        self._read_s = self._loop.time()

    def resume(self) -> None:
        self.is_paused = False
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)

    def check_timeouts(self, now_s: float, timeout_s: float, warnings: Warnings) -> float:
        """Abort if the client has read nothing for `timeout_s`; return when to check again."""
        unread = self._transport.get_write_buffer_size()
        if unread < self._unread:
            self._unread, self._read_s = unread, now_s
        elif now_s >= self._read_s + timeout_s:
            warnings.log("client disconnected: it read nothing for %s s", timeout_s)
            self._transport.abort()
            return 0.0
        return self._read_s + timeout_s
