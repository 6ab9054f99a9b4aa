"""Counters of requests, bytes and connections equal what a client has counted, and those of batches are exact."""

import asyncio
import gzip
import json
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx2
import pytest

import dragoman
from dragoman.core.calls import Measure, Request
from dragoman.formats.http2 import frames
from dragoman.formats.http2.fields import encode_fields
from rest.rest_server import Counter, Gate, Identity, RestServer, inputs, request, serving, tensor

OIP = "oip_rest"
SERVICE, GRPC = "inference.GRPCInferenceService", "oip_grpc"
BODY = json.dumps(inputs(tensor())).encode()
PATH = "/v2/models/Identity/infer"
INFER = request("POST", PATH, BODY)
MEDIUM = json.dumps(inputs(tensor(shape=[10_000], datatype="FP32", data=[0.5] * 10_000))).encode()
LARGE = json.dumps(inputs(tensor(shape=[200_000], datatype="FP32", data=[0.5] * 200_000))).encode()


async def samples(server: RestServer) -> dict[str, float]:
    """Return all metrics by name and labels, without a request."""
    families = (await server.dragoman.engine.call(Request(Measure()))).answer
    found = [s for family in families for s in family.flat]
    return {s.name + "".join(f",{k}={v}" for k, v in s.labels.items()): s.value for s in found}


class Changes:
    """Differences of metrics since a moment; those that did not change are left out."""

    def __init__(self, server: RestServer, before: dict[str, float]) -> None:
        self._server, self._before = server, before

    async def get(self) -> dict[str, float]:
        now = await samples(self._server)
        return {
            name: value - self._before.get(name, 0) for name, value in now.items() if value != self._before.get(name, 0)
        }

    async def responses(self) -> dict[str, float]:
        prefix = "dragoman_requests_total,"
        return {k.removeprefix(prefix): v for k, v in (await self.get()).items() if k.startswith(prefix)}

    async def wait_for(self, name: str, value: float) -> None:
        """Wait until a metric has changed by this value: a count may come just after the client has its bytes."""
        async with asyncio.timeout(60):
            while (found := (await self.get()).get(name, 0)) != value:
                assert found < value, f"{name}: {found}, more than {value}"
                await asyncio.sleep(0.01)


@asynccontextmanager
async def counted(server: RestServer) -> AsyncIterator[Changes]:
    yield Changes(server, await samples(server))


class CountingClient:
    """A connection that counts the bytes of both directions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.sent = self.received = 0

    def send(self, data: bytes) -> None:
        self._writer.write(data)
        self.sent += len(data)

    async def read(self, end: bytes | int) -> bytes:
        data = await (self._reader.readexactly(end) if isinstance(end, int) else self._reader.readuntil(end))
        self.received += len(data)
        return data

    async def response(self, *, has_body: bool = True) -> int:
        """Return the status of a response over HTTP/1.1."""
        head = (await self.read(b"\r\n\r\n")).lower()
        if b"transfer-encoding: chunked" in head:
            while size := int(await self.read(b"\r\n"), 16):
                await self.read(size + 2)
            await self.read(2)
        elif has_body and b"content-length: " in head:
            await self.read(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
        return int(head.split()[1])

    async def exchange(self, data: bytes) -> int:
        self.send(data)
        return await self.response(has_body=not data.startswith(b"HEAD"))


@asynccontextmanager
async def connected(server: RestServer, tls: ssl.SSLContext | None = None) -> AsyncIterator[CountingClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=tls)
    try:
        yield CountingClient(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()


async def check_bytes(client: CountingClient, changes: Changes) -> None:
    await changes.wait_for("dragoman_received_bytes_total", client.sent)
    await changes.wait_for("dragoman_sent_bytes_total", client.received)


async def test_responses_and_bytes_of_http1() -> None:
    async with serving(Identity, Counter) as server, counted(server) as changes, connected(server) as client:
        stream = request("POST", "/v2/models/Counter/infer_stream", inputs(tensor(), parameters={"n": 4}))
        for data, status in (
            (INFER, 200),
            (INFER, 200),
            (request("POST", PATH, LARGE), 200),
            (stream, 200),
            (request("POST", PATH, b"{"), 400),
            (request("POST", "/v2/models/Other/infer", BODY), 404),
            (request("GET", "/v2/health/live"), 200),
            (request("HEAD", "/v2"), 200),
            (request("GET", "/nowhere/at/all"), 404),
        ):
            assert await client.exchange(data) == status
            await check_bytes(client, changes)
        client.send(INFER[:-5])
        await changes.wait_for("dragoman_received_bytes_total", client.sent)
        assert await client.exchange(INFER[-5:]) == 200
        await check_bytes(client, changes)
        client.send(request("POST", PATH, BODY, {"expect": "100-continue"})[: -len(BODY)])
        assert (await client.read(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        assert await client.exchange(BODY) == 200
        await check_bytes(client, changes)
        found = await changes.responses()
        assert sum(found.values()) == 10  # health checks count apart
        assert found[f"protocol={OIP},status=200"] == 7
        assert found[f"protocol={OIP},status=400"] == 1
        assert await client.exchange(b"NONSENSE\r\n\r\n") == 400
        assert (await changes.responses())["protocol=none,status=400"] == 1


async def test_bytes_of_tls_are_those_of_http(tmp_path: Path) -> None:
    """Large responses over TLS are written in chunks."""
    names = {"cert": tmp_path / "server.pem", "key": tmp_path / "server.key"}
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=127.0.0.1"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {names['key']} -out {names['cert']}"
    process = await asyncio.create_subprocess_exec(*command.split(), stderr=asyncio.subprocess.DEVNULL)
    assert await process.wait() == 0
    settings = {f"tls_{name}": str(path) for name, path in names.items()}
    tls = ssl.create_default_context(cafile=str(names["cert"]))
    async with (
        serving(Identity, **settings) as server,
        counted(server) as changes,
        connected(server, tls) as client,
    ):
        for body in (BODY, LARGE):
            assert await client.exchange(request("POST", PATH, body)) == 200
            await check_bytes(client, changes)


async def test_responses_and_bytes_of_http2() -> None:
    head = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"x")]

    def send(number: int, path: bytes, body: bytes) -> bytes:
        block = encode_fields([*head, (b":path", path)])
        return frames.frame(frames.HEADERS, 4, number, block) + data(number, body)

    def data(number: int, body: bytes) -> bytes:
        parts = [body[at : at + 16_384] for at in range(0, len(body), 16_384)] or [b""]
        return b"".join(frames.frame(frames.DATA, part is parts[-1], number, part) for part in parts)

    async def wait_for_end(client: CountingClient, number: int) -> None:
        while True:
            frame = await client.read(9)
            await client.read(int.from_bytes(frame[:3]))
            if frame[3] in (frames.HEADERS, frames.DATA) and frame[4] & 1 and int.from_bytes(frame[5:]) == number:
                return

    async with serving(Identity) as server, counted(server) as changes, connected(server) as client:
        client.send(
            frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 24}) + frames.window_update(0, 1 << 24)
        )
        requests = (
            (PATH.encode(), BODY),
            (PATH.encode(), MEDIUM[:10_000]),
            (PATH.encode(), MEDIUM),
            (b"/no/path", b""),
        )
        for number, (path, body) in enumerate(requests):
            client.send(send(2 * number + 1, path, body))
            await wait_for_end(client, 2 * number + 1)
        await changes.wait_for("dragoman_received_bytes_total", client.sent)
        found = await changes.responses()
        assert found[f"protocol={OIP},status=200"] == 2
        assert found[f"protocol={OIP},status=400"] == 1
        assert sum(found.values()) == 4
        sent = (await changes.get())["dragoman_sent_bytes_total"]
        await client.read(int(sent) - client.received)  # SETTINGS, WINDOW_UPDATE
        client.send(frames.frame(6, 0, 0, bytes(8)))
        await client.read(9 + 8)
        await check_bytes(client, changes)


async def test_statuses_of_grpc_are_counted() -> None:
    async with serving(Identity, Gate, grpc_port=0, max_grpc_calls=1) as server, counted(server) as changes:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.dragoman.grpc_port}") as channel:
            call = channel.unary_unary(f"/{SERVICE}/ServerMetadata")
            await call(b"")
            for path in (f"/{SERVICE}/ModelInfer", f"/{GRPC}/Other", "/other/Method"):
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary(path)(b"")
            stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()
            await stream.wait_for_connection()
            with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
                async with asyncio.timeout(60):
                    while True:  # until the stream has reached the server
                        await call(b"")
            stream.cancel()
        found = await changes.get()
    assert found[f"dragoman_requests_total,protocol={GRPC},status=INVALID_ARGUMENT"] == 1
    assert found[f"dragoman_requests_total,protocol={GRPC},status=RESOURCE_EXHAUSTED"] == 1
    assert found["dragoman_rejected_total,reason=grpc_calls"] == 1
    assert found["dragoman_requests_total,protocol=none,status=UNIMPLEMENTED"] == 2


async def test_one_of_64_small_requests_is_measured_and_every_other_one() -> None:
    async with serving(Identity, Gate) as server, counted(server) as changes, connected(server) as client:
        for _ in range(128):
            assert await client.exchange(INFER) == 200
        found = await changes.get()
        for stage in ("parse", "format"):
            assert found[f"dragoman_{stage}_seconds_count,protocol={OIP}"] == 128
            assert 0 < found[f"dragoman_{stage}_seconds_sum,protocol={OIP}"] < 60
        headers = {"content-encoding": "gzip"}
        assert await client.exchange(request("POST", PATH, gzip.compress(BODY), headers)) == 200
        found = await changes.get()
        for stage in ("parse", "format"):
            assert found[f"dragoman_{stage}_seconds_count,protocol={OIP}"] == 129
        server.model("Gate").open.set()
        for _ in range(64):  # the response comes later
            assert await client.exchange(request("POST", "/v2/models/Gate/infer", BODY)) == 200
        found = await changes.get()
        for stage in ("parse", "format"):
            assert found[f"dragoman_{stage}_seconds_count,protocol={OIP}"] == 129 + 64


async def test_connections_are_counted() -> None:
    async with serving(Identity, max_connections=3) as server, counted(server) as changes:
        async with connected(server) as a, connected(server) as b, connected(server) as c:
            assert [await client.exchange(INFER) for client in (a, b, c)] == [200] * 3
            found = await changes.get()
            assert (found["dragoman_connections_total"], found["dragoman_open_connections"]) == (3, 3)
            async with connected(server) as fourth:
                assert await fourth.exchange(INFER) == 503
            found = await changes.get()
            assert (found["dragoman_connections_total"], found["dragoman_rejected_total,reason=connections"]) == (4, 1)
        async with asyncio.timeout(60):
            while "dragoman_open_connections" in await changes.get():
                await asyncio.sleep(0.01)


async def test_responses_over_asgi_are_counted() -> None:
    app = dragoman.asgi(Identity)
    async with app, httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test") as client:
        for path, body, status in ((PATH, BODY, 200), (PATH, b"{", 400), ("/no/path", b"", 404)):
            assert (await client.post(path, content=body)).status_code == status
        text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("dragoman_requests_total")]
    assert f'dragoman_requests_total{{protocol="{OIP}",status="200"}} 1' in lines
    assert f'dragoman_requests_total{{protocol="{OIP}",status="400"}} 1' in lines
    assert sum(float(line.rpartition(" ")[2]) for line in lines) == 3


class Batched(dragoman.Model):
    """Wait for `open` and return the rows."""

    placement = "thread"
    batched = True
    inputs = (dragoman.TensorSpec("x", dragoman.INT32, (-1,)),)

    def load(self) -> None:
        self.open = threading.Event()

    def infer(self, call: dragoman.Infer) -> dict[str, dragoman.Tensor]:
        assert self.open.wait(60)
        return dict(call.inputs)


async def test_batches_are_counted() -> None:
    async with serving(Batched, max_batch_size=8, batch_linger=0.0, trial_s=0) as server, counted(server) as changes:
        body = inputs(tensor(shape=[2], data=[1, 2]))
        first = asyncio.create_task(server.infer("Batched", body))
        labels = "model=Batched,version="
        await changes.wait_for(f"dragoman_calls_in_flight,{labels}", 1)
        others = [asyncio.create_task(server.infer("Batched", body)) for _ in range(3)]
        await changes.wait_for(f"dragoman_queued_calls,{labels}", 3)
        server.model("Batched").open.set()
        assert {(await response).status for response in (first, *others)} == {200}
        found = await changes.get()
    assert (found[f"dragoman_batch_calls_sum,{labels}"], found[f"dragoman_batch_calls_count,{labels}"]) == (4, 2)
    assert (found[f"dragoman_batch_rows_sum,{labels}"], found[f"dragoman_batch_rows_count,{labels}"]) == (8, 2)
    assert found[f"dragoman_queue_seconds_count,{labels},call=Infer"] == 4
    assert f"dragoman_queued_calls,{labels}" not in found
    reasons = {name: value for name, value in found.items() if name.startswith("dragoman_batches_total")}
    assert reasons == {
        f"dragoman_batches_total,{labels},reason=idle_worker": 1,
        f"dragoman_batches_total,{labels},reason=worker_free": 1,
    }
