"""Concurrent large requests are handled one by one, each in its own iteration of the event loop."""

import asyncio
import gzip
import itertools
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import pytest_asyncio
import uvloop

from dragoman.core.sizes import INLINE, THREAD
from dragoman.protocols.wire import HttpProtocol, HttpRequest, HttpResponse, Route, json_response
from dragoman.transports.application import Application
from dragoman.transports.http_server import HttpServer
from dragoman.transports.limits import Limits

from .loop_iterations import Iterations

CLIENTS = 6
LARGE_TEXT = THREAD // 4
BODY = bytes(range(256)) * (INLINE // 256 + 1)
LONG_S = 0.015  # more than large requests may take of one iteration


class Endpoint(Iterations):
    """A slow endpoint, with the iterations in which it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def answer(self, request: HttpRequest) -> HttpResponse:
        self.numbers.append(self.number)
        self.thread = threading.current_thread()
        if request.method == "GET":
            return HttpResponse(200, (b"%d" % self.number,))
        time.sleep(LONG_S)
        return HttpResponse(200, (b"%d %r" % (len(request.body), bytes(request.body[:4])),))


@pytest_asyncio.fixture
async def iterations() -> AsyncIterator[Endpoint]:
    iterations = Endpoint()
    yield iterations
    iterations.stop()


@pytest_asyncio.fixture
async def port(iterations: Endpoint) -> AsyncIterator[int]:
    engine: Any = None  # not called
    table = HttpProtocol(
        "test",
        (Route("POST", "/", iterations.answer), Route("GET", "/", iterations.answer)),
        lambda error, _: json_response({"error": str(error)}, getattr(error, "status", 500)),
    )
    # There is memory for the concurrent bodies and no further one.
    server = HttpServer(Application(engine, (table,), Limits(max_bodies_bytes=CLIENTS * (len(BODY) + 1024))))
    (found,) = await server.start([("127.0.0.1", 0)])
    yield found
    await server.stop(0.0)


async def clients(port: int, body: bytes, headers: bytes = b"") -> list[tuple[asyncio.StreamReader, Any]]:
    """Connect clients that have sent all of a request but its last byte."""
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CLIENTS)]
    for _, writer in opened:
        start = b"POST / HTTP/1.1\r\nhost: a\r\n%bcontent-length: %d\r\n\r\n" % (headers, len(body))
        writer.write(start + body[:-1])
    await asyncio.sleep(0.05)
    return opened


async def answer(reader: asyncio.StreamReader) -> bytes:
    headers = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    size = int(headers.lower().partition(b"content-length: ")[2].split()[0])
    return headers.split()[1] + b" " + await reader.readexactly(size)


@pytest.mark.parametrize("compressed", [False, True])
async def test_large_requests_are_handled_in_separate_iterations(
    port: int, iterations: Endpoint, compressed: bool
) -> None:
    body = gzip.compress(BODY) if compressed else BODY
    opened = await clients(port, body, b"content-encoding: gzip\r\n" if compressed else b"")
    for _, writer in opened:
        writer.write(body[-1:])
    responses = [await answer(reader) for reader, _ in opened]
    assert responses == [b"200 %d %r" % (len(BODY), BODY[:4])] * CLIENTS
    # The counter may count before or behind the first of them, so one number may occur twice.
    assert len(set(iterations.numbers)) >= CLIENTS - 1
    between = [later - earlier for earlier, later in itertools.pairwise(iterations.numbers)]
    assert sorted(between)[1] > 4, "the loop has had turns without a large request"
    for _, writer in opened:
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nnext")
    assert [await answer(reader) for reader, _ in opened] == [b"200 4 b'next'"] * CLIENTS
    for _, writer in opened:
        writer.close()


async def test_a_disconnect_while_queued_releases_memory(port: int, iterations: Endpoint) -> None:
    for _ in range(2):
        iterations.numbers.clear()
        opened = await clients(port, BODY)
        for _, writer in opened:
            writer.write(BODY[-1:])
        opened[-1][1].close()
        responses = [await answer(reader) for reader, _ in opened[:-1]]
        assert responses == [b"200 %d %r" % (len(BODY), BODY[:4])] * (CLIENTS - 1)
        await asyncio.sleep(2 * LONG_S)
        assert len(iterations.numbers) == CLIENTS - 1, "the request of the client that left is not worked on"
        for _, writer in opened[:-1]:
            writer.close()


@pytest.mark.parametrize(
    ("size", "header", "in_thread"),
    [
        (LARGE_TEXT, b"", False),
        (LARGE_TEXT + 1, b"", True),
        (LARGE_TEXT + 1, b"inference-header-content-length: 100\r\n", False),
        (LARGE_TEXT + 1, b"inference-header-content-length: %d\r\n" % (LARGE_TEXT + 1), True),
        (LARGE_TEXT + 1, b"inference-header-content-length: many\r\n", True),
        (THREAD + 1, b"inference-header-content-length: 100\r\n", True),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
async def test_long_texts_are_parsed_in_a_thread(
    iterations: Endpoint, size: int, header: bytes, in_thread: bool, compressed: bool
) -> None:
    table = HttpProtocol("test", (Route("POST", "/", iterations.answer),), lambda error, _: json_response({}, 500))
    engine: Any = None
    server = HttpServer(Application(engine, (table,), Limits()))
    (port,) = await server.start([("127.0.0.1", 0)])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = gzip.compress(bytes(size)) if compressed else bytes(size)
    header += b"content-encoding: gzip\r\n" if compressed else b""
    writer.write(b"POST / HTTP/1.1\r\nhost: a\r\n%bcontent-length: %d\r\n\r\n%b" % (header, len(body), body))
    assert (await answer(reader)).startswith(b"200 %d" % size)
    assert (iterations.thread is not threading.main_thread()) == in_thread
    writer.close()
    await server.stop(0.0)


def test_concurrent_connections_are_accepted_in_few_iterations() -> None:
    """uvloop accepts one connection of a socket in an iteration; asyncio all of them."""

    async def run() -> list[int]:
        iterations, engine = Endpoint(), cast("Any", None)
        table = HttpProtocol("test", (Route("GET", "/", iterations.answer),), lambda error, _: json_response({}, 500))
        server = HttpServer(Application(engine, (table,), Limits()))
        (port,) = await server.start([("127.0.0.1", 0)])
        opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(64)]
        for each in opened:
            each.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        responses = await asyncio.to_thread(lambda: [each.recv(4096) for each in opened])
        for each in opened:
            each.close()
        iterations.stop()
        await server.stop(0.0)
        return [int(response.partition(b"\r\n\r\n")[2]) for response in responses]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        turns = runner.run(run())
    assert max(turns) - min(turns) < 32
