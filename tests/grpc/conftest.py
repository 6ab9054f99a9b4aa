"""A server with a stand-in for the engine, and a channel to it."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_fakes import LIMIT, TABLE, FakeEngine

from dragoman.transports.grpc import GrpcServer

UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def server(engine: FakeEngine) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(engine, [TABLE], max_message_bytes=LIMIT)
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[Any]:
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED) as channel:
        yield channel
