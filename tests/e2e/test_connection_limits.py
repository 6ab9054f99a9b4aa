"""Beyond the limits on connections and files, health checks are answered and the log reports the limit."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack

import grpc
import numpy as np
import pytest
from hpack import Decoder, Encoder
from hyperframe.frame import Frame
from numpy.typing import NDArray

import dragoman
from dragoman.formats import grpc_messages as m
from dragoman.formats.http2 import frames
from rest.rest_server import RestServer

BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP64", "shape": [3], "data": [1.0, 2.0, 3.0]}]})
INFER = "/v2/models/double/infer"
FILES = 64  # the limit, of which the last 8 are kept
SERVICE = "/inference.GRPCInferenceService/"


def double(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 2 * x


@pytest.fixture
async def limited(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dragoman.Server]:
    """Run a server whose process has opened all file descriptors for ordinary connections."""
    monkeypatch.setattr("dragoman.assembly.open_files_limit", lambda: FILES)
    async with dragoman.Server(double, http_port=0, grpc_port=0, placement="inline", header_timeout_s=60.0) as server:
        with ExitStack() as stack:
            while (number := os.dup(0)) < FILES:
                stack.callback(os.close, number)
            os.close(number)
            yield server


async def test_health_over_http1(limited: dragoman.Server, caplog: pytest.LogCaptureFixture) -> None:
    client = RestServer(limited.http_ports[0], limited)
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/double/ready", "/health", "/ping"):
        response = await client.request("GET", path)
        assert (response.status, response.headers["connection"]) == (200, "close")
    response = await client.request("POST", INFER, BODY)
    assert response.status == 503
    assert response.error.startswith("the server has too many connections")
    assert response.headers["retry-after"] == "1"
    assert "running out of file descriptors" in caplog.text
    assert "limit=64 (ulimit -n)" in caplog.text
    assert len(caplog.records) == 1  # not one for each connection


async def test_health_over_grpc(limited: dragoman.Server) -> None:
    for port in (limited.http_ports[0], limited.grpc_port):
        for name in ("ServerLive", "ServerReady"):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=LONE) as channel:
                assert await channel.unary_unary(SERVICE + name)(b"", timeout=60) == b"\x08\x01"
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=LONE) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(SERVICE + "ServerMetadata")(b"", timeout=60)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert caught.value.details().startswith("the server has too many connections")


LONE = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))


@pytest.mark.parametrize(("path", "status"), [("/v2/health/live", "200"), ("/v2", "503")])
async def test_health_over_http2(limited: dragoman.Server, path: str, status: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", limited.http_ports[0])
    fields = [(":method", "GET"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
    request = frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, Encoder().encode(fields))
    writer.write(frames.PREFACE + frames.settings({}) + request)
    writer.write(frames.frame(frames.PING, frames.ACK, 0, b"dragoman"))
    received = await asyncio.wait_for(reader.read(), 60)  # the server ends the connection
    writer.close()
    kinds: dict[int, bytes] = {}
    while received:
        frame, length = Frame.parse_frame_header(memoryview(received[:9]))
        kinds[frame.type] = received[9 : 9 + length]
        received = received[9 + length :]
    assert Decoder().decode(kinds[frames.HEADERS])[0] == (":status", status)
    assert frames.GOAWAY in kinds


async def test_silent_connections_make_way_for_health_checks(limited: dragoman.Server) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", limited.http_ports[0]) for _ in range(30)]
    assert (await RestServer(limited.http_ports[0], limited).request("GET", "/v2/health/live")).status == 200
    assert await asyncio.wait_for(_ended(idle[0][0]), 60)
    for _, writer in idle:
        writer.transport.abort()


async def test_idle_connections_of_one_client_leave_room_for_health_checks_of_another(
    limited: dragoman.Server,
) -> None:
    port = limited.http_ports[0]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    idle = [await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.9", 0)) for _ in range(30)]
    assert await asyncio.wait_for(_ended(idle[0][0]), 60)
    writer.write(b"GET /v2/health/live HTTP/1.1\r\nhost: a\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 200 ")
    for _, each in [*idle, (reader, writer)]:
        each.transport.abort()


# More connections wait than the process may open files; the last one, from another address, is a health check.
_FLOOD = """
import asyncio, resource, socket
import dragoman, uvloop

resource.setrlimit(resource.RLIMIT_NOFILE, (160, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

def double(x: float) -> float:
    return 2 * x

async def main():
    async with dragoman.Server(double, http_port=0, grpc_port=-1, placement="inline") as server:
        address = ("127.0.0.1", server.http_ports[0])
        idle = [socket.create_connection(address, source_address=("127.0.0.9", 0)) for _ in range(90)]
        health = socket.create_connection(address)
        health.sendall(b"GET /v2/health/live HTTP/1.1\\r\\nhost: a\\r\\n\\r\\n")
        health.setblocking(False)
        print((await asyncio.wait_for(asyncio.get_running_loop().sock_recv(health, 4096), 60))[:12].decode())

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


def test_more_connections_at_once_than_there_are_files_leave_room_for_health_checks() -> None:
    ended = subprocess.run([sys.executable, "-c", _FLOOD], capture_output=True, text=True, timeout=100)
    assert ended.stdout == "HTTP/1.1 200\n", ended.stderr


async def _ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


async def test_requests_are_answered_while_file_descriptors_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.assembly.open_files_limit", lambda: 4096)
    async with dragoman.Server(double, http_port=0, grpc_port=0, placement="inline") as server:
        response = await RestServer(server.http_ports[0], server).request("POST", INFER, BODY)
        assert response.json["outputs"][0]["data"] == [2.0, 4.0, 6.0]
        assert "connection" not in response.headers
        async with grpc.aio.insecure_channel(server.grpc_url) as channel:
            reply = await channel.unary_unary(SERVICE + "ServerMetadata")(b"", timeout=60)
        assert m.ServerMetadataResponse.FromString(reply).name == "dragoman"
