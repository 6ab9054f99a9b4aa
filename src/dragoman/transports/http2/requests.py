"""HTTP/2 streams as requests to the application.

A request that its headers reject is answered at once. The body of another one is received into one piece of memory. A
complete request waits while the client leaves too many responses unread (`Backlog`), and a large one for its turn
(`LoopBudget`). Then the application responds through the same object, in a task if it has to wait.

    the request is   known by          ends by
    received         `_body`           its last byte, an error, a timeout
    waiting          `_body`           `_resume`
    responded to     `_task`, unless   the end of the coroutine; `started` once it has sent the headers
                     it is at once
    answered         `_is_answered`    its memory is released, and what the client still sends is ignored

Independent of this, `is_disconnected` says that the stream was reset or the connection lost; a task is cancelled then.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from email.utils import formatdate
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from dragoman.core.errors import DragomanError
from dragoman.core.foreign_code import ClientDisconnected
from dragoman.core.sizes import INLINE
from dragoman.formats.http2 import frames
from dragoman.formats.http2.fields import encode_fields, encode_request_id
from dragoman.protocols.wire import Headers, HttpError, HttpRequest, HttpResponse
from dragoman.system.coroutines import Start
from dragoman.system.request_context import client_request_id, new_context, variables_of
from dragoman.transports.application import Application, RequestSummary
from dragoman.transports.bodies import FixedBody, GrowingBody, SpooledBody, fixed_body, growing_body, too_large
from dragoman.transports.clients import TOO_MANY_CONNECTIONS
from dragoman.transports.http2.request import Http2Headers, merge_fields
from dragoman.transports.http2.stream import Buffer, Http2Stream
from dragoman.transports.loop_delay import LOOP_LATE
from dragoman.transports.routing import Match

log = logging.getLogger("dragoman.http")

# Not allowed in HTTP/2 (RFC 9113, 8.2.2).
_CONNECTION_HEADERS = frozenset(("connection", "keep-alive", "transfer-encoding"))
_FORBIDDEN = frozenset("\r\n\0")
_CONTINUE = encode_fields([(b":status", b"100")])


class Http2Requests:
    """Handles the streams of any connection as HTTP requests."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self.loop = asyncio.get_running_loop()

    def open(self, stream: Http2Stream, headers: Http2Headers, ended: bool) -> "Http2Request":
        request = Http2Request(self, stream, headers)
        if ended:
            request.receive(b"", 0, 0, True)
        elif request.expects_continue:
            stream.send_headers(_CONTINUE)
        return request


class Http2Request:
    """One request and the writer of its response."""

    def __init__(self, service: Http2Requests, stream: Http2Stream, headers: Http2Headers) -> None:
        self.is_disconnected = self.started = False
        self._service = service
        self._application = service.application
        self._stream = stream
        self._request_headers = headers
        self._headers = merge_fields(headers.fields)
        self._context = new_context(client_request_id(self._headers))
        if headers.authority:
            self._headers["host"] = headers.authority
        self._body: FixedBody | GrowingBody | SpooledBody | None = None
        self._match: Match | None = None
        self._task: asyncio.Task[None] | None = None
        self._can_write: asyncio.Future[None] | None = None
        self._began_s = service.loop.time()
        self._is_answered = False
        if headers.error is not None:
            self._reject(headers.error)  # not raised: requests with equal headers share it
            return
        try:
            self._prepare()
        except (DragomanError, HttpError) as error:
            self._reject(error)

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for status 100 before it sends the body (RFC 9110, 10.1.1)."""
        return not self._is_answered and self._headers.get("expect", "").lower() == "100-continue"

    def _prepare(self) -> None:
        application, length = self._service.application, self._request_headers.length
        path = self._request_headers.path.partition("?")[0]
        self._match = application.match(self._request_headers.method, path, self._headers)
        if self._stream.connection.reserved and not self._match.health:
            raise HttpError(503, TOO_MANY_CONNECTIONS.message, (("retry-after", "1"),))
        if self._match.is_sheddable and application.executor.loop_delay.rejects():
            raise LOOP_LATE
        method, connection = self._request_headers.method, self._stream.connection
        of_client = (lambda: connection.host), (lambda: connection.certificate)
        caller = application.authorize(self._match, method, self._headers, *of_client)
        self._application = caller.application
        spool = self._match.spool
        max_bytes = application.limits.max_body_bytes if spool is None else spool.max_bytes
        if length > max_bytes:
            raise too_large(max_bytes)
        self._body = (
            fixed_body(length, application.bodies, spool)
            if length > 0
            else growing_body(max_bytes, application.bodies, spool if self._match.endpoint is not None else None)
        )

    # --- request ---------------------------------------------------------------------------------------------------

    def receive(self, data: bytes | memoryview, at: int, stop: int, ended: bool) -> None:
        if self._is_answered or self._body is None:
            return
        try:
            if stop > at:
                self._body.append(bytes(data[at:stop]))
        except HttpError as error:
            self._reject(error)
            return
        self._body_received(stop - at, ended)

    def buffer(self, size: int) -> memoryview | None:
        return self._body.free_space()[:size] if isinstance(self._body, FixedBody) else None

    def on_buffer_filled(self, size: int, ended: bool) -> None:
        assert isinstance(self._body, FixedBody)
        try:
            self._body.advance(size)
        except HttpError as error:
            self._reject(error)
            return
        self._body_received(size, ended)

    def _body_received(self, size: int, ended: bool) -> None:
        if not ended:
            self._stream.acknowledge(size)
        elif (backlog := self._stream.connection.backlog).is_full:
            backlog.wait(self._resume)
        elif self._body is not None and self._body.size > INLINE:
            self._service.application.executor.budget.run(self._resume)
        else:
            self._start()

    def _resume(self) -> None:
        """Continue once the client has read enough, or it is this request's turn."""
        if not self._is_answered:
            self._start()

    def check_timeout(self, now_s: float) -> None:
        limits = self._service.application.limits
        size = 0 if self._body is None else self._body.size
        if not self._is_answered and now_s - self._began_s > limits.body_timeout_s + size / (1 << 16):
            text = f"the body came too slowly: {size} bytes in {limits.body_timeout_s} s"
            self._reject(HttpError(408, text))

    def _start(self) -> None:
        path, _, query = self._request_headers.path.partition("?")
        body = b"" if self._body is None else self._body.take()
        assert self._match is not None
        method, caller = self._request_headers.method, self._application.caller
        request = HttpRequest(
            method, unquote(path), self._match.params, self._headers, body, query, self._context, caller,
            self._stream.connection.host, "2",
        )  # fmt: skip
        answering = self._application.answer(self._match, request, self)
        start = Start(answering, self._service.loop, variables_of(self._context))
        self._task = start.task
        if start.task is not None:
            start.task.add_done_callback(self._on_done)
        else:
            if start.error is not None:
                log.error("a request failed", exc_info=start.error)
            self._finish()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a request failed", exc_info=error)
        self._finish()

    def _finish(self) -> None:
        """The application has responded or failed."""
        self._release()
        if not self._stream.local_ended and not self.started:
            self._stream.reset(frames.INTERNAL_ERROR)

    def _reject(self, error: HttpError | DragomanError) -> None:
        """Respond with an error without calling the application."""
        if not self._is_answered and not self.started:
            request, protocol = self._request_headers, self._match.protocol if self._match else None
            path = unquote(request.path.partition("?")[0])
            client = self._stream.connection.host
            summary = RequestSummary(request.method, path, self._headers, protocol, self._context, client, "2")
            self._send(self._service.application.reject(error, summary))
        self._release()

    def _release(self) -> None:
        if not self._is_answered:
            self._is_answered = True
            if self._body is not None:
                self._service.application.bodies.release(self._body.size)
                self._body = None

    # --- response -------------------------------------------------------------------------------------------------

    async def send(self, response: HttpResponse) -> None:
        """Send a complete response, without waiting for the client: that would keep the request in memory."""
        self._check_connected()
        self._send(response)

    def _send(self, response: HttpResponse) -> None:
        self.started = True
        parts = [memoryview(part).cast("B") for part in response.body]
        size = sum(map(len, parts))
        length = () if response.status in (204, 304) else (("content-length", str(size)),)
        block = self._block(response.status, (*response.headers, *length))
        if not size or self._request_headers.method == "HEAD":
            self._stream.send_headers(block, ended=True)
            return
        self._stream.send_headers(block)
        self._stream.send_data(*parts)
        self._stream.send_trailers(b"")

    def _block(self, status: int, headers: Headers) -> bytes:
        counters = self._service.application.counters
        (counters.unmatched if self._match is None else self._match.statuses)[status] += 1
        return _encode_headers(status, headers) + _encode_date(int(time.time())) + encode_request_id(self._context)

    async def start(self, status: int, headers: Headers) -> None:
        self._check_connected()
        self.started = True
        self._stream.send_headers(self._block(status, headers), ended=self._request_headers.method == "HEAD")

    def write(self, part: Buffer) -> Awaitable[None] | None:
        self._check_connected()
        self._stream.send_data(part)
        return self._wait_until_sent() if self._stream.pending else None

    async def end(self, part: Buffer) -> None:
        self._check_connected()
        self._stream.send_data(part)
        self._stream.send_trailers(b"")
        await self._wait_until_sent()

    async def _wait_until_sent(self) -> None:
        while self._stream.pending:
            self._can_write = self._service.loop.create_future()
            try:
                await self._can_write
            finally:
                self._can_write = None

    def on_drained(self) -> None:
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)

    # --- ends ----------------------------------------------------------------------------------------------------

    def _check_connected(self) -> None:
        if self.is_disconnected:
            raise ClientDisconnected

    def abort(self) -> None:
        self.is_disconnected = True
        self._stream.reset(frames.INTERNAL_ERROR)

    def on_closed(self, code: int) -> None:
        self.is_disconnected = True
        if self._task is not None:
            self._task.cancel()
        else:
            self._release()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self._reject(HttpError(503, "the server is shutting down"))


@lru_cache(maxsize=512)
def _encode_headers(status: int, headers: Headers) -> bytes:
    """Raises ValueError if a header contains a line break or NUL."""
    fields: list[Any] = [(b":status", b"%d" % status)]
    for name, value in headers:
        if _FORBIDDEN.intersection(name) or _FORBIDDEN.intersection(value):
            raise ValueError(f"the header {name!r} of a response contains a line break or NUL")
        if name.lower() not in _CONNECTION_HEADERS:
            fields.append((name.lower().encode("latin-1", "replace"), value.strip().encode("latin-1", "replace")))
    return encode_fields(fields)


@lru_cache(maxsize=2)
def _encode_date(second: int) -> bytes:
    return encode_fields([(b"date", formatdate(second, usegmt=True).encode())])
