"""Streams over a real server: order, faults in them, their end, and clients that leave or do not read."""

import asyncio
import logging
from typing import Any

import grpc
import pytest
from grpc_fakes import LIMIT, SERVICE, FakeEngine, failed, infer_message

from dragoman.core.errors import InvalidInput
from dragoman.formats import oip_messages as m


class Talk:
    """One stream, in messages."""

    def __init__(self, channel: Any, *metadata: tuple[str, str]) -> None:
        self.call = channel.stream_stream(SERVICE + "ModelStreamInfer")(metadata=metadata)

    async def say(self, message: Any) -> None:
        await self.call.write(message.SerializeToString())

    async def hear(self) -> Any:
        return m.ModelStreamInferResponse.FromString(await self.call.read())


async def test_a_stream_answers_each_message_in_order(channel: Any) -> None:
    talk = Talk(channel)
    for number in "12":
        await talk.say(infer_message(id=number))
    assert [(await talk.hear()).infer_response.id for _ in range(6)] == list("111222")
    await talk.call.done_writing()
    assert await talk.call.read() is grpc.aio.EOF
    assert await talk.call.code() == grpc.StatusCode.OK


async def test_a_stream_outlives_faults(channel: Any, engine: FakeEngine) -> None:  # T74
    engine.faults = {"bad": InvalidInput("no"), "boom": ValueError("a secret")}
    talk = Talk(channel)
    for model, text in (("bad", "no"), ("boom", "internal error, request id 7"), ("", "expected the name of a model")):
        await talk.say(infer_message(model, id="7"))
        reply = await talk.hear()
        assert reply.error_message.startswith(text)
        assert reply.infer_response.id == "7"
    await talk.call.write(b"\xff")
    assert (await talk.hear()).error_message.startswith("the message is no")
    await talk.say(infer_message(id="8"))
    assert (await talk.hear()).infer_response.id == "8"


@pytest.mark.parametrize("metadata", [("triton_grpc_error", "true"), ("dragoman-stream-shape", "bare")])
async def test_a_stream_may_end_with_a_status(channel: Any, engine: FakeEngine, metadata: tuple[str, str]) -> None:
    engine.faults = {"bad": InvalidInput("no")}
    talk = Talk(channel, metadata)
    await talk.say(infer_message("bad"))
    error = await failed(talk.call.read())
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "no")


async def test_a_stream_marks_its_end(channel: Any) -> None:
    message = infer_message()
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    talk = Talk(channel)
    await talk.say(message)
    marks = [(await talk.hear()).infer_response.parameters["triton_final_response"].bool_param for _ in range(4)]
    assert marks == [False, False, False, True]


async def test_a_client_that_leaves_cancels_its_stream(channel: Any, engine: FakeEngine) -> None:
    talk = Talk(channel)
    await talk.say(infer_message("slow"))
    await engine.started.wait()
    talk.call.cancel()
    await asyncio.wait_for(engine.cancelled.wait(), 10)


async def test_a_client_that_does_not_read_holds_its_model_up(
    channel: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.pieces = 10_000
    message = m.ModelInferRequest(model_name="echo")
    message.inputs.add(name="x", datatype="UINT8", shape=[LIMIT // 2])
    message.raw_input_contents.append(bytes(LIMIT // 2))
    talk = Talk(channel)
    await talk.say(message)
    await talk.hear()
    text = -1
    while text != engine.sent_chunks:  # until nothing moves any more
        text = engine.sent_chunks
        await asyncio.sleep(0.2)
    assert text < 200
    with caplog.at_level(logging.ERROR):
        talk.call.cancel()
        await asyncio.wait_for(engine.cancelled.wait(), 10)
    assert not caplog.records  # that clients leave is nothing to log


async def test_stopping_waits_for_calls_and_ends_idle_streams(channel: Any, server: Any, engine: FakeEngine) -> None:
    talk = Talk(channel)
    await talk.say(infer_message())
    for _ in range(3):
        await talk.hear()
    await asyncio.wait_for(server.stop(60), 10)
    assert (await failed(talk.call.read())).code() == grpc.StatusCode.UNAVAILABLE
