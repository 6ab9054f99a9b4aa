"""Answers HTTP requests, whichever transport receives them.

A transport parses the request line and headers, calls `match` to find the endpoint, receives the body within the
limits, and calls `answer` with a `ResponseWriter`. The rest is the same for every transport: decompress the body, run
the protocol's endpoint, call the engine, format and compress the response. If the transport itself rejects a request,
`refusal` formats the error as its protocol does.
"""

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from dragoman.core.calls import ModelCall, Response
from dragoman.core.errors import DragomanError, NotReady
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
)
from dragoman.system.coroutines import ensure_task
from dragoman.transports.async_results import AsyncResult, AsyncResultStore, stored_result_request
from dragoman.transports.bodies import Bodies
from dragoman.transports.encoding import accepted, decoded, encoded
from dragoman.transports.executor import LARGE, MessageExecutor, is_large, weight
from dragoman.transports.limits import Limits
from dragoman.transports.response_writer import CorsResponseWriter, ResponseWriter
from dragoman.transports.routing import Match, Router

log = logging.getLogger("dragoman.http")

A = TypeVar("A")


class Begun(msgspec.Struct, frozen=True):
    """A call that has begun, with its response or an awaitable of it."""

    asked: EngineCall[Any, HttpResponse] | PreliminaryCall[Any]
    response: Response[Any] | Awaitable[Response[Any]]


class CompressibleResponse(msgspec.Struct, frozen=True):
    """A model's answer, written, which may be compressed. Nothing else ever is: clients of Triton that ask for gzip do
    not expect it of metadata, lists, health or errors."""

    response: HttpResponse


class Application:
    """Routes requests to protocols and their calls to the engine. `bodies` counts what all of them hold."""

    def __init__(
        self,
        engine: CallHandler,
        protocols: Sequence[HttpProtocol],
        limits: Limits,
        executor: MessageExecutor | None = None,
    ) -> None:
        self.limits = limits
        self.executor = executor or MessageExecutor(Bodies(limits.max_bodies_bytes))
        self.bodies = self.executor.bodies
        # Bytes of an answer from which on somebody may want it compressed.
        self._packed_from: float = limits.compress_min_bytes if limits.compress_responses else math.inf
        self._engine = engine
        self._router = Router(protocols)
        self._default = protocols[0]
        self._shelf = AsyncResultStore()

    def match(self, method: str, raw_path: str) -> Match:
        """What answers a path, still percent-encoded. Raises HttpError 404 or 405."""
        root = self.limits.root_path
        if root and raw_path.startswith(root) and raw_path[len(root) : len(root) + 1] in ("/", "", "?"):
            raw_path = raw_path[len(root) :] or "/"
        return self._router.match(method, raw_path)

    def refusal(self, fault: DragomanError | HttpError, protocol: HttpProtocol | None = None) -> HttpResponse:
        """The answer of a fault, in the shape of the protocol that it is about."""
        nearest = fault.protocol if isinstance(fault, HttpError) else None
        return (protocol or nearest or self._default).format_error(fault)

    def plain(self, match: Match | None, headers: Mapping[str, str]) -> bool:
        """Whether a request with this head, and a body that is not long, needs nothing but its endpoint and the engine:
        its answer may then be there at once, by `begin`."""
        unusual = "content-encoding" in headers or (self.limits.cors.on and "origin" in headers)
        return match is not None and match.endpoint is not None and not unusual

    def begin(
        self, match: Match, request: HttpRequest, caller: ResponseWriter
    ) -> HttpResponse | Coroutine[Any, Any, None]:
        """The answer to a `plain` request, where it is there at once; else what answers the caller as `answer` does."""
        asked = self._at_once(match, request)
        if type(asked) is HttpResponse:
            return asked
        if type(asked) is CompressibleResponse and "accept-encoding" not in request.headers:
            return _varying(asked.response)
        return self.answer(match, request, caller, asked)

    def _at_once(self, match: Match, request: HttpRequest) -> EndpointResult | Begun | CompressibleResponse:
        """How far a `plain` request comes without waiting: to its answer, or to that of its fault, if all goes well."""
        fault_of: Callable[[DragomanError], HttpResponse] | None = None
        try:
            assert match.endpoint is not None
            asked: EndpointResult = match.endpoint(request)
            while type(asked) is PreliminaryCall:
                response = self._engine.begin(asked.request)
                if not isinstance(response, Response):
                    return Begun(asked, response)
                asked = asked.then(response)
            if type(asked) is EngineCall:
                fault_of = asked.format_error
                response = self._engine.begin(asked.request)
                if not isinstance(response, Response) or weight(response.answer) > LARGE:
                    return Begun(asked, response)
                return self._written(asked.format_response(response), isinstance(asked.request.call, ModelCall))
            return asked
        except HttpError as fault:
            return match.protocol.format_error(fault)
        except DragomanError as fault:
            return match.protocol.format_error(fault) if fault_of is None else fault_of(fault)
        except Exception:
            return match.protocol.format_error(_internal())

    def _written(self, response: HttpResponse, inferred: bool) -> HttpResponse | CompressibleResponse:
        """A response, which is `CompressibleResponse` where a model made it and it is long enough to be compressed."""
        body = response.body
        size = len(body[0]) if len(body) == 1 else sum(map(len, body))
        if size < self._packed_from or response.status != 200 or not inferred:
            return response
        is_encoded = any(name == "content-encoding" for name, _ in response.headers)  # by the model itself
        return response if is_encoded else CompressibleResponse(response)

    async def answer(
        self,
        match: Match,
        request: HttpRequest,
        caller: ResponseWriter,
        asked: EndpointResult | Begun | CompressibleResponse | None = None,
    ) -> None:
        """Answer one request; it never raises. `asked` is what its endpoint has made of it, if that was run.

        Cancelling it cancels the work. A caller that has not left is then told that the server stops.
        """
        cors, preflight = self.limits.cors, None
        if cors.on and "origin" in request.headers:
            caller = CorsResponseWriter(caller, cors.added(request.headers))
            preflight = cors.preflight(request.method, request.headers)
        answering = self._answer(match, request, caller, asked) if preflight is None else caller.send(preflight)
        del request, asked  # so that the body's memory is free once the body was parsed, and the inputs' after the call
        try:
            await answering
        except asyncio.CancelledError:
            if not caller.left:
                await self._give_up(match.protocol, caller, NotReady("the server is shutting down"))
        except Exception:
            await self._give_up(match.protocol, caller, _internal())

    async def _answer(
        self,
        match: Match,
        request: HttpRequest,
        caller: ResponseWriter,
        asked: EndpointResult | Begun | CompressibleResponse | None,
    ) -> None:
        if match.endpoint is None:
            await caller.send(HttpResponse(204, (), (("allow", match.allow),)))
            return
        accept, held = request.headers.get("accept-encoding", ""), 0
        try:
            if "content-encoding" in request.headers and len(request.body):
                request = await self._unpacked(request)
                self.bodies.take(len(request.body))
                held = len(request.body)
            if asked is None:
                asked = await self._read(match.endpoint, request)
            elif isinstance(asked, Begun) and isinstance(asked.asked, PreliminaryCall):
                response = await _finished(asked.response)
                asked = await self._resolved(await self._parse(asked.asked.then, response, request), request)
            responding = (
                self._kept(asked, request)
                if isinstance(asked, ResultPoll | BackgroundCall)
                else self._done(asked, caller)
            )
            del request, asked
            done = await responding
        except (DragomanError, HttpError) as fault:
            await self._give_up(match.protocol, caller, fault)
        except Exception:
            await self._give_up(match.protocol, caller, _internal())
        else:
            if done is not None:
                await caller.send(await self._sendable(done, match.protocol, accept))
        finally:
            self.bodies.give_back(held)

    async def _unpacked(self, request: HttpRequest) -> HttpRequest:
        body = await decoded(request.body, request.headers["content-encoding"], self.limits.max_body_bytes)
        return HttpRequest(request.method, request.path, request.params, request.headers, body, request.query)

    async def _read(self, endpoint: Endpoint, request: HttpRequest) -> EndpointResult:
        return await self._resolved(await self._parse(endpoint, request, request), request)

    async def _resolved(self, asked: EndpointResult, request: HttpRequest) -> EndpointResult:
        """What a request asks for, once the engine has answered what its protocol has to know."""
        while isinstance(asked, PreliminaryCall):
            asked = await self._parse(asked.then, await self._engine.call(asked.request), request)
        return asked

    async def _parse(
        self, function: Callable[[A], EndpointResult], argument: A, request: HttpRequest
    ) -> EndpointResult:
        return await self.executor.parse(function, argument, len(request.body), in_thread=is_large(request))

    async def _done(
        self, asked: EndpointResult | Begun | CompressibleResponse, caller: ResponseWriter
    ) -> HttpResponse | CompressibleResponse | None:
        """The response, or None where it was a stream and has gone out."""
        begun: Response[Any] | Awaitable[Response[Any]] | None = None
        if isinstance(asked, Begun):
            begun, asked = asked.response, asked.asked
        if isinstance(asked, HttpResponse | CompressibleResponse):
            return asked
        assert isinstance(asked, EngineCall | HttpStream)
        fault_of = asked.format_error
        try:
            if isinstance(asked, HttpStream):
                await ensure_task()
                await self._stream(asked, caller)
                return None
            request, reply = asked.request, asked.format_response
            del asked
            inferred = isinstance(request.call, ModelCall)
            response = await _finished(self._engine.begin(request) if begun is None else begun)
            del request, begun
            size = weight(response.answer)
            written = await self.executor.format(reply, response, size)
            return self._written(written, inferred=inferred)
        except DragomanError as fault:
            if fault_of is None or caller.started:
                raise
            return fault_of(fault)

    async def stored_result_request(self, request: HttpRequest) -> HttpResponse:
        """The answer to a request that has come to a front end, about one that is kept here."""
        match = self.match(request.method, quote(request.path))
        assert match.endpoint is not None
        asked = await self._read(match.endpoint, request)
        assert isinstance(asked, ResultPoll | BackgroundCall)
        return await self._kept(asked, request)

    async def _kept(self, asked: ResultPoll | BackgroundCall, request: HttpRequest) -> HttpResponse:
        if not self.limits.keeps_answers:
            return (await self._engine.call(stored_result_request(request))).answer
        if isinstance(asked, ResultPoll):
            return self._shelf.fetch(asked)
        return self._shelf.begin(asked, partial(self._work, asked, request))

    async def _work(self, later: BackgroundCall, request: HttpRequest, kept: AsyncResult) -> None:
        """Work out an answer that is fetched later."""
        try:
            try:
                done = await self._done(await self._resolved(later.call, request), kept)
            except (DragomanError, HttpError) as fault:
                done = later.format_error(fault)
            except Exception:
                done = later.format_error(_internal())
            if done is not None and not kept.started:
                await kept.send(done.response if isinstance(done, CompressibleResponse) else done)
        finally:
            if not kept.done:
                kept.hang_up()

    async def _sendable(
        self, done: HttpResponse | CompressibleResponse, protocol: HttpProtocol, accept: str
    ) -> HttpResponse:
        """The response, compressed if it is `CompressibleResponse` and the client's `accept-encoding` allows it."""
        response = done.response if isinstance(done, CompressibleResponse) else done
        if self.bodies.over and sum(map(len, response.body)) > LARGE:
            return protocol.format_error(self.bodies.unread)
        if not isinstance(done, CompressibleResponse):
            return response
        response = _varying(response)
        encoding = accepted(accept)
        if encoding is None:
            return response
        body = await encoded(list(response.body), encoding)
        return HttpResponse(response.status, (body,), (*response.headers, ("content-encoding", encoding)))

    async def _stream(self, stream: HttpStream[Any], caller: ResponseWriter) -> None:
        async with (
            aclosing(self._engine.stream(stream.request)) as pieces,
            aclosing(self._texts(stream, pieces)) as texts,
        ):
            # A fault before the first piece is written still gets its own status.
            first = await anext(pieces, None)
            text = await self.executor.format(stream.format_chunk, first) if first is not None else b""
            await caller.start(200, stream.headers)
            await caller.write(text)
            async for text in texts:
                await caller.write(text)
            await caller.end(stream.end)

    async def _texts(
        self, stream: HttpStream[Any], pieces: AsyncGenerator[Response[Any], None]
    ) -> AsyncGenerator[bytes, None]:
        """Each further piece as it is written, and what closes them; a fault becomes the stream's own error instead."""
        try:
            async for piece in pieces:
                yield await self.executor.format(stream.format_chunk, piece)
            yield stream.format_last_chunk()
        except DragomanError as fault:
            yield stream.format_late_error(fault)
        except Exception:
            yield stream.format_late_error(DragomanError(_internal().message))

    async def _give_up(self, protocol: HttpProtocol, caller: ResponseWriter, fault: DragomanError | HttpError) -> None:
        """Answer with a fault, or hang up where an answer is under way already."""
        if caller.started:
            caller.hang_up()
        else:
            await caller.send(protocol.format_error(fault))


async def _finished(response: Response[A] | Awaitable[Response[A]]) -> Response[A]:
    return response if isinstance(response, Response) else await response


def _varying(response: HttpResponse) -> HttpResponse:
    """An answer that others may get compressed."""
    return HttpResponse(response.status, response.body, (*response.headers, ("vary", "accept-encoding")))


def _internal() -> HttpError:
    number = uuid.uuid4().hex[:12]
    log.exception("unexpected fault, request id %s", number)
    return HttpError(500, f"internal error; the log has more under request id {number}")
