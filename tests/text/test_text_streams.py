"""Streams of text: piece by piece, clients that leave, and callers who do not disturb each other."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.text import Token
from dragoman.protocols.text_common.parameters import split_by_token

from .text_house import House, events, lines, read_answer, read_chunks, read_head, speaking

CHAT: dict[str, Any] = {"model": "Speaker", "messages": [{"role": "user", "content": "!wait now"}], "stream": True}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/invocations", {"inputs": "!wait now", "stream": True}),
    ("/generate_stream", {"inputs": "!wait now"}),
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"model": "Speaker", "prompt": "!wait now", "stream": True}),
    ("/v2/models/Speaker/generate_stream", {"text_input": "!wait now"}),
]


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with speaking() as made:
        yield made


async def _until(happened: Any) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_pieces_flow_as_they_come(house: House, path: str, body: Any) -> None:
    reader, writer = await house.send("POST", path, body)
    status, headers = await read_head(reader)
    assert (status, headers["transfer-encoding"]) == (200, "chunked")
    chunks = read_chunks(reader)
    text = b""
    while b"now" not in text:  # it is here while the model still waits with the next
        text += await asyncio.wait_for(anext(chunks), 60)
    assert b"!wait" not in text
    assert house.model().active == 1
    house.model().gate.set()
    text += b"".join([chunk async for chunk in chunks])
    assert b"!wait" in text
    writer.close()


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_who_leaves_takes_the_work_along(house: House, path: str, body: Any) -> None:
    model = house.model()
    _, writer = await house.send("POST", path, body)
    await _until(lambda: model.active)
    writer.close()
    await _until(lambda: not model.active)
    assert model.cancelled == 1


async def test_who_leaves_without_a_stream_does_too(house: House) -> None:
    model = house.model()
    for path in ("/generate", "/invocations"):
        _, writer = await house.send("POST", path, {"inputs": "!wait now"})
        await _until(lambda: model.active)
        writer.close()
        await _until(lambda: not model.active)
    assert model.cancelled == 2


async def test_two_hundred_leave_in_mid_stream() -> None:
    async with speaking(max_queue=0, replicas=4) as house:
        model = house.model()

        async def leave(i: int) -> None:
            path, body = ASKED[i % len(ASKED)]
            reader, writer = await house.send("POST", path, body)
            await read_head(reader)
            await reader.read(1)
            writer.close()

        await asyncio.gather(*map(leave, range(200)))
        await _until(lambda: not model.active)
        assert model.cancelled == 200
        answer = await house.post("/generate", {"inputs": "still here"})
        assert answer.json == {"generated_text": "here still"}


BAD: list[tuple[str, dict[str, Any]]] = [
    ("/invocations", {"inputs": "a", "parameters": {"temperature": -1}}),
    ("/generate", {"inputs": "a " * 99}),
    ("/v1/completions", {"model": "Speaker", "prompt": "a b c !fault d"}),
    ("/generate_stream", {"inputs": "a b !fault c"}),
    ("/invocations", {"inputs": "x !fault y", "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), BAD)
async def test_one_bad_and_seven_good(house: House, path: str, body: Any) -> None:
    good: list[tuple[str, Any]] = [
        ("/invocations", {"inputs": "one two three", "parameters": {"details": True}}),
        ("/invocations", {"inputs": "four five", "stream": True}),
        ("/generate", {"inputs": "six seven eight", "parameters": {"details": True}}),
        ("/generate_stream", {"inputs": "nine ten"}),
        ("/invocations", {"inputs": ["a b", "c d"]}),
        ("/v2/models/Speaker/generate", {"text_input": "eleven twelve"}),
        ("/v2/models/Speaker/generate_stream", {"text_input": "thirteen"}),
    ]
    alone = [(await house.post(*each)).body for each in good]
    bad, *together = await asyncio.gather(house.post(path, body), *(house.post(*each) for each in good))
    assert [answer.body for answer in together] == alone
    assert b"rror" in bad.body


async def test_a_request_that_is_pipelined_behind_a_stream(house: House) -> None:
    reader, writer = await house.send("POST", "/generate_stream", {"inputs": "a b"})
    body = b'{"inputs":"c"}'
    writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    assert events((await read_answer(reader)).body)[-1]["generated_text"] == "b a"
    assert (await read_answer(reader)).json == {"generated_text": "c"}
    writer.close()


# --- the generate extension of Open Inference ----------------------------------------------------------------


async def test_open_inference_generates(house: House) -> None:
    answer = await house.post("/v2/models/Speaker/generate", {"text_input": "a b", "parameters": {"max_tokens": 1}})
    assert answer.body == b'{"model_name":"Speaker","text_output":"b"}'
    answer = await house.post("/v2/models/Speaker/generate_stream", {"text_input": "a b", "id": "7"})
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.body == (
        b'data: {"id":"7","model_name":"Speaker","text_output":"b","done":false}\n\n'
        b'data: {"id":"7","model_name":"Speaker","text_output":" a","done":false}\n\n'
        b'data: {"id":"7","model_name":"Speaker","text_output":"","done":true}\n\n'
    )
    assert house.model().calls[-1].sampling.max_new_tokens == 20
    none = {"text_input": "a b", "parameters": {"max_tokens": 0}}
    answer = await house.post("/v2/models/Speaker/generate", none)
    assert answer.json == {"model_name": "Speaker", "text_output": ""}
    answer = await house.post("/v2/models/Speaker/generate_stream", none)
    assert events(answer.body) == [{"model_name": "Speaker", "text_output": "", "done": True}]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 422, "not valid JSON"),
        ({"text_input": ""}, 422, "`text_input` must be a text that is not empty"),
        (
            {"text_input": "a", "parameters": {"max_tokens": 513}},
            422,
            "`max_tokens` must be an integer >= 0 and <= 512",
        ),
        ({"text_input": "a", "parameters": {"temperature": -1}}, 422, "`temperature`"),
        ({"text_input": "a", "parameters": {"top_p": 1.5}}, 422, "`top_p`"),
        (
            {"text_input": "a", "parameters": {"num_beams": 2, "best_of": 4}},
            422,
            "`best_of` must be <= `num_beams`; got 4 and 2",
        ),
        ({"text_input": "a", "parameters": {"logit_bias": {"1" * 5000: 1}}}, 422, "`logit_bias` must be an object of"),
        ({"text_input": "a", "parameters": {"stop": ["a"] * 6}}, 422, "`stop` must be a list of at most 5"),
        ({"text_input": "a !fault"}, 424, "would not say"),
    ],
)
async def test_open_inference_refuses(house: House, body: Any, status: int, message: str) -> None:
    for path in ("generate", "generate_stream"):
        answer = await house.post(f"/v2/models/Speaker/{path}", body)
        assert answer.status == status
        assert set(answer.json) == {"error"}
        assert message in answer.json["error"]
    amid = await house.post("/v2/models/Speaker/generate_stream", {"text_input": "!fault a"})
    assert set(events(amid.body)[-1]) == {"error"}
    lost = await house.post("/v2/models/nobody/generate", {"text_input": "a"})
    assert lost.status == 404


# --- texts and their tokens ----------------------------------------------------------------------------------


@given(st.text(max_size=20), st.lists(st.text(max_size=4), max_size=6))
def test_parts_add_up_whatever_the_tokens_are(text: str, tokens: list[str]) -> None:
    parts = split_by_token(text, [Token(i, token) for i, token in enumerate(tokens)])
    assert len(parts) == len(tokens)
    assert "".join(parts) == (text if tokens else "")


@given(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=6))
def test_tokens_that_are_the_text_keep_theirs(tokens: list[str]) -> None:
    assert split_by_token("".join(tokens), [Token(i, token) for i, token in enumerate(tokens)]) == tokens


@pytest.mark.parametrize(
    ("text", "tokens", "parts"),
    [
        ("héy", ["h", "\ufffd", "\ufffd", "y"], ["h", "", "é", "y"]),
        ("a 水 b", ["a", " \ufffd", "\ufffd", "\ufffd", " b"], ["a", "", "", " 水", " b"]),
        ("one two", ["one", "two"], ["one", " two"]),
        ("a w", ["a", " wor", "ld"], ["a", "", " w"]),
        ("", ["", "\ufffd"], ["", ""]),
        ("ab", ["x"], ["ab"]),
    ],
)
def test_characters_that_are_split_go_to_the_last_of_their_tokens(
    text: str, tokens: list[str], parts: list[str]
) -> None:
    assert split_by_token(text, [Token(i, token) for i, token in enumerate(tokens)]) == parts


async def test_lines_add_up_to_the_text(house: House) -> None:
    told = lines((await house.post("/invocations", {"inputs": "ü 水 🦆", "stream": True})).body)
    assert "".join(line["token"]["text"] for line in told) == told[-1]["generated_text"] == "🦆 水 ü"
