"""Fixtures that serve models from a background thread, for tests with blocking clients."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import dragoman


@pytest.fixture
def serve_model(serve_in_background: Callable[..., str]) -> Callable[[Any], str]:
    """Return a function that serves a model until the test ends and returns the server's URL."""
    return serve_in_background


@pytest.fixture
def serve_trusted_model(serve_in_background: Callable[..., str]) -> Callable[[Any], str]:
    """Return the same function for model files that may execute code when they are loaded."""
    return lambda model: serve_in_background(model, allow_pickle=True)


@pytest.fixture
def serve_in_background() -> Iterator[Callable[..., str]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers: list[Any] = []

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    def serve(model: Any, **settings: Any) -> str:
        server = dragoman.Server(model, http_port=0, grpc_port=-1, placement="thread", **settings)
        servers.append(server)
        run(server.__aenter__())
        return str(server.http_url)

    yield serve
    for server in servers:
        run(server.__aexit__(None, None, None))
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()
