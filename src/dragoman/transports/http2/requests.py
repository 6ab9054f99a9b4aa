"""Requests over HTTP/2, answered by the application."""

import asyncio
import logging
import time
from email.utils import formatdate
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from dragoman.protocols.wire import Headers, HttpError, HttpRequest, HttpResponse
from dragoman.system.coroutines import Start
from dragoman.transports.application import Application
from dragoman.transports.http1.body import Body, GrowingBody, too_large
from dragoman.transports.http2 import frames
from dragoman.transports.http2.fields import encoded
from dragoman.transports.http2.request import Http2Headers
from dragoman.transports.http2.stream import Buffer, Http2Stream
from dragoman.transports.loop_budget import LARGE_MESSAGE
from dragoman.transports.reserve import TOO_MANY_CONNECTIONS
from dragoman.transports.routing import Match

log = logging.getLogger("dragoman.http")

# RFC 9113, 8.2.2: of no use here, and forbidden.
_OF_CONNECTIONS = frozenset(("connection", "keep-alive", "transfer-encoding"))
_FORBIDDEN = frozenset("\r\n\0")
_CONTINUE = encoded([(b":status", b"100")])


class Http2Requests:
    """Answers the streams of any connection."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self.loop = asyncio.get_running_loop()

    def open(self, stream: Http2Stream, head: Http2Headers, ended: bool) -> "Http2Request":
        request = Http2Request(self, stream, head)
        if ended:
            request.receive(b"", 0, 0, True)
        elif request.expects_continue:
            stream.send_headers(_CONTINUE)
        return request


class Http2Request:
    """One request, and the caller who waits for its answer."""

    def __init__(self, service: Http2Requests, stream: Http2Stream, head: Http2Headers) -> None:
        self.left = self.started = False
        self._service = service
        self._stream = stream
        self._head = head
        self._headers = _merged(head.fields)
        if head.authority:
            self._headers["host"] = head.authority
        self._body: Body | GrowingBody | None = None
        self._match: Match | None = None
        self._task: asyncio.Task[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._began_s = service.loop.time()
        self._over = False
        if head.fault is not None:
            self._refuse(head.fault)  # not raised: equal heads share it
            return
        try:
            self._prepare()
        except HttpError as fault:
            self._refuse(fault)

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for word that it may send the body (RFC 9110, 10.1.1)."""
        return not self._over and self._headers.get("expect", "").lower() == "100-continue"

    def _prepare(self) -> None:
        application, length = self._service.application, self._head.length
        self._match = application.match(self._head.method, self._head.path.partition("?")[0])
        if self._stream.connection.reserved and not self._match.health:
            raise HttpError(503, TOO_MANY_CONNECTIONS.message, (("retry-after", "1"),))
        if length > application.limits.max_body_bytes:
            raise too_large(application.limits.max_body_bytes)
        self._body = (
            Body(length, application.bodies)
            if length > 0
            else GrowingBody(application.limits.max_body_bytes, application.bodies)
        )

    # --- in ------------------------------------------------------------------------------------------------------

    def receive(self, data: bytes | memoryview, at: int, stop: int, ended: bool) -> None:
        if self._over or self._body is None:
            return
        try:
            if stop > at:
                self._body.put(bytes(data[at:stop]))
        except HttpError as fault:
            self._refuse(fault)
            return
        self._heard(stop - at, ended)

    def room(self, size: int) -> memoryview | None:
        return self._body.room()[:size] if isinstance(self._body, Body) else None

    def filled(self, size: int, ended: bool) -> None:
        assert isinstance(self._body, Body)
        try:
            self._body.came(size)
        except HttpError as fault:
            self._refuse(fault)
            return
        self._heard(size, ended)

    def _heard(self, size: int, ended: bool) -> None:
        if not ended:
            self._stream.acknowledge(size)
        elif (backlog := self._stream.connection.backlog).is_full:
            backlog.wait(self._go_on)
        elif self._body is not None and self._body.held > LARGE_MESSAGE:
            self._service.application.executor.budget.run(self._go_on)
        else:
            self._ask()

    def _go_on(self) -> None:
        """The client has made room, or it is this request's turn."""
        if not self._over:
            self._ask()

    def watch(self, now_s: float) -> None:
        limits = self._service.application.limits
        held = 0 if self._body is None else self._body.held
        if not self._over and now_s - self._began_s > limits.body_timeout_s + held / (1 << 16):
            text = f"the body came too slowly: {held} bytes in {limits.body_timeout_s} s"
            self._refuse(HttpError(408, text))

    def _ask(self) -> None:
        path, _, query = self._head.path.partition("?")
        body = b"" if self._body is None else self._body.whole()
        assert self._match is not None
        request = HttpRequest(self._head.method, unquote(path), self._match.params, self._headers, body, query)
        start = Start(self._service.application.answer(self._match, request, self), self._service.loop)
        self._task = start.task
        if start.task is not None:
            start.task.add_done_callback(self._done)
        else:
            if start.error is not None:
                log.error("a request failed", exc_info=start.error)
            self._finished()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            log.error("a request failed", exc_info=fault)
        self._finished()

    def _finished(self) -> None:
        """The application is done; it has answered, or cannot."""
        self._release()
        if not self._stream.local_ended and not self.started:
            self._stream.reset(frames.INTERNAL_ERROR)

    def _refuse(self, fault: HttpError) -> None:
        """Answer without asking the application."""
        if not self._over and not self.started:
            self._send(self._service.application.refusal(fault, self._match.protocol if self._match else None))
        self._release()

    def _release(self) -> None:
        if not self._over:
            self._over = True
            if self._body is not None:
                self._service.application.bodies.give_back(self._body.held)
                self._body = None

    # --- out -----------------------------------------------------------------------------------------------------

    async def send(self, response: HttpResponse) -> None:
        """Send the whole answer. It does not wait until the client takes it: that would keep the request, and all that
        its answer was made of, while only the answer counts."""
        self._check_there()
        self._send(response)

    def _send(self, response: HttpResponse) -> None:
        self.started = True
        parts = [memoryview(part).cast("B") for part in response.body]
        size = sum(map(len, parts))
        length = () if response.status in (204, 304) else (("content-length", str(size)),)
        block = _block(response.status, (*response.headers, *length))
        if not size or self._head.method == "HEAD":
            self._stream.send_headers(block, ended=True)
            return
        self._stream.send_headers(block)
        self._stream.send_data(*parts)
        self._stream.send_trailers(b"")

    async def start(self, status: int, headers: Headers) -> None:
        self._check_there()
        self.started = True
        self._stream.send_headers(_block(status, headers), ended=self._head.method == "HEAD")

    async def write(self, part: Buffer) -> None:
        self._check_there()
        self._stream.send_data(part)
        await self._has_room()

    async def end(self, part: Buffer) -> None:
        self._check_there()
        self._stream.send_data(part)
        self._stream.send_trailers(b"")
        await self._has_room()

    async def _has_room(self) -> None:
        while self._stream.pending:
            self._room = self._service.loop.create_future()
            try:
                await self._room
            finally:
                self._room = None

    def drained(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    # --- ends ----------------------------------------------------------------------------------------------------

    def _check_there(self) -> None:
        if self.left:
            raise asyncio.CancelledError

    def hang_up(self) -> None:
        self.left = True
        self._stream.reset(frames.INTERNAL_ERROR)

    def broken(self, code: int) -> None:
        self.left = True
        if self._task is not None:
            self._task.cancel()
        else:
            self._release()

    def cut(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self._refuse(HttpError(503, "the server is shutting down"))


def _merged(fields: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """RFC 9110, 5.3: fields of one name are one list."""
    headers: dict[str, str] = {}
    for name, value in fields:
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _block(status: int, headers: Headers) -> bytes:
    return _prepared(status, headers) + _dated(int(time.time()))


@lru_cache(maxsize=512)
def _prepared(status: int, headers: Headers) -> bytes:
    """Raises ValueError where a header holds what none may."""
    fields: list[Any] = [(b":status", b"%d" % status)]
    for name, value in headers:
        if _FORBIDDEN.intersection(name) or _FORBIDDEN.intersection(value):
            raise ValueError(f"the header {name!r} of an answer holds what no header may")
        if name.lower() not in _OF_CONNECTIONS:
            fields.append((name.lower().encode("latin-1", "replace"), value.strip().encode("latin-1", "replace")))
    return encoded(fields)


@lru_cache(maxsize=2)
def _dated(second: int) -> bytes:
    return encoded([(b"date", formatdate(second, usegmt=True).encode())])
