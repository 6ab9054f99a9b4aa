"""The standard gRPC health service: SERVING while the engine is ready."""

import asyncio
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from dragoman.engine.call_handler import CallHandler
from dragoman.protocols.wire import Buffer, GrpcRequest
from dragoman.transports.grpc.descriptors import load_descriptor, message_classes
from dragoman.transports.grpc.handlers import GrpcError, Handler, Peer, StreamHandler, UnaryHandler

SERVICE = "grpc.health.v1.Health"
DESCRIPTOR = load_descriptor("health")

_CLASSES = message_classes(DESCRIPTOR)
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3  # HealthCheckResponse.ServingStatus


class Health:
    """Health of the server, named "", and of each of its services."""

    def __init__(self, engine: CallHandler, services: Sequence[str], stopping: asyncio.Future[None]) -> None:
        self._engine = engine
        self._services = frozenset(("", *services))
        self._stopping = stopping

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers of the service by path."""
        return {
            f"/{SERVICE}/Check": UnaryHandler(self.check, health=True),
            f"/{SERVICE}/Watch": StreamHandler(self.watch, health=True),
        }

    async def check(self, request: GrpcRequest) -> bytes:
        service = _parse_service(request.body)
        status = self._status(service)
        if status == _SERVICE_UNKNOWN:
            raise GrpcError("NOT_FOUND", f"there is no service '{service}'")
        return _serialize(status)

    async def watch(self, peer: Peer) -> None:
        """Send the status now and whenever it changes, until the server stops."""
        message = await peer.read()
        if message is None:
            raise GrpcError("INTERNAL", "expected one message, got none")
        service, last = _parse_service(message), None
        while True:
            status = self._status(service)
            if status != last:
                await peer.write(_serialize(status))
                last = status
            elif self._stopping.done():
                return
            else:
                await self._next_change(service, status)

    async def _next_change(self, service: str, status: int) -> None:
        changing = asyncio.ensure_future(self._engine.changed())
        try:
            await asyncio.sleep(0)  # let it subscribe, so that no change after the next line is missed
            if self._status(service) == status:
                await asyncio.wait({changing, self._stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changing.cancel()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return _SERVICE_UNKNOWN
        return _SERVING if self._engine.ready() and not self._stopping.done() else _NOT_SERVING


def _parse_service(message: Buffer) -> str:
    """Return the service that a HealthCheckRequest names. Raises GrpcError."""
    try:
        return str(_CLASSES["HealthCheckRequest"].FromString(bytes(message)).service)
    except DecodeError as error:
        raise GrpcError(
            "INVALID_ARGUMENT", f"the message is not a grpc.health.v1.HealthCheckRequest: {error}"
        ) from error


def _serialize(status: int) -> bytes:
    response: Any = _CLASSES["HealthCheckResponse"](status=status)
    return bytes(response.SerializeToString())
