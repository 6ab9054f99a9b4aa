"""gRPC calls that are observed, for the access log and for traces."""

from collections.abc import Coroutine
from time import monotonic
from typing import Any

from dragoman.protocols.wire import Buffer
from dragoman.system.call_times import observed
from dragoman.system.request_context import Context
from dragoman.system.trace_context import Trace
from dragoman.transports.grpc.call import CallServer
from dragoman.transports.grpc.call_headers import CallHeaders
from dragoman.transports.grpc.handlers import Reply, UnaryHandler, chunks_of
from dragoman.transports.grpc.method_calls import StreamCall, UnaryCall
from dragoman.transports.http2.stream import Http2Stream
from dragoman.transports.observation import (
    CONTEXT,
    EXCHANGE,
    NO_CALL,
    RECEIVED,
    Begun,
    Exchange,
    Observation,
    find_exchange,
)


def _make_exchange(begun: Begun) -> Exchange:
    exchange = begun[EXCHANGE] = Exchange(begun, is_grpc=True)
    return exchange


def _begin(headers: CallHeaders, context: Context, trace: Trace | None) -> Begun:
    begun: Begun = [
        None, _make_exchange, monotonic(), context, headers.service, "POST", headers.path, 0, "", NO_CALL,
    ]  # fmt: skip
    if trace is not None:
        begun[CONTEXT] = _make_exchange(begun).identify(context, trace)
    return begun


def observe_rejected(observation: Observation, headers: CallHeaders, status: str, context: Context) -> None:
    """Observe a call that was rejected before it began."""
    trace = observation.find_trace(headers.metadata, headers.health)
    if trace is not None or observation.request_log is not None:
        exchange = _make_exchange(_begin(headers, context, trace))
        exchange.is_rejected = True
        exchange.identify(context, trace)
        observation.end(exchange, status)


class ObservedUnaryCall(UnaryCall):
    """A unary call that is observed."""

    __slots__ = ("begun",)

    def __init__(self, server: CallServer, stream: Http2Stream, headers: CallHeaders, trace: Trace | None) -> None:
        # Not by `super()`, here and below: without it a call takes 1 us less.
        UnaryCall.__init__(self, server, stream, headers)
        self.begun = _begin(headers, self.context, trace)
        self.context = self.begun[CONTEXT]

    def _answer(self, handler: UnaryHandler, message: Buffer) -> None:
        self.begun[RECEIVED] = len(message)
        if self.begun[EXCHANGE] is not None:
            self.begun[EXCHANGE].received = len(message)
        running = self._server.running
        running.begun = self.begun
        try:
            UnaryCall._answer(self, handler, message)
        finally:
            running.begun = None

    def _begin(self, answering: Coroutine[Any, Any, Any]) -> None:
        token = observed.set(find_exchange(self.begun))
        try:
            super()._begin(answering)
        finally:
            observed.reset(token)

    def count(self, status: str, sent: int = 0) -> None:
        UnaryCall.count(self, status, sent)
        self._server.executor.observation.end_begun(self.begun, status, sent)


class ObservedStreamCall(StreamCall):
    """A streaming call that is observed; its model is that of the last message."""

    __slots__ = ("exchange", "trace")

    def __init__(self, server: CallServer, stream: Http2Stream, headers: CallHeaders, trace: Trace | None) -> None:
        self.trace = trace
        super().__init__(server, stream, headers)

    def start_task(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        begun = _begin(self.headers, self.context, self.trace)
        self.exchange = find_exchange(begun)
        self.context = self.exchange.context
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

    def count(self, status: str, sent: int = 0) -> None:
        super().count(status, sent)
        self._server.executor.observation.end(self.exchange, status)
