"""Tool calls in generated text: the common formats, complete and in chunks."""

import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dragoman_text.apis.common.completion_parser import parser_for
from dragoman_text.apis.common.tools import ChatChunk, collect_calls, parse_tools
from text_server import TextServer, events, serve

TOOLS: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
OSLO = '{"city": "Oslo"}'
WEATHER = f'{{"name": "weather", "arguments": {OSLO}}}'
TIME = '{"name":"time","parameters":{}}'


def parse_chunks(chunks: Sequence[str], *, cut: bool = False, single: bool = False) -> list[ChatChunk]:
    parser = parser_for(replace(parse_tools(TOOLS, None), single=single))
    return [parser.feed(text_chunk, last=i + 1 == len(chunks), cut=cut) for i, text_chunk in enumerate(chunks)]


def parse(chunks: Sequence[str], **options: bool) -> tuple[str, list[tuple[str, str]]]:
    results = parse_chunks(chunks, **options)
    whole = ChatChunk([part for chunk in results for part in chunk.parts])
    return whole.content, [(call.name, call.arguments) for call in collect_calls(whole)]


WITH_MARKUP = '{"a":"</tool_call>\\\\\\"}"}'
UNKNOWN_FUNCTION = '<tool_call>{"name":"no","arguments":{}}'
ONE_CALL = [("weather", OSLO)]
TWO_CALLS = [("weather", OSLO), ("time", "{}")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{WEATHER}\n</tool_call>", "", ONE_CALL),
        (f"Well. <tool_call>{WEATHER}</tool_call><tool_call>{TIME}</tool_call>", "Well.", TWO_CALLS),
        (f" \n<tool_call>{WEATHER}</tool_call>\n Well,\nwell. \n", "Well,\nwell.", ONE_CALL),
        (WEATHER, "", ONE_CALL),
        (f"\n{WEATHER} ; \n{TIME}", "", TWO_CALLS),
        (f"<|python_tag|>{WEATHER};{TIME}", "", TWO_CALLS),
        (f"[TOOL_CALLS][{WEATHER}, {TIME}]", "", TWO_CALLS),
        (f'[TOOL_CALLS] [{WEATHER[:-1]}, "id": "a}}b"}}] So.', "So.", ONE_CALL),
        (f"[{WEATHER}]", "", ONE_CALL),
        (f"[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]time{{}}", "", TWO_CALLS),
        (f"[TOOL_CALLS]weather[CALL_ID]abc012345[ARGS]{OSLO}", "", ONE_CALL),
        (f"<function=weather>{OSLO}</function><function=time>{{}}", "", TWO_CALLS),
        # keys in another order, or arguments as text: parsed once complete
        (f'<tool_call>{{"arguments": {OSLO}, "name": "weather"}}</tool_call>', "", ONE_CALL),
        (f'{{"type": "function", "function": {WEATHER}}}', "", ONE_CALL),
        ('{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}', "", ONE_CALL),
        ('<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
        (f'{{"arguments": {{"big": {1 << 90}}}, "name": "time"}}', "", [("time", f'{{"big": {1 << 90}}}')]),
        ('{"arguments": "\\ud800", "name": "time"}', "", [("time", "?")]),
        # markup in a string, and missing closing tags
        (f'<tool_call>{{"name":"time","arguments":{WITH_MARKUP}}}</tool_call>', "", [("time", WITH_MARKUP)]),
        (f"<tool_call>{WEATHER[:-1]}</tool_call> So.", "So.", ONE_CALL),
        (f"<tool_call>{WEATHER[:-2]}</tool_call> So.", "So.", [("weather", OSLO[:-1])]),
        (f"<tool_call>{WEATHER}", "", ONE_CALL),
        # unknown functions beside known ones
        (f"{UNKNOWN_FUNCTION}\n{WEATHER}</tool_call>", UNKNOWN_FUNCTION, ONE_CALL),
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
    assert parse([text]) == parse(list(text) or [""]) == expected


@pytest.mark.parametrize(
    ("text", "before"),
    [
        (f"<tool_call>{WEATHER}</tool_call>", "<tool_call>"),
        (WEATHER, ""),
        (f"[TOOL_CALLS][{WEATHER}]", "[TOOL_CALLS]["),
    ],
)
def test_arguments_are_streamed(text: str, before: str) -> None:
    results = parse_chunks(list(text))
    with_deltas = [i for i, result in enumerate(results) if result.deltas]
    start = text.index(OSLO)
    # after `{` it is a call
    assert with_deltas == list(range(start, start + len(OSLO)))
    opens = results[start].deltas[0].opens
    assert opens is not None
    assert opens.name == "weather"
    assert not any(result.content for result in results)


def test_text_is_sent_once_it_cannot_be_a_call() -> None:
    def content_after(text: str) -> str:
        return "".join(result.content for result in parse_chunks([*text, "."])[:-1])

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
        assert content_after(text) == text
    for text, expected in (
        ("Hello <tool", "Hello"),
        ('{"name": "ti', ""),
        ("[", ""),
        ("a [TOOL_CALLS]ti", "a"),
        ("<func", ""),
    ):
        assert content_after(text) == expected


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"So. <tool_call>{WEATHER[:-6]}", "So.", [("weather", OSLO[:-5])]),
        (f"<tool_call>{WEATHER}</tool_", "", ONE_CALL),
        (f'<tool_call>{WEATHER[:-1]}, "id": "a', "", ONE_CALL),
        ('<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    ],
)
def test_truncated_calls(text: str, content: str, calls: Any) -> None:
    assert parse([text], cut=True) == parse(list(text), cut=True) == (content, calls)


def test_single_returns_the_first_call() -> None:
    for text in (f"<tool_call>{WEATHER}</tool_call>" * 3, f"[{WEATHER}, {TIME}]", f"{WEATHER};{TIME};{TIME}"):
        assert parse([text], single=True) == parse(list(text), single=True) == ("", ONE_CALL)


# --- random texts, in chunks ----------------------------------------------------------------------------------

FRAGMENTS = (
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
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=12).map("".join)


@st.composite
def split_texts(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[str]:
    """Split a text into chunks, some of which may be empty."""
    text = draw(texts)
    positions = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:stop] for start, stop in itertools.pairwise([0, *positions, len(text)])]


@given(split_texts(TEXTS), st.booleans(), st.booleans())
def test_results_do_not_depend_on_the_chunks(chunks: list[str], cut: bool, single: bool) -> None:
    text = "".join(chunks)
    whole = parse([text], cut=cut, single=single)
    assert parse(chunks, cut=cut, single=single) == whole
    assert parse([*text, ""], cut=cut, single=single) == whole
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
def test_formatted_calls_roundtrip(calls: list[tuple[str, Any]], format_: str, data: st.DataObject) -> None:
    indent, ascii_ = data.draw(st.sampled_from([None, 1])), data.draw(st.booleans())
    formatted = [(name, json.dumps(arguments, indent=indent, ensure_ascii=ascii_)) for name, arguments in calls]
    key = data.draw(st.sampled_from(["arguments", "parameters"]))
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in formatted]
    text = {
        "hermes": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects),
        "llama": "<|python_tag|>" + "; ".join(objects),
        "plain": "\n".join(objects),
        "function": "".join(f"<function={name}>{arguments}</function>" for name, arguments in formatted),
        "mistral": f"[TOOL_CALLS] [{', '.join(objects)}]",
        "list": f"[{', '.join(objects)}]",
        "named": "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in formatted),
    }[format_]
    content = data.draw(st.sampled_from(["", "Let me see."])) if format_ not in ("plain", "list") else ""
    assert parse(data.draw(split_texts(st.just(content + text)))) == (content, formatted)


BAR = "\N{FULLWIDTH VERTICAL LINE}"
DSML = f"{BAR}DSML{BAR}"
BEGIN, END = f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁calls▁end{BAR}>"
OPEN, CLOSE, SEP = f"<{BAR}tool▁call▁begin{BAR}>", f"<{BAR}tool▁call▁end{BAR}>", f"<{BAR}tool▁sep{BAR}>"
ARGUMENT = "<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>"
CITY = f'<{DSML}parameter name="city" string="true">Oslo</{DSML}parameter>'
FAMILIES = {
    "granite": (f"<|tool_call|>[{WEATHER}, {TIME}]", TWO_CALLS),
    "granite-20b": (f"<function_call> {WEATHER}\n<function_call> {TIME}", TWO_CALLS),
    "phi-4": (f"<|tool_call|>[{WEATHER}]<|/tool_call|>", ONE_CALL),
    "phi-4-mini": (f"functools[{WEATHER},{TIME}]", TWO_CALLS),
    "internlm": (f"<|action_start|><|plugin|>\n{WEATHER}<|action_end|>", ONE_CALL),
    "glm": (f"<tool_call>weather\n{ARGUMENT}\n</tool_call>\n<tool_call>time\n</tool_call>", TWO_CALLS),
    "glm-4.7": (f"<tool_call>weather{ARGUMENT}</tool_call><tool_call>time</tool_call>", TWO_CALLS),
    "deepseek-v3": (
        f"{BEGIN}{OPEN}function{SEP}weather\n```json\n{OSLO}\n```{CLOSE}\n"
        f"{OPEN}function{SEP}time\n```json\n{{}}\n```{CLOSE}{END}",
        TWO_CALLS,
    ),
    "deepseek-v3.1": (
        f"{BEGIN}{OPEN}weather{SEP}{OSLO}{CLOSE}{OPEN}time{SEP}{{}}{CLOSE}{END}",
        TWO_CALLS,
    ),
    "deepseek-v3.2": (
        f'<{DSML}function_calls>\n<{DSML}invoke name="weather">\n{CITY}\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="time">\n</{DSML}invoke>\n</{DSML}function_calls>',
        TWO_CALLS,
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        ONE_CALL,
    ),
    "kimi": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{OSLO}"
        "<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        TWO_CALLS,
    ),
    "pythonic": ('[weather(city="Oslo"), time()]', TWO_CALLS),
    "llama-4": ("<|python_start|>[weather(city='Oslo')]<|python_end|>", ONE_CALL),
    "lfm2": ('<|tool_call_start|>[weather(city="Oslo")]<|tool_call_end|>', ONE_CALL),
    "olmo-3": ('<function_calls>\nweather(city="Oslo")\ntime()\n</function_calls>', TWO_CALLS),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_formats_of_model_families(family: str) -> None:
    text, calls = FAMILIES[family]
    before = "" if family == "pythonic" else "Well. "
    assert parse([before + text]) == (before.strip(), calls)
    assert parse(list(before + text)) == (before.strip(), calls)
    for size in (2, 3, 5, 7, 11):
        assert parse([text[i : i + size] for i in range(0, len(text), size)]) == ("", calls), size
    unknown = text.replace("weather", "unknown").replace("time", "unknown")
    assert parse([unknown]) == parse(list(unknown)) == (unknown, [])
    for end in range(0, len(text), 3):  # cut off anywhere, streams and whole responses are equal
        for cut in (False, True):
            assert parse([text[:end]], cut=cut) == parse(list(text[:end]), cut=cut), text[:end]


def test_the_id_that_kimi_writes_is_that_of_the_call() -> None:
    (chunk,) = parse_chunks([FAMILIES["kimi"][0]])
    assert [call.id for call in collect_calls(chunk)] == ["functions.weather:0", "functions.time:1"]


@pytest.mark.parametrize(
    "text",
    [
        "[weather(1)]",
        "[weather(city=open('x'))]",
        "[weather(**{})]",
        "[weather(city=b'x')]",
        "[weather(a=1)(b=2)]",
        "[weather(city=1e999)]",
        "[weather(city={1})]",
        "[weather(city='Oslo'), no()]",
        "[weather(city=" + "(" * 5000 + ")" * 5000 + ")]",
        "[weather(city=']",
    ],
)
def test_python_that_is_no_call_is_text(text: str) -> None:
    assert parse([text]) == parse(list(text)) == (text, [])


def test_values_of_python_calls() -> None:
    text = """[weather(a=True, b=None, c=[1, {"d": 'e]"'}], f=-1.5, g="\\n")]"""
    (call,) = parse([text])[1]
    assert json.loads(call[1]) == {"a": True, "b": None, "c": [1, {"d": 'e]"'}], "f": -1.5, "g": "\n"}


@given(st.data())
def test_any_split_of_any_text_gives_the_same_calls(data: st.DataObject) -> None:
    pieces = [text for text, _ in FAMILIES.values()]
    tags = [
        "<tool_call>",
        "</tool_call>",
        OPEN,
        "[weather(",
        "weather",
        "<|tool_call|>",
        "functools[",
        "{",
        "\n",
        " a",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from([*pieces, *tags]), max_size=4)))
    cut = data.draw(st.booleans())
    assert parse(data.draw(split_texts(st.just(text))), cut=cut) == parse([text], cut=cut)


def test_parsing_takes_linear_time() -> None:
    start_s = time.process_time()
    for start in (
        "<tool_call>{",
        "<function=time>{",
        "[TOOL_CALLS]",
        "{",
        '{"name":',
        '<tool_call>{"name":"time","arguments":{}',
        "<function=time><parameter=a>",
        "<function=time><parameter=",
        "<tool_call>time<arg_key>a</arg_key><arg_value>",
        "[time(a=",
        f"{BEGIN}{OPEN}function",
    ):
        for fill in (" ", "{};", "<tool_call>", "\n</parameter", "<parameter=b>", '{"a":1}\n', "\\"):
            parse([start + fill * (10_000 // len(fill))])
            parse(list(start + fill * (1_000 // len(fill))))
    assert time.process_time() - start_s < 8  # it would take minutes


# --- over the wire -------------------------------------------------------------------------------------------


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve() as server:
        yield server


def messages_for(text: str) -> list[Any]:
    """Return messages to which the model responds with this text, one word per token."""
    return [{"role": f"={text} !end", "content": ""}]


REQUESTS: list[dict[str, Any]] = [
    {"messages": messages_for(f"Let me see. <tool_call> {WEATHER} </tool_call> <tool_call> {TIME} </tool_call>")},
    {"messages": messages_for(f"[TOOL_CALLS] [{WEATHER} , {TIME} ]"), "n": 2},
    {"messages": messages_for(f"{WEATHER} ; {TIME}"), "parallel_tool_calls": False},
    {"messages": messages_for(f"See: <tool_call> {WEATHER} </tool_call>"), "max_tokens": 6},
    {"messages": messages_for(f"See: <tool_call> {WEATHER} </tool_call>"), "stop": ["</tool_call>"]},
    {"messages": messages_for(f"See: <tool_call> {WEATHER} </tool_call>"), "stop": ["Oslo"]},
    {"messages": messages_for("<tool_call> {} or not </tool_call>")},
    {"messages": messages_for(f"So: <tool_call> {WEATHER} </tool_call> well"), "logprobs": True},
]


def accumulate(chunks: Sequence[Any], index: int) -> tuple[str, list[Any], str | None, list[Any]]:
    """Accumulate one choice of a stream: content, calls, finish reason and log-probabilities."""
    calls: list[Any] = []
    content, reason, logprobs = "", None, []
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        assert reason is None, "no chunk after the finish reason"
        reason = choice["finish_reason"]
        content += choice["delta"].get("content") or ""
        logprobs += (choice["logprobs"] or {"content": []})["content"]
        for delta in choice["delta"].get("tool_calls") or ():
            if "id" in delta:
                assert delta["index"] == len(calls)
                assert (delta["type"], delta["function"]["arguments"]) == ("function", "")
                calls.append({"name": delta["function"]["name"], "arguments": ""})
            else:
                assert delta.keys() == {"index", "function"}
                calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    return content, calls, reason, logprobs


@pytest.mark.parametrize("body", REQUESTS)
async def test_a_stream_accumulates_to_the_plain_response(server: TextServer, body: Any) -> None:
    body = {"model": "ReverseModel", "tools": TOOLS, "stop": ["!end"], **body}
    choices = (await server.post("/v1/chat/completions", body)).json["choices"]
    *chunks, done = events((await server.post("/v1/chat/completions", {**body, "stream": True})).body)
    assert done == "[DONE]"
    assert len(choices) == body.get("n", 1)
    for choice in choices:
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        logprobs = (choice["logprobs"] or {"content": []})["content"]
        expected = (message["content"] or "", calls, choice["finish_reason"], logprobs)
        assert accumulate(chunks, choice["index"]) == expected


async def test_finish_reasons(server: TextServer) -> None:
    async def complete(text: str, **more: Any) -> tuple[str, str | None, list[str]]:
        body = {"model": "ReverseModel", "messages": messages_for(text), "tools": TOOLS, "stop": ["!end"], **more}
        choice = (await server.post("/v1/chat/completions", body)).json["choices"][0]
        calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls") or ()]
        return choice["finish_reason"], choice["message"]["content"], calls

    call = f"See: <tool_call> {WEATHER} </tool_call>"
    assert await complete(call) == ("tool_calls", "See:", [OSLO])
    assert await complete(call, stop=["</tool_call>"]) == ("tool_calls", "See:", [OSLO])
    assert await complete(call, max_tokens=6) == ("length", "See:", ['{"city":'])
    assert await complete(call, max_tokens=5) == ("length", 'See: <tool_call> {"name": "weather", "arguments":', [])
    assert await complete("<tool_call> no") == ("stop", "<tool_call> no", [])


async def test_calls_are_streamed_while_generated(server: TextServer) -> None:
    """OpenAI's client, with a model that pauses inside a call until the test has received its beginning."""
    messages = messages_for('Well. <tool_call> {"name": "time", "arguments": {"a": !wait "b"}} </tool_call>')
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="ReverseModel", messages=messages, tools=TOOLS, stop=["!end"], stream=True
        )
        content = name = arguments = ""
        async for chunk in stream:
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for call_delta in delta.tool_calls or ():
                assert call_delta.function is not None
                name += call_delta.function.name or ""
                arguments += call_delta.function.arguments or ""
            if arguments.endswith('"a":') and not server.model().gate.is_set():
                assert (content, name) == ("Well.", "time")
                server.model().gate.set()
        assert arguments == '{"a": !wait "b"}'
        assert chunk.choices[0].finish_reason == "tool_calls"


async def test_openai_client_accumulates_a_stream(server: TextServer) -> None:
    messages = messages_for(f"Well. <tool_call> {WEATHER} </tool_call> <tool_call> {WEATHER} </tool_call>")
    async with (
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(model="ReverseModel", messages=messages, tools=TOOLS, stop=["!end"]) as stream,
    ):
        kinds = [event.type async for event in stream]
        choice = (await stream.get_final_completion()).choices[0]
    assert kinds.count("tool_calls.function.arguments.delta") >= 4
    assert (choice.message.content, choice.finish_reason) == ("Well.", "tool_calls")
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Oslo"}] * 2
    assert calls[0].id != calls[1].id


async def test_special_tokens_are_kept_for_tools(server: TextServer) -> None:
    for more, skipped in (
        ({"tools": TOOLS}, False),
        ({"tools": TOOLS, "skip_special_tokens": True}, True),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "tool_choice": "none"}, True),
        ({}, True),
    ):
        await server.post("/v1/chat/completions", {"model": "ReverseModel", "messages": messages_for("a"), **more})
        assert server.model().calls[-1].sampling.skip_special_tokens is skipped
