"""The standard gRPC health service, which tells what the engine tells."""

import asyncio
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from dragoman.engine.answers import Answers
from dragoman.protocols.wire import Buffer, GrpcRequest
from dragoman.transports.grpc_calls import Handler, Peer, Refusal, StreamHandler, UnaryHandler

SERVICE = "grpc.health.v1.Health"
DESCRIPTOR: bytes = health_pb2.DESCRIPTOR.serialized_pb

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """Health of the server, called "", and of each of its services: SERVING while the engine is ready.

    The ready-made servicer of grpcio keeps a copy of the status, and its watchers hold up a stop until the grace
    period is over; this one asks the engine itself and lets its watchers go.
    """

    def __init__(self, engine: Answers, services: Sequence[str], stopping: asyncio.Future[None]) -> None:
        self._engine = engine
        self._services = frozenset(("", *services))
        self._stopping = stopping

    def handlers(self) -> dict[str, Handler]:
        """The handlers of the service, by their paths."""
        return {
            f"/{SERVICE}/Check": UnaryHandler(self.check, health=True),
            f"/{SERVICE}/Watch": StreamHandler(self.watch, health=True),
        }

    async def check(self, request: GrpcRequest) -> bytes:
        service = _asked(request.body)
        status = self._status(service)
        if status == _UNKNOWN:
            raise Refusal("NOT_FOUND", f"there is no service '{service}'")
        return _written(status)

    async def watch(self, peer: Peer) -> None:
        """Tells the status now and whenever it changes."""
        message = await peer.read()
        if message is None:
            raise Refusal("INTERNAL", "expected one message, got none")
        service, last = _asked(message), None
        while True:
            status = self._status(service)
            if status != last:
                await peer.write(_written(status))
                last = status
            elif self._stopping.done():
                return
            else:
                await self._next_change(service, status)

    async def _next_change(self, service: str, status: int) -> None:
        changing = asyncio.ensure_future(self._engine.changed())
        try:
            await asyncio.sleep(0)  # now it listens, so that no change after the next line is missed
            if self._status(service) == status:
                await asyncio.wait({changing, self._stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changing.cancel()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(_UNKNOWN)
        return int(_SERVING if self._engine.ready() and not self._stopping.done() else _NOT_SERVING)


def _asked(message: Buffer) -> str:
    """The service that a question names."""
    try:
        return str(health_pb2.HealthCheckRequest.FromString(bytes(message)).service)
    except DecodeError as fault:
        raise Refusal("INVALID_ARGUMENT", f"the message is no grpc.health.v1.HealthCheckRequest: {fault}") from fault


def _written(status: int) -> bytes:
    answer: Any = health_pb2.HealthCheckResponse(status=status)
    return bytes(answer.SerializeToString())
