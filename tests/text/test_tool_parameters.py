"""Calls whose arguments come as parameters, as Qwen3-Coder writes them: typed by the schema of the tool."""

import itertools
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.protocols.text_common.tool_stream import parser_for
from dragoman.protocols.text_common.tools import ToolChunk, collect_calls, parse_tools

from .text_house import House, events, speaking

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


def found(pieces: Sequence[str], *, cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    read = parser_for(parse_tools(TOOLS, None))
    parts = [read.feed(piece, last=i + 1 == len(pieces), cut=cut) for i, piece in enumerate(pieces)]
    whole = ToolChunk("".join(part.content for part in parts), [delta for part in parts for delta in part.deltas])
    return whole.content, [(call.name, call.arguments) for call in collect_calls(whole)]


def written(name: str, **given: str) -> str:
    """A call as the model's template has it."""
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "Oslo", "Oslo"),
        ("text", "7", "7"),
        ("text", "", ""),
        ("text", "null", None),  # vLLM: whatever the type
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
    call = written("f", **{name: text})
    content, [(of, arguments)] = found([call])
    assert (content, of, json.loads(arguments)) == ("", "f", {name: value})
    assert found(list(call)) == (content, [(of, arguments)])


def test_numbers_are_passed_on_as_they_were_written() -> None:
    _, [(_, arguments)] = found([written("f", share="1.50", count="12345678901234567890", tags="[1.0]")])
    assert arguments == '{"share": 1.50, "count": 12345678901234567890, "tags": [1.0]}'


F = ("f", '{"text": "a"}')
INNER = "<function=f>\n<parameter=text>\na\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Well.\n\n{written('f', text='a')}", "Well.", [F]),
        (f"{written('f', text='a')}\n{written('time')}\nSo.", "So.", [F, ("time", "{}")]),
        (written("f", text="a", count="1"), "", [("f", '{"text": "a", "count": 1}')]),
        # what models forget: the first mark, any of those at the end, line breaks
        (f"Well. {INNER}\n</tool_call> So.", "Well.  So.", [F]),
        (INNER, "", [F]),
        (f"<tool_call>{INNER}\n{INNER}</tool_call>", "", [F, F]),
        ("<tool_call><function=f><parameter=text>a</parameter></function></tool_call>", "", [F]),
        ("<tool_call><function=f><parameter=text>a</function></tool_call>So.", "So.", [F]),
        ("<tool_call><function=f><parameter=text>a</parameter></tool_call> So.", "So.", [F]),
        ("<tool_call><function=f><parameter=text>a</tool_call> So.", "So.", [F]),
        ("<function=f><parameter=text>a<parameter=count>2", "", [("f", '{"text": "a", "count": 2}')]),
        ("<function=f><parameter=text>\na\n", "", [F]),
        ("<function=f><parameter=text>a</parameter> Well.", "Well.", [F]),
        ("<function=time></function>", "", [("time", "{}")]),
        ("<function=time>\n\n</function>\nSo.", "So.", [("time", "{}")]),
        # Llama's form stays what it was
        ('<function=f>{"text": "a"}</function>', "", [F]),
        # no calls
        ("<tool_call>\n<function=no>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", None, []),
        ("<tool_call><function=f>text</function></tool_call>", None, []),
        ("<function=f>", None, []),
        ("<parameter=a>1</parameter>", None, []),
        ("a <function=f of x> b", None, []),
    ],
)
def test_calls_and_the_text_around_them(text: str, content: str | None, calls: Any) -> None:
    assert found([text]) == found(list(text)) == (text if content is None else content, calls)


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
def test_a_text_that_is_cut_off_has_arguments_as_far_as_they_go(text: str, arguments: str) -> None:
    assert found([text], cut=True) == found(list(text), cut=True) == ("", [("f", arguments)])


def test_a_text_goes_on_as_it_comes_and_anything_else_when_it_is_whole() -> None:
    read = parser_for(parse_tools(TOOLS, None))
    text = "<tool_call>\n<function=f>\n<parameter=text>\nlong text\n</parameter>\n<parameter=count>\n12\n</parameter>"
    came = [
        (character, "".join(delta.arguments for delta in part.deltas))
        for character in text
        if (part := read.feed(character, last=False, cut=False)).deltas
    ]
    assert came == [
        ("=", "{"),  # of the first parameter: it is a call now
        (">", '"text": '),
        *zip("long text", ['"l', *"ong text"], strict=True),
        (">", '"'),
        (">", ', "count": '),
        (">", "12"),
    ]


# --- any call, any text, in any pieces -----------------------------------------------------------------------

MARKUP = (
    *("<tool_call>", "</tool_call>", "<function=f>", "<function=time>", "<function=no>", "</function>"),
    *("<parameter=text>", "<parameter=count>", "<parameter=tags>", "<parameter=x", "</parameter>", "null", "12", "[1]"),
    *("<", "</", "\n", " ", ">", "=", "a", '"', "\\", "é", "{", "}", '{"name": "time", "arguments": {}}', "Hello."),
)
TEXTS = st.lists(st.one_of(st.sampled_from(MARKUP), st.text(max_size=3)), max_size=14).map("".join)


@st.composite
def cut_up(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[str]:
    text = draw(texts)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:stop] for start, stop in itertools.pairwise([0, *places, len(text)])]


@given(cut_up(TEXTS), st.booleans())
def test_any_pieces_make_the_same(pieces: list[str], cut: bool) -> None:
    text = "".join(pieces)
    whole = found([text], cut=cut)
    assert found(pieces, cut=cut) == found([*text, ""], cut=cut) == whole
    if not whole[1]:
        assert whole[0] == text


MARKS = st.lists(st.sampled_from([mark for mark in MARKUP if "{" not in mark]), max_size=12).map("".join)


@given(cut_up(MARKS.map(lambda marks: "<function=f>" + marks)))
def test_arguments_of_parameters_are_json(pieces: list[str]) -> None:
    for _, arguments in found(pieces)[1]:
        assert isinstance(json.loads(arguments), dict)


PLAIN = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"])).filter(lambda text: text != "null")
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "text": PLAIN.filter(lambda text: text.lower() != "null"),
        "count": st.integers(),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "sure": st.booleans(),
        "tags": st.lists(PLAIN, max_size=3),
        "where": st.dictionaries(PLAIN, st.one_of(st.none(), st.integers(), PLAIN), max_size=3),
        "maybe": st.one_of(st.none(), st.integers()),
    },
)


@given(st.lists(VALUES, min_size=1, max_size=3), st.sampled_from(["", "Let me see."]), st.data())
def test_calls_come_out_as_they_were_made(calls: list[dict[str, Any]], content: str, data: st.DataObject) -> None:
    as_text = [
        {key: value if isinstance(value, str) else json.dumps(value) for key, value in call.items()} for call in calls
    ]
    text = content + "\n".join(written("f", **call) for call in as_text)
    said, made = found(data.draw(cut_up(st.just(text))))
    assert (said, [json.loads(arguments) for _, arguments in made]) == (content, calls)


# --- over the wire -------------------------------------------------------------------------------------------


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with speaking() as made:
        yield made


async def test_whole_and_streamed_over_the_wire(house: House) -> None:
    said = "<tool_call> <function=f> <parameter=count> 3 </parameter> <parameter=text>a b</parameter> </function>"
    messages = [{"role": f"=See: {said} !end", "content": ""}]
    ask = {"model": "Speaker", "tools": TOOLS, "stop": ["!end"], "messages": messages}
    choice = (await house.post("/v1/chat/completions", ask)).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("See:", "tool_calls")
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"count": 3, "text": "a b"}'}
    *chunks, _ = events((await house.post("/v1/chat/completions", {**ask, "stream": True})).body)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    pieces = [piece["function"] for delta in deltas for piece in delta.get("tool_calls") or ()]
    assert pieces[0] == {"name": "f", "arguments": ""}
    assert "".join(piece["arguments"] for piece in pieces) == call["function"]["arguments"]
    assert len(pieces) > 4
