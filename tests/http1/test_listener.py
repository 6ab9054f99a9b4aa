"""One port serves two protocols, chosen by the first bytes of a connection."""

import asyncio
import socket
import struct
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from dragoman.transports.limits import Limits
from dragoman.transports.listener import PREFACE, Listener, end_output


class EchoConnection(asyncio.BufferedProtocol):
    """Responds with its name and all bytes received."""

    def __init__(self, name: bytes, listener: Listener) -> None:
        self.name = name
        self.listener = listener
        self.space = bytearray(100)
        self.received = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def begin(self, data: bytes) -> None:
        self.received += data
        self.transport.write(self.name + b" " + self.received + b"|")

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.space

    def buffer_updated(self, nbytes: int) -> None:
        self.begin(bytes(self.space[:nbytes]))

    def connection_lost(self, exc: Exception | None) -> None:
        self.listener.remove(self)

    def announce_close(self) -> None:
        pass

    def retire(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def cancel(self) -> None:
        self.transport.write(b"cut|")
        self.transport.close()

    def abort(self) -> None:
        self.transport.abort()


class EchoProtocol(asyncio.Protocol):
    """EchoConnection as a protocol without a buffer."""

    def __init__(self, name: bytes, listener: Listener) -> None:
        self.inner = EchoConnection(name, listener)
        self.connection_made = self.inner.connection_made  # type: ignore[method-assign]
        self.data_received = self.inner.begin  # type: ignore[method-assign]
        self.begin = self.inner.begin
        self.drain, self.cancel, self.abort = self.inner.drain, self.inner.cancel, self.inner.abort
        self.retire, self.announce_close = self.inner.retire, self.inner.announce_close

    def connection_lost(self, exc: Exception | None) -> None:
        self.inner.listener.remove(self)


@pytest_asyncio.fixture(params=[EchoConnection, EchoProtocol])
async def port(request: pytest.FixtureRequest) -> Any:
    listener = Listener(
        lambda listener: request.param(b"one", listener),
        lambda listener: request.param(b"two", listener),
        limits=Limits(header_timeout_s=0.5),
    )
    (found,) = await listener.start([("127.0.0.1", 0)])
    yield found
    await listener.stop(0.0)


async def response_to(port: int, *chunks: bytes) -> bytes:
    """Return the last response to these chunks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for chunk in chunks:
        writer.write(chunk)
        await writer.drain()
        await asyncio.sleep(0.005)
    text = b""
    while len(text.rpartition(b" ")[2]) != sum(map(len, chunks)) + 1 and (more := await reader.read(1000)):
        text += more
    writer.close()
    return text.split(b"|")[-2]


async def test_the_first_bytes_choose_the_protocol(port: int) -> None:
    assert await response_to(port, b"GET/HTTP/1.1") == b"one GET/HTTP/1.1"
    assert await response_to(port, b"P", b"OST/HTTP/1.1") == b"one POST/HTTP/1.1"
    assert await response_to(port, b"\x16\x03") == b"one \x16\x03"
    preface = PREFACE
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for at in range(len(preface)):
        writer.write(preface[at : at + 1])
        await writer.drain()
    assert await reader.readexactly(4 + len(preface)) == b"two " + preface
    writer.write(b"more")
    assert (await reader.readuntil(b"more|")).endswith(preface + b"more|")
    writer.close()


async def test_a_connection_without_request_is_closed(port: int) -> None:
    for start in (b"", PREFACE[:10]):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_stopping_closes_connections_after_the_grace_period(factory: Any) -> None:
    async def main() -> None:
        listener = Listener(lambda listener: EchoConnection(b"one", listener), limits=Limits())
        ports = await listener.start([("127.0.0.1", 0), ("127.0.0.1", 0)])
        assert len(set(ports)) == 2
        reader, writer = await asyncio.open_connection("127.0.0.1", ports[1])
        writer.write(b"x")
        assert await reader.readuntil(b"|") == b"one x|"
        await asyncio.wait_for(listener.stop(0.0), 60)
        assert await reader.read() == b"cut|"
        writer.close()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", ports[0])

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_output_ends_also_if_the_client_has_reset_the_connection(factory: Any) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            client = socket.create_connection(server.getsockname())
            accepted, _ = server.accept()
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, accepted)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        assert end_output(transport)
        transport.abort()
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


async def test_a_port_in_use() -> None:
    first = Listener(lambda listener: EchoConnection(b"one", listener), limits=Limits())
    (port,) = await first.start([("127.0.0.1", 0)])
    second = Listener(lambda listener: EchoConnection(b"one", listener), limits=Limits())
    with pytest.raises(OSError):
        await second.start([("127.0.0.1", 0), ("127.0.0.1", port)])
    await first.stop(0.0)
