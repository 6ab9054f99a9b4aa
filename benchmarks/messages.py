"""HTTP client connection that calls a method for each response, for the load generators in Python."""

import asyncio

import httptools


class ResponseReader(asyncio.Protocol):
    """A connection that passes the body of each response to `on_response`."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, chunk: bytes) -> None:
        self.chunks.append(chunk)

    def on_message_complete(self) -> None:
        body = b"".join(self.chunks)
        self.chunks.clear()
        self.on_response(body)

    def on_response(self, body: bytes) -> None:
        raise NotImplementedError
