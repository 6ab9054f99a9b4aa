"""A gRPC client on the `h2` package, for requests that no gRPC library sends."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import h2.config
import h2.connection
import h2.events
from grpc_fakes import SERVICE

TIMEOUT_S = 60.0


def frame_message(message: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(message).to_bytes(4) + message


@dataclass
class RawStream:
    """What has been received on one stream."""

    headers: list[dict[str, str]] = field(default_factory=list)
    body: bytes = b""
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> tuple[int, str]:
        """Return the gRPC status and its message."""
        return int(self.headers[-1]["grpc-status"]), self.headers[-1].get("grpc-message", "")

    @property
    def message(self) -> bytes:
        assert self.body[0] == 0
        assert int.from_bytes(self.body[1:5]) == len(self.body) - 5
        return self.body[5:]


class Raw:
    """A connection. Unless it `acknowledges` data, the flow-control windows are not refilled."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self.acknowledges = reader, writer, True
        config = h2.config.H2Configuration(header_encoding="utf-8", validate_outbound_headers=False)
        self.h2 = h2.connection.H2Connection(config)
        self.streams: dict[int, RawStream] = {}
        self.end_reason: Any = None
        self.h2.initiate_connection()
        self.flush()

    @classmethod
    @asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator[Self]:
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        yield client
        client.writer.transport.abort()

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def request(
        self, method: str, *data: bytes, end: bool = True, path: str = "", fields: Mapping[str, str] | None = None
    ) -> int:
        number: int = self.h2.get_next_available_stream_id()
        pseudo = [(":method", "POST"), (":scheme", "http"), (":path", path or SERVICE + method), (":authority", "x")]
        plain = {"content-type": "application/grpc", "te": "trailers"}
        plain |= fields or {}
        self.streams[number] = RawStream()
        self.h2.send_headers(number, [*pseudo, *plain.items()], end_stream=end and not data)
        for at, chunk in enumerate(data, 1):
            self.send(number, chunk, end=end and at == len(data))
        self.flush()
        return number

    def send(self, number: int, data: bytes, *, end: bool = False) -> None:
        self.h2.send_data(number, data, end_stream=end)
        self.flush()

    async def response(self, number: int) -> RawStream:
        """Return what is received on a stream until it ends or is reset."""
        received = self.streams[number]
        await self.until(lambda: received.ended or received.reset is not None)
        return received

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                data = await self.reader.read(1 << 16)
                if not data:
                    self.end_reason = self.end_reason if self.end_reason is not None else "disconnected"
                    assert condition(), "the server closed the connection"
                    return
                self.receive_data(data)

    def receive_data(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            match event:
                case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                    self.streams[event.stream_id].headers.append(dict(event.headers))
                case h2.events.DataReceived():
                    self.streams[event.stream_id].body += event.data
                    if self.acknowledges:
                        self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case h2.events.StreamEnded():
                    self.streams[event.stream_id].ended = True
                case h2.events.StreamReset():
                    self.streams[event.stream_id].reset = event.error_code
                case h2.events.ConnectionTerminated():
                    self.end_reason = event.error_code
        self.flush()

    async def wait_for_end(self) -> Any:
        """Wait until the server ends the connection; return the error code of GOAWAY or "disconnected"."""
        await self.until(lambda: self.end_reason is not None)
        return self.end_reason
