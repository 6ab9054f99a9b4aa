"""A server with a stand-in for the engine, of either kind, and a channel to it."""

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


@pytest.fixture(params=["own", "grpcio"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which server carries the calls."""
    found: str = request.param
    return found


@pytest.fixture
async def server(kind: str, engine: FakeEngine) -> AsyncIterator[Any]:
    server = make_server(kind, engine)
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: Any) -> AsyncIterator[Any]:
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED) as channel:
        yield channel
