"""Stages of an HTTP/1.1 connection, on a transport in memory: its timeouts, and the end of the server."""

import asyncio
from typing import Any

import pytest

from dragoman.protocols.wire import HttpProtocol, HttpRequest, HttpResponse, Route, json_response
from dragoman.transports.application import Application
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.http1.connection import http1
from dragoman.transports.http1.request_reader import Http1Context
from dragoman.transports.limits import Limits
from dragoman.transports.listener import Listener

LIMITS = Limits(header_timeout_s=10, body_timeout_s=30, write_timeout_s=60, keep_alive_timeout_s=75)
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def _respond(request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, (request.body,))


def _fails(request: HttpRequest) -> HttpResponse:
    raise RuntimeError("worst")


def _error(error: Any, _request_id: str) -> HttpResponse:
    if "internal" in str(error):
        raise RuntimeError("an error that cannot be formatted")
    return json_response({"error": str(error)}, getattr(error, "status", 500))


ROUTES = Route("GET", "/", _respond), Route("POST", "/", _respond), Route("POST", "/fails", _fails)
TABLE = HttpProtocol("test", ROUTES, _error)


class Transport(asyncio.Transport):
    """Keeps what is written; `unread` bytes of it wait for the client."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.unread = 0
        self.is_closed = self.is_aborted = self.has_ended = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def writelines(self, parts: Any) -> None:
        for part in parts:
            self.write(part)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def is_closing(self) -> bool:
        return self.is_closed or self.is_aborted

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def take(self) -> list[bytes]:
        """Return the status of each response that was written since the last call."""
        written, self.written = self.written, b""
        return [part[:3] for part in written.split(b"HTTP/1.1 ")[1:]]


class Client:
    """A connection of a listener, and its transport."""

    def __init__(self) -> None:
        self.now_s = asyncio.get_running_loop().time()
        self.bodies = BodyMemory(0)
        self.connection = make_connection(self.bodies)
        self.transport = Transport()
        self.connection.connection_made(self.transport)

    def send(self, data: bytes) -> list[bytes]:
        self.connection.get_buffer(-1)[: len(data)] = data
        self.connection.buffer_updated(len(data))
        return self.transport.take()

    def check_after(self, seconds: float) -> float:
        """Check timeouts as if so many seconds had passed; return after how many to check again, 0 for never."""
        again_s: float = self.connection.check_timeouts(self.now_s + seconds)
        return again_s and again_s - self.now_s

    @property
    def is_open(self) -> bool:
        return not self.transport.is_closing()


def make_connection(bodies: BodyMemory) -> Any:
    engine: Any = None  # not called
    wire = http1(Http1Context(Application(engine, (TABLE,), LIMITS, executor=MessageExecutor(bodies))))
    return Listener(wire, limits=LIMITS).open(wire)


def post(path: str, size: int, *lines: str) -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "host: x", f"content-length: {size}", *lines, "", "")).encode()


async def test_a_connection_is_idle_after_the_last_part_of_a_rejected_body() -> None:
    """Without a request under way the client gets no error when the time for the body has passed."""
    client = Client()
    assert client.send(post("/nope", 100) + bytes(50)) == [b"404"]
    assert client.send(bytes(50)) == []
    assert 74 < client.check_after(40) < 80
    assert client.transport.take() == []
    assert client.send(GET) == [b"200"]
    assert client.check_after(90) == 0
    assert (client.transport.take(), client.is_open) == ([], False)


async def test_a_drained_connection_closes_after_the_last_part_of_a_rejected_body() -> None:
    client = Client()
    assert client.send(post("/nope", 100) + bytes(50)) == [b"404"]
    client.connection.drain()
    assert client.is_open  # closing at once could discard the response
    assert client.send(bytes(50)) == []
    assert not client.is_open


async def test_a_drained_connection_closes_once_the_client_has_read_the_rejection() -> None:
    client = Client()
    assert client.send(post("/nope", 100) + bytes(50)) == [b"404"]
    client.connection.pause_writing()
    assert client.send(bytes(50)) == []
    client.connection.drain()
    assert client.is_open
    client.connection.resume_writing()
    await asyncio.sleep(0)
    assert not client.is_open


async def test_a_request_that_fails_unexpectedly_leaves_no_body_counted(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    assert client.send(post("/fails", 100) + bytes(50)) == []
    assert client.bodies.size == 50
    assert client.send(bytes(50)) == []
    await asyncio.sleep(0)
    assert (client.bodies.size, client.transport.is_aborted) == (0, True)
    assert "HTTP/1.1 connection failed" in caplog.text


async def test_a_client_that_does_not_read_its_last_response_gets_no_second_one() -> None:
    client = Client()
    assert client.send(post("/", 100, "connection: close") + bytes(50)) == []
    client.transport.unread = 500
    assert client.send(bytes(50)) == [b"200"]
    assert client.transport.is_closed
    assert 59 < client.check_after(40) < 65
    assert client.transport.take() == []
    assert not client.transport.is_aborted
    assert client.check_after(65) == 0
    assert (client.transport.take(), client.transport.is_aborted) == ([], True)


async def test_a_connection_that_is_made_after_the_server_has_stopped_is_closed() -> None:
    connection = make_connection(BodyMemory(0))
    connection.drain()
    transport = Transport()
    connection.connection_made(transport)
    assert transport.is_closed
    connection.get_buffer(-1)[: len(GET)] = GET
    connection.buffer_updated(len(GET))
    assert transport.take() == []
    connection.connection_lost(None)


async def test_the_stages_of_a_request_have_their_timeouts() -> None:
    client = Client()
    assert 9 < client.check_after(0) < 11  # the first request
    assert client.send(GET[:10]) == []
    assert 9 < client.check_after(0) < 11  # its headers
    assert client.send(GET[10:]) == [b"200"]
    assert 74 < client.check_after(20) < 80  # the next request
    assert client.send(post("/", 100)) == []
    assert 29 < client.check_after(0) < 35  # its body
    assert client.send(bytes(100)) == [b"200"]
    assert client.send(GET + GET + GET[:10]) == [b"200", b"200"]
    assert client.check_after(20) == 0
    assert (client.transport.take(), client.transport.has_ended) == ([b"408"], True)
    assert client.check_after(40) == 0  # the client does not close its side
    assert not client.is_open


async def test_a_client_that_does_not_read_is_served_again_once_it_has() -> None:
    client = Client()
    assert client.send(GET) == [b"200"]
    client.transport.unread = 1 << 17
    client.connection.pause_writing()
    assert client.send(GET + GET) == []
    assert 59 < client.check_after(20) < 65
    client.transport.unread = 0
    client.connection.resume_writing()
    assert client.transport.take() == []
    await asyncio.sleep(0)
    assert client.transport.take() == [b"200", b"200"]
    assert client.send(GET) == [b"200"]
    assert 74 < client.check_after(40) < 80


async def test_a_retired_connection_closes_after_the_response_that_announces_it() -> None:
    client = Client()
    assert client.send(GET) == [b"200"]
    client.connection.retire()
    assert client.is_open  # idle: the client may be sending a request
    client.connection.get_buffer(-1)[: len(GET)] = GET
    client.connection.buffer_updated(len(GET))
    assert b"connection: close" in client.transport.written
    assert not client.is_open


async def test_a_retired_connection_outlives_a_response_that_did_not_announce_its_end() -> None:
    client = Client()
    client.connection.pause_writing()
    assert client.send(post("/nope", 100) + bytes(50)) == []
    client.connection.resume_writing()
    await asyncio.sleep(0)
    assert client.transport.take() == [b"404"]
    client.connection.retire()
    assert client.send(bytes(50)) == []  # the rest of the rejected body
    assert client.is_open
    assert client.send(GET) == [b"200"]
    assert not client.is_open
