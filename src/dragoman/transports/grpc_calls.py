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

    async def handle(self, body: bytes, context: Any) -> bytes:
        # `abort` raises, so it stands outside of what is caught; a client that leaves cancels this coroutine.
        answer = await self._answer(_request(body, context))
        if isinstance(answer, DragomanError):
            await _abort(context, self.protocol, answer)
        return answer

    async def _answer(self, request: GrpcRequest) -> bytes | DragomanError:
        request_id = ""
        try:
            exchange = self.method.endpoint(request)
            request_id = exchange.request.id
            return exchange.reply(await self.engine.call(exchange.request))
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

    async def handle(self, _: object, context: Any) -> None:
        async with aclosing(received(context, self.stopping)) as bodies:
            async for body in bodies:
                request = _request(body, context)
                fault = await self._answer(request, context)
                if fault is not None:
                    await self._tell(request, fault, context)
        if self.stopping.done():
            await _abort(context, self.protocol, NotReady("the server is shutting down"))

    async def _answer(self, request: GrpcRequest, context: Any) -> DragomanError | None:
        request_id = ""
        try:
            stream = self.method.endpoint(request)
            request_id = stream.request.id
            async with aclosing(self.engine.stream(stream.request)) as pieces:
                async for piece in pieces:
                    await context.write(stream.piece(piece))
            if stream.end is not None:
                await context.write(stream.end)
        except Exception as fault:
            return told(fault, request_id)
        return None

    async def _tell(self, request: GrpcRequest, fault: DragomanError, context: Any) -> None:
        in_band = self.method.fault(request, fault)
        if in_band is None:
            await _abort(context, self.protocol, fault)
        await context.write(in_band)


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
