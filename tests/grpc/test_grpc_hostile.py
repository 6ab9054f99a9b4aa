"""gRPC with unusual, slow and hostile clients: each gets a status in time and does not affect others."""

import asyncio
import gzip
import os
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc_fakes import LIMIT, LIMITS, FakeEngine, infer_message, make_server
from raw_client import Raw, frame_message

from dragoman.formats import grpc_messages as m
from dragoman.formats.http2 import frames
from dragoman.transports.grpc.call import MessageReader
from dragoman.transports.grpc.handlers import GrpcError

MESSAGE = infer_message(id="7").SerializeToString()
SHORT = replace(LIMITS, header_timeout_s=0.2, body_timeout_s=0.2, write_timeout_s=0.2, keep_alive_timeout_s=0.2)
OK, INTERNAL, UNIMPLEMENTED, EXHAUSTED, LATE = 0, 13, 12, 8, 4


@pytest.fixture
async def port(engine: FakeEngine) -> AsyncIterator[int]:
    server = make_server(engine)
    yield await server.start("127.0.0.1", 0)
    await server.stop(0)


@pytest.fixture
async def strict(engine: FakeEngine) -> AsyncIterator[int]:
    """Start a server with short timeouts."""
    server = make_server(engine, SHORT)
    yield await server.start("127.0.0.1", 0)
    await server.stop(0)


@pytest.fixture
async def raw(port: int) -> AsyncIterator[Raw]:
    async with Raw.to(port) as client:
        yield client


@pytest.fixture
async def hasty(strict: int) -> AsyncIterator[Raw]:
    """Connect to the server with short timeouts."""
    async with Raw.to(strict) as client:
        yield client


async def responses(raw: Raw) -> bool:
    """Return whether an ordinary call gets a response."""
    received = await raw.response(raw.request("ModelInfer", frame_message(MESSAGE)))
    return received.status[0] == OK and m.ModelInferResponse.FromString(received.message).id == "7"


# --- messages --------------------------------------------------------------------------------------------------------


async def test_a_message_may_arrive_in_any_chunks(raw: Raw) -> None:
    data = frame_message(MESSAGE)
    for chunks in (
        [data],
        [data[:3], data[3:]],
        [data[:5], data[5:]],
        [data, b""],
        [data[n : n + 1] for n in range(len(data))],
    ):
        received = await raw.response(raw.request("ModelInfer", *chunks))
        assert received.status == (OK, "")
        assert received.headers[0].pop("x-request-id")
        assert received.headers[0] == {":status": "200", "content-type": "application/grpc"}
        assert m.ModelInferResponse.FromString(received.message).id == "7"


@pytest.mark.parametrize("name", ["gzip", "deflate", "identity"])
async def test_compressed_messages(raw: Raw, name: str) -> None:
    packed = {"gzip": gzip.compress(MESSAGE), "deflate": zlib.compress(MESSAGE), "identity": MESSAGE}[name]
    received = await raw.response(
        raw.request("ModelInfer", frame_message(packed, int(name != "identity")), fields={"grpc-encoding": name})
    )
    assert received.status == (OK, "")
    received = await raw.response(
        raw.request("ModelInfer", frame_message(MESSAGE), fields={"grpc-encoding": name})
    )  # or uncompressed
    assert received.status == (OK, "")


async def test_an_unknown_encoding_is_unimplemented_and_lists_known_ones(raw: Raw) -> None:
    received = await raw.response(raw.request("ModelInfer", frame_message(MESSAGE, 1), fields={"grpc-encoding": "br"}))
    assert received.status == (
        UNIMPLEMENTED,
        "the encoding 'br' is not supported; expected one of identity, gzip, deflate",
    )
    assert received.headers[-1]["grpc-accept-encoding"] == "identity,gzip,deflate"
    assert len(received.headers) == 1


BOMB = gzip.compress(bytes(2 * LIMIT))
BAD: dict[str, tuple[list[bytes], dict[str, str], int, str]] = {
    "no message": ([], {}, INTERNAL, "expected one message, got none"),
    "an empty body": ([b""], {}, INTERNAL, "expected one message, got none"),
    "half a prefix": ([b"\0\0\0"], {}, INTERNAL, "expected one message, got none"),
    "half a message": ([frame_message(MESSAGE)[:-1]], {}, INTERNAL, "expected one message, got none"),
    "two messages": ([frame_message(MESSAGE) * 2], {}, INTERNAL, "expected one message, got more"),
    "more than a message": ([frame_message(MESSAGE), b"\0"], {}, INTERNAL, "expected one message, got more"),
    "a flag of two": ([frame_message(MESSAGE, 2)], {}, INTERNAL, "expected a message, whose flag is 0 or 1, got 2"),
    "compressed without an encoding": ([frame_message(MESSAGE, 1)], {}, INTERNAL, "a message is marked as compressed"),
    "not gzip": ([frame_message(b"abc", 1)], {"grpc-encoding": "gzip"}, INTERNAL, "the message is not valid gzip"),
    "a bomb": ([frame_message(BOMB, 1)], {"grpc-encoding": "gzip"}, EXHAUSTED, "the decompressed"),
    "too large": ([b"\0\x7f\xff\xff\xff"], {}, EXHAUSTED, "the message of 2147483647 bytes is larger than the limit"),
    "a bad timeout": ([frame_message(MESSAGE)], {"grpc-timeout": "soon"}, INTERNAL, "malformed grpc-timeout 'soon'"),
    "an unknown method": ([frame_message(MESSAGE)], {"path": "/a/B"}, UNIMPLEMENTED, "there is no method /a/B"),
    "no message in health": ([], {"path": "/grpc.health.v1.Health/Watch"}, INTERNAL, "expected one message"),
    "no health question": ([frame_message(b"\xff")], {"path": "/grpc.health.v1.Health/Check"}, 3, "the message is no"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_invalid_calls_get_a_status(raw: Raw, name: str) -> None:
    chunks, fields, code, text = BAD[name]
    path = fields.get("path", "")
    received = await raw.response(raw.request("ModelInfer", *chunks, path=path, fields={} if path else fields))
    assert received.status[0] == code
    assert received.status[1].startswith(text)
    assert await responses(raw)


async def test_a_too_large_message_is_rejected_before_it_arrives(raw: Raw) -> None:
    number = raw.request("ModelInfer", b"\0\x10\0\0\0" + bytes(100), end=False)
    assert (await raw.response(number)).status[0] == EXHAUSTED
    assert raw.streams[number].reset in (None, 0)
    assert await responses(raw)


async def test_requests_that_are_not_grpc(raw: Raw) -> None:
    received = await raw.response(raw.request("ModelInfer", b"{}", fields={"content-type": "application/json"}))
    assert received.headers == [{":status": "415", "content-length": "0"}]
    assert (
        await raw.response(
            raw.request("ModelInfer", frame_message(MESSAGE), fields={"content-type": "application/grpc+proto"})
        )
    ).status[0] == OK


async def test_error_messages_are_percent_encoded(raw: Raw, engine: FakeEngine) -> None:
    from dragoman.core.errors import InvalidInput

    engine.errors = {"bad": InvalidInput("50 % of é\nis too much ")}
    received = await raw.response(raw.request("ModelInfer", frame_message(infer_message("bad").SerializeToString())))
    assert received.status == (3, "50 %25 of %C3%A9%0Ais too much")


async def test_reserved_headers_are_not_metadata(raw: Raw, engine: FakeEngine) -> None:
    await raw.response(
        raw.request("ModelInfer", frame_message(MESSAGE), fields={"x-a": "b", "x-bin": "AAAA", "grpc-timeout": "5S"})
    )
    metadata = dict(engine.requests[-1].metadata)
    assert "x-bin" not in metadata
    assert not any(name.startswith((":", "grpc-")) for name in metadata)


# --- time ------------------------------------------------------------------------------------------------------------


async def test_an_immediate_response_needs_no_task(raw: Raw, engine: FakeEngine) -> None:
    tasks: list[Any] = []
    call = engine.call

    async def record(request: Any) -> Any:
        tasks.append(asyncio.current_task())
        return await call(request)

    engine.call = record  # type: ignore[method-assign]
    both: tuple[dict[str, str], ...] = ({}, {"grpc-timeout": "60S"})
    for fields in both:
        assert (await raw.response(raw.request("ModelInfer", frame_message(MESSAGE), fields=fields))).status[0] == OK
    assert tasks == [None, None]


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_a_deadline_ends_a_call(raw: Raw, engine: FakeEngine, method: str) -> None:
    slow = frame_message(infer_message("slow").SerializeToString())
    received = await raw.response(raw.request(method, slow, end=method == "ModelInfer", fields={"grpc-timeout": "50m"}))
    assert received.status == (LATE, "Request timeout expired")
    await asyncio.wait_for(engine.cancelled.wait(), 60)
    assert await responses(raw)


@pytest.mark.parametrize("leave", ["reset", "hang up", "cut"])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_a_reset_cancels_the_call(raw: Raw, engine: FakeEngine, leave: str, method: str) -> None:
    number = raw.request(method, frame_message(infer_message("slow").SerializeToString()), end=method == "ModelInfer")
    await engine.started.wait()
    if leave == "reset":
        raw.h2.reset_stream(number, 8)
        raw.flush()
    elif leave == "hang up":
        raw.writer.write_eof()
    else:
        raw.writer.transport.abort()
    await asyncio.wait_for(engine.cancelled.wait(), 60)


async def test_a_client_without_preface_is_disconnected(strict: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", strict)
    assert b"SETTINGS not received" in await asyncio.wait_for(reader.read(), 60)
    writer.close()


@pytest.mark.parametrize("sent_message", [b"\0\0\x09\1", b"\0\0\x20\1\4\0\0\0\1abc", b"\0\0\3\1\0\0\0\0\1\0\1a"])
async def test_an_incomplete_frame_times_out(hasty: Raw, sent_message: bytes) -> None:
    assert await responses(hasty)
    hasty.writer.write(sent_message)
    assert await hasty.wait_for_end() == 11


async def test_an_incomplete_message_times_out(hasty: Raw) -> None:
    numbers = [
        hasty.request("ModelInfer", frame_message(MESSAGE)[:9], end=False),
        hasty.request("ModelInfer", end=False),
    ]
    numbers.append(hasty.request("ModelStreamInfer", frame_message(MESSAGE)[:9], end=False))
    for number in numbers:
        code, text = (await hasty.response(number)).status
        assert code == LATE
        assert text.startswith("the message came too slowly")
    assert await responses(hasty)


async def test_a_stream_may_be_idle_between_messages(hasty: Raw) -> None:
    number = hasty.request("ModelStreamInfer", frame_message(MESSAGE), end=False)
    await asyncio.sleep(0.6)
    hasty.send(number, frame_message(MESSAGE), end=True)
    assert (await hasty.response(number)).status[0] == OK


async def test_a_client_without_window_times_out(hasty: Raw) -> None:
    hasty.acknowledges = False
    message = m.ModelInferRequest(model_name="echo")
    message.inputs.add(name="x", datatype="UINT8", shape=[200_000])
    message.raw_input_contents.append(bytes(200_000))
    data = frame_message(message.SerializeToString())
    number = hasty.request("ModelInfer", end=False)
    while data:
        size = min(16_384, hasty.h2.local_flow_control_window(number))
        hasty.send(number, data[:size], end=size >= len(data))
        data = data[size:]
        if data and not hasty.h2.local_flow_control_window(number):
            await hasty.until(lambda: hasty.h2.local_flow_control_window(number))
    received = await hasty.response(number)
    assert received.reset == 8
    assert len(received.body) == 65_535


async def test_a_client_that_opens_its_window_byte_by_byte_times_out(hasty: Raw) -> None:
    hasty.h2.update_settings({4: 0})
    hasty.acknowledges = False
    number = hasty.request("ModelInfer", frame_message(MESSAGE))

    async def send_slowly() -> None:
        while hasty.streams[number].reset is None:
            hasty.h2.increment_flow_control_window(1, number)
            hasty.flush()
            await asyncio.sleep(0.02)

    dripping = asyncio.ensure_future(send_slowly())
    assert (await hasty.response(number)).reset == 8
    await dripping


async def test_warnings_about_unread_responses_are_rate_limited(hasty: Raw, caplog: pytest.LogCaptureFixture) -> None:
    hasty.h2.update_settings({4: 0})
    hasty.acknowledges = False
    numbers = [hasty.request("ModelInfer", frame_message(MESSAGE)) for _ in range(20)]
    for number in numbers:
        assert (await hasty.response(number)).reset == 8
    record, *others = [r for r in caplog.records if r.levelname == "WARNING"]
    assert not others
    assert record.getMessage() == "stream reset: the client read nothing of it for 0.2 s"


async def test_unread_messages_stay_with_the_client(raw: Raw, engine: FakeEngine) -> None:
    assert await responses(raw)  # the settings of the server have arrived
    number = raw.request("ModelStreamInfer", frame_message(infer_message("slow").SerializeToString()), end=False)
    await engine.started.wait()
    chunk = frame_message(bytes(15_000))
    sent = 0
    while raw.h2.local_flow_control_window(number) >= len(chunk):
        raw.send(number, chunk)
        sent += len(chunk)
    assert await responses(raw)  # other calls are not affected
    assert raw.h2.local_flow_control_window(number) < len(chunk)
    assert sent > 1 << 19


async def test_memory_of_all_calls_is_limited(engine: FakeEngine) -> None:
    server = make_server(engine, replace(LIMITS, max_bodies_bytes=300_000))
    async with Raw.to(await server.start("127.0.0.1", 0)) as raw:
        assert await responses(raw)
        half = frame_message(bytes(200_000))[:150_000]
        numbers = [raw.request("ModelInfer", end=False) for _ in range(3)]
        for number in numbers[:2]:
            for at in range(0, len(half), 15_000):
                raw.send(number, half[at : at + 15_000])
        assert await responses(raw)  # small ones still fit
        for at in range(0, len(half), 15_000):
            raw.send(numbers[2], half[at : at + 15_000])
        code, text = (await raw.response(numbers[2])).status
        assert code == EXHAUSTED
        assert text.startswith("the requests in flight take all of the 300000 bytes")
        raw.h2.reset_stream(numbers[0], 8)
        assert await responses(raw)
        large = infer_message()
        large.raw_input_contents[0] = bytes(100_000)
        large.inputs[0].datatype, large.inputs[0].shape[0] = "UINT8", 100_000
        data = frame_message(large.SerializeToString())
        stream = raw.request("ModelStreamInfer", end=False)
        for n in range(9):  # a message that has been read is no longer counted
            for at in range(0, len(data), 15_000):
                raw.send(stream, data[at : at + 15_000], end=n == 8 and at + 15_000 >= len(data))
            await raw.until(lambda n=n: len(raw.streams[stream].body) > 3 * (n + 1) * 100_000)
        assert (await raw.response(stream)).status[0] == OK
    await server.stop(0)


async def test_an_announced_length_takes_no_file_and_little_memory(engine: FakeEngine) -> None:
    server = make_server(engine, replace(LIMITS, max_body_bytes=64 << 20))
    async with Raw.to(await server.start("127.0.0.1", 0)) as raw:
        assert await responses(raw)
        before = open_files(), address_space()
        numbers = [raw.request("ModelInfer", b"\0\x03\xff\xff\xff" + b"x", end=False) for _ in range(20)]
        assert await responses(raw)
        assert open_files() == before[0]
        assert address_space() - before[1] < 20 * (4 << 20)
        for number in numbers:
            raw.h2.reset_stream(number, 8)
    await server.stop(0)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")


async def test_a_message_counts_until_the_next_one_is_read(engine: FakeEngine) -> None:
    engine.chunk_count = 0
    server = make_server(engine, replace(LIMITS, max_bodies_bytes=300_000))
    message = infer_message("slow")
    message.raw_input_contents[0] = bytes(200_000)
    message.inputs[0].datatype, message.inputs[0].shape[0] = "UINT8", 200_000
    data = frame_message(message.SerializeToString())
    async with Raw.to(await server.start("127.0.0.1", 0)) as raw:
        assert await responses(raw)
        numbers = [raw.request("ModelStreamInfer", end=False) for _ in range(2)]
        for number in numbers:
            for at in range(0, len(data), 15_000):
                raw.send(number, data[at : at + 15_000])
            if number == numbers[0]:
                await asyncio.wait_for(engine.started.wait(), 60)
        code, text = (await raw.response(numbers[1])).status
        assert code == EXHAUSTED
        assert text.startswith("the requests in flight take all of the 300000 bytes")
    await server.stop(0)


async def test_an_idle_client_that_acknowledges_pings_stays_connected(hasty: Raw) -> None:
    assert await responses(hasty)
    pings = 0
    async with asyncio.timeout(60):
        while not pings:
            data = await hasty.reader.read(1 << 16)
            pings += data.count(b"\0\0\x08\6\0\0\0\0\0dragoman")
            hasty.receive_data(data)
    assert await responses(hasty)


async def test_too_many_pings_are_reported(raw: Raw) -> None:
    assert await responses(raw)
    for _ in range(10):
        raw.h2.ping(b"12345678")
        raw.flush()
    assert await raw.wait_for_end() == 11


async def test_stopping_sends_goaway(engine: FakeEngine) -> None:
    server = make_server(engine)
    async with Raw.to(await server.start("127.0.0.1", 0)) as raw:
        await wait_for_goaway(raw, server, engine)


async def wait_for_goaway(raw: Raw, server: Any, engine: FakeEngine) -> None:
    assert await responses(raw)
    number = raw.request("ModelInfer", frame_message(infer_message("slow").SerializeToString()))
    await engine.started.wait()
    stopping = asyncio.ensure_future(server.stop(0.2))
    received = await asyncio.wait_for(raw.reader.read(), 60)  # the h2 package accepts nothing after the first GOAWAY
    first, text, last = (
        received.find(part) for part in (goaway(frames.NUMBER), b"the server is shutting down", goaway(number))
    )
    assert 0 <= first < text < last
    await asyncio.wait_for(stopping, 60)


def goaway(last: int) -> bytes:
    return frames.goaway(last, frames.NO_ERROR)


# --- messages, in memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 100, 16_384, 16_385, 100_000])
@pytest.mark.parametrize("step", [1, 5, 4096, 1 << 20])
def test_chunking_does_not_change_messages(size: int, step: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    data = frame_message(body) + frame_message(b"x", 1) + frame_message(body)
    messages = MessageReader(1 << 20)
    if step == 1 and size > 1000:
        step = 997
    for at in range(0, len(data), step):
        messages.feed(data, at, min(at + step, len(data)))
    assert [(flag, bytes(found)) for flag, found in messages.ready] == [(0, body), (1, b"x"), (0, body)]
    assert not messages.is_incomplete


def test_large_messages_are_received_into_one_buffer() -> None:
    messages = MessageReader(1 << 20)
    messages.feed(frame_message(bytes(100_000)), 0, 1005)
    room = messages.buffer(50_000)
    assert room is not None
    assert len(room) == 50_000
    room[:] = b"x" * 50_000
    messages.count_filled(50_000)
    rest = messages.buffer(1 << 20)
    assert rest is not None
    assert len(rest) == 49_000
    messages.count_filled(49_000)
    _, found = messages.ready[0]
    assert bytes(found[:51_000]) == bytes(1000) + b"x" * 50_000
    assert isinstance(found, memoryview)
    assert found.readonly


async def test_large_raw_contents_reach_the_model_where_they_were_received(raw: Raw, engine: FakeEngine) -> None:
    for size in (100_000, 100_004, 100_008):
        message = m.ModelInferRequest(model_name="echo", id="x" * (size % 64))
        message.inputs.add(name="x", datatype="FP32", shape=[size // 4])
        message.raw_input_contents.append(bytes(size))
        data = frame_message(message.SerializeToString())
        number = raw.request("ModelInfer", end=False)
        for at in range(0, len(data), 16_000):
            if raw.h2.local_flow_control_window(number) < 16_000:
                await raw.until(lambda n=number: raw.h2.local_flow_control_window(n) >= 16_000)
            raw.send(number, data[at : at + 16_000], end=at + 16_000 >= len(data))
        assert (await raw.response(number)).status[0] == OK
        owner = engine.requests[-1].call.inputs["x"].data  # type: ignore[attr-defined]
        assert owner.flags.aligned
        while isinstance(owner, np.ndarray):
            owner = owner.base
        assert isinstance(owner, memoryview)


@pytest.mark.parametrize(("size", "least"), [(1 << 20, 1 << 20), ((1 << 20) + 1, 262_145), (5 << 20, 327_680)])
def test_the_buffer_of_a_large_message_grows_as_it_arrives(size: int, least: int) -> None:
    body = os.urandom(1 << 10) * (size >> 10) + bytes(size & 1023)
    messages = MessageReader(8 << 20)
    messages.feed(frame_message(body), 0, 5)
    first = messages.buffer(8 << 20)
    assert first is not None
    assert len(first) == least
    at, step = 5, 300_000
    while messages.is_incomplete:
        room = messages.buffer(step)
        assert room is not None
        if at % 2:
            room[:] = frame_message(body)[at : at + len(room)]
            messages.count_filled(len(room))
            at += len(room)
        else:
            messages.feed(frame_message(body), at, min(at + step, size + 5))
            at += step
    assert bytes(messages.ready[0][1]) == body


def test_a_message_beyond_the_limit_is_rejected_by_its_prefix() -> None:
    with pytest.raises(GrpcError, match="larger than the limit of 10 bytes"):
        MessageReader(10).feed(frame_message(bytes(11)), 0, 5)


async def test_data_after_the_status_of_a_stream_is_not_counted(engine: FakeEngine) -> None:
    """The status waits behind responses that the client does not read, and meanwhile the client may send."""
    server = make_server(engine, replace(LIMITS, max_bodies_bytes=300_000))
    async with Raw.to(await server.start("127.0.0.1", 0)) as raw:
        assert await responses(raw)
        raw.acknowledges = False
        raw.h2.increment_flow_control_window(1 << 20)  # of the connection, not of its streams
        for _ in range(2):
            engine.cancelled.clear()
            number = raw.request("ModelStreamInfer", end=False)
            send_slices(raw, number, frame_message(large_message(40_000)))
            await raw.until(lambda number=number: len(raw.streams[number].body) == 65_535)
            raw.send(number, frame_message(b"", flag=2))
            await asyncio.wait_for(engine.cancelled.wait(), 60)
            send_slices(raw, number, frame_message(bytes(200_000))[:150_000])
            assert await responses(raw)
            raw.h2.reset_stream(number, 8)
        raw.acknowledges = True
        number = raw.request("ModelInfer", end=False)
        send_slices(raw, number, frame_message(large_message(250_000)), end=True)
        assert (await raw.response(number)).status == (OK, "")
    await server.stop(0)


def large_message(size: int) -> bytes:
    """Return a message for the model `echo` whose tensor has `size` bytes."""
    message = infer_message()
    message.raw_input_contents[0] = bytes(size)
    message.inputs[0].datatype, message.inputs[0].shape[0] = "UINT8", size
    data: bytes = message.SerializeToString()
    return data


def send_slices(raw: Raw, number: int, data: bytes, *, end: bool = False) -> None:
    for at in range(0, len(data), 15_000):
        raw.send(number, data[at : at + 15_000], end=end and at + 15_000 >= len(data))
