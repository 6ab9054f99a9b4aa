"""Calls of tools in texts of models that may make some: what comes of each format, whole and in any pieces."""

import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.protocols.text_common.tool_stream import parser_for
from dragoman.protocols.text_common.tools import ToolChunk, collect_calls, parse_tools

from .text_house import House, events, speaking

TOOLS: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
OSLO = '{"city": "Oslo"}'
WEATHER = f'{{"name": "weather", "arguments": {OSLO}}}'
TIME = '{"name":"time","parameters":{}}'


def parts_of(pieces: Sequence[str], *, cut: bool = False, single: bool = False) -> list[ToolChunk]:
    read = parser_for(replace(parse_tools(TOOLS, None), single=single))
    return [read.feed(piece, last=i + 1 == len(pieces), cut=cut) for i, piece in enumerate(pieces)]


def found(pieces: Sequence[str], **how: bool) -> tuple[str, list[tuple[str, str]]]:
    parts = parts_of(pieces, **how)
    whole = ToolChunk("".join(part.content for part in parts), [delta for part in parts for delta in part.deltas])
    return whole.content, [(call.name, call.arguments) for call in collect_calls(whole)]


MARKED = '{"a":"</tool_call>\\\\\\"}"}'
UNKNOWN = '<tool_call>{"name":"no","arguments":{}}'
ONE = [("weather", OSLO)]
BOTH = [("weather", OSLO), ("time", "{}")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{WEATHER}\n</tool_call>", "", ONE),
        (f"Well. <tool_call>{WEATHER}</tool_call><tool_call>{TIME}</tool_call>", "Well.", BOTH),
        (f" \n<tool_call>{WEATHER}</tool_call>\n Well,\nwell. \n", "Well,\nwell.", ONE),
        (WEATHER, "", ONE),
        (f"\n{WEATHER} ; \n{TIME}", "", BOTH),
        (f"<|python_tag|>{WEATHER};{TIME}", "", BOTH),
        (f"[TOOL_CALLS][{WEATHER}, {TIME}]", "", BOTH),
        (f'[TOOL_CALLS] [{WEATHER[:-1]}, "id": "a}}b"}}] So.', "So.", ONE),
        (f"[{WEATHER}]", "", ONE),
        (f"[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]time{{}}", "", BOTH),
        (f"[TOOL_CALLS]weather[CALL_ID]abc012345[ARGS]{OSLO}", "", ONE),
        (f"<function=weather>{OSLO}</function><function=time>{{}}", "", BOTH),
        # in another order, or as text: known once it is whole
        (f'<tool_call>{{"arguments": {OSLO}, "name": "weather"}}</tool_call>', "", ONE),
        (f'{{"type": "function", "function": {WEATHER}}}', "", ONE),
        ('{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}', "", ONE),
        ('<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
        (f'{{"arguments": {{"big": {1 << 90}}}, "name": "time"}}', "", [("time", f'{{"big": {1 << 90}}}')]),
        ('{"arguments": "\\ud800", "name": "time"}', "", [("time", "?")]),
        # markup in a string is none, and a model may forget to close what it opened
        (f'<tool_call>{{"name":"time","arguments":{MARKED}}}</tool_call>', "", [("time", MARKED)]),
        (f"<tool_call>{WEATHER[:-1]}</tool_call> So.", "So.", ONE),
        (f"<tool_call>{WEATHER[:-2]}</tool_call> So.", "So.", [("weather", OSLO[:-1])]),
        (f"<tool_call>{WEATHER}", "", ONE),
        # of functions that there are not, with those that there are
        (f"{UNKNOWN}\n{WEATHER}</tool_call>", UNKNOWN, ONE),
        # no calls
        ("", "", []),
        ('  {"city": "Oslo"} \n', None, []),
        ('[1, {"name": "time"}]', None, []),
        ('{"name":"nothing","arguments":{}}', None, []),
        ('{"name":"time","age":3}', None, []),
        (f"See: {WEATHER}", None, []),
        ('{"type": "answer", "name": "time", "arguments": {}}', None, []),
        ('{"name": ["time"], "arguments": {}}', None, []),
        ("<tool_call>oops", None, []),
        ("<tool_call>[1]</tool_call> ", None, []),
        ("<function=nothing>{}</function>", None, []),
        ("[TOOL_CALLS]weather is fine", None, []),
        ("a < b [c] {d} <tool", None, []),
    ],
)
def test_calls_in_the_common_formats(text: str, content: str | None, calls: Any) -> None:
    expected = (text if content is None else content, calls)
    assert found([text]) == found(list(text) or [""]) == expected


@pytest.mark.parametrize(
    ("text", "before"),
    [
        (f"<tool_call>{WEATHER}</tool_call>", "<tool_call>"),
        (WEATHER, ""),
        (f"[TOOL_CALLS][{WEATHER}]", "[TOOL_CALLS]["),
    ],
)
def test_arguments_come_as_they_are_written(text: str, before: str) -> None:
    parts = parts_of(list(text))
    came = [i for i, part in enumerate(parts) if part.deltas]
    start = text.index(OSLO)
    # with the `{` it is a call
    assert came == list(range(start, start + len(OSLO)))
    opens = parts[start].deltas[0].opens
    assert opens is not None
    assert opens.name == "weather"
    assert not any(part.content for part in parts)


def test_text_goes_out_as_soon_as_it_can_be_no_call() -> None:
    def after(text: str) -> str:
        return "".join(part.content for part in parts_of([*text, "."])[:-1])

    for text in (
        "Hello you",
        "{}",
        '{"city',
        '{"age":',
        '{"name": "Ada"',
        '{"type": "a',
        '{"name" : 3',
        '{"function": "',
        "[1",
        "a <tool_calls",
        "<tool_call>[x",
        "<b>",
    ):
        assert after(text) == text
    for text, known in (
        ("Hello <tool", "Hello"),
        ('{"name": "ti', ""),
        ("[", ""),
        ("a [TOOL_CALLS]ti", "a"),
        ("<func", ""),
    ):
        assert after(text) == known


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"So. <tool_call>{WEATHER[:-6]}", "So.", [("weather", OSLO[:-5])]),
        (f"<tool_call>{WEATHER}</tool_", "", ONE),
        (f'<tool_call>{WEATHER[:-1]}, "id": "a', "", ONE),
        ('<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    ],
)
def test_a_text_that_is_cut_off_in_a_call(text: str, content: str, calls: Any) -> None:
    assert found([text], cut=True) == found(list(text), cut=True) == (content, calls)


def test_of_several_calls_the_first_alone() -> None:
    for text in (f"<tool_call>{WEATHER}</tool_call>" * 3, f"[{WEATHER}, {TIME}]", f"{WEATHER};{TIME};{TIME}"):
        assert found([text], single=True) == found(list(text), single=True) == ("", ONE)


# --- any text, in any pieces ---------------------------------------------------------------------------------

MARKUP = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<function="),
    *(
        "</function>",
        "<function=time>",
        "<function=weather>\n",
        "<parameter=a>",
        "<parameter=",
        "\n</parameter>\n",
        "time",
        "weather",
        '"name"',
        '"arguments"',
        '"type":',
        '{"type":"function",',
        '{"type":"a",',
        '{"id":"x","name":"time","arguments":',
    ),
    *(WEATHER, TIME, OSLO, '{"name":"no","arguments":{}}', '{"arguments":{"b":[{}]},"name":"time"}', ', "id": "z"}'),
    *("{", "}", "[", "]", '"', ":", ",", ";", " ", "\n", "\\", "<", "</", "a", "Hello. ", "é", "null"),
)
TEXTS = st.lists(st.one_of(st.sampled_from(MARKUP), st.text(max_size=3)), max_size=12).map("".join)


@st.composite
def cut_up(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[str]:
    """A text in pieces, some of which may be empty."""
    text = draw(texts)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:stop] for start, stop in itertools.pairwise([0, *places, len(text)])]


@given(cut_up(TEXTS), st.booleans(), st.booleans())
def test_any_pieces_make_the_same(pieces: list[str], cut: bool, single: bool) -> None:
    text = "".join(pieces)
    whole = found([text], cut=cut, single=single)
    assert found(pieces, cut=cut, single=single) == whole
    assert found([*text, ""], cut=cut, single=single) == whole
    if not whole[1]:
        assert whole[0] == text


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=6,
)
CALL = st.tuples(st.sampled_from(["weather", "time"]), st.dictionaries(st.text(), VALUES, max_size=3))
CALLS = st.lists(CALL, min_size=1, max_size=3)


@given(CALLS, st.sampled_from(["hermes", "llama", "plain", "function", "mistral", "list", "named"]), st.data())
def test_calls_come_out_as_they_were_made(calls: list[tuple[str, Any]], way: str, data: st.DataObject) -> None:
    indent, ascii_ = data.draw(st.sampled_from([None, 1])), data.draw(st.booleans())
    written = [(name, json.dumps(arguments, indent=indent, ensure_ascii=ascii_)) for name, arguments in calls]
    key = data.draw(st.sampled_from(["arguments", "parameters"]))
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in written]
    text = {
        "hermes": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects),
        "llama": "<|python_tag|>" + "; ".join(objects),
        "plain": "\n".join(objects),
        "function": "".join(f"<function={name}>{arguments}</function>" for name, arguments in written),
        "mistral": f"[TOOL_CALLS] [{', '.join(objects)}]",
        "list": f"[{', '.join(objects)}]",
        "named": "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in written),
    }[way]
    content = data.draw(st.sampled_from(["", "Let me see."])) if way not in ("plain", "list") else ""
    assert found(data.draw(cut_up(st.just(content + text)))) == (content, written)


def test_nothing_that_a_model_writes_takes_long() -> None:
    began_s = time.monotonic()
    for start in (
        "<tool_call>{",
        "<function=time>{",
        "[TOOL_CALLS]",
        "{",
        '{"name":',
        '<tool_call>{"name":"time","arguments":{}',
        "<function=time><parameter=a>",
        "<function=time><parameter=",
    ):
        for fill in (" ", "{};", "<tool_call>", "\n</parameter", "<parameter=b>", '{"a":1}\n', "\\"):
            found([start + fill * (60_000 // len(fill))])
            found(list(start + fill * (6_000 // len(fill))))
    assert time.monotonic() - began_s < 20  # it would take minutes


# --- over the wire -------------------------------------------------------------------------------------------


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with speaking() as made:
        yield made


def saying(text: str) -> list[Any]:
    """Messages to which the model answers with this text, a word at a time."""
    return [{"role": f"={text} !end", "content": ""}]


ASKS: list[dict[str, Any]] = [
    {"messages": saying(f"Let me see. <tool_call> {WEATHER} </tool_call> <tool_call> {TIME} </tool_call>")},
    {"messages": saying(f"[TOOL_CALLS] [{WEATHER} , {TIME} ]"), "n": 2},
    {"messages": saying(f"{WEATHER} ; {TIME}"), "parallel_tool_calls": False},
    {"messages": saying(f"See: <tool_call> {WEATHER} </tool_call>"), "max_tokens": 6},
    {"messages": saying(f"See: <tool_call> {WEATHER} </tool_call>"), "stop": ["</tool_call>"]},
    {"messages": saying(f"See: <tool_call> {WEATHER} </tool_call>"), "stop": ["Oslo"]},
    {"messages": saying("<tool_call> {} or not </tool_call>")},
    {"messages": saying(f"So: <tool_call> {WEATHER} </tool_call> well"), "logprobs": True},
]


def added_up(chunks: Sequence[Any], at: int) -> tuple[str, list[Any], str | None, list[Any]]:
    """Content, calls, reason and log-probabilities of one choice of a stream, as its chunks add up."""
    calls: list[Any] = []
    content, reason, logprobs = "", None, []
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == at):
        assert reason is None, "nothing follows the end"
        reason = choice["finish_reason"]
        content += choice["delta"].get("content") or ""
        logprobs += (choice["logprobs"] or {"content": []})["content"]
        for piece in choice["delta"].get("tool_calls") or ():
            if "id" in piece:
                assert piece["index"] == len(calls)
                assert (piece["type"], piece["function"]["arguments"]) == ("function", "")
                calls.append({"name": piece["function"]["name"], "arguments": ""})
            else:
                assert piece.keys() == {"index", "function"}
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    return content, calls, reason, logprobs


@pytest.mark.parametrize("ask", ASKS)
async def test_a_stream_adds_up_to_the_answer(house: House, ask: Any) -> None:
    ask = {"model": "Speaker", "tools": TOOLS, "stop": ["!end"], **ask}
    told = (await house.post("/v1/chat/completions", ask)).json["choices"]
    *chunks, done = events((await house.post("/v1/chat/completions", {**ask, "stream": True})).body)
    assert done == "[DONE]"
    assert len(told) == ask.get("n", 1)
    for choice in told:
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        logprobs = (choice["logprobs"] or {"content": []})["content"]
        expected = (message["content"] or "", calls, choice["finish_reason"], logprobs)
        assert added_up(chunks, choice["index"]) == expected


async def test_why_a_text_with_calls_ends(house: House) -> None:
    async def ends(text: str, **more: Any) -> tuple[str, str | None, list[str]]:
        ask = {"model": "Speaker", "messages": saying(text), "tools": TOOLS, "stop": ["!end"], **more}
        choice = (await house.post("/v1/chat/completions", ask)).json["choices"][0]
        calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls") or ()]
        return choice["finish_reason"], choice["message"]["content"], calls

    call = f"See: <tool_call> {WEATHER} </tool_call>"
    assert await ends(call) == ("tool_calls", "See:", [OSLO])
    assert await ends(call, stop=["</tool_call>"]) == ("tool_calls", "See:", [OSLO])
    assert await ends(call, max_tokens=6) == ("length", "See:", ['{"city":'])
    assert await ends(call, max_tokens=5) == ("length", 'See: <tool_call> {"name": "weather", "arguments":', [])
    assert await ends("<tool_call> no") == ("stop", "<tool_call> no", [])


async def test_pieces_of_calls_are_there_while_the_model_writes(house: House) -> None:
    """The client of OpenAI, against a model that stops in mid-call until the test has read what is there."""
    messages = saying('Well. <tool_call> {"name": "time", "arguments": {"a": !wait "b"}} </tool_call>')
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="Speaker", messages=messages, tools=TOOLS, stop=["!end"], stream=True
        )
        content = name = arguments = ""
        async for chunk in stream:
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for piece in delta.tool_calls or ():
                assert piece.function is not None
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
            if arguments.endswith('"a":') and not house.model().gate.is_set():
                assert (content, name) == ("Well.", "time")
                house.model().gate.set()
        assert arguments == '{"a": !wait "b"}'
        assert chunk.choices[0].finish_reason == "tool_calls"


async def test_the_client_adds_up_a_stream_itself(house: House) -> None:
    messages = saying(f"Well. <tool_call> {WEATHER} </tool_call> <tool_call> {WEATHER} </tool_call>")
    async with (
        openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(model="Speaker", messages=messages, tools=TOOLS, stop=["!end"]) as stream,
    ):
        kinds = [event.type async for event in stream]
        choice = (await stream.get_final_completion()).choices[0]
    assert kinds.count("tool_calls.function.arguments.delta") >= 4
    assert (choice.message.content, choice.finish_reason) == ("Well.", "tool_calls")
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Oslo"}] * 2
    assert calls[0].id != calls[1].id


async def test_markup_of_special_tokens_stays_in_the_text(house: House) -> None:
    for more, skipped in (
        ({"tools": TOOLS}, False),
        ({"tools": TOOLS, "skip_special_tokens": True}, True),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "tool_choice": "none"}, True),
        ({}, True),
    ):
        await house.post("/v1/chat/completions", {"model": "Speaker", "messages": saying("a"), **more})
        assert house.model().calls[-1].sampling.skip_special_tokens is skipped
