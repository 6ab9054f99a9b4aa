"""Malicious clients and lost connections do not affect other clients."""

import asyncio
import logging
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dragoman
from dragoman.transports.listener import PREFACE
from rest.rest_server import (
    Counter,
    Gate,
    Identity,
    RestServer,
    inputs,
    outputs,
    read_headers,
    read_response,
    request,
    serving,
    tensor,
)

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.usefixtures("both_loops")]
INFER = "/v2/models/Identity/infer"
LIVE = request("GET", "/v2/health/live")
REQUEST = request("POST", INFER, inputs(tensor()))
PENDING = request("POST", "/v2/models/Gate/infer", inputs(tensor()))


class Peer:
    """A raw connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @property
    def socket(self) -> socket.socket:
        found: socket.socket = self.writer.get_extra_info("socket")
        return found

    async def send(self, raw: bytes) -> None:
        self.writer.write(raw)
        await self.writer.drain()

    async def status(self) -> int:
        return (await read_response(self.reader)).status

    def reset(self) -> None:
        """Reset the connection."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def read_to_end(self) -> bytes:
        """Return everything until the server closes the connection."""
        try:
            return await asyncio.wait_for(self.reader.read(-1), 60)
        except ConnectionError:
            return b""
        finally:
            self.writer.close()


async def peer(server: RestServer, **options: Any) -> Peer:
    return Peer(*await asyncio.open_connection("127.0.0.1", server.port, **options))


async def still_serves(server: RestServer) -> None:
    assert next(outputs(await server.infer("Identity", inputs(tensor(data=[5])))))["data"] == [5]


def silent(caplog: pytest.LogCaptureFixture) -> bool:
    return not [r for r in caplog.records if r.levelno >= logging.WARNING]


# --- slow ones ---------------------------------------------------------------------------------------------------


async def trickle(client: Peer, raw: bytes) -> None:
    """Send a byte at a time, without end."""
    while not client.writer.is_closing():
        for byte in raw:
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\n", b"X-a: b\r\n"),
        (request("POST", INFER, b"", {"Content-Length": "1000000"}, length=False), b"x"),
        (request("POST", INFER, b"", {"Transfer-Encoding": "chunked"}, length=False), b"1\r\nx\r\n"),
    ],
)
async def test_a_slow_sender_is_disconnected(start: bytes, more: bytes) -> None:
    async with serving(Identity, header_timeout_s=0.1, body_timeout_s=0.1) as server:
        clients = [await peer(server) for _ in range(20)]
        trickling = []
        for client in clients:
            await client.send(start)
            trickling.append(asyncio.ensure_future(trickle(client, more)))
        await still_serves(server)
        assert [await client.status() for client in clients] == [408] * 20
        for task, client in zip(trickling, clients, strict=True):
            task.cancel()
            client.writer.close()


async def test_a_long_body_at_sufficient_speed_is_accepted() -> None:
    async with serving(Identity, body_timeout_s=0.2) as server:
        client = await peer(server)
        size = 40 << 16  # which is worth forty seconds
        await client.send(request("POST", INFER, b"", {"Content-Length": str(size)}, length=False))
        for _ in range(39):
            await client.send(bytes(1 << 16))
            await asyncio.sleep(0.01)
        await client.send(bytes(1 << 16))
        assert await client.status() == 400
        client.writer.close()


# --- those who die ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"GET /v2",
        REQUEST[:-5],
        request("POST", INFER, b"", {"Content-Length": "3000000"}, length=False) + bytes(2_000_000),
        request("POST", INFER, b"", {"Transfer-Encoding": "chunked"}, length=False) + b"5\r\nab",
        REQUEST * 50,
        request("POST", "/nowhere", b"", {"Content-Length": "1000"}, length=False) + b"x",
        request("POST", INFER, b"", {"Content-Length": "99999999999"}, length=False) + b"x",
    ],
)
async def test_a_reset_at_any_byte_affects_no_other_client(raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Identity) as server:
        for _ in range(3):
            client = await peer(server)
            await client.send(raw)
            client.reset()
        await still_serves(server)
    assert silent(caplog)


async def test_a_reset_cancels_the_call(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Gate, Identity) as server:
        client = await peer(server)
        await client.send(PENDING)
        await server.model("Gate").begun.wait()
        client.reset()
        await asyncio.wait_for(server.model("Gate").cancelled.wait(), 60)
        await still_serves(server)
    assert silent(caplog)


async def test_a_reset_in_a_stream_closes_it(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Counter, Identity) as server:
        client = await peer(server)
        await client.send(request("POST", "/v2/models/Counter/infer_stream", inputs(tensor(), parameters={"n": -1})))
        assert (await read_headers(client.reader))[0] == 200
        client.reset()
        await asyncio.wait_for(server.model("Counter").closed.wait(), 60)
        await still_serves(server)
    assert silent(caplog)


@pytest.mark.parametrize("size", [1, 20_000])
async def test_a_stream_that_never_waits_does_not_block_other_requests(size: int) -> None:
    class Endless(dragoman.Model):
        placement = "inline"

        def load(self) -> None:
            self.running = 0

        async def infer(self, call: dragoman.Infer) -> AsyncIterator[dict[str, Any]]:
            self.running += 1
            try:
                while True:
                    yield {"y": np.zeros(size, np.int8)}
            finally:
                self.running -= 1

    async with asyncio.timeout(60), serving(Endless, Identity) as server:
        raw = request("POST", "/v2/models/Endless/infer_stream", inputs(tensor()))
        clients = [await peer(server) for _ in range(4)]
        for client in clients:
            await client.send(raw)
        for reset, client in enumerate(clients):
            await client.reader.readexactly(300_000)
            await still_serves(server)
            if reset % 2:
                client.reset()
            else:
                client.writer.close()
        while server.model("Endless").running:
            await still_serves(server)


async def test_a_half_closed_connection() -> None:
    async with serving(Gate, Identity) as server:
        client = await peer(server)
        client.writer.write(REQUEST)
        client.writer.write_eof()
        assert await client.status() == 200
        assert await client.read_to_end() == b""
        client = await peer(server)
        client.writer.write(PENDING)
        await server.model("Gate").begun.wait()
        client.writer.write_eof()
        await asyncio.wait_for(server.model("Gate").cancelled.wait(), 60)
        assert await client.read_to_end() == b""


# --- those who take more than their share ---------------------------------------------------------------------------


async def test_connections_beyond_the_limit() -> None:
    async with serving(Identity, max_connections=3) as server:
        clients = [await peer(server) for _ in range(3)]
        for client in clients:
            await client.send(LIVE)
            assert await client.status() == 200
        for sent, status in ((REQUEST, 503), (request("GET", "/v2"), 503), (LIVE, 200)):  # beyond them, health alone
            further = await peer(server)
            await further.send(sent * 2)
            response = await read_response(further.reader)
            assert (response.status, response.headers["connection"]) == (status, "close")
            assert await further.read_to_end() == b""
        clients[0].writer.close()
        await clients[0].writer.wait_closed()
        async with asyncio.timeout(60):
            while (await server.send(REQUEST)).status != 200:
                pass
        for client in clients:
            client.writer.close()


async def test_a_client_that_never_reads_is_not_read_from(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Identity, write_timeout_s=0.2, compress_responses=False) as server:
        client = await peer(server, limit=1024)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        sent = 0
        with pytest.raises(ConnectionError):
            while True:
                await client.send(request("POST", INFER, inputs(tensor("x", [1000], "INT8", [1] * 1000))) * 100)
                sent += 100
        client.writer.close()
        assert sent < 20_000
        await still_serves(server)
    assert "client disconnected: it read nothing for 0.2 s" in caplog.text


async def test_clients_that_never_read_cause_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Identity, write_timeout_s=0.2, compress_responses=False) as server:
        body = request("POST", INFER, inputs(tensor("x", [1000], "INT8", [1] * 1000))) * 100
        clients = [await peer(server, limit=1024) for _ in range(4)]
        for client in clients:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        for client in clients:
            with pytest.raises(ConnectionError):
                while True:
                    await client.send(body)
            client.writer.close()
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("client disconnected")]
    assert lines == ["client disconnected: it read nothing for 0.2 s"]


async def test_pipelined_requests_behind_a_slow_one_stay_in_the_socket() -> None:
    async with serving(Gate, Identity) as server:
        client = await peer(server)
        client.writer.write(PENDING + LIVE * 200_000)  # ten megabytes
        await server.model("Gate").begun.wait()
        for _ in range(100):
            await still_serves(server)
        assert client.writer.transport.get_write_buffer_size() > 1 << 20
        server.model("Gate").open.set()
        assert next(outputs(await read_response(client.reader)))["data"] == [1]
        for _ in range(2000):
            assert await client.status() == 200
        client.writer.close()


async def test_a_flood_on_one_connection_does_not_starve_others() -> None:
    async with serving(Identity) as server:
        client = await peer(server)
        client.writer.write(REQUEST * 3000)
        answered = 0

        async def read() -> None:
            nonlocal answered
            for _ in range(3000):
                assert await client.status() == 200
                answered += 1

        reading = asyncio.ensure_future(read())
        await still_serves(server)
        assert answered < 2900
        await reading
        client.writer.close()


# --- those who make no sense --------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [True, False])
async def test_any_bytes_end_with_a_response_or_a_close(half: bool) -> None:
    mutated = st.builds(
        lambda raw, at, put, drop: raw[: at % len(raw)] + put + raw[at % len(raw) + drop :],
        st.sampled_from(
            [REQUEST, LIVE, REQUEST[:-9], LIVE + REQUEST, request("POST", INFER, b"5\r\nhello\r\n0\r\n\r\n")]
        ),
        st.integers(0, 500),
        st.one_of(st.binary(max_size=5), st.sampled_from([b"\r\n\r\n", b"\n", b"Transfer-Encoding: chunked\r\n"])),
        st.integers(0, 5),
    )

    @settings(max_examples=60, deadline=None)
    @given(st.one_of(st.binary(max_size=300), mutated))
    def send(port: int, raw: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            client.sendall(raw)
            text = b""
            with suppress(OSError):  # the server may have closed the connection already
                if half:
                    client.shutdown(socket.SHUT_WR)
                while chunk := client.recv(1 << 16):
                    text += chunk
            if raw.startswith(PREFACE):
                return  # that is HTTP/2
            assert not text or re.match(rb"HTTP/1\.1 (200|400|404|405|408|413|422|431) ", text)

    async with serving(Identity, header_timeout_s=0.04, body_timeout_s=0.04, keep_alive_timeout_s=0.04) as server:
        await asyncio.to_thread(send, server.port)
        await still_serves(server)


# --- what is said last ----------------------------------------------------------------------------------------------


async def test_nothing_is_parsed_after_connection_close() -> None:
    async with serving(Identity) as server:
        client = await peer(server)
        await client.send(request("GET", "/v2/health/live", headers={"Connection": "close"}) + LIVE + LIVE)
        received = await client.read_to_end()
        assert received.count(b"HTTP/1.1") == 1
        assert b"connection: close" in received


async def test_head_and_options_have_no_body() -> None:
    async with serving(Identity) as server:
        client = await peer(server)
        await client.send(request("HEAD", "/v2") + request("OPTIONS", "/v2") + request("HEAD", "/nowhere") + LIVE)
        responses = [await read_response(client.reader, head=True) for _ in range(4)]
        assert [a.status for a in responses] == [200, 204, 404, 200]
        assert int(responses[0].headers["content-length"]) > 0
        assert "content-length" not in responses[1].headers
        client.writer.close()


async def test_a_stream_over_http_1_0_ends_with_its_connection() -> None:
    async with serving(Counter) as server:
        client = await peer(server)
        raw = request("POST", "/v2/models/Counter/infer_stream", inputs(tensor(), parameters={"n": 3}))
        await client.send(raw.replace(b"HTTP/1.1", b"HTTP/1.0"))
        status, headers = await read_headers(client.reader)
        assert (status, headers["connection"]) == (200, "close")
        assert "transfer-encoding" not in headers
        assert (await client.read_to_end()).count(b"data: ") == 3


async def test_http_1_0_keep_alive() -> None:
    async with serving(Identity) as server:
        client = await peer(server)
        for _ in range(2):
            await client.send(b"GET /v2 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            response = await read_response(client.reader)
            assert (response.status, response.headers["connection"]) == (200, "keep-alive")
        client.writer.close()


async def test_requests_in_flight_finish_when_the_server_stops() -> None:
    async with serving(Gate, Identity) as server:
        idle, half, busy = [await peer(server) for _ in range(3)]
        await idle.send(LIVE)
        assert await idle.status() == 200
        await half.send(b"GET /v2 HT")
        await busy.send(PENDING)
        await server.model("Gate").begun.wait()
        stopping = asyncio.ensure_future(server.dragoman.stop(600.0))
        assert await idle.read_to_end() == b""
        assert await half.read_to_end() == b""
        server.model("Gate").open.set()
        response = await read_response(busy.reader)
        assert (response.status, response.headers["connection"]) == (200, "close")
        await asyncio.wait_for(stopping, 60)
        assert await busy.read_to_end() == b""
        with pytest.raises(ConnectionError):
            (await peer(server)).writer.close()


# --- no task where none is needed -----------------------------------------------------------------------------------


async def test_an_inline_model_needs_no_task() -> None:
    class Asks(dragoman.Model):
        placement = "inline"

        def infer(self, call: dragoman.Infer) -> dict[str, Any]:
            return {"task": [asyncio.current_task() is not None]}

    class AsksLater(dragoman.Model):
        placement = "inline"

        async def infer(self, call: dragoman.Infer) -> dict[str, Any]:
            first = asyncio.current_task()
            await asyncio.sleep(0)
            async with asyncio.timeout(60):
                return {"task": [first is not None and first is asyncio.current_task()]}

    async with serving(Asks, AsksLater) as server:
        assert next(outputs(await server.infer("Asks", inputs(tensor()))))["data"] == [False]
        assert next(outputs(await server.infer("AsksLater", inputs(tensor()))))["data"] == [True]


# --- TLS ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return self_signed(tmp_path_factory.mktemp("tls"))


def self_signed(folder: Path) -> Path:
    """Create a self-signed certificate for localhost, with its key in the same file."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    path = folder / "both.pem"
    path.write_bytes(
        builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path


@pytest.fixture
async def secure(certificate: Path) -> AsyncIterator[tuple[RestServer, ssl.SSLContext]]:
    async with serving(Identity, Counter, tls_cert=str(certificate), header_timeout_s=1.0) as server:
        yield server, ssl.create_default_context(cafile=str(certificate))


async def encrypted(server: RestServer, context: ssl.SSLContext) -> Peer:
    return await peer(server, ssl=context, server_hostname="localhost")


async def test_tls(secure: tuple[RestServer, ssl.SSLContext]) -> None:
    server, context = secure
    context.set_alpn_protocols(["http/1.1"])
    client = await encrypted(server, context)
    assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    await client.send(REQUEST * 3)
    for _ in range(3):
        assert next(outputs(await read_response(client.reader)))["data"] == [1]
    size = 3_000_000
    body = inputs(tensor("x", [size], "INT8", [1] * size))
    await client.send(request("POST", INFER, body))
    assert next(outputs(await read_response(client.reader)))["shape"] == [size]
    await client.send(request("POST", "/v2/models/Counter/infer_stream", inputs(tensor(), parameters={"n": 3})))
    assert (await read_response(client.reader)).body.count(b"data: ") == 3
    await client.send(request("POST", INFER, b"", {"Content-Length": "999999999"}, length=False) + bytes(100_000))
    assert await client.status() == 413
    client.writer.close()


async def test_invalid_or_missing_tls_handshakes(secure: tuple[RestServer, ssl.SSLContext]) -> None:
    server, context = secure
    silent, plain, half = [await peer(server) for _ in range(3)]
    await plain.send(LIVE)
    await half.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    for client in (silent, plain, half):
        assert b"HTTP" not in await client.read_to_end()
    client = await encrypted(server, context)
    await client.send(LIVE)
    assert await client.status() == 200
    client.writer.close()
