"""Limits on concurrent calls: one client cannot use up the calls of others, nor their health checks."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_fakes import LIMITS, SERVICE, FakeEngine, infer_message, make_server, rpc_error
from grpc_health.v1 import health_pb2
from raw_client import Raw, frame_message

from dragoman.formats import grpc_messages as m
from dragoman.transports.clients import client_address
from dragoman.transports.grpc.call import GrpcCall
from dragoman.transports.grpc.calls import MAX_HEALTH_CALLS
from dragoman.transports.grpc.method_calls import UnaryCall

MESSAGE = frame_message(infer_message(id="7").SerializeToString())
SLOW = frame_message(infer_message("slow").SerializeToString())
OK, EXHAUSTED, LATE = 0, 8, 4
HEALTH: dict[str, tuple[str, bytes]] = {
    "ServerLive": (f"{SERVICE}ServerLive", b""),
    "ServerReady": (f"{SERVICE}ServerReady", b""),
    "ModelReady": (f"{SERVICE}ModelReady", m.ModelReadyRequest(name="echo").SerializeToString()),
    "Check": ("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest().SerializeToString()),
}

Serve = Callable[..., Any]


@pytest.fixture
async def serve(engine: FakeEngine) -> AsyncIterator[Serve]:
    """Return a function that starts a server with other limits and returns its port."""
    servers: list[Any] = []

    async def serve(**limits: Any) -> int:
        servers.append(make_server(engine, replace(LIMITS, **limits)))
        port: int = await servers[-1].start("127.0.0.1", 0)
        return port

    yield serve
    for server in servers:
        await server.stop(0)


async def check_health(port: int, source: str = "127.0.0.1") -> None:
    async with connected(port, source) as raw:
        for path, body in HEALTH.values():
            received = await raw.response(raw.request("", frame_message(body), path=path))
            assert received.status == (OK, "")
            assert received.message == b"\x08\x01"


@asynccontextmanager
async def connected(port: int, source: str) -> AsyncIterator[Raw]:
    raw = Raw(*await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0)))
    try:
        yield raw
    finally:
        raw.writer.transport.abort()


async def status(raw: Raw, method: str = "ModelInfer", data: bytes = MESSAGE) -> tuple[int, str]:
    return (await raw.response(raw.request(method, data))).status


async def synchronized(raw: Raw) -> None:
    """Return once the server has received everything that was sent."""
    received = await raw.response(raw.request("", frame_message(b""), path=f"{SERVICE}ServerLive"))
    assert received.status == (OK, "")


async def test_calls_of_one_address_are_limited_below_the_server_limit(serve: Serve) -> None:
    port = await serve(max_grpc_calls=5, max_grpc_calls_per_address=3)
    async with connected(port, "127.0.0.2") as first, connected(port, "127.0.0.2") as second:
        numbers = [raw.request("ModelStreamInfer", end=False) for raw in (first, first, second)]
        await synchronized(first)
        await synchronized(second)
        for raw in (first, second):
            code, text = await status(raw)
            assert (code, text) == (
                EXHAUSTED,
                "this address has 3 calls under way already (max_grpc_calls_per_address)",
            )
        await check_health(port, "127.0.0.2")
        async with connected(port, "127.0.0.3") as other:
            assert await status(other) == (OK, "")
            for _ in range(2):
                other.request("ModelStreamInfer", end=False)
            assert await status(other) == (EXHAUSTED, "the server has 5 calls under way already (max_grpc_calls)")
            await check_health(port, "127.0.0.4")
        first.send(numbers[0], b"", end=True)
        assert (await first.response(numbers[0])).status == (OK, "")
        assert await status(second) == (OK, "")


async def test_no_limit_for_one_address(serve: Serve) -> None:
    port = await serve(max_grpc_calls=5, max_grpc_calls_per_address=0)
    async with connected(port, "127.0.0.1") as raw:
        for _ in range(5):
            raw.request("ModelStreamInfer", end=False)
        assert await status(raw) == (EXHAUSTED, "the server has 5 calls under way already (max_grpc_calls)")


async def test_a_call_counts_until_its_work_ends(serve: Serve, engine: FakeEngine) -> None:
    port = await serve(max_grpc_calls_per_address=2)
    working = asyncio.Event()
    call = engine.call

    async def ignore_cancellation(request: Any) -> Any:
        if request.model != "slow":
            return await call(request)
        try:
            await asyncio.Event().wait()
        finally:
            await working.wait()

    engine.call = ignore_cancellation  # type: ignore[method-assign]
    async with connected(port, "127.0.0.1") as raw:
        for _ in range(2):
            raw.h2.reset_stream(raw.request("ModelInfer", SLOW), 8)
        assert (await status(raw))[0] == EXHAUSTED
        working.set()
        while (await status(raw))[0] == EXHAUSTED:
            await asyncio.sleep(0)
        assert await status(raw) == (OK, "")


async def test_health_checks_of_one_connection_are_limited(serve: Serve) -> None:
    port = await serve()
    async with connected(port, "127.0.0.1") as raw:
        watches = [
            raw.request("", frame_message(b""), path="/grpc.health.v1.Health/Watch", end=False)
            for _ in range(MAX_HEALTH_CALLS)
        ]
        code, text = await status(raw, "ServerLive", frame_message(b""))
        assert (code, text) == (EXHAUSTED, "this connection has 16 health checks under way already")
        assert await status(raw) == (OK, "")
        await check_health(port)
        raw.h2.reset_stream(watches[0], 8)
        while (await status(raw, "ServerLive", frame_message(b"")))[0] == EXHAUSTED:  # its task ends a little later
            await asyncio.sleep(0)


async def test_streams_of_one_connection_are_limited_and_advertised(serve: Serve) -> None:
    port = await serve(max_streams=3)
    async with connected(port, "127.0.0.1") as raw:
        assert await status(raw) == (OK, "")
        assert raw.h2.remote_settings.max_concurrent_streams == 3


async def test_real_clients_wait_for_their_streams(serve: Serve, engine: FakeEngine) -> None:
    port = await serve(max_streams=3)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        infer = channel.unary_unary(f"{SERVICE}ModelInfer")
        messages = [infer_message(id=str(n)).SerializeToString() for n in range(50)]
        found = await asyncio.gather(*(infer(message, timeout=60) for message in messages))
    assert [m.ModelInferResponse.FromString(each).id for each in found] == [str(n) for n in range(50)]


async def test_an_idle_stream_times_out(serve: Serve, engine: FakeEngine) -> None:
    port = await serve(grpc_stream_idle_timeout_s=0.2)
    async with connected(port, "127.0.0.1") as raw:
        engine.chunk_count = 0
        busy = raw.request("ModelStreamInfer", SLOW, end=False)  # its call is still running
        watching = raw.request("", frame_message(b""), path="/grpc.health.v1.Health/Watch", end=False)
        silent = raw.request("ModelStreamInfer", end=False)
        talked = raw.request("ModelStreamInfer", MESSAGE, end=False)
        reflecting = raw.request("", path="/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", end=False)
        for number in (silent, talked, reflecting):
            received = await raw.response(number)
            assert received.status == (LATE, "no message came on this stream for 0.2 s (grpc_stream_idle_timeout_s)")
        await asyncio.sleep(0.3)
        await synchronized(raw)
        assert not raw.streams[busy].ended
        assert not raw.streams[watching].ended


async def test_the_idle_timeout_of_streams_can_be_disabled(serve: Serve) -> None:
    port = await serve(grpc_stream_idle_timeout_s=0.0, header_timeout_s=0.1)
    async with connected(port, "127.0.0.1") as raw:
        number = raw.request("ModelStreamInfer", end=False)
        await asyncio.sleep(0.3)
        raw.send(number, MESSAGE, end=True)
        assert (await raw.response(number)).status == (OK, "")


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::1", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        ("", ""),
        (None, ""),
    ],
)
def test_the_address_of_a_client(peer: Any, address: str) -> None:
    class Transport:
        def get_extra_info(self, name: str) -> Any:
            assert name == "peername"
            return peer

    assert client_address(Transport()) == address


# --- metadata, with a real client, at either server ------------------------------------------------------------------


async def test_white_space_around_metadata(channel: Any) -> None:
    infer = channel.unary_unary(f"{SERVICE}ModelInfer")
    metadata = (("x-a", "trail "), ("x-b", " lead"), ("x-c", " "))
    reply = await infer(infer_message(id="7").SerializeToString(), metadata=metadata, timeout=60)
    assert m.ModelInferResponse.FromString(reply).id == "7"


async def test_metadata_beyond_the_limit(channel: Any) -> None:
    live = channel.unary_unary(f"{SERVICE}ServerLive")
    error = await rpc_error(live(b"", metadata=(("x-a", "b" * 20_000),), timeout=60))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert m.ServerLiveResponse.FromString(await live(b"", timeout=60)).live


async def test_the_error_of_too_large_metadata_is_complete(serve: Serve) -> None:
    port = await serve(max_headers=20)
    async with connected(port, "127.0.0.1") as raw:
        large = raw.request("ModelInfer", MESSAGE, fields={"x-a": "b" * 20_000})
        received = await raw.response(large)
        assert received.status == (EXHAUSTED, "headers: expected at most 16384 bytes, got more")
        assert received.headers[0][":status"] == "200"
        assert len(received.headers) == 1
        many = raw.request("ModelInfer", MESSAGE, fields={f"x-{n}": "" for n in range(20)})
        assert (await raw.response(many)).status == (EXHAUSTED, "headers: expected at most 20 fields, got 26")
        assert await status(raw) == (OK, "")


@pytest.mark.parametrize(("call_type", "is_late"), [(UnaryCall, True), (GrpcCall, False)])
async def test_only_a_unary_call_has_one_time_limit_from_its_beginning(call_type: Any, is_late: bool) -> None:
    """A stream may be idle before each message; the message of a unary call is expected from the beginning."""
    now_s = 0.0
    loop = SimpleNamespace(time=lambda: now_s)
    server = SimpleNamespace(loop=loop, limits=replace(LIMITS, body_timeout_s=10.0))
    statuses: Counter[str] = Counter()
    headers = SimpleNamespace(statuses=statuses)
    stream = SimpleNamespace(send_headers=lambda *_, ended: None, expect=lambda _: None)
    server.leave = lambda _: None
    record, context, deadline_s, began_s = None, ("7",), None, loop.time()
    call = call_type(server, stream, None, headers, record, context, deadline_s, began_s)
    now_s = 9.0
    call.receive(MESSAGE, 0, 9, False)
    call.check_timeout(12.0)
    assert statuses == ({"DEADLINE_EXCEEDED": 1} if is_late else {})
