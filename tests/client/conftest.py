"""A server with every model, and each test against it four times: over both wires, from both clients."""

from collections.abc import Iterator
from typing import Any

import pytest

import dragoman
from client.client_servers import Counter, Echo, Faulty, Gate, LoopThread, Mixed, Rows, power, url_of

KINDS = [(wire, twin) for wire in ("rest", "grpc") for twin in ("blocking", "asyncio")]


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    loop_thread = LoopThread()
    yield loop_thread
    loop_thread.close()


@pytest.fixture(scope="session")
def server(loop_thread: LoopThread) -> Iterator[dragoman.Server]:
    with loop_thread.serving(Echo, Rows, Mixed, Faulty, Gate, Counter, power) as server:
        yield server


@pytest.fixture(scope="session", params=KINDS, ids="-".join)
def kind(request: Any) -> tuple[str, Any]:
    found: tuple[str, Any] = request.param
    return found


@pytest.fixture(scope="session")
def client(loop_thread: LoopThread, server: dragoman.Server, kind: tuple[str, Any]) -> Iterator[Any]:
    wire, twin = kind
    with loop_thread.client(twin, url_of(server, wire)) as client:
        yield client
