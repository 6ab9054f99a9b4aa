"""Reasoning split from the text of chats: tags, prompts that open them, streams and usage."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.text import Text, Token
from dragoman_text.apis.common.completion_parser import CompletionParser
from dragoman_text.apis.common.reasoning import TAGS, open_tag
from dragoman_text.apis.common.tools import ChatChunk, Tools, collect_calls, parse_tools
from text_server import TextServer, events, serve

TOOLS = parse_tools([{"type": "function", "function": {"name": "weather"}}], None)
CALL = '<tool_call>{"name":"weather","arguments":{}}</tool_call>'


def parse(chunks: list[str], prompt: str = "", tools: Tools | None = None, **options: bool) -> tuple[str, str, int]:
    parser = CompletionParser(tools or Tools(), prompt, **options)
    last = len(chunks) - 1
    found = [parser.feed(Text(text=text, finish="eos_token" if i == last else "")) for i, text in enumerate(chunks)]
    whole = ChatChunk([part for chunk in found for part in chunk.parts])
    return whole.reasoning, whole.content, len(collect_calls(whole))


@pytest.mark.parametrize(
    ("text", "prompt", "reasoning", "content"),
    [
        ("a", "", "", "a"),
        (" \n a ", "", "", " \n a "),
        ("<think>\na b\n</think>\n\nc ", "", "a b", "c "),
        (" \n<think>a</think>c", "", "a", "c"),
        ("a</think>c", "user: x\nassistant: <think>\n", "a", "c"),
        ("<think>a</think>c", "assistant: <think>", "a", "c"),
        ("a", "assistant: <think>\n", "a", ""),  # without an end all of it is reasoning
        ("<think>a", "", "a", ""),
        ("<think></think>c", "", "", "c"),
        ("c", "assistant: <think>\n\n</think>\n\n", "", "c"),
        ("c", "user: what does <think> mean?\nassistant:", "", "c"),
        ("See <think>a</think>", "", "", "See <think>a</think>"),
        ("a</think>c", "", "", "a</think>c"),
        ("<thinking>a", "", "", "<thinking>a"),
        ("<think>a [/THINK] b</think>c", "", "a [/THINK] b", "c"),
    ],
)
def test_reasoning_and_content(text: str, prompt: str, reasoning: str, content: str) -> None:
    assert parse([text], prompt) == parse(list(text), prompt) == (reasoning, content, 0)


def test_the_tags_of_each_family() -> None:
    assert [f"{start} {end}" for start, end in TAGS.items()] == [
        "<think> </think>",
        "[THINK] [/THINK]",
        "<seed:think> </seed:think>",
        "\u25c1think\u25b7 \u25c1/think\u25b7",
        "<|channel>thought <channel|>",
        "<|START_THINKING|> <|END_THINKING|>",
        "<mm:think> </mm:think>",
        "<ifm|think> </ifm|think>",
        "<|inner_prefix|> <|inner_suffix|>",
        "Here is my thought process: Here is my response:",
    ]


@pytest.mark.parametrize("tag", TAGS)
def test_each_pair_of_tags(tag: str) -> None:
    text = f"{tag} a b {TAGS[tag]} c"
    assert parse([text]) == parse(list(text)) == ("a b", "c", 0)
    assert open_tag(f"assistant: {tag}\n") == tag


def test_a_tool_call_ends_reasoning() -> None:
    text = f"<think>a {CALL}"
    assert parse([text], tools=TOOLS) == parse(list(text), tools=TOOLS) == ("a", "", 1)
    assert parse([text]) == (f"a {CALL}", "", 0)


def test_a_constrained_completion_has_no_reasoning() -> None:
    assert parse(["<think>a</think>"], splits_reasoning=False) == ("", "<think>a</think>", 0)


@given(st.data())
def test_any_split_gives_the_same_result(data: st.DataObject) -> None:
    pieces = ["<think>", "</think>", "<thi", "</", " ", "\n", "a", CALL, "[THINK]", "[/THINK]", "<tool_call>"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=8)))
    prompt = data.draw(st.sampled_from(["", "<think>\n", "<think></think>"]))
    tools = data.draw(st.sampled_from([Tools(), TOOLS]))
    positions = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in itertools.pairwise([0, *positions, len(text)])]
    assert parse(chunks, prompt, tools) == parse([text], prompt, tools)


def test_reasoning_tokens_are_counted_up_to_the_end_tag() -> None:
    tokens = [Token(i, text) for i, text in enumerate(("<think>", " a", " b", "</th", "ink>", "c", "d"))]
    whole = "".join(token.text for token in tokens)
    parser = CompletionParser(Tools())
    parser.feed(Text(whole=whole, tokens=tuple(tokens), finish="eos_token"), is_whole=True)
    assert parser.reasoning_tokens == 5
    parser = CompletionParser(Tools())
    for token in tokens:
        parser.feed(Text(text=token.text, tokens=(token,)))
    assert parser.reasoning_tokens == 5
    parser = CompletionParser(Tools())
    parser.feed(Text(text="c", tokens=(tokens[-1],), finish="eos_token"))
    assert parser.reasoning_tokens == 0


HARMONY = (
    "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}<|call|>"
)


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        (HARMONY, "<|start|>assistant", ("Hm. ", "I look.", 1)),
        ("<|channel|>final<|message|>Hello<|return|>", "<|start|>assistant", ("", "Hello", 0)),
        ("Hello", "<|start|>assistant<|channel|>final<|message|>", ("", "Hello", 0)),
        ("<|channel|>analysis<|message|>a <", "<|start|>assistant", ("a <", "", 0)),
        ("<|channel|>analysis", "<|start|>assistant", ("", "", 0)),
        ("<|channel|>commentary to=functions.no<|message|>{}<|call|>", "<|start|>assistant", ("", "{}", 0)),
        ("Hello", "<|start|>assistant", ("", "Hello", 0)),
        ("<|end|><|end|>a<|channel|>", "<|start|>assistant", ("", "a", 0)),
        ("a" * 2000 + "<|message|>b", "<|start|>assistant", ("", "a" * 2000 + "<|message|>b", 0)),
    ],
)
def test_harmony(text: str, prompt: str, expected: tuple[str, str, int]) -> None:
    assert parse([text], prompt, TOOLS) == expected
    assert parse(list(text), prompt, TOOLS) == expected
    for end in range(0, len(text), 7):
        assert parse([text[:end]], prompt, TOOLS) == parse(list(text[:end]) or [""], prompt, TOOLS), text[:end]


@given(
    st.lists(st.sampled_from([*map(str, HARMONY.partition("Hm.")), "<|end|>", "<|mess", "a", "<|start|>"]), max_size=6)
)
def test_any_split_of_harmony_gives_the_same_result(pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = parse([text], "<|start|>assistant", TOOLS)
    assert parse([*pieces, ""], "<|start|>assistant", TOOLS) == parse([*text, ""], "<|start|>assistant", TOOLS) == whole


# --- over the wire -------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[TextServer]:
    async with serve() as server:
        yield server


@pytest.mark.asyncio(loop_scope="module")
async def test_reasoning_of_chats(server: TextServer) -> None:
    body: dict[str, Any] = {
        "model": "ReverseModel",
        "messages": [{"role": "user", "content": "c </think> b a <think>"}],
    }
    whole = (await server.post("/v1/chat/completions", body)).json
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("a b", "a b", "c user:")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    options = {"include_usage": True}
    found = events(
        (await server.post("/v1/chat/completions", {**body, "stream": True, "stream_options": options})).body
    )
    deltas = [each["choices"][0]["delta"] for each in found[:-2]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "a b"
    assert "".join(delta.get("content", "") for delta in deltas) == "c user:"
    assert found[-2]["usage"] == whole["usage"]
    hidden = (await server.post("/v1/chat/completions", {**body, "include_reasoning": False})).json
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": "c user:"}


@pytest.mark.asyncio(loop_scope="module")
async def test_reasoning_reaches_the_template(server: TextServer) -> None:
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "c"}]
    body = {"model": "ReverseModel", "messages": history, "reasoning_effort": "none"}
    assert (await server.post("/v1/chat/completions", body)).status == 200
    chat = server.model().calls[-1].prompts[0]
    assert chat.messages[1]["reasoning_content"] == "c"
    assert chat.options == {"reasoning_effort": "none", "enable_thinking": False}
    response = await server.post("/v1/chat/completions", {**body, "reasoning_effort": 5})
    assert (response.status, "`reasoning_effort` must be" in response.json["error"]["message"]) == (400, True)
