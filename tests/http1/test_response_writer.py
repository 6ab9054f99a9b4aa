"""The response writer of a client that pauses."""

import asyncio
from typing import Any

from dragoman.transports.counters import TransportCounters
from dragoman.transports.http1.response_headers import ResponseHeaderWriter
from dragoman.transports.http1.response_writer import Http1ResponseWriter, StreamFlushes


class _Transport:
    def __init__(self) -> None:
        self.written = b""

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self.written += data


async def test_a_client_that_reads_before_the_wait_begins_is_not_waited_for() -> None:
    transport: Any = _Transport()
    loop = asyncio.get_running_loop()
    writer = Http1ResponseWriter(ResponseHeaderWriter(), StreamFlushes(), TransportCounters(), loop)
    writer.open(transport, "")
    await writer.start(200, ())
    assert writer.write(b"a") is None
    writer.pause()
    sending: Any = writer.write(b"b")
    writer.resume()
    async with asyncio.timeout(10):
        await sending
    writer.pause()
    waiting = asyncio.ensure_future(writer.write(b"c"))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert not waiting.done()
    writer.resume()
    await waiting
    await writer.end(b"")
    assert transport.written.startswith(b"HTTP/1.1 200 ")
