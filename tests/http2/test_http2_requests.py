"""One port for HTTP/1.1, HTTP/2 and gRPC: the same application answers, requests over any of them."""

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import httpx2
import numpy as np
import pytest
from numpy.typing import NDArray

import dragoman
from dragoman.formats import grpc_messages as m

REQUEST = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [3], "data": [1.0, 2.0, 3.0]}]}
RESPONSE = [2.0, 4.0, 6.0]


def double(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 2 * x


@pytest.fixture
async def server() -> AsyncIterator[dragoman.Server]:
    async with dragoman.Server(double, http_port=0, grpc_port=0, placement="inline", max_body_bytes=1 << 20) as server:
        yield server


class Client:
    """A client with one HTTP/2 connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.h2.initiate_connection()

    async def request(
        self, method: str, path: str, body: bytes = b"", *more: tuple[str, str]
    ) -> tuple[dict[str, str], bytes]:
        number = self.h2.get_next_available_stream_id()
        fields = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "localhost"), *more]
        self.h2.send_headers(number, fields, end_stream=not body)
        headers: dict[str, str] = {}
        received = b""
        ended = False
        while not ended:
            size = min(len(body), self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size)
            if size:
                self.h2.send_data(number, body[:size], end_stream=size == len(body))
                body = body[size:]
            self.writer.write(self.h2.data_to_send())
            if size and body:
                continue
            data = await asyncio.wait_for(self.reader.read(1 << 16), 60)
            assert data, "the server has hung up"
            for event in self.h2.receive_data(data):
                match event:
                    case h2.events.ResponseReceived():
                        headers = dict(event.headers)
                    case h2.events.DataReceived():
                        received += event.data
                        self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    case h2.events.StreamEnded() | h2.events.StreamReset():
                        ended, body = True, b""
            self.writer.write(self.h2.data_to_send())
        return headers, received


@pytest.fixture
async def client(server: dragoman.Server) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http_ports[0])
    yield Client(reader, writer)
    writer.transport.abort()


async def test_a_request(client: Client) -> None:
    for _ in range(3):
        headers, body = await client.request("POST", "/v2/models/double/infer", json.dumps(REQUEST).encode())
        assert headers[":status"] == "200"
        assert headers["content-type"] == "application/json"
        assert headers["content-length"] == str(len(body))
        assert "date" in headers
        assert json.loads(body)["outputs"][0]["data"] == RESPONSE


async def test_health_query_head_and_errors(client: Client) -> None:
    assert (await client.request("GET", "/v2/health/ready?x=y"))[0][":status"] == "200"
    headers, body = await client.request("HEAD", "/v2/models/double")
    assert (headers[":status"], body) == ("200", b"")
    headers, body = await client.request("GET", "/nowhere")
    assert headers[":status"] == "404"
    assert "no such path" in json.loads(body)["error"]
    assert (await client.request("DELETE", "/v2/health/ready"))[0]["allow"]
    headers, body = await client.request("POST", "/v2/models/nope/infer", json.dumps(REQUEST).encode())
    assert headers[":status"] == "404"
    headers, body = await client.request("POST", "/v2/models/double/infer", b"{")
    assert headers[":status"] == "400"


@pytest.mark.parametrize("with_content_length", [True, False])
async def test_a_too_large_body_is_rejected(client: Client, with_content_length: bool) -> None:
    body = b" " * ((1 << 20) + 1)
    more = [("content-length", str(len(body)))] if with_content_length else []
    headers, _ = await client.request("POST", "/v2/models/double/infer", body, *more)
    assert headers[":status"] == "413"
    assert (await client.request("GET", "/v2/health/live"))[0][":status"] == "200"


async def test_large_bodies_roundtrip(client: Client) -> None:
    data = np.arange(100_000, dtype=np.float64)
    head = {"name": "x", "datatype": "FP64", "shape": [len(data)], "parameters": {"binary_data_size": data.nbytes}}
    text = json.dumps(
        {"inputs": [head], "outputs": [{"name": "output-0", "parameters": {"binary_data": True}}]}
    ).encode()
    text = json.dumps({"inputs": [head], "parameters": {"binary_data_output": True}}).encode()
    body = text + data.tobytes()
    length = ("inference-header-content-length", str(len(text)))
    headers, received = await client.request(
        "POST", "/v2/models/double/infer", body, length, ("content-length", str(len(body)))
    )
    assert headers[":status"] == "200"
    begin = int(headers["inference-header-content-length"])
    assert np.array_equal(np.frombuffer(received[begin:]), 2 * data)


async def test_100_continue(client: Client) -> None:
    number = client.h2.get_next_available_stream_id()
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/v2/models/double/infer"), (":authority", "x")]
    client.h2.send_headers(number, [*fields, ("expect", "100-continue")])
    client.writer.write(client.h2.data_to_send())
    result: list[str] = []
    while not result:
        events = client.h2.receive_data(await asyncio.wait_for(client.reader.read(1 << 16), 60))
        result = [dict(e.headers)[":status"] for e in events if isinstance(e, h2.events.InformationalResponseReceived)]
    assert result == ["100"]


async def test_grpc_on_the_same_port(server: dragoman.Server) -> None:
    message = m.ModelInferRequest(model_name="double")
    message.inputs.add(name="x", datatype="FP64", shape=[3]).contents.fp64_contents.extend([1, 2, 3])
    for port in (server.http_ports[0], server.grpc_port):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            reply = m.ModelInferResponse.FromString(await call(message.SerializeToString(), timeout=60))
            assert np.frombuffer(reply.raw_output_contents[0]).tolist() == RESPONSE


class Hangs(dragoman.Model):
    """A model that never responds and records cancellation."""

    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP64, (-1,)),)
    placement = "inline"

    def __init__(self) -> None:
        self.began, self.cancelled = asyncio.Event(), asyncio.Event()

    async def infer(self, call: dragoman.Infer) -> dragoman.Tensor:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        raise AssertionError


@pytest.mark.parametrize("action", ["reset", "disconnect", "stop"])
async def test_a_disconnect_cancels_the_call(action: str) -> None:
    model = Hangs()
    server = dragoman.Server(model, http_port=0, grpc_port=-1, trial_s=0)
    async with server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http_ports[0])
        client = Client(reader, writer)
        requesting = asyncio.ensure_future(
            client.request("POST", "/v2/models/Hangs/infer", json.dumps(REQUEST).encode())
        )
        await asyncio.wait_for(model.began.wait(), 60)
        if action == "reset":
            client.h2.reset_stream(1, 8)
            writer.write(client.h2.data_to_send())
        elif action == "disconnect":
            writer.transport.abort()
        else:
            await server.stop(0.05)
        await asyncio.wait_for(model.cancelled.wait(), 60)
        requesting.cancel()
        await asyncio.wait([requesting])
        writer.transport.abort()


class Waits(dragoman.Model):
    """Answer once it is told to."""

    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)
    placement = "inline"

    def __init__(self) -> None:
        self.began, self.may_answer = asyncio.Event(), asyncio.Event()

    async def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        self.began.set()
        await self.may_answer.wait()
        return {"y": call.inputs["x"].data}


async def test_a_request_in_flight_is_answered_before_the_server_stops() -> None:
    """Also to clients such as httpx, which give up a response when they receive a GOAWAY before it."""
    model = Waits()
    async with dragoman.Server(model, http_port=0, grpc_port=-1, trial_s=0) as server:
        url = f"http://127.0.0.1:{server.http_ports[0]}/v2/models/Waits/infer"
        async with httpx2.AsyncClient(http1=False, http2=True, timeout=60) as client:
            requesting = asyncio.ensure_future(client.post(url, json=REQUEST))
            await asyncio.wait_for(model.began.wait(), 60)
            stopping = asyncio.ensure_future(server.stop(60))
            await asyncio.sleep(0.1)
            model.may_answer.set()
            response = await requesting
            await asyncio.wait_for(stopping, 60)
    assert (response.status_code, response.http_version) == (200, "HTTP/2")
    assert response.json()["outputs"][0]["data"] == [1.0, 2.0, 3.0]


async def test_a_slow_body_is_rejected() -> None:
    async with dragoman.Server(double, http_port=0, grpc_port=-1, body_timeout_s=0.2) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.http_ports[0])
        client = Client(reader, writer)
        number = client.h2.get_next_available_stream_id()
        path = "/v2/models/double/infer"
        client.h2.send_headers(number, [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")])
        client.h2.send_data(number, b"{")
        writer.write(client.h2.data_to_send())
        status = ""
        while not status:
            for event in client.h2.receive_data(await asyncio.wait_for(reader.read(1 << 16), 60)):
                if isinstance(event, h2.events.ResponseReceived):
                    status = dict(event.headers)[":status"]
        assert status == "408"
        assert (await client.request("GET", "/v2/health/live"))[0][":status"] == "200"
        writer.transport.abort()


def curl(*arguments: str) -> str:
    found = shutil.which("curl")
    if found is None or b"HTTP2" not in subprocess.run([found, "--version"], capture_output=True, check=True).stdout:
        pytest.skip("asks with a curl that speaks HTTP/2")
    command = [found, "-sS", "--max-time", "60", "-w", "\n%{http_version} %{http_code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


async def test_curl(server: dragoman.Server) -> None:
    url = f"{server.http_url}/v2/models/double/infer"
    for option, version in (("--http2-prior-knowledge", "2"), ("--http1.1", "1.1"), ("--http2", "1.1")):
        result = await asyncio.to_thread(curl, option, "-d", json.dumps(REQUEST), url)
        body, _, status = result.rpartition("\n")
        assert status == f"{version} 200"
        assert json.loads(body)["outputs"][0]["data"] == RESPONSE


@pytest.fixture
def certificate_file(tmp_path: Path) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("makes its certificate with openssl")
    key, chain = tmp_path / "key.pem", tmp_path / "chain.pem"
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    extra = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(chain)]
    subprocess.run([openssl, *options.split(), *extra], check=True, capture_output=True)
    return key, chain


async def test_tls_with_alpn(certificate_file: tuple[Path, Path]) -> None:
    key, chain = map(str, certificate_file)
    async with dragoman.Server(double, http_port=0, grpc_port=0, tls_key=key, tls_cert=chain) as server:
        for option, version in (("--http2", "2"), ("--http1.1", "1.1")):
            result = await asyncio.to_thread(curl, option, "--cacert", chain, f"{server.http_url}/v2/health/live")
            assert result.endswith(f"{version} 200")
        credentials = grpc.ssl_channel_credentials(certificate_file[1].read_bytes())
        for port in (server.http_ports[0], server.grpc_port):
            async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
                live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
                assert m.ServerLiveResponse.FromString(await live(b"", timeout=60)).live
        context: Any = ssl.create_default_context(cafile=chain)
        context.set_alpn_protocols(["h2"])
        reader, writer = await asyncio.open_connection("127.0.0.1", server.grpc_port, ssl=context)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        assert (await Client(reader, writer).request("GET", "/"))[0][":status"] == "415"
        writer.transport.abort()
