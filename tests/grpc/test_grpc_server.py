"""A real server and real channels: statuses, deadlines, limits, disconnects and stopping."""

import asyncio
import logging
import socket
import time
from typing import Any

import grpc
import pytest
from grpc_fakes import LIMIT, SERVICE, FakeEngine, infer_message, make_server, rpc_error

from dragoman.core.calls import Index
from dragoman.core.errors import InvalidInput, ModelFailed, Overloaded
from dragoman.formats import grpc_messages as m


async def infer(channel: Any, message: Any, **options: Any) -> Any:
    reply = await channel.unary_unary(SERVICE + "ModelInfer")(message.SerializeToString(), **options)
    return m.ModelInferResponse.FromString(reply)


async def test_a_call(channel: Any) -> None:
    reply = await infer(channel, infer_message(id="7"))
    assert (reply.model_name, reply.model_version, reply.id) == ("echo", "1", "7")
    assert list(reply.raw_output_contents) == [b"\1\0\0\0\2\0\0\0"]


@pytest.mark.parametrize("size", [0, 8, 800_000])
async def test_concurrent_calls(channel: Any, size: int) -> None:
    def message(number: int) -> Any:
        message = m.ModelInferRequest(model_name="echo")
        message.inputs.add(name="x", datatype="UINT8", shape=[size])
        message.raw_input_contents.append(bytes([number]) * size)
        return message

    replies = await asyncio.gather(*(infer(channel, message(n)) for n in range(16)))
    assert [bytes(r.raw_output_contents[0]) for r in replies] == [bytes([n]) * size for n in range(16)]


async def test_each_error_has_its_status(channel: Any, engine: FakeEngine) -> None:
    engine.errors = {"bad": InvalidInput("x" * 5000 + "é"), "failed": ModelFailed("no")}
    error = await rpc_error(infer(channel, infer_message("bad")))
    assert (error.code(), len(error.details())) == (grpc.StatusCode.INVALID_ARGUMENT, 2000)
    assert (await rpc_error(infer(channel, infer_message("failed")))).code() == grpc.StatusCode.INTERNAL
    error = await rpc_error(infer(channel, infer_message("nope")))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert error.details() == "Request for unknown model: 'nope' is not found"
    malformed = await rpc_error(channel.unary_unary(SERVICE + "ModelInfer")(b"\xff"))
    assert malformed.code() == grpc.StatusCode.INVALID_ARGUMENT
    unknown = await rpc_error(channel.unary_unary(SERVICE + "Nothing")(b""))
    assert unknown.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_overload_has_a_retry_delay(channel: Any, engine: FakeEngine) -> None:
    engine.errors = {"busy": Overloaded("Exceeds maximum queue size")}
    error = await rpc_error(infer(channel, infer_message("busy")))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    text = dict(error.trailing_metadata())
    assert (text["retry-after"], text["grpc-retry-pushback-ms"]) == ("1", "1000")


def call_with_metadata(name: str, value: str, size: int = 4) -> bytes:
    message = m.ModelInferRequest(model_name="headed")
    message.parameters["name"].string_param, message.parameters["value"].string_param = name, value
    message.inputs.add(name="x", datatype="UINT8", shape=[size])
    message.raw_input_contents.append(bytes(size))
    return bytes(message.SerializeToString())


@pytest.mark.parametrize("size", [4, 800_000])
async def test_headers_of_a_model_are_trailing_metadata(channel: Any, size: int) -> None:
    call = channel.unary_unary(SERVICE + "ModelInfer")(call_with_metadata("X-User", " alice and bob", size))
    assert len(m.ModelInferResponse.FromString(await call).raw_output_contents[0]) == size
    assert ("x-user", "alice and bob") in list(await call.trailing_metadata())


@pytest.mark.parametrize(
    ("name", "value"),
    [("x-user", "b\u00f6b"), ("x~", "1"), ("grpc-status", "0"), ("x-bin", "1"), ("te", "1"), ("x", "\n")],
)
async def test_headers_that_are_not_valid_metadata_are_rejected(channel: Any, name: str, value: str) -> None:
    error = await rpc_error(channel.unary_unary(SERVICE + "ModelInfer")(call_with_metadata(name, value)))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert error.details().startswith("the model set the header")


async def test_an_unexpected_exception_is_logged_and_hidden_from_the_client(
    channel: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.errors = {"boom": ValueError("a secret")}
    with caplog.at_level(logging.ERROR, "dragoman.grpc"):
        error = await rpc_error(infer(channel, infer_message("boom", id="7")))
        other = await rpc_error(infer(channel, infer_message("boom")))
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error, request id 7")
    assert "a secret" in caplog.text
    assert other.details().removeprefix("internal error, request id ") in caplog.text


async def test_metadata_and_the_deadline_reach_the_request(channel: Any, engine: FakeEngine) -> None:
    now = time.monotonic()
    index = channel.unary_unary(SERVICE + "RepositoryIndex")
    await index(b"", timeout=60, metadata=(("authorization", "Bearer secret"), ("x-bin", b"\xff")))
    (request,) = engine.requests
    assert request.call == Index("secret")
    assert request.deadline_s is not None
    assert now + 50 < request.deadline_s < now + 61
    await infer(channel, infer_message())
    assert engine.requests[-1].deadline_s is None


@pytest.mark.parametrize("leave", ["cancel", "deadline"])
async def test_a_disconnect_cancels_the_call(channel: Any, engine: FakeEngine, leave: str) -> None:
    body = infer_message("slow").SerializeToString()
    call = channel.unary_unary(SERVICE + "ModelInfer")(body, timeout=0.2 if leave == "deadline" else None)
    await engine.started.wait()
    if leave == "cancel":
        call.cancel()
    await asyncio.wait_for(engine.cancelled.wait(), 60)


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_a_message_beyond_the_limit_is_rejected(channel: Any, compression: Any) -> None:
    message = m.ModelInferRequest(model_name="echo")
    message.inputs.add(name="x", datatype="UINT8", shape=[LIMIT])
    message.raw_input_contents.append(bytes(LIMIT))
    error = await rpc_error(infer(channel, message, compression=compression))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_responses_may_be_larger_than_requests(channel: Any) -> None:
    count = LIMIT // 4
    message = m.ModelInferRequest(model_name="wide")
    message.inputs.add(name="x", datatype="INT64", shape=[count]).contents.int64_contents.extend([1] * count)
    assert message.ByteSize() < LIMIT // 2
    reply = await infer(channel, message)
    assert reply.ByteSize() > LIMIT


async def test_a_taken_port_is_an_error(server: Any) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(OSError, match=r"Address already in use: '127\.0\.0\.1:"):
        await server.start("127.0.0.1", taken.getsockname()[1])


async def test_a_second_server_does_not_share_the_port(server: Any, engine: FakeEngine) -> None:
    port = await server.start("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        await make_server(engine).start("127.0.0.1", port)


# --- stopping --------------------------------------------------------------------------------------------


async def test_stopping_cancels_calls_after_the_grace_period(channel: Any, server: Any, engine: FakeEngine) -> None:
    call = channel.unary_unary(SERVICE + "ModelInfer")(infer_message("slow").SerializeToString())
    await engine.started.wait()
    await server.stop(0.05)
    assert (await rpc_error(call)).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    await asyncio.wait_for(engine.cancelled.wait(), 60)


async def test_stopping_before_the_start_and_twice(server: Any) -> None:
    await server.stop(0)
    await server.start("127.0.0.1", 0)
    await server.stop(0)
    await server.stop(0)
