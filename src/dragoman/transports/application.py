"""Answers HTTP requests, whichever transport receives them.

A transport parses the request line and headers, calls `match` to find the endpoint, receives the body within the
limits, and calls `answer` with a `ResponseWriter`. The rest is the same for every transport: decompress the body, run
the protocol's endpoint, call the engine, format and compress the response. If the transport itself rejects a request,
`reject` formats the error as its protocol does.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from dragoman.access.caller_engine import CallerEngine
from dragoman.access.certificates import PeerCertificate
from dragoman.access.control import AccessControl
from dragoman.access.grants import Grant
from dragoman.core.callers import ANYONE
from dragoman.core.calls import ModelCall, Response
from dragoman.core.chunks import ReaderClosed
from dragoman.core.errors import DragomanError, NotReady
from dragoman.core.foreign_code import is_interruption
from dragoman.core.sizes import THREAD
from dragoman.engine.call_handler import CallHandler
from dragoman.protocols.wire import (
    BackgroundCall,
    Endpoint,
    EndpointResult,
    EngineCall,
    HttpError,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    HttpStream,
    PreliminaryCall,
    ResultPoll,
    rate_limit_headers,
)
from dragoman.system.coroutines import ensure_task
from dragoman.system.request_context import Context, request_id, running_in_thread, set_context
from dragoman.transports.async_results import AsyncResult, AsyncResultStore, stored_result_request
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.counters import SAMPLED
from dragoman.transports.encoding import compress, decompress, preferred_encoding
from dragoman.transports.executor import MessageExecutor, is_large, weight
from dragoman.transports.limits import Limits
from dragoman.transports.observation import Observation, RecordingWriter, RequestRecord
from dragoman.transports.response_writer import CorsResponseWriter, ResponseWriter, with_headers
from dragoman.transports.routing import Match, Router
from dragoman.transports.stream_sender import StreamSender

log = logging.getLogger("dragoman.http")

A = TypeVar("A")


class StartedCall(msgspec.Struct, frozen=True):
    """A call that the engine has begun, with its response or an awaitable of it."""

    call: EngineCall[Any, HttpResponse] | PreliminaryCall[Any]
    response: Response[Any] | Awaitable[Response[Any]]


class CompressibleResponse(msgspec.Struct, frozen=True):
    """A response of a model, long enough to be compressed.

    Other responses are never compressed: clients of Triton that ask for gzip do not expect it of metadata, lists,
    health or errors.
    """

    response: HttpResponse


class RequestSummary(msgspec.Struct, frozen=True):
    """A request that a transport rejects, as far as it is known."""

    method: str = ""
    path: str = ""
    headers: Mapping[str, str] = MappingProxyType({})
    protocol: HttpProtocol | None = None
    context: Context = ()
    client: str = ""
    version: str = "1.1"


class Authorization(msgspec.Struct, frozen=True):
    """The application as a caller may use it, with these headers, until the keys change or the key expires."""

    application: "Application"
    access: AccessControl | None = None
    version: int = 0
    expires_s: float = math.inf

    def is_valid(self) -> bool:
        return self.access is None or self.access.is_current(self.version, self.expires_s)


Progress = EndpointResult | StartedCall | CompressibleResponse


class Application:
    """Routes requests to protocols and their calls to the engine. `bodies` counts the memory of all requests.

    A transport asks `authorize` for the application that serves a request before it receives the body. Unless it
    `is_guarded`, requests that are plain need not be authorized.
    """

    def __init__(
        self,
        engine: CallHandler,
        protocols: Sequence[HttpProtocol],
        limits: Limits,
        executor: MessageExecutor | None = None,
        access: AccessControl | None = None,
    ) -> None:
        self.limits = limits
        self.is_guarded = access is not None and access.needs_credentials
        self.access = access
        self.unrestricted = Authorization(self)
        self.caller = ANYONE
        self._models: frozenset[str] | None = None
        self.executor = executor or MessageExecutor(BodyMemory(limits.max_bodies_bytes), limits.max_loop_delay_s)
        self.bodies = self.executor.bodies
        self._compress_min_bytes: float = limits.compress_min_bytes if limits.compress_responses else math.inf
        self.engine = engine
        self.counters = self.executor.counters
        self._router = Router(protocols, self.counters)
        self._until_measured = SAMPLED
        self._default = protocols[0]
        self._results = AsyncResultStore()
        self._observation: Observation | None = self.executor.observation
        self._running = running_in_thread()

    @property
    def is_observed(self) -> bool:
        """Whether requests are logged, traced or counted by telemetry."""
        return self._observation is not None

    def match(self, method: str, raw_path: str, headers: Mapping[str, str]) -> Match:
        """Return the endpoint of a path, still percent-encoded. Raises HttpError 404 or 405."""
        root = self.limits.root_path
        if root and raw_path.startswith(root) and raw_path[len(root) : len(root) + 1] in ("/", "", "?"):
            raw_path = raw_path[len(root) :] or "/"
        return self._router.match(method, raw_path, headers)

    def authorize(
        self,
        match: Match,
        method: str,
        headers: Mapping[str, str],
        address: Callable[[], str],
        certificate: Callable[[], PeerCertificate | None] = lambda: None,
    ) -> "Authorization":
        """Return the application as the caller of a request may use it, and how long that is valid.

        Raises Unauthorized, Forbidden, RateLimited or NotReady. Health checks and OPTIONS, which browsers send without
        credentials, are open; public paths need no credential. `address` returns the address of the client,
        `certificate` the one by which it has identified itself.
        """
        access = self.access
        if access is None or match.health or match.endpoint is None:
            return Authorization(self)
        where = f"{method} {match.route or match.path}"
        access.check_site(match.role, method, headers, address, where)
        if match.is_public:
            return Authorization(self)
        grant = access.authorize(match.role, headers, address, where, certificate)
        if grant.is_anonymous and match.role != "admin":
            return Authorization(self)
        return Authorization(self.for_caller(grant, address()), access, access.version, grant.expires_s)

    def for_caller(self, grant: Grant, address: str = "") -> "Application":
        """Return this application for the holder of a key, whose requests come from an address."""
        view = object.__new__(type(self))  # in a third of the time of `copy.copy`
        vars(view).update(vars(self))
        refusals = None if self.access is None else self.access.refusals
        counts = self.counters.key_calls.of(grant.name)
        engine = view.engine = CallerEngine(self.engine, grant, address, refusals, counts)
        view.caller, view._models = engine.caller, grant.models
        return view

    def reject(self, error: DragomanError | HttpError, request: RequestSummary) -> HttpResponse:
        """Return the response to a request that the transport rejects.

        It is in the format of the protocol that the path suggests, and pages of allowed origins can read it.
        """
        nearest = error.protocol if isinstance(error, HttpError) else None
        protocol, headers = request.protocol or nearest or self._default, request.headers
        response = protocol.format_error(error, request_id(request.context))
        if self.limits.cors.is_enabled and "origin" in headers:
            response = with_headers(response, self.limits.cors.response_headers(headers))
        if self._observation is not None:
            label = "none" if request.protocol is None else request.protocol.label
            record = self._observation.begin(
                request.context, label, request.method, request.path, headers,
                client=request.client, http_version=request.version,
            )  # fmt: skip
            if record is not None:
                record.is_rejected = True
                self._observation.end(record, response.status, sum(map(len, response.body)))
        return response

    def is_plain(self, match: Match | None, headers: Mapping[str, str]) -> bool:
        """Return whether a request needs only its endpoint and the engine, so that `begin` may be used for it. Unless
        the application is guarded, it needs no authorization either."""
        if match is None or match.endpoint is None or "content-encoding" in headers:
            return False
        if self.limits.cors.is_enabled and "origin" in headers:
            return False
        return self.is_guarded or self.access is None or not self.access.has_to_check(match.role, headers)

    def begin(
        self, match: Match, request: HttpRequest, writer: ResponseWriter
    ) -> HttpResponse | Coroutine[Any, Any, None]:
        """Return the response to a plain request if it is there at once; else a coroutine that sends it.

        The context of an observed request becomes that of the running code; the transport sets it to () afterwards.
        """
        observation = self._observation
        if observation is None or (not observation.records_all and observation.ignores(request.headers)):
            return self._begin(match, request, writer)
        record = self._observe(match, request)
        if record is None:
            return self._begin(match, request, writer)
        self._running.context = record.context
        response = self._begin(match, request, writer, record)
        if type(response) is HttpResponse:
            body = response.body
            observation.end(record, response.status, len(body[0]) if len(body) == 1 else sum(map(len, body)))
        return response

    def _observe(self, match: Match, request: HttpRequest) -> RequestRecord | None:
        """Return the record of a request that an endpoint serves, None if it is not observed."""
        assert self._observation is not None
        return self._observation.begin(
            request.context, match.protocol.label, request.method, request.path, request.headers, match.route,
            len(request.body), request.client, request.caller.name, request.version, "", match.health,
        )  # fmt: skip

    def _begin(
        self, match: Match, request: HttpRequest, writer: ResponseWriter, record: RequestRecord | None = None
    ) -> HttpResponse | Coroutine[Any, Any, None]:
        # Measured here: a function around the endpoint for one of many requests makes all of them 1 us slower, because
        # the interpreter specializes calls by the function.
        self._until_measured -= 1
        started_s = 0.0 if self._until_measured else self._start_sample()
        progress: Progress | None = None
        try:
            progress = match.endpoint(request)  # type: ignore[misc]  # a plain request has an endpoint
            if started_s:
                self.counters.observe(match.protocol.label, "parse", started_s, SAMPLED)
            if type(progress) is not EngineCall:
                while type(progress) is PreliminaryCall:
                    if record is not None:
                        record.set_call(progress.request)
                    begun: Any = self.engine.begin(progress.request)
                    progress = progress.then(begun) if type(begun) is Response else StartedCall(progress, begun)
            if type(progress) is EngineCall:
                if record is not None:
                    record.set_call(progress.request)
                begun = self.engine.begin(progress.request)
                if type(begun) is not Response or weight(begun.answer) > THREAD:
                    if started_s:
                        progress = self.counters.measure_format(match.protocol.label, progress, SAMPLED)
                    return self.answer(match, request, writer, StartedCall(progress, begun), record)
                started_s = started_s and time.monotonic()
                response: HttpResponse = progress.format_response(begun)
                if begun.limits is not None:
                    response = with_headers(response, rate_limit_headers(begun.limits))
                if started_s:
                    self.counters.observe(match.protocol.label, "format", started_s, SAMPLED)
                if len(response.body) == 1 and len(response.body[0]) < self._compress_min_bytes:
                    return response
                progress = self._mark_compressible(response, isinstance(progress.request.call, ModelCall))
        except DragomanError as error:
            format_error = progress.format_error if isinstance(progress, EngineCall | PreliminaryCall) else None
            if format_error is not None:
                return format_error(error)
            return match.protocol.format_error(error, request.request_id)
        except BaseException as error:
            found = error if isinstance(error, HttpError) else _internal_error(request.context)
            return match.protocol.format_error(found, request.request_id)
        if type(progress) is HttpResponse:
            return progress
        if type(progress) is CompressibleResponse and "accept-encoding" not in request.headers:
            return _with_vary(progress.response)
        return self.answer(match, request, writer, progress, record)

    def _start_sample(self) -> float:
        self._until_measured = SAMPLED
        return time.monotonic()

    def _mark_compressible(self, response: HttpResponse, is_of_model: bool) -> HttpResponse | CompressibleResponse:
        size = sum(map(len, response.body))
        if size < self._compress_min_bytes or response.status != 200 or not is_of_model:
            return response
        is_encoded = any(name == "content-encoding" for name, _ in response.headers)  # by the model itself
        return response if is_encoded else CompressibleResponse(response)

    async def answer(
        self,
        match: Match,
        request: HttpRequest,
        writer: ResponseWriter,
        progress: Progress | None = None,
        record: RequestRecord | None = None,
    ) -> None:
        """Answer one request; never raises. `progress` and `record` are those of `begin`.

        Cancel it to cancel the work; a client that is still connected then gets an error.
        """
        if self._observation is not None and progress is None:
            record = self._observe(match, request)
        if record is not None:
            set_context(record.context)
            writer = RecordingWriter(writer, record)
        cors, preflight, context = self.limits.cors, None, request.context
        if "origin" in request.headers and cors.is_enabled:
            writer = CorsResponseWriter(writer, cors.response_headers(request.headers))
            preflight = cors.preflight(request.method, request.headers)
        answering = (
            self._answer(match, request, writer, progress, record) if preflight is None else writer.send(preflight)
        )
        del request, progress  # to free the body once it is parsed, and the inputs after the call
        try:
            await answering
        except asyncio.CancelledError:
            if not writer.is_disconnected:
                await self._send_error(match.protocol, writer, NotReady("the server is shutting down"), context)
        except BaseException as error:
            if is_interruption(error):
                raise
            await self._send_error(match.protocol, writer, _internal_error(context), context)
        finally:
            if record is not None and self._observation is not None:
                self._observation.end(record, record.status, record.sent)

    async def _answer(
        self,
        match: Match,
        request: HttpRequest,
        writer: ResponseWriter,
        progress: Progress | None,
        record: RequestRecord | None,
    ) -> None:
        if match.endpoint is None:
            await writer.send(HttpResponse(204, (), (("allow", match.allow),)))
            return
        accept, decompressed_size, context = request.headers.get("accept-encoding", ""), 0, request.context
        try:
            if "content-encoding" in request.headers and len(request.body):
                request = await self._decompress(request)
                self.bodies.reserve(len(request.body))
                decompressed_size = len(request.body)
            if progress is None:
                measured = self.counters.measure_endpoint(match.protocol.label, match.endpoint)
                progress = await self._run_endpoint(measured, request, record)
            elif isinstance(progress, StartedCall) and isinstance(progress.call, PreliminaryCall):
                progress = await self._resolve_preliminary(progress.call, request, progress.response, record)
            responding = (
                self._use_store(progress, request)
                if isinstance(progress, ResultPoll | BackgroundCall)
                else self._respond(progress, writer, context, record)
            )
            del request, progress
            result = await responding
        except (DragomanError, HttpError) as error:
            await self._send_error(match.protocol, writer, error, context)
        except BaseException as error:  # of content types and other plug-ins, too
            if is_interruption(error):
                raise
            await self._send_error(match.protocol, writer, _internal_error(context), context)
        else:
            if result is not None:
                await writer.send(await self._encode(result, match.protocol, accept, context))
        finally:
            self.bodies.release(decompressed_size)

    async def _decompress(self, request: HttpRequest) -> HttpRequest:
        encodings = request.headers["content-encoding"]
        body = await decompress(request.body, encodings, self.limits.max_body_bytes, self.executor)
        return msgspec.structs.replace(request, body=body)

    async def _run_endpoint(
        self, endpoint: Endpoint, request: HttpRequest, record: RequestRecord | None = None
    ) -> EndpointResult:
        return await self._resolve_preliminary(await self._parse(endpoint, request, request), request, record=record)

    async def _resolve_preliminary(
        self,
        result: EndpointResult,
        request: HttpRequest,
        begun: Response[Any] | Awaitable[Response[Any]] | None = None,
        record: RequestRecord | None = None,
    ) -> EndpointResult:
        """Make preliminary calls until the endpoint gives another result; `begun` is the response of the first one."""
        while isinstance(result, PreliminaryCall):
            if record is not None:
                record.set_call(result.request)
            try:
                response: Any = self.engine.begin(result.request) if begun is None else begun
                response = response if isinstance(response, Response) else await response
            except DragomanError as error:
                if result.format_error is None:
                    raise
                return result.format_error(error)
            begun = None
            result = await self._parse(result.then, response, request)
        return result

    async def _parse(
        self, function: Callable[[A], EndpointResult], argument: A, request: HttpRequest
    ) -> EndpointResult:
        return await self.executor.parse(function, argument, len(request.body), in_thread=is_large(request))

    async def _respond(
        self, progress: Progress, writer: ResponseWriter, context: Context, record: RequestRecord | None = None
    ) -> HttpResponse | CompressibleResponse | None:
        """Return the response; None if it was a stream, which has been sent."""
        started: Response[Any] | Awaitable[Response[Any]] | None = None
        if isinstance(progress, StartedCall):
            started, progress = progress.response, progress.call
        if isinstance(progress, HttpResponse | CompressibleResponse):
            return progress
        assert isinstance(progress, EngineCall | HttpStream)
        if record is not None:
            record.set_call(progress.request)
        format_error = progress.format_error
        try:
            if isinstance(progress, HttpStream):
                await ensure_task()
                whole = await self._stream(progress, writer, context)
                return whole and self._mark_compressible(whole, True)
            request, format_response, in_thread = progress.request, progress.format_response, progress.in_thread
            del progress
            is_of_model = isinstance(request.call, ModelCall)
            response: Any = self.engine.begin(request) if started is None else started
            del request, started
            response = response if isinstance(response, Response) else await response
            limits = response.limits
            if in_thread:
                formatted = await self.executor.run_in_thread(format_response, response)
                return formatted if limits is None else with_headers(formatted, rate_limit_headers(limits))
            formatted = await self.executor.format(format_response, response, weight(response.answer))
            if limits is not None:
                formatted = with_headers(formatted, rate_limit_headers(limits))
            return self._mark_compressible(formatted, is_of_model)
        except DragomanError as error:
            if format_error is None or writer.started:
                raise
            return format_error(error)

    async def stored_result_request(self, request: HttpRequest, grant: Grant) -> HttpResponse:
        """Answer a request that a server process has received, about a result that is stored here.

        `grant` is that of the caller.
        """
        application = self if grant.is_anonymous else self.for_caller(grant)
        match = self.match(request.method, quote(request.path), request.headers)
        assert match.endpoint is not None
        result = await application._run_endpoint(match.endpoint, request)
        assert isinstance(result, ResultPoll | BackgroundCall)
        return await application._use_store(result, request)

    async def _use_store(self, result: ResultPoll | BackgroundCall, request: HttpRequest) -> HttpResponse:
        if not self.limits.keeps_answers:
            sent = msgspec.structs.replace(stored_result_request(request), models=self._models)
            return (await self.engine.call(sent)).answer
        if isinstance(result, ResultPoll):
            return self._results.poll(result, self.caller.owner)
        run = partial(self._run_in_background, result, request)
        return self._results.begin(result, run, self.caller.owner)

    async def _run_in_background(self, background: BackgroundCall, request: HttpRequest, stored: AsyncResult) -> None:
        try:
            try:
                resolved = await self._resolve_preliminary(background.call, request)
                result = await self._respond(resolved, stored, request.context)
            except (DragomanError, HttpError) as error:
                result = background.format_error(error)
            except BaseException as error:
                if is_interruption(error):
                    raise
                result = background.format_error(_internal_error(request.context))
            if result is not None and not stored.started:
                await stored.send(result.response if isinstance(result, CompressibleResponse) else result)
        finally:
            if not stored.is_complete:
                stored.abort()

    async def _encode(
        self, result: HttpResponse | CompressibleResponse, protocol: HttpProtocol, accept: str, context: Context
    ) -> HttpResponse:
        """Compress a response if it may be and the client's `accept-encoding` allows it."""
        response = result.response if isinstance(result, CompressibleResponse) else result
        if self.bodies.is_over_limit and sum(map(len, response.body)) > THREAD:
            return protocol.format_error(self.bodies.unread_error, request_id(context))
        if not isinstance(result, CompressibleResponse):
            return response
        response = _with_vary(response)
        encoding = preferred_encoding(accept)
        if encoding is None:
            return response
        body = await compress(list(response.body), encoding, self.executor)
        return HttpResponse(response.status, body, (*response.headers, ("content-encoding", encoding)))

    async def _stream(self, stream: HttpStream[Any], writer: ResponseWriter, context: Context) -> HttpResponse | None:
        """Send the chunks of a stream and return None, or return the response if it is a whole one."""
        sender = StreamSender(stream, writer, self.executor)
        error: BaseException
        try:
            try:
                await self.engine.stream(stream.request).send_to(sender.take)
                last = stream.format_last_chunk()
                if stream.final_request is not None:
                    await self.engine.call(stream.final_request())
            except ReaderClosed:
                if sender.broken is not None:
                    raise sender.broken from None
                if sender.error is None:
                    return sender.whole
                failure, sender.error = sender.error, None  # which refers to the sender
                raise failure from None
        except BaseException as raised:  # of the model and of the format
            if (
                not writer.started or raised is sender.broken or is_interruption(raised)
            ):  # the error still gets a status of its own
                raise
            error = raised if isinstance(raised, DragomanError) else DragomanError(_internal_error(context).message)
            last = stream.format_late_error(error)
        if not writer.started:
            await writer.start(200, stream.headers)
        if (sending := writer.write(last)) is not None:
            await sending
        await writer.end(stream.end)
        return None

    async def _send_error(
        self, protocol: HttpProtocol, writer: ResponseWriter, error: DragomanError | HttpError, context: Context
    ) -> None:
        """Send an error, or abort a response that has been started."""
        if writer.started:
            writer.abort()
        else:
            await writer.send(protocol.format_error(error, request_id(context)))


def _with_vary(response: HttpResponse) -> HttpResponse:
    return HttpResponse(response.status, response.body, (*response.headers, ("vary", "accept-encoding")))


def _internal_error(context: Context) -> HttpError:
    """Log the current exception and return the error for the client."""
    number = request_id(context)
    log.exception("unexpected error, request id %s", number)
    return HttpError(500, f"internal error; the log has more under request id {number}")
