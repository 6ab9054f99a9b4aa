"""Observe requests for the access log and for traces: what they ask for, their status, sizes and times.

Nothing here runs unless something is observed: `ObservedApplication`, `ObservedEngine` and the classes of observed gRPC
calls are chosen when the server starts.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from dragoman.access.control import AccessControl
from dragoman.access.grants import Grant
from dragoman.core.calls import Request, Response
from dragoman.core.errors import DragomanError
from dragoman.core.metrics import Family
from dragoman.engine.call_handler import CallHandler
from dragoman.protocols.wire import Buffer, Headers, HttpError, HttpProtocol, HttpRequest, HttpResponse
from dragoman.system.call_times import CallTimes, observed
from dragoman.system.request_context import Context, get_context, request_id, running_in_thread, set_context
from dragoman.system.trace_context import PARENT, Sampler, Trace, new_lower_half
from dragoman.transports.application import Application, Progress, RequestSummary
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.limits import Limits
from dragoman.transports.response_writer import ForwardingWriter, ResponseWriter
from dragoman.transports.routing import Match

A = TypeVar("A")


class Exchange(CallTimes):
    """A request and its response. Times are in seconds, moments on the monotonic clock; 0 if unknown.

    The engine works on it from `engine_s` to `responded_s`; a stream has its first chunk at `first_chunk_s`. `status`
    is that of HTTP or the name of gRPC's; 0 if the client has disconnected before the response. `route`: pattern of the
    path. `is_rejected`: no endpoint has seen it.
    """

    __slots__ = (
        "context", "engine_s", "first_chunk_s", "is_grpc", "is_rejected", "method", "path", "protocol", "received",
        "responded_s", "route", "sent", "status", "trace",
    )  # fmt: skip

    def __init__(self, protocol: str, method: str, path: str, received: int, trace: Trace | None) -> None:
        # Not by `super().__init__()`, which takes longer than all the rest.
        self.model = self.version = self.route = ""
        self.ended_s = self.queue_s = self.dispatched_s = self.computed_s = self.compute_s = 0.0
        self.engine_s = self.responded_s = self.first_chunk_s = 0.0
        self.batch = None
        self.nested = ()
        self.context: Context = ()
        self.status: int | str = 0
        self.sent = 0
        self.is_grpc = self.is_rejected = False
        self.protocol, self.method, self.path, self.received, self.trace = protocol, method, path, received, trace
        self.started_s = time.monotonic()

    def identify(self, context: Context) -> Context:
        """Set the context of the request, and return it with the trace of the request if it has one."""
        trace = self.trace
        if trace is not None:
            context = (request_id(context), trace.trace_id, trace.span_id, trace.flags, trace.state)
        self.context = context
        return context

    def set_responded(self, response: Response[Any]) -> None:
        """Record the response of the engine."""
        self.responded_s = time.monotonic()
        self.model, self.version = response.model or self.model, response.version or self.version


class Observer(Protocol):
    """Receives each exchange once its response has ended."""

    def record(self, exchange: Exchange) -> None: ...

    def families(self) -> Iterable[Family]: ...

    def close(self) -> None: ...


class Observation:
    """What is observed of the requests of a server: all by an access log, those that are sampled by a tracer."""

    def __init__(self, access_log: Observer | None, tracer: Observer | None, sampler: Sampler | None) -> None:
        self._access_log = access_log
        self._tracer = tracer
        self._sampler = sampler
        # Requests without `traceparent` for which a larger number is drawn are not observed.
        self.bound = 1 << 64 if access_log is not None or sampler is None else sampler.bound
        self._observers = [each for each in (access_log, tracer) if each is not None]

    def start(
        self,
        protocol: str,
        method: str,
        path: str,
        received: int,
        headers: Mapping[str, str],
        is_health: bool = False,
        lower: int = -1,
    ) -> Exchange | None:
        """Return the exchange that a request begins, None if it is not observed. `lower`: see `Sampler.trace`."""
        trace = None
        if self._sampler is not None:
            trace = self._sampler.trace(headers, new_lower_half(64) if lower < 0 else lower, is_health)
        if trace is None and self._access_log is None:
            return None
        return Exchange(protocol, method, path, received, trace)

    def end(self, exchange: Exchange, status: int | str) -> None:
        """Pass an exchange that has ended to the observers."""
        exchange.status = status
        exchange.ended_s = time.monotonic()
        if self._access_log is not None:
            self._access_log.record(exchange)
        if exchange.trace is not None and exchange.trace.is_sampled and self._tracer is not None:
            self._tracer.record(exchange)

    def families(self) -> Iterable[Family]:
        return [family for each in self._observers for family in each.families()]

    def close(self) -> None:
        """Write and export what is left, within seconds."""
        for each in self._observers:
            each.close()


class ObservedEngine:
    """A `CallHandler` that records in the exchange of a request when the engine worked on it."""

    def __init__(self, engine: CallHandler) -> None:
        self._engine = engine
        self._running = running_in_thread()
        self.is_remote = engine.is_remote
        self.ready = engine.ready
        self.wait_for_change = engine.wait_for_change

    def begin(self, request: Request[A]) -> Response[A] | Awaitable[Response[A]]:
        exchange: Any = self._running.times or observed.get()
        if exchange is None:
            return self._engine.begin(request)
        exchange.model, exchange.version = request.model, request.version
        exchange.engine_s = time.monotonic()
        response = self._engine.begin(request)
        if type(response) is not Response:
            return _ObservedResponse(response, exchange)  # type: ignore[arg-type]  # responses have no subclasses
        exchange.responded_s = time.monotonic()
        exchange.model, exchange.version = response.model, response.version
        return response

    async def call(self, request: Request[A]) -> Response[A]:
        exchange = self._get_exchange()
        if exchange is None:
            return await self._engine.call(request)
        _start(exchange, request)
        response = await self._engine.call(request)
        exchange.set_responded(response)
        return response

    def stream(self, request: Request[A]) -> AsyncGenerator[Response[A], None]:
        exchange = self._get_exchange()
        responses = self._engine.stream(request)
        return responses if exchange is None else _observe_stream(responses, request, exchange)

    def _get_exchange(self) -> Exchange | None:
        exchange: Any = self._running.times or observed.get()
        found: Exchange | None = exchange
        return found


class _ObservedResponse(Generic[A]):
    """An awaitable response; unlike a coroutine it need not be awaited, as when the client has disconnected."""

    def __init__(self, response: Awaitable[Response[A]], exchange: Exchange) -> None:
        self._response = response
        self._exchange = exchange

    def __await__(self) -> Generator[Any, Any, Response[A]]:
        response = yield from self._response.__await__()
        self._exchange.set_responded(response)
        return response


async def _observe_stream(
    responses: AsyncGenerator[Response[A], None], request: Request[A], exchange: Exchange
) -> AsyncGenerator[Response[A], None]:
    _start(exchange, request)
    async with aclosing(responses):
        try:
            async for response in responses:
                exchange.first_chunk_s = exchange.first_chunk_s or time.monotonic()
                exchange.set_responded(response)
                yield response
        finally:
            exchange.responded_s = time.monotonic()


def _start(exchange: Exchange, request: Request[Any]) -> None:
    exchange.model, exchange.version = request.model, request.version
    exchange.engine_s = time.monotonic()


class ObservedApplication(Application):
    """An application that observes its requests; `plain` answers those that are not observed, with the same state."""

    def __init__(self, plain: Application, engine: CallHandler, observation: Observation) -> None:
        vars(self).update(vars(plain))
        self._plain = plain
        self._restricted = WeakKeyDictionary()
        self._engine = ObservedEngine(engine)
        self._observation = observation
        self._bound = observation.bound
        self._running = running_in_thread()

    def _restrict(self, grant: Grant) -> Application:
        view = super()._restrict(grant)
        assert isinstance(view, ObservedApplication)
        view._plain = self._plain._restrict(grant)
        return view

    def _start(self, match: Match, request: HttpRequest, lower: int) -> Exchange | None:
        exchange = self._observation.start(
            match.protocol.name, request.method, request.path, len(request.body), request.headers, match.health, lower
        )
        if exchange is not None:
            exchange.route = match.route
        return exchange

    def begin(
        self, match: Match, request: HttpRequest, writer: ResponseWriter
    ) -> HttpResponse | Coroutine[Any, Any, None]:
        # Decided here, as one further call would cost 1 % of a small request.
        lower = new_lower_half(64)
        if lower >= self._bound and PARENT not in request.headers:
            return self._plain.begin(match, request, writer)
        exchange = self._start(match, request, lower)
        if exchange is None:
            return self._plain.begin(match, request, writer)
        running = self._running
        running.context = exchange.identify(running.context)
        running.times = exchange
        try:
            response = Application.begin(self, match, request, writer)  # faster than by `super()`
        finally:
            running.times = None
        if type(response) is HttpResponse:
            body = response.body
            exchange.sent = len(body[0]) if len(body) == 1 else sum(map(len, body))
            self._observation.end(exchange, response.status)
        return response

    # Not a coroutine function: `begin` calls it in the context of its exchange.
    def answer(
        self, match: Match, request: HttpRequest, writer: ResponseWriter, progress: Progress | None = None
    ) -> Coroutine[Any, Any, None]:
        exchange: Exchange | None = self._running.times if progress is not None else self._start(match, request, -1)
        if exchange is None:
            return self._plain.answer(match, request, writer, progress)
        return self._observe_answer(exchange, match, request, writer, progress)

    async def _observe_answer(
        self,
        exchange: Exchange,
        match: Match,
        request: HttpRequest,
        writer: ResponseWriter,
        progress: Progress | None,
    ) -> None:
        observed.set(exchange)
        set_context(exchange.context if progress is not None else exchange.identify(get_context()))
        answering = super().answer(match, request, _ObservedWriter(writer, exchange), progress)
        del request, progress  # to free the body once it is parsed
        try:
            await answering
        finally:
            self._observation.end(exchange, exchange.status)

    def reject(self, error: DragomanError | HttpError, request: RequestSummary) -> HttpResponse:
        response = super().reject(error, request)
        protocol = "none" if request.protocol is None else request.protocol.name
        exchange = self._observation.start(protocol, request.method, request.path, 0, request.headers)
        if exchange is not None:
            exchange.is_rejected = True
            exchange.identify(request.context)
            exchange.sent = sum(map(len, response.body))
            self._observation.end(exchange, response.status)
        return response


def make_application(
    engine: CallHandler,
    protocols: Sequence[HttpProtocol],
    limits: Limits,
    executor: MessageExecutor | None = None,
    access: AccessControl | None = None,
) -> Application:
    """Return an application, an observed one if the executor has an observation."""
    plain = Application(engine, protocols, limits, executor, access)
    if executor is None or executor.observation is None:
        return plain
    return ObservedApplication(plain, engine, executor.observation)


class _ObservedWriter(ForwardingWriter):
    """Records status and size of a response."""

    def __init__(self, writer: ResponseWriter, exchange: Exchange) -> None:
        super().__init__(writer)
        self._exchange = exchange

    async def send(self, response: HttpResponse) -> None:
        self._exchange.status = response.status
        self._exchange.sent += sum(map(len, response.body))
        await super().send(response)

    async def start(self, status: int, headers: Headers) -> None:
        self._exchange.status = status
        await super().start(status, headers)

    async def write(self, chunk: Buffer) -> None:
        self._exchange.sent += len(chunk)
        await super().write(chunk)

    async def end(self, chunk: Buffer) -> None:
        self._exchange.sent += len(chunk)
        await super().end(chunk)
