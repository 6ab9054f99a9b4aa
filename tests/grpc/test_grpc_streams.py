"""Streams over a real server: order, errors, end, and clients that disconnect or do not read."""

import asyncio
import logging
from typing import Any

import grpc
import pytest
from grpc_fakes import LIMIT, SERVICE, FakeEngine, infer_message, rpc_error

from dragoman.core.errors import InvalidInput
from dragoman.formats import grpc_messages as m


class StreamClient:
    """One stream of messages."""

    def __init__(self, channel: Any, *metadata: tuple[str, str]) -> None:
        self.call = channel.stream_stream(SERVICE + "ModelStreamInfer")(metadata=metadata)

    async def send(self, message: Any) -> None:
        await self.call.write(message.SerializeToString())

    async def receive(self) -> Any:
        return m.ModelStreamInferResponse.FromString(await self.call.read())


async def test_responses_of_a_stream_are_in_order(channel: Any) -> None:
    client = StreamClient(channel)
    for number in "12":
        await client.send(infer_message(id=number))
    assert [(await client.receive()).infer_response.id for _ in range(6)] == list("111222")
    await client.call.done_writing()
    assert await client.call.read() is grpc.aio.EOF
    assert await client.call.code() == grpc.StatusCode.OK


async def test_an_error_does_not_end_a_stream(channel: Any, engine: FakeEngine) -> None:  # T74
    engine.errors = {"bad": InvalidInput("no"), "boom": ValueError("a secret")}
    client = StreamClient(channel)
    for model, text in (("bad", "no"), ("boom", "internal error, request id 7"), ("", "expected the name of a model")):
        await client.send(infer_message(model, id="7"))
        reply = await client.receive()
        assert reply.error_message.startswith(text)
        assert reply.infer_response.id == "7"
    await client.call.write(b"\xff")
    assert (await client.receive()).error_message.startswith("the message is no")
    await client.send(infer_message(id="8"))
    assert (await client.receive()).infer_response.id == "8"


@pytest.mark.parametrize("metadata", [("triton_grpc_error", "true"), ("dragoman-stream-shape", "bare")])
async def test_an_error_ends_the_stream_on_request(channel: Any, engine: FakeEngine, metadata: tuple[str, str]) -> None:
    engine.errors = {"bad": InvalidInput("no")}
    client = StreamClient(channel, metadata)
    await client.send(infer_message("bad"))
    error = await rpc_error(client.call.read())
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "no")


async def test_the_final_response_is_marked_on_request(channel: Any) -> None:
    message = infer_message()
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    client = StreamClient(channel)
    await client.send(message)
    marks = [(await client.receive()).infer_response.parameters["triton_final_response"].bool_param for _ in range(4)]
    assert marks == [False, False, False, True]


async def test_a_disconnect_cancels_the_stream(channel: Any, engine: FakeEngine) -> None:
    client = StreamClient(channel)
    await client.send(infer_message("slow"))
    await engine.started.wait()
    client.call.cancel()
    await asyncio.wait_for(engine.cancelled.wait(), 60)


async def test_a_client_that_does_not_read_pauses_the_model(
    channel: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.chunk_count = 10_000
    message = m.ModelInferRequest(model_name="echo")
    message.inputs.add(name="x", datatype="UINT8", shape=[LIMIT // 2])
    message.raw_input_contents.append(bytes(LIMIT // 2))
    client = StreamClient(channel)
    await client.send(message)
    await client.receive()
    text = -1
    while text != engine.sent_chunks:  # until the server stops sending
        text = engine.sent_chunks
        await asyncio.sleep(0.2)
    assert text < 200
    with caplog.at_level(logging.ERROR):
        client.call.cancel()
        await asyncio.wait_for(engine.cancelled.wait(), 60)
    assert not caplog.records  # a disconnect is not logged


async def test_stopping_waits_for_calls_and_ends_idle_streams(channel: Any, server: Any, engine: FakeEngine) -> None:
    client = StreamClient(channel)
    await client.send(infer_message())
    for _ in range(3):
        await client.receive()
    await asyncio.wait_for(server.stop(600), 60)
    assert (await rpc_error(client.call.read())).code() == grpc.StatusCode.UNAVAILABLE
