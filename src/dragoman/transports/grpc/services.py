"""All services of a gRPC server: those of its protocols, health and reflection."""

import asyncio
from collections.abc import Sequence

from dragoman.engine.call_handler import CallHandler
from dragoman.protocols.wire import GrpcProtocol
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.grpc import health
from dragoman.transports.grpc.handlers import Handler, table_handlers
from dragoman.transports.grpc.health import Health
from dragoman.transports.grpc.reflection import make_reflection


def make_handlers(
    engine: CallHandler, protocols: Sequence[GrpcProtocol], stopping: asyncio.Future[None], executor: MessageExecutor
) -> dict[str, Handler]:
    """Return the handler of each path, `/service/method`.

    Once `stopping` is done, streams end and health is NOT_SERVING. `executor` parses and formats the messages
    of the protocols.
    """
    checks = Health(engine, [p.service for p in protocols], stopping)
    reflection = make_reflection(protocols, [(health.SERVICE, health.DESCRIPTOR)], stopping)
    tables = table_handlers(engine, protocols, stopping, executor)
    return {**tables, **checks.handlers(), **reflection.handlers()}
