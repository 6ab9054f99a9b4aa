"""The methods of a gRPC table as handlers: bytes in, through the engine, bytes out."""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import grpc

from dragoman.core.calls import Request, Response
from dragoman.core.errors import DragomanError, NotReady, ServerError
from dragoman.protocols.wire import GrpcMethod, GrpcProtocol, GrpcRequest, GrpcStreamMethod
from dragoman.transports.aside import Aside

A = TypeVar("A")
log = logging.getLogger("dragoman.grpc")

# A status travels in headers, of which clients take about 8 KiB; a byte may become three there.
_MAX_MESSAGE_BYTES = 2000


class Answers(Protocol):
    """What this transport needs of the engine."""

    async def call(self, request: Request[A]) -> Response[A]: ...

    def stream(self, request: Request[A]) -> AsyncGenerator[Response[A], None]: ...

    def ready(self) -> bool: ...

    async def changed(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Unary:
    """A method of one message in and one out."""

    engine: Answers
    protocol: GrpcProtocol
    method: GrpcMethod
    aside: Aside

    async def handle(self, body: bytes, context: Any) -> bytes:
        # `abort` raises, so it stands outside of what is caught; a client that leaves cancels this coroutine.
        answer = await self._answer(_request(body, context))
        if isinstance(answer, DragomanError):
            await _abort(context, self.protocol, answer)
        return answer

    async def _answer(self, request: GrpcRequest) -> bytes | DragomanError:
        request_id = ""
        try:
            exchange = await self.aside.read(self.method.endpoint, request, len(request.body))
            request_id = exchange.request.id
            return await self.aside.write(exchange.reply, await self.engine.call(exchange.request))
        except Exception as fault:
            return told(fault, request_id)


@dataclass(frozen=True, slots=True)
class Stream:
    """A method of messages both ways; they are answered one after the other.

    The next message is read, and the next piece asked of the model, when the last one has been written: a client
    that reads slowly slows down its own model calls and fills no queue here.
    """

    engine: Answers
    protocol: GrpcProtocol
    method: GrpcStreamMethod
    stopping: asyncio.Future[None]
    aside: Aside

    async def handle(self, _: object, context: Any) -> None:
        async with aclosing(received(context, self.stopping)) as bodies:
            async for body in bodies:
                request = _request(body, context)
                async with aclosing(self._answers(request)) as answers:
                    async for answer in answers:
                        await self._tell(request, answer, context)
        if self.stopping.done():
            await _abort(context, self.protocol, NotReady("the server is shutting down"))

    async def _answers(self, request: GrpcRequest) -> AsyncGenerator[bytes | DragomanError, None]:
        """The pieces of the answer, and what went wrong if something did; to write them may fail on its own."""
        request_id = ""
        try:
            stream = await self.aside.read(self.method.endpoint, request, len(request.body))
            request_id = stream.request.id
            async with aclosing(self.engine.stream(stream.request)) as pieces:
                async for piece in pieces:
                    yield await self.aside.write(stream.piece, piece)
            if stream.end is not None:
                yield stream.end
        except Exception as fault:
            yield told(fault, request_id)

    async def _tell(self, request: GrpcRequest, answer: bytes | DragomanError, context: Any) -> None:
        written = self.method.fault(request, answer) if isinstance(answer, DragomanError) else answer
        if isinstance(answer, DragomanError) and written is None:
            await _abort(context, self.protocol, answer)
        try:
            await context.write(written)
        except Exception as fault:  # what is written are bytes of ours, so it can only be that nobody is there
            log.debug("a client left its stream: %s", fault)
            raise asyncio.CancelledError from None


async def received(context: Any, stopping: asyncio.Future[None]) -> AsyncGenerator[Any, None]:
    """The messages of a client as they come, until it or the server has no more wish for them."""
    while not stopping.done():
        reading = asyncio.ensure_future(context.read())
        try:
            await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()  # does nothing where it is done
        if stopping.done() or (message := await reading) is grpc.aio.EOF:
            return
        yield message


def told(fault: Exception, request_id: str) -> DragomanError:
    """What the caller is told of a fault. One that is not meant for callers is logged in full and told blandly."""
    if isinstance(fault, DragomanError):
        return fault
    request_id = request_id or uuid.uuid4().hex
    log.error("internal error, request id %r", request_id, exc_info=fault)
    return ServerError(f"internal error, request id {request_id}")


def _request(body: bytes, context: Any) -> GrpcRequest:
    left_s = context.time_remaining()
    return GrpcRequest(
        body,
        {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)},
        None if left_s is None else time.monotonic() + left_s,
    )


async def _abort(context: Any, protocol: GrpcProtocol, fault: DragomanError) -> NoReturn:
    metadata: tuple[tuple[str, str], ...] = ()
    wait_s = fault.retry_after_s
    if wait_s is not None:
        # gRPC: clients that retry by policy heed the second one (proposal A6).
        metadata = (("retry-after", str(math.ceil(wait_s))), ("grpc-retry-pushback-ms", str(math.ceil(wait_s * 1000))))
    message = fault.message.encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
    await context.abort(grpc.StatusCode[protocol.status(fault)], message, metadata)
    raise AssertionError("abort raises")
