"""All services of a gRPC server: its tables, health and reflection."""

import asyncio
from collections.abc import Sequence

from dragoman.engine.answers import Answers
from dragoman.protocols.wire import GrpcProtocol
from dragoman.transports import grpc_health
from dragoman.transports.bodies import Bodies
from dragoman.transports.grpc_calls import Handler, table_handlers
from dragoman.transports.grpc_health import Health
from dragoman.transports.grpc_reflection import reflection


def handlers(
    engine: Answers, protocols: Sequence[GrpcProtocol], stopping: asyncio.Future[None], bodies: Bodies | None = None
) -> dict[str, Handler]:
    """What answers each path, `/service/method`. Streams end, and health is NOT_SERVING, once `stopping` is done.

    Large answers that are being written count among `bodies`, where there is such a budget.
    """
    health = Health(engine, [p.service for p in protocols], stopping)
    about = reflection(protocols, [(grpc_health.SERVICE, grpc_health.DESCRIPTOR)], stopping)
    return {**table_handlers(engine, protocols, stopping, bodies or Bodies(0)), **health.handlers(), **about.handlers()}
