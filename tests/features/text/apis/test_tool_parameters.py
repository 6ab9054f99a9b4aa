"""Tool calls with `<parameter>` tags, as of Qwen3-Coder: values are typed by the schema of the tool."""

import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_text.apis.common.completion_parser import parser_for
from dragoman_text.apis.common.tools import ChatChunk, collect_calls, parse_tools
from text_server import TextServer, events, serve

TYPES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "sure": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "where": {"type": "object"},
    "maybe": {"type": ["integer", "null"]},
    "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "level": {"enum": [1, 2, 3]},
    "colour": {"enum": ["red", "blue"]},
    "place": {"$ref": "#/$defs/place"},
    "loop": {"$ref": "#/$defs/loop"},
    "python": {"type": "dict"},
    "untyped": {},
}
DEFS: dict[str, Any] = {"place": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}}
SCHEMA: dict[str, Any] = {"type": "object", "properties": TYPES, "$defs": DEFS}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]


def parse(text_chunks: Sequence[str], *, cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    parser = parser_for(parse_tools(TOOLS, None))
    chunks_ = [parser.feed(text, last=i + 1 == len(text_chunks), cut=cut) for i, text in enumerate(text_chunks)]
    whole = ChatChunk([part for chunk in chunks_ for part in chunk.parts])
    return whole.content, [(call.name, call.arguments) for call in collect_calls(whole)]


def format_call(name: str, **arguments: str) -> str:
    """Format a call as the model's template does."""
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "Oslo", "Oslo"),
        ("text", "7", "7"),
        ("text", "", ""),
        ("text", "null", None),  # of any type, as in vLLM
        ("text", "nullable", "nullable"),
        ("text", 'if a < b:\n\treturn "é\\n"\n', 'if a < b:\n\treturn "é\\n"\n'),
        ("text", "</parameter", "</parameter"),
        ("count", "3", 3),
        ("count", " -03 ", -3),
        ("count", "5.0", 5),
        ("count", "5.5", "5.5"),
        ("count", "1_000", "1_000"),
        ("count", "many", "many"),
        ("count", "9" * 30, int("9" * 30)),
        ("count", "9" * 5000, "9" * 5000),
        ("count", "NULL", None),
        ("share", "0.5", 0.5),
        ("share", "2", 2),
        ("share", "+.5e1", 5.0),
        ("share", "1e999", "1e999"),
        ("share", "nan", "nan"),
        ("sure", "True", True),
        ("sure", "false", False),
        ("sure", "perhaps", "perhaps"),
        ("tags", '["a", "b"]', ["a", "b"]),
        ("tags", "['a', True, None]", ["a", True, None]),
        ("tags", "[NaN]", "[NaN]"),
        ("tags", "[" * 5000, "[" * 5000),
        ("tags", "a, b", "a, b"),
        ("where", '{"city": "Oslo",\n "at": [1, 2]}', {"city": "Oslo", "at": [1, 2]}),
        ("where", "{'city': '\\d'}", {"city": "\\d"}),
        ("where", "{1, 2}", "{1, 2}"),
        ("maybe", "4", 4),
        ("maybe", "null", None),
        ("either", "4", 4),
        ("either", "four", "four"),
        ("level", "2", 2),
        ("colour", "red", "red"),
        ("place", '{"a": 1}', {"a": 1}),
        ("loop", "a", "a"),
        ("python", "{'a': 1}", {"a": 1}),
        ("untyped", "4", "4"),
        ("unheard", "4", "4"),
    ],
)
def test_values_are_typed_by_the_schema(name: str, text: str, value: Any) -> None:
    call = format_call("f", **{name: text})
    content, [(of, arguments)] = parse([call])
    assert (content, of, json.loads(arguments)) == ("", "f", {name: value})
    assert parse(list(call)) == (content, [(of, arguments)])


def test_numbers_keep_their_text() -> None:
    _, [(_, arguments)] = parse([format_call("f", share="1.50", count="12345678901234567890", tags="[1.0]")])
    assert arguments == '{"share": 1.50, "count": 12345678901234567890, "tags": [1.0]}'


CALL = ("f", '{"text": "a"}')
CALL_MARKUP = "<function=f>\n<parameter=text>\na\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Well.\n\n{format_call('f', text='a')}", "Well.", [CALL]),
        (f"{format_call('f', text='a')}\n{format_call('time')}\nSo.", "So.", [CALL, ("time", "{}")]),
        (format_call("f", text="a", count="1"), "", [("f", '{"text": "a", "count": 1}')]),
        # missing tags and line breaks
        (f"Well. {CALL_MARKUP}\n</tool_call> So.", "Well.  So.", [CALL]),
        (CALL_MARKUP, "", [CALL]),
        (f"<tool_call>{CALL_MARKUP}\n{CALL_MARKUP}</tool_call>", "", [CALL, CALL]),
        ("<tool_call><function=f><parameter=text>a</parameter></function></tool_call>", "", [CALL]),
        ("<tool_call><function=f><parameter=text>a</function></tool_call>So.", "So.", [CALL]),
        ("<tool_call><function=f><parameter=text>a</parameter></tool_call> So.", "So.", [CALL]),
        ("<tool_call><function=f><parameter=text>a</tool_call> So.", "So.", [CALL]),
        ("<function=f><parameter=text>a<parameter=count>2", "", [("f", '{"text": "a", "count": 2}')]),
        ("<function=f><parameter=text>\na\n", "", [CALL]),
        ("<function=f><parameter=text>a</parameter> Well.", "Well.", [CALL]),
        ("<function=time></function>", "", [("time", "{}")]),
        ("<function=time>\n\n</function>\nSo.", "So.", [("time", "{}")]),
        # Llama's format
        ('<function=f>{"text": "a"}</function>', "", [CALL]),
        # no calls
        ("<tool_call>\n<function=no>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", None, []),
        ("<tool_call><function=f>text</function></tool_call>", None, []),
        ("<function=f>", None, []),
        ("<parameter=a>1</parameter>", None, []),
        ("a <function=f of x> b", None, []),
    ],
)
def test_parse_calls_and_text(text: str, content: str | None, calls: Any) -> None:
    assert parse([text]) == parse(list(text)) == (text if content is None else content, calls)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<function=f><parameter=te", "{"),
        ("<function=f><parameter=text>", '{"text": '),
        ("<function=f><parameter=text>Os", '{"text": "Os'),
        ("<function=f><parameter=text>Os\n</para", '{"text": "Os'),
        ("<function=f><parameter=count>1", '{"count": '),
        ("<function=f><parameter=count>1</parameter>\n</fun", '{"count": 1'),
        ("<function=f><parameter=count>1</parameter></function>\n</tool", '{"count": 1}'),
    ],
)
def test_truncated_texts_have_partial_arguments(text: str, arguments: str) -> None:
    assert parse([text], cut=True) == parse(list(text), cut=True) == ("", [("f", arguments)])


def test_strings_are_streamed_other_values_are_sent_complete() -> None:
    parser = parser_for(parse_tools(TOOLS, None))
    text = "<tool_call>\n<function=f>\n<parameter=text>\nlong text\n</parameter>\n<parameter=count>\n12\n</parameter>"
    deltas = [
        (character, "".join(delta.arguments for delta in chunk.deltas))
        for character in text
        if (chunk := parser.feed(character, last=False, cut=False)).deltas
    ]
    assert deltas == [
        ("=", "{"),  # at the first parameter it is a call
        (">", '"text": '),
        *zip("long text", ['"l', *"ong text"], strict=True),
        (">", '"'),
        (">", ', "count": '),
        (">", "12"),
    ]


# --- random calls and texts, in chunks -------------------------------------------------------------------------

FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<function=f>", "<function=time>", "<function=no>", "</function>"),
    *("<parameter=text>", "<parameter=count>", "<parameter=tags>", "<parameter=x", "</parameter>", "null", "12", "[1]"),
    *("<", "</", "\n", " ", ">", "=", "a", '"', "\\", "é", "{", "}", '{"name": "time", "arguments": {}}', "Hello."),
)
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=14).map("".join)


@st.composite
def split_texts(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[str]:
    text = draw(texts)
    positions = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:stop] for start, stop in itertools.pairwise([0, *positions, len(text)])]


@given(split_texts(TEXTS), st.booleans())
def test_results_do_not_depend_on_the_chunks(text_chunks: list[str], cut: bool) -> None:
    text = "".join(text_chunks)
    whole = parse([text], cut=cut)
    assert parse(text_chunks, cut=cut) == parse([*text, ""], cut=cut) == whole
    if not whole[1]:
        assert whole[0] == text


MARKUP = st.lists(st.sampled_from([fragment for fragment in FRAGMENTS if "{" not in fragment]), max_size=12).map(
    "".join
)


@given(split_texts(MARKUP.map(lambda markup: "<function=f>" + markup)))
def test_arguments_of_parameters_are_json(text_chunks: list[str]) -> None:
    for _, arguments in parse(text_chunks)[1]:
        assert isinstance(json.loads(arguments), dict)


PLAIN_TEXT = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"])).filter(
    lambda text: text != "null"
)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "text": PLAIN_TEXT.filter(lambda text: text.lower() != "null"),
        "count": st.integers(),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "sure": st.booleans(),
        "tags": st.lists(PLAIN_TEXT, max_size=3),
        "where": st.dictionaries(PLAIN_TEXT, st.one_of(st.none(), st.integers(), PLAIN_TEXT), max_size=3),
        "maybe": st.one_of(st.none(), st.integers()),
    },
)


@given(st.lists(VALUES, min_size=1, max_size=3), st.sampled_from(["", "Let me see."]), st.data())
def test_formatted_calls_roundtrip(calls: list[dict[str, Any]], content: str, data: st.DataObject) -> None:
    as_text = [
        {key: value if isinstance(value, str) else json.dumps(value) for key, value in call.items()} for call in calls
    ]
    text = content + "\n".join(format_call("f", **call) for call in as_text)
    parsed_content, parsed_calls = parse(data.draw(split_texts(st.just(text))))
    assert (parsed_content, [json.loads(arguments) for _, arguments in parsed_calls]) == (content, calls)


# --- over the wire -------------------------------------------------------------------------------------------


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve() as server:
        yield server


async def test_plain_and_streamed_responses(server: TextServer) -> None:
    call_text = "<tool_call> <function=f> <parameter=count> 3 </parameter> <parameter=text>a b</parameter> </function>"
    messages = [{"role": f"=See: {call_text} !end", "content": ""}]
    body = {"model": "ReverseModel", "tools": TOOLS, "stop": ["!end"], "messages": messages}
    choice = (await server.post("/v1/chat/completions", body)).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("See:", "tool_calls")
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"count": 3, "text": "a b"}'}
    *chunks, _ = events((await server.post("/v1/chat/completions", {**body, "stream": True})).body)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    functions = [call_delta["function"] for delta in deltas for call_delta in delta.get("tool_calls") or ()]
    assert functions[0] == {"name": "f", "arguments": ""}
    assert "".join(call_delta["arguments"] for call_delta in functions) == call["function"]["arguments"]
    assert len(functions) > 4
