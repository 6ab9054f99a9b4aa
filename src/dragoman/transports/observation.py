"""Observe requests for request logs and for traces: what they ask for, their status, sizes and times.

Nothing here runs unless something is observed: `ObservedApplication`, `ObservedEngine` and the classes of observed gRPC
calls are chosen when the server starts.
"""

from collections.abc import AsyncGenerator, Awaitable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from time import monotonic
from typing import Any, Final, Generic, Protocol, TypeVar

from dragoman.access.control import AccessControl
from dragoman.access.grants import Grant
from dragoman.core.calls import Request, Response
from dragoman.core.errors import DragomanError
from dragoman.core.metrics import Family
from dragoman.engine.call_handler import CallHandler
from dragoman.protocols.wire import Buffer, Headers, HttpError, HttpProtocol, HttpRequest, HttpResponse
from dragoman.system.call_times import CallTimes, get_times, observed
from dragoman.system.request_context import Context, request_id, running_in_thread, set_context
from dragoman.system.trace_context import PARENT, Sampler, Trace
from dragoman.system.trace_settings import TraceSettings
from dragoman.transports.application import Application, Progress, RequestSummary
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.limits import Limits
from dragoman.transports.response_writer import ForwardingWriter, ResponseWriter
from dragoman.transports.routing import Match

A = TypeVar("A")

# A request before it needs an `Exchange`, which takes ten times as long to create as this list: the exchange or None;
# `make_exchange`; `started_s`, `context`, `protocol`, `method`, `path`, `received`, `route`; a tuple of `model`,
# `version`, `engine_s`, `responded_s`, `queue_s`; and once it has ended `status`, `sent`, `ended_s`.
Begun = list[Any]
EXCHANGE: Final = 0
_MAKE: Final = 1
CONTEXT: Final = 3
RECEIVED: Final = 7
_CALL: Final = 9
NO_CALL: Final = ("", "", 0.0, 0.0, 0.0)


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

    def __init__(self, begun: Begun, *, is_grpc: bool = False) -> None:
        super().__init__()
        (
            _, _, self.started_s, self.context, self.protocol, self.method, self.path, self.received, self.route,
            (self.model, self.version, self.engine_s, self.responded_s, _),
        ) = begun  # fmt: skip
        self.status: int | str = 0
        self.sent = 0
        self.first_chunk_s = 0.0
        self.is_rejected = False
        self.is_grpc = is_grpc
        self.trace: Trace | None = None

    def set_call(self, call: tuple[str, str, float, float, float]) -> None:
        """Record a call of the engine that was answered at once."""
        self.model, self.version, self.engine_s, self.responded_s, _ = call

    def to_list(self) -> Begun:
        """Return the list of a request that has ended."""
        call = self.model, self.version, self.engine_s, self.responded_s, self.queue_s
        return [
            self, None, self.started_s, self.context, self.protocol, self.method, self.path, self.received, self.route,
            call, self.status, self.sent, self.ended_s,
        ]  # fmt: skip

    def identify(self, context: Context, trace: Trace | None) -> Context:
        """Set context and trace of the request; return its context, which has the ids of the trace if there is one."""
        self.trace = trace
        if trace is not None:
            context = (request_id(context), trace.trace_id, trace.span_id, trace.flags, trace.state)
        self.context = context
        return context

    def set_responded(self, response: Response[Any]) -> None:
        """Record the response of the engine."""
        self.responded_s = monotonic()
        self.model, self.version = response.model or self.model, response.version or self.version


def make_exchange(begun: Begun) -> Exchange:
    """Make the exchange of a request over HTTP."""
    exchange = begun[EXCHANGE] = Exchange(begun)
    return exchange


def find_exchange(begun: Begun) -> Exchange:
    """Return the exchange of a request, with what is known of it; make one if there is none."""
    exchange: Exchange = begun[EXCHANGE] or begun[_MAKE](begun)
    if begun[_CALL] is not NO_CALL:
        exchange.set_call(begun[_CALL])
        begun[_CALL] = NO_CALL
    return exchange


class Observer(Protocol):
    """Receives each exchange once its response has ended."""

    def record(self, exchange: Exchange) -> None: ...

    def families(self) -> Iterable[Family]: ...

    def close(self) -> None: ...


class RequestLog(Observer, Protocol):
    """An observer that needs no more than the list of a request."""

    def add(self, begun: Begun) -> None: ...


class Observation:
    """What is observed of the requests of a server: all by a request log, those that are sampled by a tracer."""

    def __init__(
        self,
        request_log: RequestLog | None,
        tracer: Observer | None,
        sampler: Sampler | None,
        settings: TraceSettings | None = None,
    ) -> None:
        self.request_log = request_log
        self.sampler = sampler
        self._settings = settings or TraceSettings()
        if sampler is not None:
            self._settings.attach(sampler)
        self._tracer = tracer
        self._observers: list[Observer] = [each for each in (request_log, tracer) if each is not None]

    def find_trace(self, headers: Mapping[str, str], is_health: bool = False) -> Trace | None:
        """Return the trace of a request, None if it has none. Call it once for each request."""
        if self.sampler is None:
            return None
        self.sampler.countdown -= 1
        return self.sampler.trace(headers, is_health)

    def end(self, exchange: Exchange, status: int | str) -> None:
        """Pass an exchange that has ended to the observers."""
        exchange.status = status
        exchange.ended_s = monotonic()
        if self.request_log is not None:
            self.request_log.record(exchange)
        trace, tracer = exchange.trace, self._tracer
        if (
            trace is not None
            and trace.is_sampled
            and tracer is not None
            and self._settings.keeps(exchange.model, trace)
        ):
            tracer.record(exchange)

    def end_begun(self, begun: Begun, status: int | str, sent: int) -> None:
        """Pass a request that has ended to the observers, without an exchange if nothing has needed one."""
        if begun[EXCHANGE] is None and self.request_log is not None:
            begun += (status, sent, monotonic())
            self.request_log.add(begun)
        else:
            exchange = find_exchange(begun)
            exchange.sent = sent
            self.end(exchange, status)

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
        begun = self._running.begun
        if begun is None:
            return self._engine.begin(request) if observed.get() is None else self._begin_late(request)
        engine_s = monotonic()
        try:
            response = self._engine.begin(request)
        except BaseException:
            begun[_CALL] = request.model, request.version, engine_s, 0.0, 0.0
            raise
        if type(response) is Response:
            begun[_CALL] = response.model, response.version, engine_s, monotonic(), 0.0
            return response
        begun[_CALL] = request.model, request.version, engine_s, 0.0, 0.0
        return _ObservedResponse(response, find_exchange(begun))  # type: ignore[arg-type]  # responses have no subclasses

    def _begin_late(self, request: Request[A]) -> Response[A] | Awaitable[Response[A]]:
        """Begin a call of a request that had to wait before."""
        exchange = _current_exchange()
        assert exchange is not None
        _start(exchange, request)
        response = self._engine.begin(request)
        if not isinstance(response, Response):
            return _ObservedResponse(response, exchange)
        exchange.set_responded(response)
        return response

    async def call(self, request: Request[A]) -> Response[A]:
        exchange = _current_exchange()
        if exchange is None:
            return await self._engine.call(request)
        _start(exchange, request)
        response = await self._engine.call(request)
        exchange.set_responded(response)
        return response

    def stream(self, request: Request[A]) -> AsyncGenerator[Response[A], None]:
        exchange = _current_exchange()
        responses = self._engine.stream(request)
        return responses if exchange is None else _observe_stream(responses, request, exchange)


def _current_exchange() -> Exchange | None:
    exchange: Any = get_times()
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
                exchange.first_chunk_s = exchange.first_chunk_s or monotonic()
                exchange.set_responded(response)
                yield response
        finally:
            exchange.responded_s = monotonic()


def _start(exchange: Exchange, request: Request[Any]) -> None:
    exchange.model, exchange.version, exchange.engine_s = request.model, request.version, monotonic()


class ObservedApplication(Application):
    """An application that observes its requests; `plain` answers those that are not observed, with the same state."""

    def __init__(self, plain: Application, engine: CallHandler, observation: Observation) -> None:
        vars(self).update(vars(plain))
        self._plain = plain
        self._engine = ObservedEngine(engine)
        self._observation = observation
        self._request_log = observation.request_log
        self._sampler = observation.sampler
        self._running = running_in_thread()

    def for_caller(self, grant: Grant, address: str = "") -> Application:
        view = super().for_caller(grant, address)
        assert isinstance(view, ObservedApplication)
        view._plain = self._plain.for_caller(grant, address)
        return view

    def begin(
        self, match: Match, request: HttpRequest, writer: ResponseWriter
    ) -> HttpResponse | Coroutine[Any, Any, None]:
        # Decided here, as one further call would cost 1 % of a small request.
        sampler, trace = self._sampler, None
        if sampler is not None:
            sampler.countdown -= 1
            if sampler.countdown <= 0 or PARENT in request.headers:
                trace = sampler.trace(request.headers, match.health)
            if trace is None and self._request_log is None:
                return self._plain.begin(match, request, writer)
        running = self._running
        begun: Begun = [
            None, make_exchange, monotonic(), running.context, match.protocol.name, request.method, request.path,
            len(request.body), match.route, NO_CALL,
        ]  # fmt: skip
        if trace is not None:
            running.context = make_exchange(begun).identify(running.context, trace)
        running.begun = begun
        try:
            response = Application.begin(self, match, request, writer)  # faster than by `super()`
        finally:
            running.begun = None
        if type(response) is HttpResponse:
            body = response.body
            sent = len(body[0]) if len(body) == 1 else sum(map(len, body))
            self._observation.end_begun(begun, response.status, sent)
        return response

    # Not a coroutine function: `begin` calls it while the request is the running one.
    def answer(
        self, match: Match, request: HttpRequest, writer: ResponseWriter, progress: Progress | None = None
    ) -> Coroutine[Any, Any, None]:
        begun = self._running.begun
        if progress is not None:
            exchange = None if begun is None else find_exchange(begun)
        else:
            summary = RequestSummary(request.method, request.path, request.headers, match.protocol, request.context)
            exchange = self._start(summary, len(request.body), match)
        if exchange is None:
            return self._plain.answer(match, request, writer, progress)
        return self._observe_answer(exchange, match, request, writer, progress)

    def _start(self, request: RequestSummary, received: int = 0, match: Match | None = None) -> Exchange | None:
        """Return the exchange that a request begins, None if it is not observed."""
        trace = self._observation.find_trace(request.headers, match is not None and match.health)
        if trace is None and self._request_log is None:
            return None
        protocol = "none" if request.protocol is None else request.protocol.name
        exchange = Exchange(
            [
                None, None, monotonic(), request.context, protocol, request.method, request.path, received,
                "" if match is None else match.route, NO_CALL,
            ]
        )  # fmt: skip
        exchange.identify(request.context, trace)
        return exchange

    async def _observe_answer(
        self,
        exchange: Exchange,
        match: Match,
        request: HttpRequest,
        writer: ResponseWriter,
        progress: Progress | None,
    ) -> None:
        observed.set(exchange)
        set_context(exchange.context)
        answering = super().answer(match, request, _ObservedWriter(writer, exchange), progress)
        del request, progress  # to free the body once it is parsed
        try:
            await answering
        finally:
            self._observation.end(exchange, exchange.status)

    def reject(self, error: DragomanError | HttpError, request: RequestSummary) -> HttpResponse:
        response = super().reject(error, request)
        exchange = self._start(request)
        if exchange is not None:
            exchange.is_rejected = True
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
