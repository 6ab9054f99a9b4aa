"""A server with a fake engine, and a channel to it."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_fakes import FakeEngine, make_server

UNLIMITED = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def server(engine: FakeEngine) -> AsyncIterator[Any]:
    server = make_server(engine)
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: Any) -> AsyncIterator[Any]:
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED) as channel:
        yield channel
