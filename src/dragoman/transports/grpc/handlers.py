"""gRPC methods as handlers of messages."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from types import CoroutineType
from typing import Any, NoReturn, Protocol

import msgspec

from dragoman.core.callers import Caller
from dragoman.core.calls import Response
from dragoman.core.chunks import ReaderClosed
from dragoman.core.errors import DragomanError, NotReady, ServerError
from dragoman.core.foreign_code import is_interruption
from dragoman.core.sizes import INLINE, THREAD
from dragoman.engine.call_handler import CallHandler
from dragoman.protocols.wire import (
    Buffer,
    CallRecord,
    EngineCall,
    GrpcMethod,
    GrpcProtocol,
    GrpcRequest,
    GrpcResponse,
    GrpcStream,
    GrpcStreamMethod,
    PreliminaryCall,
    Role,
)
from dragoman.system.coroutines import Start
from dragoman.system.request_context import Context, request_id
from dragoman.transports.executor import MessageExecutor, weight

log = logging.getLogger("dragoman.grpc")

# A message; the buffers of a large one are sent one after the other.
Reply = Buffer | Sequence[Buffer]

# A result, or a coroutine that gives it.
Begun = Reply | GrpcResponse | Coroutine[Any, Any, Reply | GrpcResponse]

# The message of a status is sent in headers, which clients limit to about 8 KiB; percent-encoding triples a byte.
_MAX_MESSAGE_BYTES = 2000


class GrpcError(Exception):
    """The status that ends a call: the name of a gRPC status code, a message, and trailing metadata."""

    def __init__(self, status: str, message: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.metadata = metadata


class Peer(Protocol):
    """The client of a streaming call. The methods raise CancelledError if it has disconnected."""

    @property
    def metadata(self) -> Mapping[str, str]: ...

    @property
    def deadline_s(self) -> float | None: ...

    @property
    def context(self) -> Context: ...

    @property
    def caller(self) -> Caller: ...

    @property
    def record(self) -> CallRecord | None: ...

    async def read(self) -> Any:
        """Return the next message, None after the last."""

    def write(self, message: Reply) -> Awaitable[None] | None:
        """Send a message; return what to await before the next one, None if another can be sent at once."""

    def count_unread(self, size: int) -> None:
        """Count `size` bytes more, or fewer if negative, that wait for the client beside the messages written."""


class UnaryHandler(msgspec.Struct, frozen=True):
    """Handles a unary method. `begin`, if there is one, may return its result at once. Both raise GrpcError.

    `with_engine` returns the handler of calls that another engine answers; None if it needs none.
    """

    answer: Callable[[GrpcRequest], Coroutine[Any, Any, Reply | GrpcResponse]]
    begin: "Callable[[GrpcRequest], Begun] | None" = None
    health: bool = False
    role: Role = "read"
    with_engine: "Callable[[CallHandler], UnaryHandler] | None" = None
    protocol: str = ""


class StreamHandler(msgspec.Struct, frozen=True):
    """Handles a streaming method: reads from a peer and writes to it until the call ends. Raises GrpcError."""

    talk: Callable[[Peer], Coroutine[Any, Any, None]]
    health: bool = False
    role: Role = "read"
    with_engine: "Callable[[CallHandler], StreamHandler] | None" = None
    protocol: str = ""


Handler = UnaryHandler | StreamHandler


def table_handlers(
    engine: CallHandler, protocols: Sequence[GrpcProtocol], stopping: asyncio.Future[None], executor: MessageExecutor
) -> dict[str, Handler]:
    found: dict[str, Handler] = {}
    for protocol in protocols:
        for method in protocol.methods:
            match method:
                case GrpcMethod():
                    handler: Handler = UnaryMethod(engine, protocol, method, executor).handler()
                case GrpcStreamMethod():
                    handler = StreamMethod(engine, protocol, method, stopping, executor).handler()
            found[f"/{protocol.service}/{method.name}"] = handler
            for service, names in protocol.other_services.items():
                if method.name in names:
                    found[f"/{service}/{method.name}"] = handler
    return found


class UnaryMethod(msgspec.Struct, frozen=True):
    """A unary method of a protocol."""

    engine: CallHandler
    protocol: GrpcProtocol
    method: GrpcMethod
    executor: MessageExecutor

    def handler(self) -> UnaryHandler:
        return UnaryHandler(
            self.answer, self.begin, self.method.health, self.method.role, self._with_engine, self.protocol.key
        )

    def _with_engine(self, engine: CallHandler) -> UnaryHandler:
        return UnaryMethod(engine, self.protocol, self.method, self.executor).handler()

    async def answer(self, request: GrpcRequest) -> Reply | GrpcResponse:
        """Return the response; cancelled if the client disconnects."""
        if len(request.body) > INLINE:
            return await self._read(request)
        done: Any = self.begin(request)
        found: Reply | GrpcResponse = await done if type(done) is CoroutineType else done
        return found

    def begin(self, request: GrpcRequest) -> Begun:
        """Return the response if it is there at once; else a coroutine that returns it. Raises GrpcError."""
        if len(request.body) > THREAD:
            return self._read(request)
        own_id = ""
        try:
            exchange = self.method.endpoint(request)
            own_id = exchange.request.id
            if request.record is not None:
                request.record.set_call(exchange.request)
            response = self.engine.begin(exchange.request)
            if not isinstance(response, Response) or weight(response.answer) > THREAD:
                return self._rest(exchange, response, request.context)
            return exchange.format_response(response)
        except BaseException as error:
            raise status_error(self.protocol, public_error(error, request.context, own_id)) from error

    async def _read(self, request: GrpcRequest) -> Reply | GrpcResponse:
        """Parse a large message and return the response."""
        try:
            size = len(request.body)
            exchange = await self.executor.parse(self.method.endpoint, request, size, in_thread=size > THREAD)
        except BaseException as error:
            if is_interruption(error):
                raise
            raise status_error(self.protocol, public_error(error, request.context)) from error
        if request.record is not None:
            request.record.set_call(exchange.request)
        return await self._rest(exchange, self.engine.call(exchange.request), request.context)

    async def _rest(
        self, exchange: EngineCall[Any, Any], response: Response[Any] | Awaitable[Response[Any]], context: Context
    ) -> Reply | GrpcResponse:
        try:
            if not isinstance(response, Response):
                response = await response
            written: Reply | GrpcResponse = await self.executor.format(exchange.format_response, response)
            return written
        except BaseException as error:
            if is_interruption(error):
                raise
            raise status_error(self.protocol, public_error(error, context, exchange.request.id)) from error


class StreamMethod(msgspec.Struct, frozen=True):
    """A streaming method of a protocol; messages are handled one after the other.

    The next message is read, and the next response requested, once the last one has been written: a client that reads
    slowly slows down its own calls only, and fills no queue.
    """

    engine: CallHandler
    protocol: GrpcProtocol
    method: GrpcStreamMethod
    stopping: asyncio.Future[None]
    executor: MessageExecutor

    def handler(self) -> StreamHandler:
        return StreamHandler(
            self.talk, role=self.method.role, with_engine=self._with_engine, protocol=self.protocol.key
        )

    def _with_engine(self, engine: CallHandler) -> StreamHandler:
        return StreamMethod(engine, self.protocol, self.method, self.stopping, self.executor).handler()

    async def talk(self, peer: Peer) -> None:
        async with aclosing(read_messages(peer, self.stopping)) as bodies:
            async for body in bodies:
                request = GrpcRequest(body, peer.metadata, peer.deadline_s, peer.context, peer.caller, peer.record)
                await self._answer(request, peer)
        if self.stopping.done():
            raise status_error(self.protocol, NotReady("the server is shutting down"))

    async def _answer(self, request: GrpcRequest, peer: Peer) -> None:
        """Write the response messages to one message, and its error if there is one."""
        own_id, stream = "", None
        try:
            size = len(request.body)
            stream = await self.executor.parse(self.method.endpoint, request, size, in_thread=size > THREAD)
            own_id = stream.request.id
            if isinstance(stream, PreliminaryCall):
                stream = stream.then(await self.engine.call(stream.request))
            if request.record is not None:
                request.record.set_call(stream.request)
            sender = _MessageSender(stream, peer, self.executor)
            try:
                await self.engine.stream(stream.request).send_to(sender.take)
            except ReaderClosed:
                failure, sender.error = sender.error, None  # which refers to the sender
                raise failure or GrpcError("CANCELLED", "the call was cancelled") from None
            last = stream.format_end()
        except BaseException as error:
            if is_interruption(error) or isinstance(error, GrpcError):
                raise
            found = public_error(error, request.context, own_id)
            if isinstance(stream, GrpcStream) and stream.ends_with_status:
                raise status_error(self.protocol, found) from error
            last = self.method.format_error(request, found)
            if last is None:
                raise status_error(self.protocol, found) from error
        if last is not None and (sending := peer.write(last)) is not None:
            await sending


class _MessageSender:
    """Formats the responses of one stream and writes them to its client.

    error: of the format or of the response, which ends the stream; a GrpcError ends the call.
    """

    __slots__ = ("_executor", "_peer", "_stream", "error")

    def __init__(self, stream: GrpcStream[Any], peer: Peer, executor: MessageExecutor) -> None:
        self._stream = stream
        self._peer = peer
        self._executor = executor
        self.error: BaseException | None = None

    def take(self, response: Response[Any]) -> Awaitable[None] | None:
        """Write a message; see `dragoman.core.chunks.Take`."""
        answer = response.answer
        size = weight(answer)
        if size > INLINE:
            return self._take_large(response, size)
        try:
            if isinstance(answer, DragomanError):
                message = self._stream.format_error(answer)
                if message is None:
                    raise answer
            else:
                message = self._stream.format_chunk(response)
            return self._peer.write(message)
        except BaseException as error:
            self._fail(error)

    async def _take_large(self, response: Response[Any], size: int) -> None:
        """Write a large message. It counts as unread while it is formatted: other streams of the client must not run
        ahead."""
        try:
            self._peer.count_unread(size)
            try:
                message = await self._executor.format(self._stream.format_chunk, response, size)
            finally:
                self._peer.count_unread(-size)
            if (sending := self._peer.write(message)) is not None:
                await sending
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> NoReturn:
        if is_interruption(error):
            raise error
        self.error = error
        raise ReaderClosed from error


async def read_messages(peer: Peer, stopping: asyncio.Future[None]) -> AsyncGenerator[Any, None]:
    """Yield the messages of a client until it has sent the last one or the server stops."""
    loop = asyncio.get_running_loop()
    while not stopping.done():
        start = Start(peer.read(), loop)  # no task is needed for a message that has arrived
        message, reading = start.result, start.task
        if start.error is not None:
            raise start.error
        if reading is not None:
            try:
                await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                reading.cancel()  # does nothing if it is done
            message = None if stopping.done() else await reading
        if message is None:
            return
        yield message


def public_error(error: BaseException, context: Context, own_id: str = "") -> DragomanError:
    """Return the error for the client; an unexpected exception is logged and becomes an internal error.

    `own_id`: the id in the message, which precedes that of the context.
    """
    if isinstance(error, DragomanError):
        return error
    number = own_id or request_id(context)
    log.error("internal error, request id %r", number, exc_info=error)
    return ServerError(f"internal error, request id {number}")


def retry_metadata(wait_s: float) -> tuple[tuple[str, str], ...]:
    """Return trailers after which clients retry; those with a retry policy use the second one (gRPC proposal A6)."""
    return ("retry-after", str(math.ceil(wait_s))), ("grpc-retry-pushback-ms", str(math.ceil(wait_s * 1000)))


def status_error(protocol: GrpcProtocol, error: DragomanError) -> GrpcError:
    metadata = () if error.retry_after_s is None else retry_metadata(error.retry_after_s)
    message = error.message.encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
    return GrpcError(protocol.status(error), message, metadata)


def chunks_of(reply: Reply) -> Sequence[Buffer]:
    return (reply,) if isinstance(reply, bytes | bytearray | memoryview) else reply
