"""A WebSocket connection (RFC 6455): messages of a client, answered one after the other as requests are.

A GET with `Upgrade: websocket` of a route with a `session` becomes one. `upgrade_response` checks its headers, the
`Http1Connection` answers 101 and hands its transport over. Frames are parsed and serialized by wsproto. A message is an
`HttpRequest` for the endpoint of the session; its response, whole or a stream, is sent as text messages, one for each
line. So keys, limits, logs and metrics of a message are those of a request. The credential is checked again for each
message, since keys may expire or be removed while a connection is open.

    stage       waits for                              becomes
    IDLE        the next message                       RESPONDING; CLOSING
    RESPONDING  the application; messages are queued   IDLE; CLOSING
    CLOSING     the client's Close frame               GONE
    GONE        the task that responds, if there is one

Control frames are answered in each stage, so that a client that closes cancels the response. Extensions are not
negotiated: nothing is compressed. Limits are those of requests: `max_body_bytes` a message, `body_timeout_s` until it
is complete, `write_timeout_s` for a client that does not read. A client from which nothing has come for
`keep_alive_timeout_s` gets a Ping, and has as long again.
"""

import asyncio
import base64
import binascii
import logging
from collections import deque
from collections.abc import Awaitable
from enum import IntEnum
from typing import Any

from msgspec.structs import replace
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage
from wsproto.utilities import generate_accept_token

from dragoman.core.errors import Forbidden, Unauthorized
from dragoman.core.foreign_code import ClientDisconnected
from dragoman.protocols.wire import Buffer, Headers, HttpError, HttpRequest, HttpResponse, MessageSession
from dragoman.system.coroutines import Start
from dragoman.system.request_context import new_context, variables_of
from dragoman.transports.http1.admission import RequestAdmission
from dragoman.transports.http1.headers import Http1Headers
from dragoman.transports.http1.request_reader import Http1Context
from dragoman.transports.http1.timeouts import Stage as HttpStage
from dragoman.transports.http1.timeouts import deadline_s
from dragoman.transports.listener import Listener

log = logging.getLogger("dragoman.http")

_VERSION = "13"
_KEY_BYTES = 16
# Messages that wait while one is answered.
_MAX_QUEUED = 8
# Seconds that a client may take to answer a Close frame.
_CLOSE_S = 2.0
# Headers of the handshake that do not describe its messages.
_OF_HANDSHAKE = frozenset(("accept-encoding", "content-encoding", "content-length", "connection", "upgrade", "origin"))
# Close codes (RFC 6455, 7.4.1).
_GOING_AWAY, _PROTOCOL_ERROR, _UNSUPPORTED, _POLICY, _TOO_BIG, _INTERNAL, _TRY_LATER = (
    1001,
    1002,
    1003,
    1008,
    1009,
    1011,
    1013,
)


class _Stage(IntEnum):
    IDLE = 0
    RESPONDING = 1
    CLOSING = 2
    GONE = 3


IDLE, RESPONDING, CLOSING, GONE = _Stage


def upgrade_response(head: Http1Headers) -> HttpResponse:
    """Return the response 101 to a handshake (RFC 6455, 4.2). Raises HttpError 400, or 426 for another version."""
    if head.http10 or head.length:
        raise HttpError(400, "a WebSocket needs a request of HTTP/1.1 without a body")
    version, key = head.headers.get("sec-websocket-version", ""), head.headers.get("sec-websocket-key", "")
    if version != _VERSION:
        expected = (("sec-websocket-version", _VERSION), ("upgrade", "websocket"))
        raise HttpError(426, f"Sec-WebSocket-Version: expected {_VERSION}, got {version[:64]!r}", expected)
    try:
        is_valid = len(base64.b64decode(key, validate=True)) == _KEY_BYTES
    except (binascii.Error, ValueError):
        is_valid = False
    if not is_valid:
        raise HttpError(400, f"Sec-WebSocket-Key: expected {_KEY_BYTES} bytes in base64, got {key[:64]!r}")
    accept = generate_accept_token(key.encode()).decode()
    upgrade = (("upgrade", "websocket"), ("connection", "upgrade"), ("sec-websocket-accept", accept))
    return HttpResponse(101, (), upgrade)


class WebSocketConnection(asyncio.BufferedProtocol):
    """Passes messages to the application and its responses to the transport. A `ListenerConnection`."""

    def __init__(
        self,
        context: Http1Context,
        listener: Listener,
        admission: RequestAdmission,
        head: Http1Headers,
        session: MessageSession,
        client: str,
    ) -> None:
        match: Any = head.match
        self.slot = 0
        self._context, self._listener, self._admission, self._session = context, listener, admission, session
        self._head, self._client = head, client
        self._match = replace(match, endpoint=session.answer)
        self._headers = {name: value for name, value in head.headers.items() if name not in _OF_HANDSHAKE}
        self._frames = Connection(ConnectionType.SERVER)
        self._transport: Any = None
        self._stage = IDLE
        self._since_s = self._received_s = listener.loop.time()  # of the stage CLOSING; when the client sent something
        self._pinged_s = 0.0  # when a Ping was sent that nothing has followed
        self._parts: list[str] = []  # of an incomplete message
        self._begun_s = 0.0
        self._size = 0  # bytes of it, which are counted in `bodies`
        self._queue: deque[bytes] = deque()
        self._is_ending = False  # it closes after the current response
        self._task: asyncio.Task[None] | None = None
        self.is_disconnected = False
        self._can_write: asyncio.Future[None] | None = None
        self._unread, self._read_s = 0, 0.0  # bytes that the client had not read at the last check; when it last read
        self.is_paused = False

    # --- called by the transport --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._listener.wheel.watch(self, self._next_check_s())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._context.scratch

    def buffer_updated(self, nbytes: int) -> None:
        self.begin(bytes(self._context.scratch[:nbytes]))

    def begin(self, data: bytes) -> None:
        """Handle bytes of the client."""
        self._context.counters.received += len(data)
        if self._stage is GONE or not data:
            return
        self._received_s, self._pinged_s = self._listener.loop.time(), 0.0
        try:
            self._receive(data)
        except Exception:
            log.exception("WebSocket connection failed")
            self.close(_INTERNAL)

    def eof_received(self) -> bool:
        return False  # the transport closes

    def pause_writing(self) -> None:
        self.is_paused = True
        self._unread, self._read_s = self._transport.get_write_buffer_size(), self._listener.loop.time()
        self._context.bodies.count_unread(self._unread)
        self._listener.wheel.watch(self, self._read_s + self._context.limits.write_timeout_s)

    def resume_writing(self) -> None:
        self.is_paused = False
        self._context.bodies.count_unread(-self._counted_unread())
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.is_paused:
            self.resume_writing()
        self._forget_messages()
        self._stage = GONE
        self.is_disconnected = True
        self._listener.wheel.forget(self)
        if self._task is None:
            self._listener.remove(self)
        else:
            self._task.cancel()

    # --- frames -------------------------------------------------------------------------------------------------

    def _receive(self, data: bytes) -> None:
        if self._frames.state not in (ConnectionState.OPEN, ConnectionState.LOCAL_CLOSING):
            return
        self._frames.receive_data(data)
        for event in self._frames.events():
            if isinstance(event, CloseConnection):
                self._end(event)
                return
            if self._stage is CLOSING:
                continue
            if isinstance(event, Ping):
                self._write(self._frames.send(event.response()))
            elif isinstance(event, BytesMessage):
                self.close(_UNSUPPORTED, "expected text messages, got a binary one")
            elif isinstance(event, TextMessage):
                self._add(event.data, event.message_finished)

    def _add(self, text: str, is_last: bool) -> None:
        """Add a part to the message that arrives, and answer it or queue it when it is complete."""
        limit, size = self._context.limits.max_body_bytes, len(text.encode())
        if not self._parts:
            self._begun_s = self._listener.loop.time()
        if self._size + size > limit:
            self.close(_TOO_BIG, f"a message has more than {limit} bytes")
            return
        try:
            self._context.bodies.reserve(size, self._size + size)
        except HttpError as error:
            self.close(_TRY_LATER, error.message)
            return
        self._parts.append(text)
        self._size += size
        if not is_last:
            return
        message = "".join(self._parts).encode()
        self._parts, self._size = [], 0
        if len(self._queue) >= _MAX_QUEUED:
            self._context.bodies.release(len(message))
            self.close(_POLICY, f"more than {_MAX_QUEUED} messages wait for a response")
            return
        self._queue.append(message)
        self._advance()

    def _end(self, event: CloseConnection) -> None:
        """Answer a Close frame of the client, or one that an invalid frame calls for, and close."""
        if self._frames.state in (ConnectionState.OPEN, ConnectionState.REMOTE_CLOSING):
            self._write(self._frames.send(event.response()))
        self._cancel_response()
        self._stage = CLOSING
        self._forget_messages()
        self._transport.close()

    def close(self, code: int, reason: str = "") -> None:
        """Send a Close frame, and close once the client has answered it. What it sends is ignored from now on."""
        if self._stage >= CLOSING:
            return
        if self._frames.state is ConnectionState.OPEN:
            self._write(self._frames.send(CloseConnection(code, reason[:120])))
        self._cancel_response()
        self._stage, self._since_s = CLOSING, self._listener.loop.time()
        self._forget_messages()
        self._listener.wheel.watch(self, self._since_s + _CLOSE_S)

    def _cancel_response(self) -> None:
        self.is_disconnected = True
        if self._task is not None:
            self._task.cancel()
        self._release_writer()

    def _forget_messages(self) -> None:
        self._context.bodies.release(self._size + sum(map(len, self._queue)))
        self._parts, self._size = [], 0
        self._queue.clear()

    # --- messages -----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Answer the next message, or close after the last one."""
        while self._stage is IDLE and self._queue:
            self._respond(self._queue.popleft())
        if self._stage is IDLE and self._is_ending:
            self.close(_GOING_AWAY)

    def _respond(self, message: bytes) -> None:
        head, application = self._head, self._context.application
        context = new_context("")
        writer = _MessageWriter(self)
        error = self._admission.check(head)
        self._stage = RESPONDING
        if error is not None:
            response = application.reject(error, head.summary(context, self._client))
            writer.send_now(response)
            self._finish(message, None)
            if isinstance(error, Unauthorized | Forbidden):
                self.close(_POLICY, "the credential of the connection is not accepted any more")
            return
        application = self._admission.application
        params = self._match.params
        request = HttpRequest(
            head.method, head.path, params, self._headers, message, head.query, context, application.caller,
            self._client, head.version,
        )  # fmt: skip
        start = Start(application.answer(self._match, request, writer), self._listener.loop, variables_of(context))
        if start.task is None:
            self._finish(message, start.error)
        else:
            self._task = start.task
            start.task.add_done_callback(lambda task: self._task_done(message, task))

    def _task_done(self, message: bytes, task: asyncio.Task[None]) -> None:
        self._task = None
        self._finish(message, None if task.cancelled() else task.exception())
        if self._stage is GONE:
            self._listener.remove(self)
        else:
            self._advance()

    def _finish(self, message: bytes, error: BaseException | None) -> None:
        self._context.bodies.release(len(message))
        if error is not None and not isinstance(error, asyncio.CancelledError):
            log.error("WebSocket connection failed", exc_info=error)
            self.close(_INTERNAL)
        elif self._stage is RESPONDING:
            self._stage = IDLE

    # --- output -------------------------------------------------------------------------------------------------

    def count(self, status: int) -> None:
        self._match.statuses[status] += 1

    def format_response(self, response: HttpResponse) -> bytes:
        return self._session.format_response(response)

    def check_connected(self) -> None:
        """Raise CancelledError if the connection closes."""
        if self.is_disconnected or self._transport.is_closing():
            self.is_disconnected = True
            raise ClientDisconnected

    def write_lines(self, data: Buffer) -> None:
        """Send each line as a text message."""
        lines = bytes(data).decode().split("\n")
        self._write(b"".join(self._frames.send(TextMessage(line)) for line in lines if line))

    def _write(self, data: bytes) -> None:
        if data and not self._transport.is_closing():
            self._context.counters.sent += len(data)
            self._transport.write(data)

    async def wait_until_read(self) -> None:
        """Wait until the client has read enough; the connection checks the timeout."""
        if not self.is_paused:
            return
        self._can_write = self._listener.loop.create_future()
        try:
            await self._can_write
        finally:
            self._can_write = None
        self.check_connected()

    def _release_writer(self) -> None:
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)

    # --- timeouts and shutdown ----------------------------------------------------------------------------------

    def _counted_unread(self) -> int:
        unread, self._unread = self._unread, 0
        return unread

    def _next_check_s(self) -> float:
        limits = self._context.limits
        if self._stage is CLOSING:
            return self._since_s + _CLOSE_S
        due_s = (self._pinged_s or self._received_s) + limits.keep_alive_timeout_s
        return min(due_s, self._message_deadline_s()) if self._parts else due_s

    def _message_deadline_s(self) -> float:
        return deadline_s(HttpStage.BODY, self._begun_s, self._size, self._context.limits)

    def check_timeouts(self, now_s: float) -> float:
        limits = self._context.limits
        if self.is_paused:
            unread = self._transport.get_write_buffer_size()
            if unread < self._unread:
                self._context.bodies.count_unread(unread - self._unread)
                self._unread, self._read_s = unread, now_s
            elif now_s >= self._read_s + limits.write_timeout_s:
                self._listener.warnings.log("client disconnected: it read nothing for %s s", limits.write_timeout_s)
                self._transport.abort()
                return 0.0
            return self._read_s + limits.write_timeout_s
        if now_s < (due_s := self._next_check_s()):
            return due_s
        if self._stage is CLOSING or self._pinged_s:
            self._transport.abort()
            return 0.0
        if self._parts and now_s >= self._message_deadline_s():
            self.close(_POLICY, f"a message came too slowly: {self._size} bytes in {limits.body_timeout_s} s")
        else:
            self._pinged_s = now_s
            self._write(self._frames.send(Ping()))
        return self._next_check_s()

    def announce_close(self) -> None:
        """Nothing: the Close frame of `drain` says which messages are not answered."""

    def retire(self) -> None:
        self.drain()

    def drain(self) -> None:
        """Close after the current response. Messages that wait are not answered: the Close frame says so."""
        self._is_ending = True
        self._context.bodies.release(sum(map(len, self._queue)))
        self._queue.clear()
        self._advance()

    def cancel(self) -> None:
        self._is_ending = True
        if self._task is not None:
            self._task.cancel()  # the application sends an error, if it has sent nothing yet
        else:
            self.close(_GOING_AWAY)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _MessageWriter:
    """The `ResponseWriter` of one message."""

    def __init__(self, connection: WebSocketConnection) -> None:
        self._connection = connection
        self.started = False

    @property
    def is_disconnected(self) -> bool:
        return self._connection.is_disconnected

    def send_now(self, response: HttpResponse) -> None:
        self.started = True
        self._connection.count(response.status)
        self._connection.write_lines(self._connection.format_response(response))

    async def send(self, response: HttpResponse) -> None:
        self._connection.check_connected()
        self.send_now(response)
        await self._connection.wait_until_read()

    async def start(self, status: int, headers: Headers) -> None:
        self._connection.check_connected()
        self.started = True
        self._connection.count(status)

    def write(self, chunk: Buffer) -> Awaitable[None] | None:
        self._connection.check_connected()
        self._connection.write_lines(chunk)
        # A model that never waits would block the event loop.
        return self._connection.wait_until_read() if self._connection.is_paused else asyncio.sleep(0)

    async def end(self, chunk: Buffer) -> None:
        self._connection.check_connected()
        if chunk:
            self._connection.write_lines(chunk)
        await self._connection.wait_until_read()

    def abort(self) -> None:
        self._connection.close(_INTERNAL, "the response broke off")
