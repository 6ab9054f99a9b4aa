"""The standard gRPC health service, which tells what the engine tells."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from dragoman.transports.grpc_calls import Answers

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

    def handlers(self) -> Any:
        """The handlers of the service."""
        ask, tell = health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self.check, ask, tell),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch, ask, tell),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service '{request.service}'")
        return health_pb2.HealthCheckResponse(status=status)

    async def watch(self, request: Any, context: Any) -> None:
        """Tells the status now and whenever it changes."""
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            elif self._stopping.done():
                return
            else:
                await self._next_change(request.service, status)

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
