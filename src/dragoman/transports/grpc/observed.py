"""gRPC calls that are observed, for the access log."""

from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from dragoman.protocols.wire import Buffer, GrpcProtocol
from dragoman.system.call_times import observed
from dragoman.transports.grpc.call import CallServer
from dragoman.transports.grpc.call_headers import CallHeaders
from dragoman.transports.grpc.handlers import Reply, UnaryHandler, chunks_of
from dragoman.transports.grpc.method_calls import StreamCall, UnaryCall
from dragoman.transports.http2.stream import Http2Stream
from dragoman.transports.observation import Exchange, Observer, observe_endpoint


def observe_protocols(protocols: Sequence[GrpcProtocol]) -> list[GrpcProtocol]:
    """Return the protocols with endpoints that add to the exchange of the current call."""

    def observe(method: Any) -> Any:
        return replace(method, endpoint=observe_endpoint(method.endpoint))

    return [replace(protocol, methods=tuple(map(observe, protocol.methods))) for protocol in protocols]


def _exchange(call: UnaryCall | StreamCall) -> Exchange:
    exchange = Exchange(call.headers.service, "POST", call.headers.path, 0)
    exchange.context = call.context
    return exchange


def record_rejected(observer: Observer, headers: CallHeaders, status: str) -> None:
    """Record a call that was rejected before it began."""
    exchange = Exchange(headers.service, "POST", headers.path, 0)
    exchange.end(status)
    observer.record(exchange)


class ObservedUnaryCall(UnaryCall):
    """A unary call that is passed to the observer of the server when it ends."""

    __slots__ = ("exchange",)

    def __init__(self, server: CallServer, stream: Http2Stream, headers: CallHeaders) -> None:
        super().__init__(server, stream, headers)
        self.exchange = _exchange(self)

    def _answer(self, handler: UnaryHandler, message: Buffer) -> None:
        self.exchange.received = len(message)
        token = observed.set(self.exchange)
        try:
            super()._answer(handler, message)
        finally:
            observed.reset(token)

    def _begin(self, answering: Coroutine[Any, Any, Any]) -> None:
        token = observed.set(self.exchange)
        try:
            super()._begin(answering)
        finally:
            observed.reset(token)

    def _send(self, reply: Any, error: BaseException | None) -> None:
        message = getattr(reply, "message", reply)
        self.exchange.sent = 0 if message is None else sum(map(len, chunks_of(message)))
        super()._send(reply, error)

    def count(self, status: str) -> None:
        super().count(status)
        self.exchange.end(status)
        self._server.executor.observer.record(self.exchange)


class ObservedStreamCall(StreamCall):
    """A streaming call that is passed to the observer when it ends; its model is that of the last message."""

    __slots__ = ("exchange",)

    def start_task(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.exchange = _exchange(self)
        token = observed.set(self.exchange)
        try:
            super().start_task(coroutine)
        finally:
            observed.reset(token)

    async def read(self) -> Any:
        message = await super().read()
        self.exchange.received += len(message or b"")
        return message

    async def write(self, message: Reply) -> None:
        self.exchange.sent += sum(map(len, chunks_of(message)))
        await super().write(message)

    def count(self, status: str) -> None:
        super().count(status)
        self.exchange.end(status)
        self._server.executor.observer.record(self.exchange)
