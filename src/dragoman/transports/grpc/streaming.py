"""A streaming call: its handler reads and writes messages as the client and the windows allow."""

import asyncio
from collections.abc import Mapping
from typing import Any

from dragoman.transports.grpc.call import SMALL, CallServer, GrpcCall, unread
from dragoman.transports.grpc.call_headers import CallHeaders
from dragoman.transports.grpc.handlers import GrpcError, Reply, StreamHandler, parts_of, told
from dragoman.transports.grpc.messages import PREFIX_BYTES, MessageReader, prefix
from dragoman.transports.grpc.status import HEAD, OK
from dragoman.transports.http2.stream import Http2Stream


class StreamCall(GrpcCall):
    """The peer of a handler. What the handler does not read stays with the client, beyond one window of it."""

    __slots__ = ("_ended", "_idle_since_s", "_in_work", "_reader", "_writer")

    def __init__(self, server: CallServer, stream: Http2Stream, head: CallHeaders) -> None:
        super().__init__(server, stream, head)
        self._ended = False
        self._in_work = 0  # bytes of the message that is being answered
        self._idle_since_s = server.loop.time()
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        handler = head.handler
        assert isinstance(handler, StreamHandler)
        self.launch(handler.talk(self))

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.head.metadata

    # --- in ------------------------------------------------------------------------------------------------------

    def heard(self, messages: MessageReader) -> None:
        if messages.ready:
            _wake(self._reader)
        elif messages.awaited:
            self._stream.expect(messages.awaited)  # a message may be larger than the window

    def heard_all(self) -> None:
        messages = self._messages
        if messages is not None and messages.begun:
            raise GrpcError("INTERNAL", "the client's part ends within a message")
        self._ended = True
        _wake(self._reader)

    async def read(self) -> Any:
        """The next message, None after the last. It comes later where the client does not take its answers.

        The handler holds each until it asks for the next one.
        """
        in_work, self._in_work = self._in_work, 0
        self.hold(-in_work)
        backlog = self._stream.connection.backlog
        if backlog.is_full:
            went_on = self._server.loop.create_future()
            backlog.wait(lambda: _wake(went_on))
            await went_on
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
        if self._server.bodies.over:
            raise unread(self._server.bodies)
        flag, message = messages.ready.popleft()
        self._in_work = PREFIX_BYTES + len(message)
        self._stream.acknowledge(self._in_work)
        if not messages.ready and messages.awaited:
            self._stream.expect(messages.awaited)
        return await self.unpacked(message) if flag else message

    def watch(self, now_s: float) -> None:
        """End a stream on which no message has come for long while none was being answered."""
        timeout_s = self._server.limits.grpc_stream_idle_timeout_s
        is_idle = self._reader is not None and not self.late()
        if timeout_s and is_idle and now_s - self._idle_since_s > timeout_s:
            told = f"no message came on this stream for {timeout_s:g} s (grpc_stream_idle_timeout_s)"
            self.refuse(GrpcError("DEADLINE_EXCEEDED", told))
        else:
            super().watch(now_s)

    # --- out -----------------------------------------------------------------------------------------------------

    async def write(self, message: Reply) -> None:
        """Returns when the message is on its way."""
        if self._gone:
            raise asyncio.CancelledError
        if not self._begun:
            self._begun = True
            self._stream.send_headers(HEAD)
        parts = parts_of(message)
        size = sum(map(len, parts))
        if self._server.bodies.over and size > SMALL:
            raise unread(self._server.bodies)
        self._stream.send_data(prefix.pack(0, size), *parts)
        while self._stream.pending:
            self._writer = self._server.loop.create_future()
            try:
                await self._writer
            finally:
                self._writer = None

    def drained(self) -> None:
        _wake(self._writer)

    def finish(self, task: asyncio.Task[Any]) -> None:
        fault = task.exception()
        if fault is not None:
            expected = fault if isinstance(fault, Exception) else RuntimeError(repr(fault))
            self.refuse(fault if isinstance(fault, GrpcError) else GrpcError("INTERNAL", told(expected, "").message))
        elif not self._gone:
            self._gone = True
            if not self._begun:
                self._stream.send_headers(HEAD)
            self._stream.send_trailers(OK)


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
