"""A gRPC call: its stream, its place among the calls of the server, and its end."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from dragoman.protocols.wire import HttpError
from dragoman.transports.bodies import Bodies
from dragoman.transports.encoding import decoded
from dragoman.transports.grpc.call_headers import CallHeaders
from dragoman.transports.grpc.handlers import GrpcError
from dragoman.transports.grpc.messages import MessageReader
from dragoman.transports.grpc.status import trailers, trailers_only
from dragoman.transports.http2.stream import Buffer, Http2Stream
from dragoman.transports.limits import Limits
from dragoman.transports.loop_budget import LoopBudget

# Messages up to this size are not counted among the bodies, only bounded by how many calls there may be.
SMALL = 1 << 16
# How much later than its deadline a call is ended here, where the engine did not do it.
_GRACE_S = 0.05


class CallServer(Protocol):
    """What a call needs of its server."""

    loop: asyncio.AbstractEventLoop
    limits: Limits
    bodies: Bodies
    budget: LoopBudget

    def enter(self, call: "GrpcCall") -> None: ...

    def leave(self, call: "GrpcCall") -> None: ...


class GrpcCall:
    """One call. It is over for the client once its status is sent, and for the server once its task has ended."""

    __slots__ = (
        "_began_s",
        "_begun",
        "_counted",
        "_gone",
        "_heard",
        "_held",
        "_left",
        "_messages",
        "_server",
        "_stream",
        "_task",
        "_timer",
        "connection",
        "deadline_s",
        "head",
    )  # fmt: skip

    def __init__(self, server: CallServer, stream: Http2Stream, head: CallHeaders) -> None:
        self._server = server
        self._stream = stream
        self.connection = stream.connection
        self.head = head
        self.deadline_s = None if head.timeout_s is None else time.monotonic() + head.timeout_s
        self._messages: MessageReader | None = None
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._begun = self._gone = self._left = False
        self._held = self._counted = 0
        self._heard = 0  # of the message that is coming in
        self._began_s = 0.0
        server.enter(self)

    # --- in ------------------------------------------------------------------------------------------------------

    def receive(self, data: bytes | memoryview, at: int, stop: int, ended: bool) -> None:
        """A piece of the client's messages."""
        try:
            self._feed(data, at, stop)
            if ended:
                self.heard_all()
        except GrpcError as fault:
            self.refuse(fault)

    def _feed(self, data: bytes | memoryview, at: int, stop: int) -> None:
        messages = self._messages
        if messages is None:
            messages = self._messages = MessageReader(self._server.limits.max_body_bytes)
        begun = messages.begun
        self._count(stop - at)
        messages.feed(data, at, stop)
        self._fed(messages, begun)

    def _fed(self, messages: MessageReader, begun: bool) -> None:
        if messages.begun and not (begun and not messages.ready):
            self._began_s = self._server.loop.time()
            self._heard = 0
        self.heard(messages)

    def room(self, size: int) -> memoryview | None:
        return None if self._messages is None else self._messages.room(size)

    def filled(self, size: int, ended: bool) -> None:
        assert self._messages is not None
        try:
            self._count(size)
            self._messages.filled(size)
            self.heard(self._messages)
            if ended:
                self.heard_all()
        except GrpcError as fault:
            self.refuse(fault)

    def heard(self, messages: MessageReader) -> None:
        """More has come."""

    def heard_all(self) -> None:
        """The client has said all."""

    def _count(self, size: int) -> None:
        self._heard += size
        self.hold(size)

    def hold(self, size: int) -> None:
        """Count so many bytes more, or fewer, that this call holds among all bodies; little is not counted."""
        self._held += size
        counted = self._held if self._held > SMALL else 0
        if counted != self._counted:
            try:
                self._server.bodies.take(counted - self._counted)
            except HttpError as fault:
                raise GrpcError("RESOURCE_EXHAUSTED", fault.message) from fault
            self._counted = counted

    async def unpacked(self, message: Buffer) -> Buffer:
        """A packed message. Raises GrpcError."""
        limit = self._server.limits.max_body_bytes
        if not self.head.encoding:
            raise GrpcError("INTERNAL", "a message is marked as compressed, and grpc-encoding names no encoding")
        try:
            return await decoded(message, self.head.encoding, limit)
        except HttpError as fault:
            status = "RESOURCE_EXHAUSTED" if fault.status == 413 else "INTERNAL"
            raise GrpcError(status, fault.message.replace("body", "message")) from fault

    def watch(self, now_s: float) -> None:
        """Refuse a client that is late with a message that it has begun; an unary one has to come at all."""
        limits = self._server.limits
        if self.late() and now_s - self._began_s > limits.body_timeout_s + self._heard / (1 << 16):
            told = f"the message came too slowly: {self._heard} bytes in {limits.body_timeout_s} s"
            self.refuse(GrpcError("DEADLINE_EXCEEDED", told))

    def late(self) -> bool:
        """Whether the client is in the middle of a message."""
        return self._messages is not None and self._messages.begun

    # --- work ----------------------------------------------------------------------------------------------------

    def run(self, task: asyncio.Task[Any]) -> None:
        """The task that answers."""
        self._task = task
        if self.deadline_s is not None:
            left_s = max(0.0, self.deadline_s - time.monotonic())
            self._timer = self._server.loop.call_later(left_s + _GRACE_S, self._expire)
        task.add_done_callback(self._done)

    def launch(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.run(self._server.loop.create_task(coroutine))

    def _expire(self) -> None:
        self.refuse(GrpcError("DEADLINE_EXCEEDED", "Request timeout expired"))

    def _done(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self.refuse(GrpcError("CANCELLED", "the call was cancelled"))
        else:
            self.finish(task)
        self._leave()

    def finish(self, task: asyncio.Task[Any]) -> None:
        """Send what the task gave."""
        raise NotImplementedError

    # --- ends ----------------------------------------------------------------------------------------------------

    def refuse(self, fault: GrpcError) -> None:
        """End the call with a status; what still works for it is cancelled."""
        if not self._gone:
            self._gone = True
            if self._begun:
                self._stream.send_trailers(trailers(fault))
            else:
                self._stream.send_headers(trailers_only(fault), ended=True)
        self._stop()

    def cut(self) -> None:
        """The server stops."""
        self.refuse(GrpcError("UNAVAILABLE", "the server is shutting down"))

    def broken(self, code: int) -> None:
        """The client has left."""
        self._gone = True
        self._stop()

    def _stop(self) -> None:
        if self._task is None or self._task.done():
            self._leave()
        else:
            self._task.cancel()

    def _leave(self) -> None:
        if not self._left:
            self._left = True
            if self._timer is not None:
                self._timer.cancel()
            if self._counted:
                self._server.bodies.give_back(self._counted)
            self._messages = None
            self._server.leave(self)

    def drained(self) -> None:
        """All that was written has been sent."""


def unread(bodies: Bodies) -> GrpcError:
    """Clients do not take their answers, so there is no room for another."""
    return GrpcError("RESOURCE_EXHAUSTED", bodies.unread.message)
