"""A unary call; one that is answered at once takes neither a task nor a turn of the event loop."""

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import copy_context
from functools import partial
from types import CoroutineType
from typing import Any

from dragoman.protocols.wire import Buffer, GrpcRequest, GrpcResponse
from dragoman.system.coroutines import Start
from dragoman.transports.grpc.call import SMALL, CallServer, GrpcCall, unread
from dragoman.transports.grpc.call_headers import CallHeaders
from dragoman.transports.grpc.handlers import GrpcError, Reply, UnaryHandler, parts_of, told
from dragoman.transports.grpc.messages import MessageReader, prefix
from dragoman.transports.grpc.status import HEAD, OK, ok
from dragoman.transports.http2.stream import Http2Stream
from dragoman.transports.loop_budget import LARGE_MESSAGE

log = logging.getLogger("dragoman.grpc")

_unpack = prefix.unpack_from
_pack = prefix.pack


class UnaryCall(GrpcCall):
    """It starts once its message is whole and the client has said all."""

    __slots__ = ("_message",)

    def __init__(self, server: CallServer, stream: Http2Stream, head: CallHeaders) -> None:
        super().__init__(server, stream, head)
        self._message: Buffer | None = None
        self._began_s = server.loop.time()

    def receive(self, data: bytes | memoryview, at: int, stop: int, ended: bool) -> None:
        if ended and self._messages is None and stop - at >= 5:
            flag, length = _unpack(data, at)
            if flag == 0 and length == stop - at - 5 and length <= self._server.limits.max_body_bytes:
                if not self._gone:
                    self._start(bytes(data[at + 5 : stop]))  # the whole message in one piece, as small ones come
                return
        super().receive(data, at, stop, ended)

    def _fed(self, messages: MessageReader, begun: bool) -> None:
        self.heard(messages)

    def heard(self, messages: MessageReader) -> None:
        if len(messages.ready) + messages.begun > 1:
            raise GrpcError("INTERNAL", "expected one message, got more")
        if messages.awaited:
            self._stream.expect(messages.awaited)

    def heard_all(self) -> None:
        messages = self._messages
        if self._gone:
            return
        if messages is None or not messages.ready or messages.begun:
            raise GrpcError("INTERNAL", "expected one message, got none that is whole")
        flag, message = messages.ready.popleft()
        if flag:
            self._begin(self._answer_packed(message))
        else:
            self._start(message)

    def late(self) -> bool:
        return True

    # --- the answer ----------------------------------------------------------------------------------------------

    def _start(self, message: Buffer) -> None:
        handler = self.head.handler
        assert isinstance(handler, UnaryHandler)
        if self._server.bodies.over:
            self.refuse(unread(self._server.bodies))
            return
        backlog = self._stream.connection.backlog
        if backlog.is_full:
            self._message = message
            backlog.wait(self._go_on)
        elif len(message) > LARGE_MESSAGE:
            self._server.budget.run(partial(self._answer, handler, message))
        else:
            self._answer(handler, message)

    def _answer(self, handler: UnaryHandler, message: Buffer) -> None:
        if self._gone:
            return
        request = GrpcRequest(message, self.head.metadata, self.deadline_s)
        if handler.begin is None:
            self._begin(handler.answer(request))
            return
        try:
            done: Any = copy_context().run(handler.begin, request)
        except GrpcError as fault:
            self._send(None, fault)
        else:
            if type(done) is CoroutineType:
                self._begin(done)
                return
            self._send(done, None)
        self._leave()

    def _go_on(self) -> None:
        """The client has made room."""
        message, self._message = self._message, None
        if not self._gone and message is not None:
            self._start(message)

    async def _answer_packed(self, packed: Buffer) -> Reply | GrpcResponse:
        handler = self.head.handler
        assert isinstance(handler, UnaryHandler)
        message = await self.unpacked(packed)
        return await handler.answer(GrpcRequest(message, self.head.metadata, self.deadline_s))

    def _begin(self, answering: Coroutine[Any, Any, Reply | GrpcResponse]) -> None:
        start = Start(answering, self._server.loop)
        if start.task is not None:
            self.run(start.task)
            return
        self._send(start.result, start.error)
        self._leave()

    def finish(self, task: asyncio.Task[Any]) -> None:
        fault = task.exception()
        self._send(None if fault is not None else task.result(), fault)

    def _send(self, reply: Reply | GrpcResponse | None, fault: BaseException | None) -> None:
        if fault is not None or reply is None:
            self.refuse(fault if isinstance(fault, GrpcError) else _unexpected(fault))
            return
        if self._gone:
            return
        if isinstance(reply, bytes) and len(reply) <= SMALL:
            self._gone = True
            size = len(reply)
            self._stream.send_response(HEAD, (_pack(0, size), reply), size + 5, OK)
            return
        message, ending = (reply.message, ok(reply.metadata)) if isinstance(reply, GrpcResponse) else (reply, OK)
        parts = [memoryview(part).cast("B") for part in parts_of(message)]
        size = sum(map(len, parts))
        if self._server.bodies.over and size > SMALL:
            self.refuse(unread(self._server.bodies))
            return
        self._gone = True
        self._stream.send_response(HEAD, (_pack(0, size), *parts), size + 5, ending)


def _unexpected(fault: BaseException | None) -> GrpcError:
    """A fault that no handler should let through."""
    found = told(fault if isinstance(fault, Exception) else RuntimeError(repr(fault)), "")
    return GrpcError("INTERNAL", found.message)
