"""Concurrent large uploads over every protocol of one port share one limit of memory."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dragoman
from dragoman.formats import grpc_messages as m
from e2e.test_unread_responses import UnreadClient

HALF = 1_000_000
LIMIT = 4 << 20
COUNT = HALF // 4  # of float64: two halves


def double(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 2 * x


PATH = "/v2/models/double/infer"
TENSOR: dict[str, Any] = {"name": "x", "datatype": "FP64", "shape": [COUNT]}
HEAD = json.dumps(
    {"inputs": [TENSOR | {"parameters": {"binary_data_size": 8 * COUNT}}], "outputs": [{"name": "nothing"}]}
).encode()
BODY = HEAD + bytes(8 * COUNT)
MESSAGE = m.ModelInferRequest(
    model_name="double", inputs=[TENSOR], outputs=[{"name": "nothing"}], raw_input_contents=[bytes(8 * COUNT)]
).SerializeToString()
FRAMED = b"\0" + len(MESSAGE).to_bytes(4) + MESSAGE
LENGTH = ("inference-header-content-length", str(len(HEAD)))


class Http1:
    """An upload of which one half is sent first, then the rest."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def start(cls, port: int) -> "Http1":
        upload = cls(*await asyncio.open_connection("127.0.0.1", port))
        headers = f"POST {PATH} HTTP/1.1\r\nhost: x\r\n{': '.join(LENGTH)}\r\ncontent-length: {len(BODY)}\r\n\r\n"
        upload.writer.write(headers.encode() + BODY[:HALF])
        await upload.writer.drain()
        return upload

    async def send_rest(self) -> int:
        self.writer.write(BODY[HALF:])
        return await self.status()

    async def status(self) -> int:
        async with asyncio.timeout(60):
            line = await self.reader.readline()
        await self.disconnect()
        return int(line.split()[1])

    async def disconnect(self) -> None:
        self.writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class Http2:
    """The same on a stream of an HTTP/2 connection, for REST or gRPC."""

    def __init__(self, client: UnreadClient, body: bytes) -> None:
        self.client = client
        self.body = body
        self.number: int = client.h2.get_next_available_stream_id()

    @classmethod
    async def start(cls, client: UnreadClient, kind: str) -> "Http2":
        result = cls(client, BODY if kind == "rest" else FRAMED)
        path = PATH if kind == "rest" else "/inference.GRPCInferenceService/ModelInfer"
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
        more = [LENGTH] if kind == "rest" else [("content-type", "application/grpc"), ("te", "trailers")]
        client.h2.send_headers(result.number, [*fields, *more])
        client.received_bytes[result.number] = 0
        await result.send(result.body[:HALF], ended=False)
        return result

    async def send(self, data: bytes, *, ended: bool) -> None:
        """Send as the flow-control window allows."""
        h2 = self.client.h2
        while data:
            size = min(len(data), h2.local_flow_control_window(self.number), h2.max_outbound_frame_size)
            if size:
                h2.send_data(self.number, data[:size], end_stream=ended and size == len(data))
                data = data[size:]
                self.client.writer.write(h2.data_to_send())
            else:
                await self.client.receive()

    async def send_rest(self) -> int:
        await self.send(self.body[HALF:], ended=True)
        return await self.status()

    async def status(self) -> int:
        while self.number not in self.client.headers:
            await self.client.receive()
        headers = self.client.headers[self.number]
        return int(headers.get("grpc-status", headers[":status"]))


@asynccontextmanager
async def serving_models(**settings: Any) -> AsyncIterator[int]:
    """Start a server; yield its port."""
    async with dragoman.Server(double, http_port=0, grpc_port=0, placement="inline", **settings) as server:
        yield server.http_ports[0]


async def wait_for_halves(port: int, halves: int) -> None:
    """Wait until the server holds this number of half bodies, within a tenth of one."""
    free = LIMIT - halves * HALF
    async with asyncio.timeout(60):
        while await has_free_memory(port, free + 1) or not await has_free_memory(port, free - HALF // 10):
            await asyncio.sleep(0.005)


async def has_free_memory(port: int, size: int) -> bool:
    """Return whether the server has memory for `size` bytes more of request bodies."""
    upload = Http1(*await asyncio.open_connection("127.0.0.1", port))
    upload.writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n".encode())
    upload.writer.write(b"x" * size)  # not JSON
    status = await upload.status()
    assert status in (400, 503)
    return status == 400


@pytest.mark.parametrize("late", ["http1", "rest", "grpc"])
async def test_uploads_over_all_protocols_share_one_limit(late: str) -> None:
    async with serving_models(max_bodies_bytes=LIMIT) as port, UnreadClient.to(port) as client:
        await client.receive()  # the flow-control windows of the server
        uploads: list[Any] = [await Http1.start(port), await Http1.start(port)]
        uploads += [await Http2.start(client, "rest"), await Http2.start(client, "grpc")]
        await wait_for_halves(port, 4)
        if late == "http1":
            assert await (await Http1.start(port)).status() == 503
        else:
            rejected = await Http2.start(client, late)
            assert await rejected.status() == (503 if late == "rest" else 8)
        await uploads.pop(0).disconnect()  # room for the rest of the others, one after the other
        for upload in uploads:
            await wait_for_halves(port, 3 - uploads.index(upload))
            # The requested output does not exist: a short response in every protocol.
            assert await upload.send_rest() == (3 if upload is uploads[-1] else 400)


async def test_too_large_bodies_are_rejected_before_they_are_sent() -> None:
    async with serving_models(max_body_bytes=HALF) as port, UnreadClient.to(port) as client:
        upload = Http1(*await asyncio.open_connection("127.0.0.1", port))
        expects = "expect: 100-continue\r\n"
        upload.writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\n{expects}content-length: {len(BODY)}\r\n\r\n".encode())
        assert await upload.status() == 413
        fields = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "x")]
        number = client.h2.get_next_available_stream_id()
        client.h2.send_headers(number, [*fields, ("expect", "100-continue"), ("content-length", str(len(BODY)))])
        client.writer.write(client.h2.data_to_send())
        while number not in client.headers:
            await client.receive()
        assert client.headers[number][":status"] == "413"
