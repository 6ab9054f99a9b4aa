"""A gRPC call on its HTTP/2 stream: parser of messages, deadline, status.

A `MessageReader` parses the data of the stream into messages, and a subclass in `method_calls` answers them: at once,
or in a task that `run` gives a timer for the deadline. A call ends twice. For the client it ends with its status
(`_close`); from then on, data that the client still sends is ignored. For the server it ends when its task has ended:
only then (`_leave`) does it free its place among the calls, and the memory of its messages.

    state    the client                     the server                                 becomes
    OPEN     has received nothing           receives, waits for its turn or computes   STARTED, CLOSED
    STARTED  has the headers of a stream    goes on                                    CLOSED
    CLOSED   was sent a status, or has      waits for the task to end                  LEFT, at once without a task
             disconnected
    LEFT     as CLOSED                      has forgotten the call

    event                                    OPEN, STARTED            CLOSED                LEFT
    data                                     parsed                   ignored               ignored
    first message of a stream is written     STARTED                  ClientDisconnected
    response, error, deadline, server stops  CLOSED, with a status    nothing
    client resets the stream or disconnects  CLOSED, CANCELLED        nothing               nothing
    the task ends                            CLOSED, then LEFT        LEFT

The other fields are independent of the state: a call has a reader of messages once data has arrived that is not one
whole message, a task once its handler has had to wait, and a timer if its client has set a deadline too.
"""

import asyncio
import struct
import time
from collections import deque
from collections.abc import Coroutine
from enum import IntEnum
from typing import Any, ClassVar, Final, Protocol

import msgspec

from dragoman.core.sizes import INLINE
from dragoman.formats.http2.fields import encode_request_id
from dragoman.protocols.wire import Buffer, HttpError
from dragoman.system.request_context import Context, Running, variables_of
from dragoman.transports.bodies import BodyMemory, ReceiveBuffer
from dragoman.transports.encoding import decompress
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.grpc.call_headers import CallHeaders, trailers, trailers_only
from dragoman.transports.grpc.handlers import GrpcError, public_error
from dragoman.transports.http2.stream import Http2Stream, StreamConnection
from dragoman.transports.limits import Limits
from dragoman.transports.observation import RequestRecord

PREFIX_BYTES: Final = 5
prefix = struct.Struct(">BI")


class MessageReader:
    """Parses the messages of one call. `ready`: complete ones, each with its compression flag.

    `missing`: bytes of the incomplete one that have not arrived.
    """

    __slots__ = ("_flag", "_large", "_limit", "_prefix", "_small", "missing", "ready")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._prefix = b""
        self._flag = 0
        self._small = bytearray()
        self._large: ReceiveBuffer | None = None
        self.missing = 0
        self.ready: deque[tuple[int, Buffer]] = deque()

    @property
    def is_incomplete(self) -> bool:
        return bool(self.missing or self._prefix)

    def feed(self, data: bytes | memoryview, at: int, stop: int) -> None:
        """Parse `data[at:stop]`. Raises GrpcError."""
        while at < stop:
            if self.missing:
                at = self._more(data, at, stop)
                continue
            if not self._prefix and stop - at >= PREFIX_BYTES:
                prefix_bytes, at = bytes(data[at : at + PREFIX_BYTES]), at + PREFIX_BYTES
            else:
                take = min(stop - at, PREFIX_BYTES - len(self._prefix))
                self._prefix += bytes(data[at : at + take])
                at += take
                if len(self._prefix) < PREFIX_BYTES:
                    return
                prefix_bytes, self._prefix = self._prefix, b""
            self._begin(*prefix.unpack(prefix_bytes))

    def _begin(self, flag: int, length: int) -> None:
        if flag > 1:
            raise GrpcError("INTERNAL", f"expected a message, whose flag is 0 or 1, got {flag}")
        if length > self._limit:
            raise GrpcError(
                "RESOURCE_EXHAUSTED", f"the message of {length} bytes is larger than the limit of {self._limit} bytes"
            )
        if not length:
            self.ready.append((flag, b""))
            return
        self._flag, self.missing = flag, length
        if length > INLINE:
            self._large = ReceiveBuffer(length)

    def _more(self, data: bytes | memoryview, at: int, stop: int) -> int:
        size = min(self.missing, stop - at)
        if self._large is not None:
            self._large.append(memoryview(data)[at : at + size])
            self._on_received(self._large, size)
            return at + size
        part = data[at : at + size]
        self.missing -= size
        if self.missing:
            self._small += part
        else:
            whole: Buffer = bytes(self._small) + part if self._small else bytes(part)
            self._small.clear()
            self.ready.append((self._flag, whole))
        return at + size

    def buffer(self, size: int) -> memoryview | None:
        """Return where up to `size` further bytes are to be written to; None to use `feed`."""
        return None if self._large is None else self._large.free_space()[:size]

    def count_filled(self, size: int) -> None:
        """Count bytes that were written to `buffer`."""
        assert self._large is not None
        self._large.advance(size)
        self._on_received(self._large, size)

    def _on_received(self, buffer: ReceiveBuffer, size: int) -> None:
        self.missing -= size
        if not self.missing:
            self._large = None
            self.ready.append((self._flag, buffer.take()))


# Smaller messages are not counted in `BodyMemory`; the limit on calls bounds them.
SMALL = 1 << 16
# Time after its deadline when a call is ended here if the engine has not done so.
_GRACE_S = 0.05


class CallServer(Protocol):
    """What a call uses of its server."""

    loop: asyncio.AbstractEventLoop
    limits: Limits
    bodies: BodyMemory
    executor: MessageExecutor
    running: Running

    def leave(self, call: "GrpcCall") -> None: ...


class CallState(IntEnum):
    """How far a call is, in order; see the table of this module."""

    OPEN = 0
    STARTED = 1
    CLOSED = 2
    LEFT = 3


OPEN, STARTED, CLOSED, LEFT = CallState


class GrpcCall(msgspec.Struct, eq=False):
    """One call, in one of four states.

    times_each_message: whether the time limit of a message begins with that message, not with the call.
    """

    times_each_message: ClassVar[bool] = True
    _server: CallServer
    _stream: Http2Stream
    connection: StreamConnection
    headers: CallHeaders
    record: RequestRecord | None
    context: Context
    deadline_s: float | None
    _began_s: float  # of the message that is expected, by the clock of the event loop
    _messages: MessageReader | None = None
    _task: asyncio.Task[Any] | None = None
    _timer: asyncio.TimerHandle | None = None
    _state: CallState = OPEN
    _size: int = 0
    _counted: int = 0
    _message_size: int = 0  # bytes received of the current message

    # --- messages ------------------------------------------------------------------------------------------------

    def receive(self, data: bytes | memoryview, at: int, stop: int, ended: bool) -> None:
        if self._state >= CLOSED:  # nothing would release what `_feed` counts
            return
        try:
            self._feed(data, at, stop)
            if ended:
                self.on_end()
        except GrpcError as error:
            self.fail(error)

    def _feed(self, data: bytes | memoryview, at: int, stop: int) -> None:
        messages = self._messages
        if messages is None:
            messages = self._messages = MessageReader(self._server.limits.max_body_bytes)
        is_incomplete = messages.is_incomplete
        self._count(stop - at)
        messages.feed(data, at, stop)
        if self.times_each_message and messages.is_incomplete and not (is_incomplete and not messages.ready):
            self._began_s = self._server.loop.time()
            self._message_size = 0
        self.on_data(messages)

    def buffer(self, size: int) -> memoryview | None:
        return None if self._messages is None or self._state >= CLOSED else self._messages.buffer(size)

    def on_buffer_filled(self, size: int, ended: bool) -> None:
        assert self._messages is not None
        try:
            self._count(size)
            self._messages.count_filled(size)
            self.on_data(self._messages)
            if ended:
                self.on_end()
        except GrpcError as error:
            self.fail(error)

    def on_data(self, messages: MessageReader) -> None:
        """Handle the messages that have arrived."""

    def on_end(self) -> None:
        """Handle the end of the request."""

    def _count(self, size: int) -> None:
        self._message_size += size
        self.hold(size)

    def hold(self, size: int) -> None:
        """Count `size` bytes more, or fewer if negative, that this call keeps in memory. Raises GrpcError."""
        self._size += size
        counted = self._size if self._size > SMALL else 0
        if counted != self._counted:
            try:
                self._server.bodies.reserve(counted - self._counted, counted)
            except HttpError as error:
                raise GrpcError("RESOURCE_EXHAUSTED", error.message) from error
            self._counted = counted

    async def decompress_message(self, message: Buffer) -> Buffer:
        """Return a decompressed message. Raises GrpcError."""
        limit = self._server.limits.max_body_bytes
        if not self.headers.encoding:
            raise GrpcError("INTERNAL", "a message is marked as compressed, and grpc-encoding names no encoding")
        try:
            return await decompress(message, self.headers.encoding, limit, self._server.executor)
        except HttpError as error:
            status = "RESOURCE_EXHAUSTED" if error.status == 413 else "INTERNAL"
            raise GrpcError(status, error.message.replace("body", "message")) from error

    def check_timeout(self, now_s: float) -> None:
        """End the call if its message arrives too slowly; of a unary call, also if it has not begun."""
        limits = self._server.limits
        if self.is_receiving() and now_s - self._began_s > limits.body_timeout_s + self._message_size / (1 << 16):
            text = f"the message came too slowly: {self._message_size} bytes in {limits.body_timeout_s} s"
            self.fail(GrpcError("DEADLINE_EXCEEDED", text))

    def is_receiving(self) -> bool:
        """Return whether a message is expected or incomplete."""
        return self._messages is not None and self._messages.is_incomplete

    # --- the task that answers -----------------------------------------------------------------------------------

    def run(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        if self.deadline_s is not None:
            left_s = max(0.0, self.deadline_s - time.monotonic())
            self._timer = self._server.loop.call_later(left_s + _GRACE_S, self._expire)
        task.add_done_callback(self._on_done)

    def start_task(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.run(self._server.loop.create_task(coroutine, context=variables_of(self.context)))

    def _expire(self) -> None:
        self.fail(GrpcError("DEADLINE_EXCEEDED", "Request timeout expired"))

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self.fail(GrpcError("CANCELLED", "the call was cancelled"))
        else:
            self.finish(task)
        self._leave()

    def finish(self, task: asyncio.Task[Any]) -> None:
        raise NotImplementedError

    def status_of(self, error: BaseException | None) -> GrpcError:
        """Return the status of a call that ended with an error, or without a result."""
        if isinstance(error, GrpcError):
            return error
        unexpected = error or RuntimeError("the handler returned nothing")
        return GrpcError("INTERNAL", public_error(unexpected, self.context).message)

    # --- the end -------------------------------------------------------------------------------------------------

    def _close(self, status: str, sent: int = 0) -> None:
        """End the call for its client, and count it; its response has `sent` bytes."""
        self._state = CLOSED
        self.headers.statuses[status] += 1
        if self.record is not None:
            self._server.executor.observation.end(self.record, status, sent)

    def fail(self, error: GrpcError) -> None:
        """End the call with an error and cancel its task."""
        state = self._state
        if state < CLOSED:
            self._close(error.status)
            if state is STARTED:
                self._stream.send_trailers(trailers(error))
            else:
                self._stream.send_headers(trailers_only(error) + encode_request_id(self.context), ended=True)
        self._stop()

    def cancel(self) -> None:
        """End the call because the server stops."""
        self.fail(GrpcError("UNAVAILABLE", "the server is shutting down"))

    def on_closed(self, code: int) -> None:
        """The client has reset the stream or disconnected."""
        if self._state < CLOSED:
            self._close("CANCELLED")
        self._stop()

    def _stop(self) -> None:
        if self._task is None or self._task.done():
            self._leave()
        else:
            self._task.cancel()

    def _leave(self) -> None:
        if self._state is not LEFT:
            self._state = LEFT
            if self._timer is not None:
                self._timer.cancel()
            if self._counted:
                self._server.bodies.release(self._counted)
            self._messages = None
            self._server.leave(self)

    def on_drained(self) -> None:
        """All that was written has been sent."""


def overload_error(bodies: BodyMemory) -> GrpcError:
    """Return the error of a response that is not sent because too many are unread."""
    return GrpcError("RESOURCE_EXHAUSTED", bodies.unread_error.message)
