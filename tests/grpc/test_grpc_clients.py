"""gRPC clients of other projects: grpclib, and every kind of call of grpcio, on both event loops."""

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any

import grpc
import grpclib.client
import grpclib.const
import grpclib.exceptions
import pytest
import uvloop
from grpc_fakes import LIMITS, SERVICE, TABLE, FakeEngine, infer_message, make_server
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.formats import grpc_messages as m
from dragoman.formats.http2 import frames
from dragoman.formats.http2.fields import encode_fields
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.grpc.calls import GrpcCalls
from dragoman.transports.http2.connection import Http2Connection
from dragoman.transports.http2.limits import Http2Limits
from dragoman.transports.http2.stream import Buffer

LARGE = m.ModelInferRequest(model_name="echo")
LARGE.inputs.add(name="x", datatype="UINT8", shape=[900_000])
LARGE.raw_input_contents.append(random.Random(7).randbytes(900_000))


@pytest.fixture
async def port(engine: FakeEngine) -> AsyncIterator[int]:
    server = make_server(engine)
    yield await server.start("127.0.0.1", 0)
    await server.stop(0)


async def test_grpclib(port: int, engine: FakeEngine) -> None:
    kind = grpclib.const.Cardinality
    channel = grpclib.client.Channel("127.0.0.1", port)
    try:
        infer = grpclib.client.UnaryUnaryMethod(
            channel, SERVICE + "ModelInfer", m.ModelInferRequest, m.ModelInferResponse
        )
        for message in (infer_message(id="7"), LARGE):
            reply = await infer(message, timeout=60)
            assert reply.raw_output_contents == message.raw_input_contents
        with pytest.raises(grpclib.exceptions.GRPCError) as caught:
            await infer(infer_message("nope"))
        assert caught.value.status is grpclib.const.Status.NOT_FOUND
        path = SERVICE + "ModelStreamInfer"
        async with channel.request(path, kind.STREAM_STREAM, m.ModelInferRequest, m.ModelStreamInferResponse) as stream:
            for number in "12":
                await stream.send_message(infer_message(id=number), end=number == "2")
            assert [reply.infer_response.id async for reply in stream] == list("111222")
    finally:
        channel.close()


def call_every_way(target: str) -> list[str]:
    """Make every kind of call of a synchronous grpcio client; describe the responses."""
    with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        infer = channel.unary_unary(SERVICE + "ModelInfer")
        text = []
        for compression in grpc.Compression:
            reply = m.ModelInferResponse.FromString(
                infer(LARGE.SerializeToString(), timeout=60, compression=compression)
            )
            text.append("same" if reply.raw_output_contents == LARGE.raw_input_contents else "other")
        waiting = [infer.future(infer_message(id=str(n)).SerializeToString()) for n in range(50)]
        text += [m.ModelInferResponse.FromString(w.result(60)).id for w in waiting]
        stream = channel.stream_stream(SERVICE + "ModelStreamInfer")
        replies = stream(iter([infer_message(id="a").SerializeToString()] * 2), timeout=60)
        text += [m.ModelStreamInferResponse.FromString(r).infer_response.id for r in replies]
        try:
            infer(infer_message("slow").SerializeToString(), timeout=0.05)
        except grpc.RpcError as error:
            text.append(error.code().name)
        return text


EXPECTED = [*["same"] * 3, *map(str, range(50)), *["a"] * 6, "DEADLINE_EXCEEDED"]


@pytest.mark.parametrize("loops", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_grpcio_on_both_event_loops(loops: Any) -> None:
    async def run() -> list[str]:
        server = make_server(FakeEngine())
        port = await server.start("127.0.0.1", 0)
        try:
            return await asyncio.to_thread(call_every_way, f"127.0.0.1:{port}")
        finally:
            await server.stop(0)

    with asyncio.Runner(loop_factory=loops) as runner:
        assert runner.run(run()) == EXPECTED


# --- in memory -------------------------------------------------------------------------------------------------------


def recorded_requests() -> bytes:
    """Return the bytes of concurrent calls of every size, one with an unknown encoding and one of an unknown method."""
    head = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"x"), (b"content-type", b"application/grpc")]
    parts = [frames.PREFACE, frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 24}), frames.window_update(0, 1 << 24)]
    small, large = infer_message(id="7").SerializeToString(), LARGE.SerializeToString()[:40_000]
    expected = [("ModelInfer", 0, small), ("ModelInfer", 0, large), ("ModelInfer", 1, small), ("Nothing", 0, small)]
    bodies = [bytes((flag,)) + len(message).to_bytes(4) + message for _, flag, message in expected]
    for n, (name, _, _) in enumerate(expected):
        block = encode_fields([(b":path", (SERVICE + name).encode()), *head])
        parts.append(frames.frame(1, 4, 2 * n + 1, block))
    for at in range(0, max(map(len, bodies)), 10_000):
        for n, body in enumerate(bodies):
            if at < len(body):
                parts.append(frames.frame(0, at + 10_000 >= len(body), 2 * n + 1, body[at : at + 10_000]))
    return b"".join(parts)


RECORDED = recorded_requests()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def respond(loop: asyncio.AbstractEventLoop, chunks: list[bytes]) -> bytes:
    """Return all bytes of the server if the client sends these chunks."""

    async def run() -> bytes:
        out: list[Buffer] = []
        calls = GrpcCalls(FakeEngine(), [TABLE], LIMITS, MessageExecutor(BodyMemory(0)))
        connection = Http2Connection(calls, Http2Limits(), out.extend, lambda: None)
        for chunk in chunks:
            while chunk:
                room = connection.buffer()
                if room is None:
                    connection.receive(chunk)
                    while connection.reader.more:
                        connection.receive(b"")
                    break
                size = min(len(room), len(chunk))
                room[:size] = chunk[:size]
                connection.receive(b"", size)
                chunk = chunk[size:]
        return b"".join(out)

    return loop.run_until_complete(run())


def test_the_recorded_requests_get_responses(loop: asyncio.AbstractEventLoop) -> None:
    whole = respond(loop, [RECORDED])
    assert b"there is no method" in whole
    assert b"is marked as compressed" in whole
    assert whole.count(b"grpc-status\x010") == 1


@settings(deadline=None)
@given(places=st.lists(st.integers(0, len(RECORDED)), max_size=30))
def test_chunking_does_not_change_responses(loop: asyncio.AbstractEventLoop, places: list[int]) -> None:
    at = [0, *sorted(places), len(RECORDED)]
    found = [respond(loop, chunks) for chunks in ([RECORDED[a:b] for a, b in pairwise(at)], [RECORDED])]
    assert len({re.sub(rb"[0-9a-f]{16}-[0-9]{10}", b"id", each) for each in found}) == 1
