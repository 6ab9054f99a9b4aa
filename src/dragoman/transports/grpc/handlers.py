"""gRPC methods as handlers of messages."""

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import CoroutineType
from typing import Any, Protocol

from dragoman.core.calls import Response
from dragoman.core.errors import DragomanError, NotReady, ServerError
from dragoman.engine.call_handler import CallHandler
from dragoman.protocols.wire import (
    Buffer,
    EngineCall,
    GrpcMethod,
    GrpcProtocol,
    GrpcRequest,
    GrpcResponse,
    GrpcStreamMethod,
)
from dragoman.system.coroutines import Start
from dragoman.transports.executor import LARGE, MessageExecutor, weight
from dragoman.transports.loop_budget import LARGE_MESSAGE

log = logging.getLogger("dragoman.grpc")

# A message; where it comes in parts, these follow one another on the wire.
Reply = Buffer | Sequence[Buffer]

# What is there at once, or will be.
Begun = Reply | GrpcResponse | Coroutine[Any, Any, Reply | GrpcResponse]

# A status travels in headers, of which clients take about 8 KiB; a byte may become three there.
_MAX_MESSAGE_BYTES = 2000


class GrpcError(Exception):
    """The status that ends a call: the name of a gRPC status code, a message, and trailing metadata."""

    def __init__(self, status: str, message: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.metadata = metadata


class Peer(Protocol):
    """The client of one call with streams. Its methods raise CancelledError where it has left."""

    @property
    def metadata(self) -> Mapping[str, str]: ...

    @property
    def deadline_s(self) -> float | None: ...

    async def read(self) -> Any:
        """The next message, None after the last."""

    async def write(self, message: Reply) -> None:
        """Returns when there is room for another."""


@dataclass(frozen=True, slots=True)
class UnaryHandler:
    """Answers one message with one. Raises GrpcError. `begin`, where there is one, answers at once if it can."""

    answer: Callable[[GrpcRequest], Coroutine[Any, Any, Reply | GrpcResponse]]
    begin: "Callable[[GrpcRequest], Begun] | None" = None
    health: bool = False


@dataclass(frozen=True, slots=True)
class StreamHandler:
    """Reads from a peer and writes to it until the call is over. Raises GrpcError."""

    talk: Callable[[Peer], Coroutine[Any, Any, None]]
    health: bool = False


Handler = UnaryHandler | StreamHandler


def table_handlers(
    engine: CallHandler, protocols: Sequence[GrpcProtocol], stopping: asyncio.Future[None], executor: MessageExecutor
) -> dict[str, Handler]:
    """The methods of tables, by their paths."""
    found: dict[str, Handler] = {}
    for protocol in protocols:
        for method in protocol.methods:
            match method:
                case GrpcMethod():
                    handler: Handler = UnaryMethod(engine, protocol, method, executor).handler()
                case GrpcStreamMethod():
                    handler = StreamHandler(StreamMethod(engine, protocol, method, stopping, executor).talk)
            found[f"/{protocol.service}/{method.name}"] = handler
    return found


@dataclass(frozen=True, slots=True)
class UnaryMethod:
    """A method of one message in and one out."""

    engine: CallHandler
    protocol: GrpcProtocol
    method: GrpcMethod
    executor: MessageExecutor

    def handler(self) -> UnaryHandler:
        return UnaryHandler(self.answer, self.begin, self.method.health)

    async def answer(self, request: GrpcRequest) -> Reply | GrpcResponse:
        """A client that leaves cancels this coroutine."""
        if len(request.body) > LARGE_MESSAGE:
            return await self._read(request)
        done: Any = self.begin(request)
        found: Reply | GrpcResponse = await done if type(done) is CoroutineType else done
        return found

    def begin(self, request: GrpcRequest) -> Begun:
        """The answer, where it is there at once; else the coroutine that gives it. Raises GrpcError."""
        if len(request.body) > LARGE:
            return self._read(request)
        request_id = ""
        try:
            exchange = self.method.endpoint(request)
            request_id = exchange.request.id
            response = self.engine.begin(exchange.request)
            if not isinstance(response, Response) or weight(response.answer) > LARGE:
                return self._rest(exchange, response)
            return exchange.format_response(response)
        except Exception as fault:
            raise refusal(self.protocol, told(fault, request_id)) from fault

    async def _read(self, request: GrpcRequest) -> Reply | GrpcResponse:
        """The answer to a long message."""
        try:
            size = len(request.body)
            exchange = await self.executor.parse(self.method.endpoint, request, size, in_thread=size > LARGE)
        except Exception as fault:
            raise refusal(self.protocol, told(fault, "")) from fault
        return await self._rest(exchange, self.engine.call(exchange.request))

    async def _rest(
        self, exchange: EngineCall[Any, Any], response: Response[Any] | Awaitable[Response[Any]]
    ) -> Reply | GrpcResponse:
        """Wait for a response and serialize it."""
        try:
            if not isinstance(response, Response):
                response = await response
            written: Reply | GrpcResponse = await self.executor.format(exchange.format_response, response)
            return written
        except Exception as fault:
            raise refusal(self.protocol, told(fault, exchange.request.id)) from fault


@dataclass(frozen=True, slots=True)
class StreamMethod:
    """A method of messages both ways; they are answered one after the other.

    The next message is read, and the next piece asked of the model, when the last one has been written: a client
    that reads slowly slows down its own model calls and fills no queue here.
    """

    engine: CallHandler
    protocol: GrpcProtocol
    method: GrpcStreamMethod
    stopping: asyncio.Future[None]
    executor: MessageExecutor

    async def talk(self, peer: Peer) -> None:
        async with aclosing(received(peer, self.stopping)) as bodies:
            async for body in bodies:
                request = GrpcRequest(body, peer.metadata, peer.deadline_s)
                async with aclosing(self._answers(request)) as answers:
                    async for answer in answers:
                        await self._tell(request, answer, peer)
        if self.stopping.done():
            raise refusal(self.protocol, NotReady("the server is shutting down"))

    async def _answers(self, request: GrpcRequest) -> AsyncGenerator[bytes | DragomanError, None]:
        """The pieces of the answer, and what went wrong if something did; to write them may fail on its own."""
        request_id = ""
        try:
            size = len(request.body)
            stream = await self.executor.parse(self.method.endpoint, request, size, in_thread=size > LARGE)
            request_id = stream.request.id
            async with aclosing(self.engine.stream(stream.request)) as pieces:
                async for piece in pieces:
                    yield await self.executor.format(stream.format_chunk, piece)
            if stream.end is not None:
                yield stream.end
        except Exception as fault:
            yield told(fault, request_id)

    async def _tell(self, request: GrpcRequest, answer: Any, peer: Peer) -> None:
        written = self.method.format_error(request, answer) if isinstance(answer, DragomanError) else answer
        if written is None:
            raise refusal(self.protocol, answer)
        await peer.write(written)


async def received(peer: Peer, stopping: asyncio.Future[None]) -> AsyncGenerator[Any, None]:
    """The messages of a client as they come, until it or the server has no more wish for them."""
    loop = asyncio.get_running_loop()
    while not stopping.done():
        start = Start(peer.read(), loop)  # what has come already needs no task
        message, reading = start.result, start.task
        if start.error is not None:
            raise start.error
        if reading is not None:
            try:
                await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                reading.cancel()  # does nothing where it is done
            message = None if stopping.done() else await reading
        if message is None:
            return
        yield message


def told(fault: Exception, request_id: str) -> DragomanError:
    """What the caller is told of a fault. One that is not meant for callers is logged in full and told blandly."""
    if isinstance(fault, DragomanError):
        return fault
    request_id = request_id or uuid.uuid4().hex
    log.error("internal error, request id %r", request_id, exc_info=fault)
    return ServerError(f"internal error, request id {request_id}")


def refusal(protocol: GrpcProtocol, fault: DragomanError) -> GrpcError:
    """The status that tells of a fault."""
    metadata: tuple[tuple[str, str], ...] = ()
    wait_s = fault.retry_after_s
    if wait_s is not None:
        # gRPC: clients that retry by policy heed the second one (proposal A6).
        metadata = (("retry-after", str(math.ceil(wait_s))), ("grpc-retry-pushback-ms", str(math.ceil(wait_s * 1000))))
    message = fault.message.encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
    return GrpcError(protocol.status(fault), message, metadata)


def parts_of(reply: Reply) -> Sequence[Buffer]:
    """A message as its parts."""
    return (reply,) if isinstance(reply, bytes | bytearray | memoryview) else reply


def whole(reply: Reply) -> bytes:
    """A message in one piece."""
    return reply if isinstance(reply, bytes) else b"".join(parts_of(reply))
