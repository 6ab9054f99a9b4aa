"""Echo servers over HTTP and gRPC, which cost about the least that a Python server can.

usage: python -m benchmarks.echo http|http-buffered|grpc PORT
"""

import asyncio
import sys

import grpc
import httptools
import uvloop

from benchmarks.workloads import GRPC_PATH
from dragoman.system.process import keep_freed_memory

_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class HttpEcho(asyncio.Protocol):
    """Return the body of each request."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.chunks: list[bytes] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, chunk: bytes) -> None:
        self.chunks.append(chunk)

    def on_message_complete(self) -> None:
        body = b"".join(self.chunks)
        self.chunks.clear()
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body))
        self.transport.write(body)


class BufferedEcho(asyncio.BufferedProtocol):
    """Return the body of each request, received directly into its final memory, with a minimal parser."""

    def __init__(self) -> None:
        self.scratch = memoryview(bytearray(1 << 16))
        self.head = b""
        self.body: memoryview | None = None
        self.received = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.scratch if self.body is None else self.body[self.received :]

    def buffer_updated(self, nbytes: int) -> None:
        if self.body is None:
            self._head(bytes(self.scratch[:nbytes]))
        else:
            self.received += nbytes
        if self.body is not None and self.received == len(self.body):
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % self.received)
            self.transport.write(self.body)
            self.body = None

    def _head(self, data: bytes) -> None:
        self.head += data
        end = self.head.find(b"\r\n\r\n") + 4
        if end < 4:
            return
        length = self.head[:end].lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
        self.received = len(self.head) - end
        self.body = memoryview(bytearray(int(length)))
        self.body[: self.received] = self.head[end:]
        self.head = b""


async def http(port: int, echo: type[HttpEcho | BufferedEcho] = HttpEcho) -> None:
    server = await asyncio.get_running_loop().create_server(echo, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


async def http_buffered(port: int) -> None:
    await http(port, BufferedEcho)


async def _echo(message: bytes, context: object) -> bytes:
    return message


async def grpc_aio(port: int) -> None:
    """Serve messages as bytes, because there is no serializer."""
    server = grpc.aio.server(options=_UNLIMITED)
    service, method = GRPC_PATH.strip("/").split("/")
    methods = {method: grpc.unary_unary_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, methods)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    if sys.argv[1] == "http-buffered":
        keep_freed_memory()  # like our server; otherwise large bodies cost mostly allocation
    uvloop.run({"http": http, "http-buffered": http_buffered, "grpc": grpc_aio}[sys.argv[1]](int(sys.argv[2])))
