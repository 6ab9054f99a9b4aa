"""A connection of HTTP/2 at its transport: which readers it waits for. Time is the argument of `overdue`."""

import asyncio
import logging
from typing import Any

import pytest
from http2_fakes import House

from dragoman.transports.bodies import Bodies
from dragoman.transports.http2 import frames
from dragoman.transports.http2.protocol import Http2Protocol, http2
from dragoman.transports.http2.terms import Terms
from dragoman.transports.limits import Limits
from dragoman.transports.listener import Listener
from dragoman.transports.warnings import Warnings


class Transport:
    """Keeps `unread` bytes of what was written."""

    def __init__(self) -> None:
        self.unread = 0
        self.aborted = False

    def get_extra_info(self, name: str) -> Any:
        return None

    def set_write_buffer_limits(self, high: int) -> None: ...

    def write(self, data: bytes) -> None: ...

    def writelines(self, buffers: list[bytes]) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
async def paused() -> tuple[Any, Transport]:
    """A connection whose client does not read as fast as it is written to."""
    wire = http2(House(), Terms(), Bodies(0))
    connection = wire(Listener(wire, limits=Limits(write_timeout_s=60.0, keep_alive_timeout_s=75.0)))
    assert isinstance(connection, Http2Protocol)
    transport = Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.begin(frames.PREFACE + frames.settings({}))
    transport.unread = 2 << 20
    connection.pause_writing()
    return connection, transport


async def test_a_slow_and_steady_reader_is_awaited(paused: tuple[Any, Transport]) -> None:
    connection, transport = paused
    now_s = asyncio.get_running_loop().time()
    for _ in range(20):  # it says nothing meanwhile, not even to a PING, which waits behind the rest
        now_s += 50.0
        transport.unread -= 1000
        connection.overdue(now_s)
        assert not transport.aborted
    connection.overdue(now_s + 59.0)
    assert not transport.aborted
    connection.overdue(now_s + 61.0)
    assert transport.aborted


async def test_a_client_that_reads_nothing_is_cut_off(
    paused: tuple[Any, Transport], caplog: pytest.LogCaptureFixture
) -> None:
    connection, transport = paused
    connection.overdue(asyncio.get_running_loop().time() + 61.0)
    assert transport.aborted
    assert [r.getMessage() for r in caplog.records] == ["client disconnected: it read nothing for 60.0 s"]


async def test_warnings_of_a_kind_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    warnings = Warnings(logging.getLogger("dragoman.test"), asyncio.get_running_loop(), 0.05)
    for number in range(5):
        warnings.log("client %d is odd", number)
    warnings.log("another kind")
    while len(caplog.records) < 3:
        await asyncio.sleep(0.01)
    told = ["client 0 is odd", "another kind", "client 0 is odd (4 times in the last 0.05 s)"]
    assert [r.getMessage() for r in caplog.records] == told
    warnings.close()
