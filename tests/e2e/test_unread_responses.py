"""Unread responses are bounded, for each connection and for all together."""

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import numpy as np
import pytest
from h2.settings import SettingCodes

import dragoman
from dragoman.formats import grpc_messages as m
from e2e.server_process import ServerProcess, running_server
from loaded_models import recorded_models

MIB = 1 << 20
STREAMS = 60


class Grown(dragoman.Model):
    """Return 1 MiB for one byte."""

    inputs = (dragoman.TensorSpec("n", dragoman.UINT8, (1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.UINT8, (-1,)),)
    placement = "inline"

    def load(self) -> None:
        self.call_count = 0
        self.received_inputs: list[weakref.ref[Any]] = []

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        self.call_count += 1
        self.received_inputs.append(weakref.ref(call.inputs["n"].data))
        return {"y": np.full(MIB, call.inputs["n"].data[0], np.uint8)}


PATH = "/v2/models/Grown/infer"
REST_BODY = json.dumps(
    {
        "inputs": [{"name": "n", "datatype": "UINT8", "shape": [1], "data": [7]}],
        "parameters": {"binary_data_output": True},
    }
).encode()
GRPC_MESSAGE = m.ModelInferRequest(
    model_name="Grown",
    inputs=[{"name": "n", "datatype": "UINT8", "shape": [1], "contents": {"uint_contents": [7]}}],
).SerializeToString()
HEALTH = ("/grpc.health.v1.Health/Check", "application/grpc", bytes(5))
REQUESTS = {
    "rest": (PATH, "application/json", REST_BODY),
    "grpc": (
        "/inference.GRPCInferenceService/ModelInfer",
        "application/grpc",
        b"\0" + len(GRPC_MESSAGE).to_bytes(4) + GRPC_MESSAGE,
    ),
    "grpc stream": (
        "/inference.GRPCInferenceService/ModelStreamInfer",
        "application/grpc",
        b"\0" + len(GRPC_MESSAGE).to_bytes(4) + GRPC_MESSAGE,
    ),
}


class UnreadClient:
    """A connection without flow-control window until it is opened."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.h2.local_settings = type(self.h2.local_settings)(
            client=True, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: 0, SettingCodes.ENABLE_PUSH: 0}
        )
        self.h2.initiate_connection()
        writer.write(self.h2.data_to_send())
        self.received_bytes: dict[int, int] = {}
        self.headers: dict[int, dict[str, str]] = {}
        self.ended: set[int] = set()

    @classmethod
    @asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator["UnreadClient"]:
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        try:
            yield client
        finally:
            client.writer.transport.abort()
            await asyncio.sleep(0)

    def request(self, kind: str) -> int:
        path, content_type, body = HEALTH if kind == "health" else REQUESTS[kind]
        number: int = self.h2.get_next_available_stream_id()
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
        self.h2.send_headers(number, [*fields, ("content-type", content_type), ("te", "trailers")])
        self.h2.send_data(number, body, end_stream=True)
        self.received_bytes[number] = 0
        self.writer.write(self.h2.data_to_send())
        return number

    def open_windows(self) -> None:
        self.h2.increment_flow_control_window(1 << 30)
        for number in self.received_bytes:
            if number not in self.ended:
                self.h2.increment_flow_control_window(1 << 30, number)
        self.writer.write(self.h2.data_to_send())

    async def wait_for_ping(self) -> None:
        """Return once the server has received everything that was sent."""
        self.h2.ping(b"whatever")
        self.writer.write(self.h2.data_to_send())
        await self._wait_for(h2.events.PingAckReceived)

    async def wait_for_headers(self, number: int) -> None:
        while number not in self.headers:
            await self.wait_for_ping()

    async def wait_for_all(self) -> None:
        while len(self.ended) < len(self.received_bytes):
            await self._wait_for(h2.events.StreamEnded)

    async def _wait_for(self, kind: type) -> None:
        async with asyncio.timeout(60):
            while not any(isinstance(event, kind) for event in await self.receive()):
                pass

    async def receive(self) -> list[h2.events.Event]:
        """Return the next event."""
        async with asyncio.timeout(60):
            data = await self.reader.read(1 << 18)
        assert data, "the server has hung up"
        events: list[h2.events.Event] = self.h2.receive_data(data)
        for event in events:
            self._handle(event)
        self.writer.write(self.h2.data_to_send())
        return events

    def _handle(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                self.headers.setdefault(event.stream_id, {}).update(event.headers)
            case h2.events.DataReceived():
                self.received_bytes[event.stream_id] += len(event.data)
            case h2.events.StreamEnded():
                self.ended.add(event.stream_id)


@asynccontextmanager
async def serving_models(**settings: Any) -> AsyncIterator[tuple[Grown, dragoman.Server]]:
    settings = {
        "http_port": 0,
        "grpc_port": 0,
        "trial_s": 0.0,
        "compress_responses": False,
        "max_bodies_bytes": 64 * MIB,
        **settings,
    }
    async with AsyncExitStack() as stack:
        with recorded_models() as models:
            server = await stack.enter_async_context(dragoman.Server(Grown, **settings))
        yield models["Grown"], server
        async with asyncio.timeout(60):  # all that was counted is released
            while not await has_free_memory(server, settings["max_bodies_bytes"]):
                await asyncio.sleep(0.01)


async def has_free_memory(server: dragoman.Server, size: int) -> bool:
    """Return whether the server has memory for a request body of `size` bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http_ports[0])
    binary = "inference-header-content-length: 1"  # the limit of JSON does not apply to what follows
    writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\n{binary}\r\ncontent-length: {size}\r\n\r\n".encode())
    writer.write(b"x" * size)
    status = int((await reader.readline()).split()[1])
    writer.transport.abort()
    await asyncio.sleep(0)
    assert status in (400, 503)
    return status == 400


@pytest.mark.parametrize("kind", REQUESTS)
async def test_unread_responses_are_bounded_and_sent_once_read(kind: str) -> None:
    async with serving_models() as (model, server), UnreadClient.to(server.http_ports[0]) as client:
        for _ in range(STREAMS):
            client.request(kind)
        await client.wait_for_ping()
        assert 16 <= model.call_count <= 18
        client.open_windows()
        await client.wait_for_all()
        assert model.call_count == STREAMS
        assert min(client.received_bytes.values()) >= MIB
        assert max(client.received_bytes.values()) < MIB + 1000


@pytest.mark.parametrize("kind", ["rest", "grpc"])
async def test_a_waiting_response_does_not_keep_its_request(kind: str) -> None:
    async with serving_models() as (model, server), UnreadClient.to(server.http_ports[0]) as client:
        for _ in range(5):
            client.request(kind)
        while model.call_count < 5:
            await client.wait_for_ping()
        gc.collect()
        assert [seen() for seen in model.received_inputs] == [None] * 5
        client.open_windows()
        await client.wait_for_all()


async def test_cancelled_streams_free_their_waiting_responses() -> None:
    async with serving_models() as (model, server), UnreadClient.to(server.http_ports[0]) as client:
        numbers = [client.request("grpc") for _ in range(STREAMS)]
        await client.wait_for_ping()
        for number in reversed(numbers):
            client.h2.reset_stream(number)
            client.ended.add(number)
        await client.wait_for_ping()
        assert model.call_count < STREAMS  # waiting requests were not started
        client.request("grpc")
        client.open_windows()
        await client.wait_for_all()


@pytest.mark.parametrize("kind", ["rest", "grpc"])
async def test_unread_responses_of_all_connections_are_bounded(kind: str) -> None:
    async with serving_models(max_bodies_bytes=20 * MIB) as (_, server):
        port = server.http_ports[0]
        async with UnreadClient.to(port) as first, UnreadClient.to(port) as second, UnreadClient.to(port) as third:
            for client in (first, second):
                for _ in range(20):
                    client.request(kind)
                await client.wait_for_ping()
            number = third.request(kind)
            await third.wait_for_headers(number)
            rejected = third.headers[number]
            if kind == "rest":
                third.open_windows()
                await third.wait_for_all()
                assert (rejected[":status"], rejected["retry-after"]) == ("503", "1")
            else:
                assert rejected["grpc-status"] == "8"
                assert "responses that clients do not read" in rejected["grpc-message"]
                health = third.request("health")
                third.open_windows()
                await third.wait_for_all()
                assert third.headers[health]["grpc-status"] == "0"
        async with UnreadClient.to(port) as fourth:  # the memory has been released
            async with asyncio.timeout(60):
                while True:
                    number = fourth.request(kind)
                    fourth.open_windows()
                    await fourth.wait_for_all()
                    if fourth.received_bytes[number] >= MIB:
                        break


MODEL = """
import numpy as np
import dragoman

class Grown(dragoman.Model):
    inputs = (dragoman.TensorSpec("n", dragoman.UINT8, (1,)),)
    placement = "inline"

    def infer(self, call):
        return {"y": np.full(2 << 20, 7, np.uint8)}
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    file: Path = tmp_path_factory.mktemp("grown") / "grown.py"
    file.write_text(MODEL)
    with running_server(f"{file}:Grown", "--placement", "inline", "--max-bodies-bytes", str(32 * MIB)) as found:
        yield found


def peak_mib(process: ServerProcess) -> float:
    status = Path(f"/proc/{process.popen.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


@pytest.mark.parametrize("kind", REQUESTS)
async def test_memory_is_bounded_with_unread_streams(process: ServerProcess, kind: str) -> None:
    before = peak_mib(process)
    async with UnreadClient.to(process.http_port) as client:
        for _ in range(500):  # a GiB
            client.request(kind)
        await client.wait_for_ping()
    assert peak_mib(process) - before < 200


async def test_memory_is_bounded_with_unread_pipelined_responses(process: ServerProcess) -> None:
    before = peak_mib(process)
    headers = f"POST {REQUESTS['rest'][0]} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(REST_BODY)}\r\n\r\n".encode()
    clients = [await asyncio.open_connection("127.0.0.1", process.http_port) for _ in range(150)]
    too_late = 0
    for reader, writer in clients:
        writer.write((headers + REST_BODY) * 50)
        try:
            assert await reader.readline()
        except ConnectionResetError:  # a 503, and the connection was closed before this process had time to read it
            too_late += 1
    assert too_late < len(clients) / 2
    for _, writer in clients:
        writer.transport.abort()
    assert peak_mib(process) - before < 200  # 300 MiB if each had one response, 15 GiB if each had all
    assert process.status("/v2/health/ready") == 200
