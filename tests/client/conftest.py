"""A server with every model, and a client of each kind: REST and gRPC, blocking and asyncio."""

from collections.abc import Iterator
from typing import Any

import pytest

import dragoman
from client.client_servers import (
    Counter,
    Echo,
    Faulty,
    Gate,
    LoopThread,
    Mixed,
    Named,
    Pixels,
    Rows,
    Typed,
    power,
    url_of,
)

KINDS = [(wire, client_kind) for wire in ("rest", "grpc") for client_kind in ("blocking", "asyncio")]


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    loop_thread = LoopThread()
    yield loop_thread
    loop_thread.close()


@pytest.fixture(scope="session")
def server(loop_thread: LoopThread) -> Iterator[dragoman.Server]:
    with loop_thread.serving(Echo, Rows, Mixed, Named, Pixels, Typed, Faulty, Gate, Counter, power) as server:
        yield server


@pytest.fixture(scope="session", params=KINDS, ids="-".join)
def kind(request: Any) -> tuple[str, Any]:
    found: tuple[str, Any] = request.param
    return found


@pytest.fixture(scope="session")
def client(loop_thread: LoopThread, server: dragoman.Server, kind: tuple[str, Any]) -> Iterator[Any]:
    wire, client_kind = kind
    with loop_thread.client(client_kind, url_of(server, wire)) as client:
        yield client
