"""Observe requests for the access log: what they ask for, their status, sizes and times.

Nothing here runs unless something is observed: `ObservedApplication` and the classes of observed gRPC calls are chosen
when the server starts.
"""

import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

from msgspec import structs

from dragoman.access.control import AccessControl
from dragoman.core.errors import DragomanError
from dragoman.core.metrics import Family
from dragoman.engine.call_handler import CallHandler
from dragoman.protocols.wire import (
    Buffer,
    EngineCall,
    GrpcStream,
    Headers,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    HttpStream,
    PreliminaryCall,
)
from dragoman.system.call_times import CallTimes, get_times, observed
from dragoman.system.request_context import Context, get_context, running_in_thread
from dragoman.transports.application import Application, Progress
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.limits import Limits
from dragoman.transports.response_writer import ForwardingWriter, ResponseWriter
from dragoman.transports.routing import Match


class Exchange(CallTimes):
    """A request and its response. Times are in seconds; `parse_s`, `engine_s` and `format_s` are 0 if unknown.

    `status` is that of HTTP or the name of gRPC's; 0 if the client has disconnected before the response.
    """

    __slots__ = (
        "context", "engine_s", "format_s", "method", "model", "parse_s", "path", "protocol", "received", "sent",
        "started_s", "status", "total_s", "version", "wall_s",
    )  # fmt: skip

    def __init__(self, protocol: str, method: str, path: str, received: int) -> None:
        super().__init__()
        self.protocol, self.method, self.path, self.received = protocol, method, path, received
        self.context: Context = get_context()
        self.wall_s = time.time()
        self.started_s = time.monotonic()
        self.parse_s = self.engine_s = self.format_s = self.total_s = 0.0
        self.model = self.version = ""
        self.status: int | str = 0
        self.sent = 0

    def parsed(self, result: Any, started_s: float) -> Any:
        """Record what was parsed, and return it so that the formatting of its response is recorded too."""
        now_s = time.monotonic()
        self.parse_s += now_s - started_s
        kind = type(result)
        if kind is PreliminaryCall:
            then = result.then
            return structs.replace(result, then=lambda response: self.parsed(then(response), time.monotonic()))
        if kind is EngineCall:
            self.model, self.version = result.request.model, result.request.version
            return EngineCall(result.request, self._formatting(result.format_response, now_s), result.format_error)
        if kind is HttpStream or kind is GrpcStream:
            self.model, self.version = result.request.model, result.request.version
        return result

    def _formatting(self, function: Callable[[Any], Any], parsed_s: float) -> Callable[[Any], Any]:
        def format_response(response: Any) -> Any:
            started_s = time.monotonic()
            self.engine_s = started_s - parsed_s
            self.model, self.version = response.model or self.model, response.version or self.version
            formatted = function(response)
            self.format_s = time.monotonic() - started_s
            return formatted

        return format_response

    def end(self, status: int | str) -> None:
        """Record the end of the response."""
        self.status = status
        self.total_s = time.monotonic() - self.started_s


class Observer(Protocol):
    """Receives each exchange once its response has ended."""

    def record(self, exchange: Exchange) -> None: ...

    def families(self) -> Iterable[Family]: ...

    def close(self) -> None: ...


def observe_endpoint(endpoint: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return an endpoint that adds to the exchange of the current request."""

    def endpoint_observed(request: Any) -> Any:
        started_s = time.monotonic()
        result = endpoint(request)
        exchange = get_times()
        return exchange.parsed(result, started_s) if isinstance(exchange, Exchange) else result

    return endpoint_observed


class ObservedApplication(Application):
    """An application that passes each exchange to an observer."""

    def __init__(self, observer: Observer, engine: Any, protocols: Sequence[HttpProtocol], *arguments: Any) -> None:
        self._observer = observer
        self._running = running_in_thread()
        super().__init__(engine, [_observe_routes(protocol) for protocol in protocols], *arguments)

    def begin(
        self, match: Match, request: HttpRequest, writer: ResponseWriter
    ) -> HttpResponse | Coroutine[Any, Any, None]:
        exchange = Exchange(match.protocol.name, request.method, request.path, len(request.body))
        running = self._running
        running.times = exchange
        try:
            response = super().begin(match, request, writer)
        finally:
            running.times = None
        if type(response) is HttpResponse:
            body = response.body
            exchange.sent = len(body[0]) if len(body) == 1 else sum(map(len, body))
            exchange.end(response.status)
            self._observer.record(exchange)
        return response

    # Not a coroutine function: `begin` calls it in the context of its exchange.
    def answer(
        self, match: Match, request: HttpRequest, writer: ResponseWriter, progress: Progress | None = None
    ) -> Coroutine[Any, Any, None]:
        exchange = self._running.times if progress is not None else None
        if not isinstance(exchange, Exchange):
            exchange = Exchange(match.protocol.name, request.method, request.path, len(request.body))
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
        answering = super().answer(match, request, _ObservedWriter(writer, exchange), progress)
        del request, progress  # to free the body once it is parsed
        try:
            await answering
        finally:
            exchange.end(exchange.status)
            self._observer.record(exchange)

    def format_error(
        self,
        error: DragomanError | HttpError,
        protocol: HttpProtocol | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> HttpResponse:
        """Return the response to a request that the transport rejects."""
        response = super().format_error(error, protocol, headers)
        exchange = Exchange("none" if protocol is None else protocol.name, "", "", 0)
        exchange.sent = sum(map(len, response.body))
        exchange.end(response.status)
        self._observer.record(exchange)
        return response


def make_application(
    engine: CallHandler,
    protocols: Sequence[HttpProtocol],
    limits: Limits,
    executor: MessageExecutor | None = None,
    access: AccessControl | None = None,
) -> Application:
    """Return an application, an observed one if the executor has an observer."""
    if executor is None or executor.observer is None:
        return Application(engine, protocols, limits, executor, access)
    return ObservedApplication(executor.observer, engine, protocols, limits, executor, access)


def _observe_routes(protocol: HttpProtocol) -> HttpProtocol:
    routes = tuple(replace(route, endpoint=observe_endpoint(route.endpoint)) for route in protocol.routes)
    fallback = None if protocol.fallback is None else observe_endpoint(protocol.fallback)
    return replace(protocol, routes=routes, fallback=fallback)


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
