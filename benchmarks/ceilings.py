"""What the same bytes cost without a model server: a bare echo over HTTP, another over gRPC.

usage: python -m benchmarks.ceilings http|grpc PORT
"""

import asyncio
import sys

import grpc
import httptools
import uvloop

from benchmarks.workloads import GRPC_PATH

_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class HttpEcho(asyncio.Protocol):
    """Answers every request with its own body."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.pieces: list[bytes] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        body = b"".join(self.pieces)
        self.pieces.clear()
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body))
        self.transport.write(body)


async def http(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(HttpEcho, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


async def _same(message: bytes, context: object) -> bytes:
    return message


async def grpc_aio(port: int) -> None:
    """Without a serializer grpc gives and takes bytes."""
    server = grpc.aio.server(options=_UNLIMITED)
    service, method = GRPC_PATH.strip("/").split("/")
    methods = {method: grpc.unary_unary_rpc_method_handler(_same)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, methods)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run({"http": http, "grpc": grpc_aio}[sys.argv[1]](int(sys.argv[2])))
