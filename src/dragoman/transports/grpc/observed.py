"""gRPC calls that are observed, for the access log and for traces."""

from collections.abc import Coroutine
from typing import Any

from dragoman.protocols.wire import Buffer
from dragoman.system.call_times import observed
from dragoman.system.request_context import Context
from dragoman.transports.grpc.call import CallServer
from dragoman.transports.grpc.call_headers import CallHeaders
from dragoman.transports.grpc.handlers import Reply, UnaryHandler, chunks_of
from dragoman.transports.grpc.method_calls import StreamCall, UnaryCall
from dragoman.transports.http2.stream import Http2Stream
from dragoman.transports.observation import Exchange, Observation


def _start(observation: Observation, headers: CallHeaders) -> Exchange | None:
    exchange = observation.start(headers.service, "POST", headers.path, 0, headers.metadata, headers.health)
    if exchange is not None:
        exchange.is_grpc = True
    return exchange


def observe_rejected(observation: Observation, headers: CallHeaders, status: str, context: Context) -> None:
    """Observe a call that was rejected before it began."""
    exchange = _start(observation, headers)
    if exchange is not None:
        exchange.is_rejected = True
        exchange.identify(context)
        observation.end(exchange, status)


class ObservedUnaryCall(UnaryCall):
    """A unary call that may be observed."""

    __slots__ = ("exchange",)

    def __init__(self, server: CallServer, stream: Http2Stream, headers: CallHeaders) -> None:
        super().__init__(server, stream, headers)
        self.exchange = _start(server.executor.observation, headers)
        if self.exchange is not None:
            self.context = self.exchange.identify(self.context)

    def _answer(self, handler: UnaryHandler, message: Buffer) -> None:
        if self.exchange is None:
            super()._answer(handler, message)
            return
        self.exchange.received = len(message)
        running = self._server.running
        running.times = self.exchange
        try:
            super()._answer(handler, message)
        finally:
            running.times = None

    def _begin(self, answering: Coroutine[Any, Any, Any]) -> None:
        if self.exchange is None:
            super()._begin(answering)
            return
        token = observed.set(self.exchange)
        try:
            super()._begin(answering)
        finally:
            observed.reset(token)

    def _send(self, reply: Any, error: BaseException | None) -> None:
        if self.exchange is not None:
            message = getattr(reply, "message", reply)
            self.exchange.sent = 0 if message is None else sum(map(len, chunks_of(message)))
        super()._send(reply, error)

    def count(self, status: str) -> None:
        super().count(status)
        if self.exchange is not None:
            self._server.executor.observation.end(self.exchange, status)


class ObservedStreamCall(StreamCall):
    """A streaming call that may be observed; its model is that of the last message."""

    __slots__ = ("exchange",)

    def start_task(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.exchange = _start(self._server.executor.observation, self.headers)
        if self.exchange is None:
            super().start_task(coroutine)
            return
        self.context = self.exchange.identify(self.context)
        token = observed.set(self.exchange)
        try:
            super().start_task(coroutine)
        finally:
            observed.reset(token)

    async def read(self) -> Any:
        message = await super().read()
        if self.exchange is not None:
            self.exchange.received += len(message or b"")
        return message

    async def write(self, message: Reply) -> None:
        if self.exchange is not None:
            self.exchange.sent += sum(map(len, chunks_of(message)))
        await super().write(message)

    def count(self, status: str) -> None:
        super().count(status)
        if self.exchange is not None:
            self._server.executor.observation.end(self.exchange, status)
