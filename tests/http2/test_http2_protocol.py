"""Timeouts of HTTP/2 connections. Time is the argument of `check_timeouts`."""

import asyncio
import logging
from typing import Any

import pytest
from http2_fakes import EchoService, Wire

from dragoman.formats.http2 import frames
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.clients import Warnings
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.http2.limits import Http2Limits
from dragoman.transports.http2.protocol import Http2Protocol, http2
from dragoman.transports.http2.request import Http2Headers
from dragoman.transports.http2.stream import Http2Stream
from dragoman.transports.limits import Limits
from dragoman.transports.listener import Listener


class Transport:
    """A transport with `unread` bytes in its buffer."""

    def __init__(self) -> None:
        self.unread = 0
        self.aborted = False
        self.reading = True

    def get_extra_info(self, name: str) -> Any:
        return None

    def set_write_buffer_limits(self, high: int) -> None: ...

    def write(self, data: bytes) -> None: ...

    def writelines(self, buffers: list[bytes]) -> None: ...

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
async def paused_protocol() -> tuple[Any, Transport]:
    """A connection whose transport is full."""
    wire = http2(EchoService(), Http2Limits(), MessageExecutor(BodyMemory(0)))
    connection = wire(Listener(wire, limits=Limits(write_timeout_s=60.0, keep_alive_timeout_s=75.0)))
    assert isinstance(connection, Http2Protocol)
    transport = Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.begin(frames.PREFACE + frames.settings({}))
    transport.unread = 2 << 20
    connection.pause_writing()
    return connection, transport


async def test_a_slow_steady_reader_stays_connected(paused_protocol: tuple[Any, Transport]) -> None:
    connection, transport = paused_protocol
    now_s = asyncio.get_running_loop().time()
    for _ in range(20):  # it sends nothing meanwhile, not even an acknowledgement of PING, which is queued
        now_s += 50.0
        transport.unread -= 1000
        connection.check_timeouts(now_s)
        assert not transport.aborted
    connection.check_timeouts(now_s + 59.0)
    assert not transport.aborted
    connection.check_timeouts(now_s + 61.0)
    assert transport.aborted


async def test_a_client_that_reads_nothing_is_disconnected(
    paused_protocol: tuple[Any, Transport], caplog: pytest.LogCaptureFixture
) -> None:
    connection, transport = paused_protocol
    connection.check_timeouts(asyncio.get_running_loop().time() + 61.0)
    assert transport.aborted
    assert [r.getMessage() for r in caplog.records] == ["client disconnected: it read nothing for 60.0 s"]


async def test_streams_that_wait_for_their_turn_are_not_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    wire = http2(EchoService(), Http2Limits(), MessageExecutor(BodyMemory(0)))
    connection: Any = wire(Listener(wire, limits=Limits(write_timeout_s=60.0)))
    connection.connection_made(Transport())
    connection.begin(frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 20}))
    client = Wire()
    for number in range(1, 21, 2):
        connection.begin(client.headers_frame(number))
        for part in range(10):
            connection.begin(frames.frame(frames.DATA, int(part == 9), number, bytes(10_000)))
    assert len(connection.connection.streams) == 10
    for _ in range(30):  # a stream has its turn every 100 s
        now_s += 10.0
        connection.begin(frames.window_update(0, 2000))
        connection.check_timeouts(now_s)
        assert len(connection.connection.streams) == 10
    connection.check_timeouts(now_s + 59.0)
    assert len(connection.connection.streams) == 10
    connection.check_timeouts(now_s + 61.0)
    assert not connection.connection.streams


class SlowService(EchoService):
    """Each request takes a millisecond of the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def open(self, stream: Http2Stream, head: Http2Headers, ended: bool) -> Any:
        self.now_s += 0.001
        return super().open(stream, head, ended)


def test_requests_that_arrive_together_are_handled_in_time_slices() -> None:
    service = SlowService()
    wire = Wire(service)
    connection: Any = wire.connection
    connection.reader.stopwatch = lambda: service.now_s
    connection.receive(b"".join(wire.headers_frame(n, ended=True) for n in range(1, 41, 2)))
    slices = [len(service.handlers)]
    while connection.reader.more:
        connection.receive(b"")
        slices.append(len(service.handlers) - sum(slices))
    assert sum(slices) == 20
    assert max(slices) <= 4
    assert wire.still_responds()


async def test_reading_pauses_until_received_bytes_are_handled() -> None:
    service = SlowService()
    wire = http2(service, Http2Limits(), MessageExecutor(BodyMemory(0)))
    connection: Any = wire(Listener(wire, limits=Limits()))
    connection.connection.reader.stopwatch = lambda: service.now_s
    transport: Any = Transport()
    connection.connection_made(transport)
    client = Wire(service)
    connection.begin(frames.PREFACE + frames.settings({}))
    connection.begin(b"".join(client.headers_frame(n, ended=True) for n in range(1, 41, 2)))
    assert not transport.reading
    assert len(service.handlers) < 5
    while not transport.reading:
        await asyncio.sleep(0)
    assert len(service.handlers) == 20


async def test_warnings_of_a_kind_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    warnings = Warnings(logging.getLogger("dragoman.test"), asyncio.get_running_loop(), 0.05)
    for number in range(5):
        warnings.log("client %d is odd", number)
    warnings.log("another kind")
    while len(caplog.records) < 3:
        await asyncio.sleep(0.01)
    result = ["client 0 is odd", "another kind", "client 0 is odd (4 times in the last 0.05 s)"]
    assert [r.getMessage() for r in caplog.records] == result
    warnings.close()
