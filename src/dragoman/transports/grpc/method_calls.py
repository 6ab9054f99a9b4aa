"""Unary and streaming gRPC calls; a unary one needs no task if its response is there at once."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Mapping
from contextvars import copy_context
from functools import partial
from types import CoroutineType
from typing import Any

from dragoman.core.callers import Caller
from dragoman.core.foreign_code import ClientDisconnected
from dragoman.core.sizes import INLINE
from dragoman.formats.http2.fields import encode_request_id
from dragoman.protocols.wire import Buffer, GrpcRequest, GrpcResponse
from dragoman.system.coroutines import Start
from dragoman.system.request_context import variables_of
from dragoman.transports.grpc.call import (
    CLOSED,
    OPEN,
    PREFIX_BYTES,
    SMALL,
    STARTED,
    GrpcCall,
    MessageReader,
    overload_error,
    prefix,
)
from dragoman.transports.grpc.call_headers import OK, RESPONSE_HEADERS, ok
from dragoman.transports.grpc.handlers import GrpcError, Reply, StreamHandler, UnaryHandler, chunks_of

log = logging.getLogger("dragoman.grpc")

_unpack = prefix.unpack_from
_pack = prefix.pack


class UnaryCall(GrpcCall, eq=False):
    """Starts once its message and the request are complete."""

    times_each_message = False

    def receive(self, data: bytes | memoryview, at: int, stop: int, ended: bool) -> None:
        if ended and self._messages is None and stop - at >= 5:
            flag, length = _unpack(data, at)
            if flag == 0 and length == stop - at - 5 and length <= self._server.limits.max_body_bytes:
                self._start(bytes(data[at + 5 : stop]))  # a small message arrives at once
                return
        super().receive(data, at, stop, ended)

    def on_data(self, messages: MessageReader) -> None:
        if len(messages.ready) + messages.is_incomplete > 1:
            raise GrpcError("INTERNAL", "expected one message, got more")
        if messages.missing:
            self._stream.expect(messages.missing)

    def on_end(self) -> None:
        messages = self._messages
        if self._state >= CLOSED:
            return
        if messages is None or not messages.ready or messages.is_incomplete:
            raise GrpcError("INTERNAL", "expected one message, got none that is complete")
        flag, message = messages.ready.popleft()
        if flag:
            self._begin(self._answer_compressed(message))
        else:
            self._start(message)

    def is_receiving(self) -> bool:
        return True

    # --- the response --------------------------------------------------------------------------------------------

    def _start(self, message: Buffer, *, is_its_turn: bool = False) -> None:
        """Answer the message: once the client has read enough, and if it is large, when it is its turn."""
        if self._state >= CLOSED:
            return
        record, headers, backlog = self.record, self.headers, self.connection.backlog
        handler: Any = headers.handler
        if not is_its_turn:
            if self._server.bodies.is_over_limit and not headers.health:
                self.fail(overload_error(self._server.bodies))
                return
            if backlog.size > backlog.limit:
                backlog.wait(partial(self._start, message))
                return
            if len(message) > INLINE:
                self._server.executor.budget.run(partial(self._start, message, is_its_turn=True))
                return
        if record is not None:
            record.received = len(message)
        request = GrpcRequest(message, headers.metadata, self.deadline_s, self.context, headers.caller, record)
        if handler.begin is None:
            self._begin(handler.answer(request))
            return
        self._server.running.context = self.context
        try:
            done: Any = copy_context().run(handler.begin, request)
        except GrpcError as error:
            self._send(None, error)
        else:
            if type(done) is CoroutineType:
                self._begin(done)
                return
            self._send(done, None)
        finally:
            self._server.running.context = ()
        self._leave()

    async def _answer_compressed(self, compressed: Buffer) -> Reply | GrpcResponse:
        handler = self.headers.handler
        assert isinstance(handler, UnaryHandler)
        message = await self.decompress_message(compressed)
        headers = self.headers
        request = GrpcRequest(message, headers.metadata, self.deadline_s, self.context, headers.caller, self.record)
        return await handler.answer(request)

    def _begin(self, answering: Coroutine[Any, Any, Reply | GrpcResponse]) -> None:
        start = Start(answering, self._server.loop, variables_of(self.context))
        if start.task is not None:
            self.run(start.task)
            return
        self._send(start.result, start.error)
        self._leave()

    def finish(self, task: asyncio.Task[Any]) -> None:
        error = task.exception()
        self._send(None if error is not None else task.result(), error)

    def _send(self, reply: Reply | GrpcResponse | None, error: BaseException | None) -> None:
        if error is not None or reply is None:
            self.fail(self.status_of(error))
            return
        if self._state >= CLOSED:
            return
        if isinstance(reply, bytes) and len(reply) <= SMALL:
            size = len(reply)
            self._close("OK", size)
            self.connection.send_response(
                self._stream, RESPONSE_HEADERS + encode_request_id(self.context), (_pack(0, size), reply), size + 5, OK
            )
            return
        message, ending = (reply.message, ok(reply.metadata)) if isinstance(reply, GrpcResponse) else (reply, OK)
        parts = [memoryview(part).cast("B") for part in chunks_of(message)]
        size = sum(map(len, parts))
        if self._server.bodies.is_over_limit and size > SMALL:
            self.fail(overload_error(self._server.bodies))
            return
        self._close("OK", size)
        self.connection.send_response(
            self._stream, RESPONSE_HEADERS + encode_request_id(self.context), (_pack(0, size), *parts), size + 5, ending
        )


class StreamCall(GrpcCall, eq=False):
    """The `Peer` of a handler. The client can send one window more than the handler has read.

    Its record is of the call that the last message has made.
    """

    _sent: int = 0
    _ended: bool = False
    _current_size: int = 0  # bytes of the message that is being handled
    _idle_since_s: float = 0.0
    _reader: asyncio.Future[None] | None = None
    _writer: asyncio.Future[None] | None = None

    def __post_init__(self) -> None:
        self._idle_since_s = self._began_s
        handler = self.headers.handler
        assert isinstance(handler, StreamHandler)
        self.start_task(handler.talk(self))

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.headers.metadata

    @property
    def caller(self) -> Caller:
        return self.headers.caller

    # --- messages of the client ----------------------------------------------------------------------------------

    def on_data(self, messages: MessageReader) -> None:
        if messages.ready:
            _wake(self._reader)
        elif messages.missing:
            self._stream.expect(messages.missing)  # a message may be larger than the window

    def on_end(self) -> None:
        messages = self._messages
        if messages is not None and messages.is_incomplete:
            raise GrpcError("INTERNAL", "the request ends within a message")
        self._ended = True
        _wake(self._reader)

    async def read(self) -> Any:
        """Return the next message, None after the last; wait while the client does not read its responses.

        A message counts as memory in use until the next one is read.
        """
        current_size, self._current_size = self._current_size, 0
        self.hold(-current_size)
        backlog = self._stream.connection.backlog
        if backlog.is_full:
            resumed = self._server.loop.create_future()
            backlog.wait(lambda: _wake(resumed))
            await resumed
        self._idle_since_s = self._server.loop.time()
        while self._messages is None or not self._messages.ready:
            if self._ended:
                return None
            self._reader = self._server.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        messages = self._messages
        if self._server.bodies.is_over_limit and not self.headers.health:
            raise overload_error(self._server.bodies)
        flag, message = messages.ready.popleft()
        if self.record is not None:
            self.record.received += len(message)
        self._current_size = PREFIX_BYTES + len(message)
        self._stream.acknowledge(self._current_size)
        if not messages.ready and messages.missing:
            self._stream.expect(messages.missing)
        return await self.decompress_message(message) if flag else message

    def check_timeout(self, now_s: float) -> None:
        """End a stream on which no message has arrived for too long while none was being handled."""
        timeout_s = self._server.limits.grpc_stream_idle_timeout_s
        is_idle = self._reader is not None and not self.is_receiving()
        if timeout_s and is_idle and now_s - self._idle_since_s > timeout_s:
            text = f"no message came on this stream for {timeout_s:g} s (grpc_stream_idle_timeout_s)"
            self.fail(GrpcError("DEADLINE_EXCEEDED", text))
        else:
            super().check_timeout(now_s)

    # --- messages to the client ----------------------------------------------------------------------------------

    def write(self, message: Reply) -> Awaitable[None] | None:
        """Send a message; return what to await until it has been passed to the transport."""
        if self._state >= CLOSED:
            raise ClientDisconnected
        if self._state is OPEN:
            self._state = STARTED
            self._stream.send_headers(RESPONSE_HEADERS + encode_request_id(self.context))
        parts = chunks_of(message)
        size = sum(map(len, parts))
        if self._server.bodies.is_over_limit and size > SMALL:
            raise overload_error(self._server.bodies)
        self._sent += size
        self._stream.send_data(prefix.pack(0, size), *parts)
        return self._wait_until_sent() if self._stream.pending else None

    async def _wait_until_sent(self) -> None:
        while self._stream.pending:
            self._writer = self._server.loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None

    def _close(self, status: str, sent: int = 0) -> None:
        super()._close(status, self._sent)

    def count_unread(self, size: int) -> None:
        # Without `changed()`: the formatted message is written and counted next, and nothing may go on in between.
        self._stream.connection.backlog.size += size

    def on_drained(self) -> None:
        _wake(self._writer)

    def finish(self, task: asyncio.Task[Any]) -> None:
        error = task.exception()
        if error is not None:
            self.fail(self.status_of(error))
        elif (state := self._state) < CLOSED:
            self._close("OK")
            if state is OPEN:
                self._stream.send_headers(RESPONSE_HEADERS + encode_request_id(self.context))
            self._stream.send_trailers(OK)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
