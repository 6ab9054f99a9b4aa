"""OpenAI's answers: shapes, tools, formats, limits and errors."""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dragoman
from dragoman import Generate, errors
from dragoman.core.text import Generation, Grammar, PromptInfo, RawPrompt, Text, Token, merge_chunks
from dragoman.protocols.text_common.completions import Offsets
from dragoman.protocols.text_common.openai_format import format_logprob, format_prompt_logprobs
from dragoman.protocols.text_common.tool_stream import parser_for
from dragoman.protocols.text_common.tools import ToolChunk, collect_calls, parse_tools

from .text_house import House, Speaker, events, speaking

HELLO: list[Any] = [{"role": "user", "content": "hello you"}]


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with speaking() as made:
        yield made


async def chat(house: House, **body: Any) -> Any:
    answer = await house.post("/v1/chat/completions", {"model": "Speaker", "messages": HELLO, **body})
    assert answer.status == 200, answer.body
    return answer.json


def saying(text: str) -> list[Any]:
    """Messages to which the model's answer begins with this text."""
    return [{"role": f"={text} ", "content": "."}]


async def test_the_shape_of_a_chat(house: House) -> None:
    told = await chat(house)
    assert list(told) == ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"]
    assert told["object"] == "chat.completion"
    assert told["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "you hello user:"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert told["usage"]["total_tokens"] == 7


async def test_the_bytes_of_a_stream(house: House) -> None:
    ask = {"model": "Speaker", "messages": HELLO, "stream": True, "max_tokens": 1}
    answer = await house.post("/v1/chat/completions", ask)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.body.endswith(b"\n\ndata: [DONE]\n\n")
    first, last, done = events(answer.body)
    assert done == "[DONE]"
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert last["object"] == "chat.completion.chunk"
    ended = {"finish_reason": "length", "stop_reason": None}
    assert last["choices"][0] == {"index": 0, "delta": {"content": "you"}, "logprobs": None, **ended}


async def test_a_stream_in_the_form_of_tgi_tells_all_of_a_delta(house: House) -> None:
    ask = {"model": "tgi", "messages": HELLO, "stream": True, "max_tokens": 2}
    told = events((await house.post("/v1/chat/completions", ask)).body)[:-1]
    assert [each["choices"][0]["delta"] for each in told] == [
        {"role": "assistant", "content": text, "tool_calls": None} for text in ("", "you", " hello")
    ]


async def test_what_is_told_of_a_prompt_as_by_vllm(house: House) -> None:
    wanted = [None, {"108": {"logprob": -0.125, "rank": None, "decoded_token": " b"}}]
    ask = {"model": "Speaker", "prompt": ["a b", "c"], "prompt_logprobs": 0}
    told = (await house.post("/v1/completions", ask)).json["choices"]
    assert [choice["prompt_logprobs"] for choice in told] == [wanted, [None]]
    streamed = events((await house.post("/v1/completions", {**ask, "prompt": "a b", "stream": True})).body)[:-1]
    assert [each["choices"][0].get("prompt_logprobs") for each in streamed] == [wanted, None, None]
    told = await chat(house, messages=[{"role": "a", "content": "b"}], prompt_logprobs=0)
    assert [len(each or ()) for each in told["prompt_logprobs"]] == [0, 1]
    assert "prompt_logprobs" not in await chat(house)
    ask = {"model": "Speaker", "messages": [{"role": "a", "content": "b"}], "prompt_logprobs": 0, "stream": True}
    first, *rest = events((await house.post("/v1/chat/completions", {**ask, "n": 2})).body)[:-1]
    assert first["prompt_logprobs"] == told["prompt_logprobs"]
    assert not any("prompt_logprobs" in each for each in rest)


async def test_nothing_new_but_what_is_known_of_a_prompt(house: House) -> None:
    ask = {"model": "Speaker", "prompt": ["a b", "c"], "max_tokens": 0, "echo": True, "logprobs": 0}
    told = (await house.post("/v1/completions", ask)).json
    assert [(c["text"], c["finish_reason"]) for c in told["choices"]] == [("a b", "length"), ("c", "length")]
    assert told["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.125]
    assert (told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"]) == (3, 0)
    streamed = events((await house.post("/v1/completions", {**ask, "prompt": "a b", "stream": True})).body)
    assert [each["choices"][0]["text"] for each in streamed[:-1]] == ["a b"]


class Parrot(dragoman.Model):
    """Says the last word again, and tells nothing of the prompt."""

    placement = "inline"

    def generate(self, call: Generate) -> Generation:
        return Generation((Text(0, 0, "b", (Token(1, "b", 0.0),), 1, "eos_token", whole="b"),))


async def test_a_model_that_tells_nothing_of_a_prompt() -> None:
    async with speaking(Parrot) as house:
        ask = {"messages": HELLO, "prompt_logprobs": 1}
        told = (await house.post("/v1/chat/completions", ask)).json
        assert (told["choices"][0]["message"]["content"], "prompt_logprobs" in told) == ("b", False)
        answer = await house.post("/v1/chat/completions", {**ask, "stream": True})
        assert [each["choices"][0]["delta"].get("content") for each in events(answer.body)[:-1]] == ["", "b"]
        ask = {"prompt": "a b", "echo": True, "logprobs": 1}
        (choice,) = (await house.post("/v1/completions", ask)).json["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == ("a bb", [3])
        (piece, _) = events((await house.post("/v1/completions", {**ask, "stream": True})).body)
        assert piece["choices"][0]["logprobs"] == choice["logprobs"]


# --- where tokens stand ----------------------------------------------------------------------------------------


class Held(dragoman.Model):
    """Says "st return", of which the first token might have become a stop string."""

    placement = "inline"

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        prompt = str(call.prompts[0])
        read = tuple(Token(i, text, -1.0) for i, text in enumerate((" the", " end")[-(call.sampling.truncate or 2) :]))
        first, second = Token(1, "st", -0.5), Token(2, " return", -0.25)
        pieces = (
            Generation((Text(0, 0, "", (first,), 1),), (PromptInfo(prompt, len(read), 0, read),)),
            Generation((Text(0, 0, "st return", (second,), 2, "length", whole="st return"),)),
        )
        for piece in pieces if call.stream else (merge_chunks(pieces),):
            yield piece


@pytest.mark.parametrize(
    ("more", "text", "offsets"),
    [
        ({}, "st return", [0, 2]),
        ({"echo": True}, "This is the endst return", [7, 11, 15, 17]),
        ({"echo": True, "truncate_prompt_tokens": 1}, "This is the endst return", [11, 15, 17]),
    ],
)
async def test_offsets_tell_where_a_token_stands(more: Any, text: str, offsets: list[int]) -> None:
    async with speaking(Held) as house:
        ask = {"prompt": "This is the end", "logprobs": 2, **more}
        (choice,) = (await house.post("/v1/completions", ask)).json["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)
        pieces = events((await house.post("/v1/completions", {**ask, "stream": True})).body)[:-1]
        told = [piece["choices"][0] for piece in pieces]
        assert "".join(each["text"] for each in told) == text
        assert [at for each in told for at in each["logprobs"]["text_offset"]] == offsets


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=3), st.integers(0, 6)), max_size=8))
def test_offsets_do_not_depend_on_what_is_held_back(steps: list[tuple[str, int]]) -> None:
    offsets, whole, sent, found = Offsets(5), "".join(text for text, _ in steps), 0, []
    said = 0
    for i, (text, held) in enumerate(steps):
        said += len(text)
        last = i + 1 == len(steps)
        upto = said if last else max(sent, said - held)
        found += offsets.of(whole[sent:upto], [Token(i, text)], last=last)
        sent = upto
    assert found == [5 + sum(len(text) for text, _ in steps[:i]) for i in range(len(steps))]


def test_offsets_where_tokens_do_not_add_up() -> None:
    half = Token(1, "\N{REPLACEMENT CHARACTER}")
    offsets = Offsets()
    pieces = [("", [half]), ("水", [half]), ("", [Token(2, " x")]), (" x b", [Token(3, " b")])]
    assert [offsets.of(text, tokens, last=False) for text, tokens in pieces] == [[0], [0], [1], [3]]
    assert offsets.of("", [Token(4, "</s>", special=True)], last=True) == [5]
    offsets = Offsets()
    strange = [offsets.of("z", [Token(i, "x")], last=False)[0] for i in range(500)]
    assert strange[-64:] == list(range(436, 500))


def test_likely_tokens_of_a_prompt_have_ranks() -> None:
    top = Token(7, "x", -0.5), Token(5, "a", -1.0)
    known, beyond = Token(5, "a", -1.0, top=top), Token(6, "b", -9.0, top=top)
    assert [
        [(id_, each["rank"]) for id_, each in (told or {}).items()] for told in format_prompt_logprobs([known, beyond])
    ] == [
        [("7", 1), ("5", 2)],
        [("7", 1), ("5", 2), ("6", None)],
    ]


def test_no_bytes_are_told_of_half_a_character() -> None:
    assert format_logprob(Token(1, "é", -1.0))["bytes"] == [195, 169]
    assert format_logprob(Token(1, " \N{REPLACEMENT CHARACTER}", -1.0))["bytes"] is None


async def test_usage_all_along(house: House) -> None:
    ask = {"model": "Speaker", "prompt": "a b", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    told = events((await house.post("/v1/completions", ask)).body)
    assert [t["usage"]["completion_tokens"] for t in told[:-1]] == [1, 2, 3]


class Sparing(dragoman.Model):
    """Gives each prompt one text, however many are wanted, and says of none that it ends."""

    placement = "inline"

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        for i, prompt in enumerate(call.prompts):
            yield Generation((Text(i, 0, "so", (Token(5, "so", -0.5),), 1),), (PromptInfo(str(prompt), 2),))
            if prompt == "!fault":
                raise errors.ModelFailed("it would not say that")


async def test_usage_ends_a_stream_whatever_texts_a_model_gives() -> None:
    usage = {"stream": True, "stream_options": {"include_usage": True}, "n": 3}
    async with speaking(Sparing) as house:
        for path, ask, counts in (
            ("/v1/chat/completions", {"messages": HELLO}, (2, 1)),
            ("/v1/completions", {"prompt": ["a", "b"]}, (4, 2)),
            ("/invocations", {"messages": HELLO}, (2, 1)),
        ):
            *before, last, end = events((await house.post(path, {**ask, **usage})).body)
            assert (last["model"], last["choices"], end) == ("Sparing", [], "[DONE]")
            assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == counts
            assert {chunk["usage"] for chunk in before} == {None}
        *_, last, end = events((await house.post("/v1/completions", {"prompt": "!fault", **usage})).body)
        assert (set(last), end) == ({"error"}, "[DONE]")


async def test_a_temperature_of_none_is_greedy_and_one_is_not(house: House) -> None:
    await chat(house, temperature=0, seed=-5)
    assert not house.model().calls[-1].sampling.do_sample
    await chat(house)
    assert house.model().calls[-1].sampling.do_sample
    await chat(house, use_beam_search=True, n=3, temperature=0)
    assert house.model().calls[-1].sampling.num_beams == 3
    for more, beams in (({}, 2), ({"n": 3}, 3), ({"n": 2, "best_of": 4}, 4)):
        ask = {"model": "Speaker", "prompt": "a", "use_beam_search": True, **more}
        assert (await house.post("/v1/completions", ask)).status == 200
        assert house.model().calls[-1].sampling.num_beams == beams


@pytest.mark.parametrize("name", ["", "tgi", "dummy", None])
async def test_names_that_mean_whatever_is_there(house: House, name: str | None) -> None:
    answer = await house.post("/v1/chat/completions", {"model": name, "messages": HELLO})
    assert answer.json["model"] == "Speaker"
    assert (await house.post("/v1/completions", {"model": name, "prompt": "a"})).status == 200
    assert (await house.post("/v1/embeddings", {"model": name, "input": "a"})).status == 200


async def test_the_hubs_name_of_a_model(house: House) -> None:
    for name in ("someone/Speaker", "someone/Speaker:pirate"):
        assert (await house.post("/v1/completions", {"model": name, "prompt": "a"})).json["model"] == "Speaker"
    assert house.model().calls[-1].sampling.adapter == "pirate"
    assert (await house.post("/v1/completions", {"model": "Speaker/other", "prompt": "a"})).status == 404


async def test_adapters_are_models_of_their_own(house: House) -> None:
    cards = (await house.ask("GET", "/v1/models")).json["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("Speaker", None), ("Speaker:pirate", "Speaker")]
    assert (await house.ask("GET", "/v1/models/Speaker:pirate")).json == cards[1]
    for path, body in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "a"})):
        answer = await house.post(f"/v1/{path}", {"model": "Speaker:pirate", **body})
        assert answer.json["model"] == "Speaker"
        assert house.model().calls[-1].sampling.adapter == "pirate"


async def test_the_path_goes_before_the_body(house: House) -> None:
    answer = await house.post("/models/Speaker/v1/chat/completions", {"model": "whatever", "messages": HELLO})
    assert answer.json["model"] == "Speaker"


async def test_messages_as_templates_take_them(house: House) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    await chat(house, messages=messages, chat_template_kwargs={"enable_thinking": False})
    prompt = house.model().calls[-1].prompts[0]
    assert prompt.messages[0] == {"role": "system", "content": "be kind"}
    assert prompt.messages[1]["content"] == ""
    assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert prompt.options == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("form", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
            Grammar("json_schema", '{"type": "object"}'),
        ),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a", "b"]')),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"guided_json": '{"type": "object"}'}, Grammar("json_schema", '{"type": "object"}')),
    ],
)
async def test_what_the_text_must_be(house: House, form: Any, grammar: Grammar | None) -> None:
    await chat(house, **form)
    assert house.model().calls[-1].sampling.grammar == grammar


async def test_the_text_of_tokens(house: House) -> None:
    for path in ("/detokenize", "/models/Speaker/detokenize"):
        answer = await house.post(path, {"model": "Speaker", "tokens": [5, 1, 2]})
        assert (answer.status, answer.json) == (200, {"prompt": "5 1 2"})
    strange: list[Any] = [None, "a", [1, "a"], [-1], [True], {}]
    for tokens in strange:
        answer = await house.post("/detokenize", {"tokens": tokens})
        assert (answer.status, answer.json["error"]["param"]) == (400, "tokens")
    assert (await house.post("/detokenize", {"model": "nobody", "tokens": [1]})).status == 404


UNKNOWN: list[tuple[str, Any, str]] = [
    ("/tokenize", {"prompt": "a", "add_special_token": False, "user": None}, "add_special_token"),
    ("/tokenize", {"prompt": "a", "messages": HELLO, "tools": [], "chat_templates": "x"}, "prompt, chat_templates"),
    ("/detokenize", {"tokens": [5], "skip_special_tokens": True}, "skip_special_tokens"),
    (
        "/v1/completions",
        {"prompt": "a", "stream": True, "foo": 1, "stream_options": {"foo": 5, "bar": None, "include_usage": True}},
        "foo, stream_options.foo",
    ),
    ("/v1/chat/completions", {"messages": HELLO, "stream": True, "stream_options": {"a b": 1}}, "stream_options.a%20b"),
]


async def test_what_nobody_knows_is_named_and_in_strict_mode_refused(house: House) -> None:
    for path, body, named in UNKNOWN:
        answer = await house.post(path, body)
        assert (answer.status, answer.headers["x-ignored-parameters"]) == (200, named)
    for path, body in (("/tokenize", {"prompt": "a", "return_token_strs": True}), ("/detokenize", {"tokens": [5]})):
        assert "x-ignored-parameters" not in (await house.post(path, body)).headers
    async with speaking(strict_parameters=True) as strict:
        for path, body, named in UNKNOWN:
            answer = await strict.post(path, body)
            assert answer.status == (422 if path == "/tokenize" else 400)  # the first is a path of TGI's
            told = answer.json["error"]
            message = told if isinstance(told, str) else told["message"]
            assert f"unknown parameters: `{named.split(', ')[0].replace('%20', ' ')}`" in message
        assert (await strict.post("/detokenize", {"model": "Speaker", "tokens": [5]})).status == 200


async def test_whether_the_tokenizer_adds_special_tokens(house: House) -> None:
    async def prompts(path: str, **body: Any) -> Any:
        assert (await house.post(path, {"model": "Speaker", **body})).status == 200
        return house.model().calls[-1].prompts

    for more, bare in (({}, False), ({"add_special_tokens": True}, False), ({"add_special_tokens": False}, True)):
        found = await prompts("/v1/completions", prompt=["a", "b"], **more)
        assert [isinstance(prompt, RawPrompt) for prompt in found] == [bare, bare]
        (found,) = await prompts("/v1/chat/completions", messages=HELLO, **more)
        assert found.special_tokens is more.get("add_special_tokens", False)
    assert await prompts("/v1/completions", prompt=[1, 2], add_special_tokens=False) == ((1, 2),)


# --- tools ---------------------------------------------------------------------------------------------------

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "time")
]
OSLO = '{"city":"Oslo"}'


async def test_calls_over_the_wire(house: House) -> None:
    ask = {"messages": saying('<tool_call>{"name":"time","arguments":{}}</tool_call>'), "tools": TOOLS}
    message = (await chat(house, **ask))["choices"][0]
    assert message["finish_reason"] == "tool_calls"
    (call,) = message["message"]["tool_calls"]
    assert call["function"] == {"name": "time", "arguments": "{}"}
    assert re.fullmatch("[a-z0-9]{9}", call["id"])  # as Mistral's templates want it back
    streamed = await house.post("/v1/chat/completions", {"model": "Speaker", **ask, "stream": True})
    *told, done = events(streamed.body)
    assert done == "[DONE]"
    choices = [each["choices"][0] for each in told]
    assert [each["finish_reason"] for each in choices] == [None] * (len(told) - 1) + ["tool_calls"]
    (first, *rest) = [piece for each in choices for piece in each["delta"].get("tool_calls") or ()]
    assert re.fullmatch("[a-z0-9]{9}", first.pop("id"))
    assert first == {"index": 0, "type": "function", "function": {"name": "time", "arguments": ""}}
    assert rest == [{"index": 0, "function": {"arguments": "{}"}}]


async def test_one_call_alone(house: House) -> None:
    both = '<tool_call>{"name":"time","arguments":{}}</tool_call>' * 2
    for parallel, count in ((True, 2), (False, 1)):
        told = await chat(house, messages=saying(both), tools=TOOLS, parallel_tool_calls=parallel)
        assert len(told["choices"][0]["message"]["tool_calls"]) == count


async def test_calls_that_are_required(house: House) -> None:
    await chat(house, tools=TOOLS, tool_choice="required")
    grammar = house.model().calls[-1].sampling.grammar
    schema = json.loads(grammar.text)
    assert schema["items"]["anyOf"][0]["properties"] == {
        "name": {"const": "time"},
        "arguments": {"$ref": "#/$defs/time"},
    }
    assert schema["$defs"] == {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    one = {"type": "function", "function": {"name": "weather"}}
    told = await chat(house, messages=saying(OSLO), tools=TOOLS, tool_choice=one)
    assert json.loads(house.model().calls[-1].sampling.grammar.text) == TOOLS[0]["function"]["parameters"]
    assert told["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    await chat(house, tools=TOOLS, tool_choice="none")
    assert house.model().calls[-1].prompts[0].tools == ()


REQUIRED = f'[ {{ "name": "time", "arguments": {{}} }}, {{"name":"weather","arguments":{OSLO} }} ]'


def read(text: str, choice: Any, *, cut: bool, **tools: Any) -> list[ToolChunk]:
    """What comes of a text, a character at a time."""
    found = parser_for(replace(parse_tools(TOOLS, choice), **tools))
    return [found.feed(c, last=i + 1 == len(text), cut=cut) for i, c in enumerate(text)]


def merge_deltas(parts: list[ToolChunk]) -> ToolChunk:
    return ToolChunk("".join(part.content for part in parts), [delta for part in parts for delta in part.deltas])


@pytest.mark.parametrize(
    ("text", "cut", "content", "calls"),
    [
        (REQUIRED, False, "", [("time", "{}"), ("weather", OSLO)]),
        (REQUIRED[:-5], True, "", [("time", "{}"), ("weather", OSLO[:-1])]),
        (REQUIRED[:60], True, "", [("time", "{}")]),
        (REQUIRED.partition("}")[0], True, "", [("time", "{")]),
        (REQUIRED[:15], True, "", []),
        ("[", True, "", []),
        ('[{"name":"time","arguments":{"a":"}]\\\\\\""}}]', False, "", [("time", '{"a":"}]\\\\\\""}')]),
        # of a model that does not hold to it
        ('[{"arguments":{},"name":"time"}]', False, "", [("time", "{}")]),
        ("I would rather not", False, "I would rather not", []),
        ("I would rather", True, "I would rather", []),
    ],
)
def test_a_required_call_as_far_as_it_goes(text: str, cut: bool, content: str, calls: Any) -> None:
    whole = parser_for(parse_tools(TOOLS, "required")).feed(text, last=True, cut=cut)
    for part in (whole, merge_deltas(read(text, "required", cut=cut))):
        assert part.content == content
        assert [(call.name, call.arguments) for call in collect_calls(part)] == calls


def test_pieces_of_a_required_call_come_at_once() -> None:
    parts = read(REQUIRED, "required", cut=False)
    assert not parts[-1].deltas
    assert sum(bool(part.deltas) for part in parts) > len(OSLO)
    alone = collect_calls(merge_deltas(read(REQUIRED, "required", cut=False, single=True)))
    assert [call.name for call in alone] == ["time"]


@pytest.mark.parametrize("text", ["", " \n", f" {OSLO}\n ", OSLO[:5]])
def test_the_arguments_of_a_named_call(text: str) -> None:
    one = {"type": "function", "function": {"name": "weather"}}
    whole = parser_for(parse_tools(TOOLS, one)).feed(text, last=True, cut=False)
    assert [(call.name, call.arguments) for call in collect_calls(whole)] == [("weather", text.strip())]
    if text:
        assert collect_calls(merge_deltas(read(text, "weather", cut=False)))[0].arguments == text.strip()


ARGUMENTS = '{"city": "Oslo"}'
LIST = f'[ {{"name":"weather","arguments": {ARGUMENTS} }} ]'


@pytest.mark.parametrize(
    ("choice", "text", "tokens", "arguments", "reason"),
    [
        ("required", LIST, 40, ARGUMENTS, "tool_calls"),
        ("required", LIST, 3, '{"city":', "length"),
        ("required", LIST, 1, None, "length"),
        ("weather", ARGUMENTS, 40, ARGUMENTS, "stop"),
        ("weather", ARGUMENTS, 1, '{"city":', "length"),
    ],
)
async def test_calls_that_have_to_be_made(
    house: House, choice: str, text: str, tokens: int, arguments: str | None, reason: str
) -> None:
    messages = [{"role": f"={text} !end", "content": ""}]
    ask = {"messages": messages, "tools": TOOLS, "tool_choice": choice, "max_tokens": tokens, "stop": ["!end"]}
    told = (await chat(house, **ask))["choices"][0]
    assert told["finish_reason"] == reason
    expected = [] if arguments is None else [arguments]
    assert [call["function"]["arguments"] for call in told["message"].get("tool_calls") or ()] == expected
    assert told["message"]["content"] == (None if expected else "")
    streamed = events((await house.post("/v1/chat/completions", {"model": "Speaker", **ask, "stream": True})).body)
    deltas = [each["choices"][0]["delta"] for each in streamed[:-1]]
    pieces = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == "".join(expected)
    assert sum("id" in piece for piece in pieces) == len(expected)
    assert streamed[-2]["choices"][0]["finish_reason"] == reason


async def test_a_function_without_parameters_takes_none(house: House) -> None:
    await chat(house, tools=[{"type": "function", "function": {"name": "now"}}], tool_choice="now")
    schema = json.loads(house.model().calls[-1].sampling.grammar.text)
    assert (schema["properties"], schema["additionalProperties"]) == ({}, False)


async def test_references_in_a_tool_are_its_own(house: House) -> None:
    place = {"type": "object", "properties": {"in": {"$ref": "#/$defs/Place"}, "$ref": {"type": "string"}}}
    parameters = {"$defs": {"Place": place}, "anyOf": [{"$ref": "#/$defs/Place"}, {"$ref": "#"}]}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    await chat(house, tools=[tool], tool_choice="required")
    moved = json.loads(house.model().calls[-1].sampling.grammar.text)["$defs"]["go"]
    assert moved["anyOf"] == [{"$ref": "#/$defs/go/$defs/Place"}, {"$ref": "#/$defs/go"}]
    assert moved["$defs"]["Place"]["properties"] == {
        "in": {"$ref": "#/$defs/go/$defs/Place"},
        "$ref": {"type": "string"},
    }


async def test_tools_that_are_allowed(house: House) -> None:
    def allowed(mode: str, *names: str) -> Any:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    await chat(house, tools=TOOLS, tool_choice=allowed("required", "time"))
    assert list(json.loads(house.model().calls[-1].sampling.grammar.text)["$defs"]) == ["time"]
    await chat(house, tools=TOOLS, tool_choice=allowed("auto", "weather"))
    assert house.model().calls[-1].prompts[0].tools == tuple(TOOLS[:1])
    for choice in (allowed("auto"), allowed("auto", "time", "nothing"), allowed("maybe", "time")):
        answer = await house.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, "tool_choice": choice})
        assert (answer.status, answer.json["error"]["param"]) == (400, "tool_choice")


async def test_a_prompt_for_tools_has_no_effect(house: House) -> None:
    ask = {"model": "Speaker", "messages": HELLO, "tools": TOOLS, "tool_prompt": "use these"}
    answer = await house.post("/v1/chat/completions", ask)
    assert (answer.status, answer.headers["x-ignored-parameters"]) == (200, "tool_prompt")


async def test_one_format_may_have_two_names(house: House) -> None:
    await chat(house, response_format={"type": "text"}, guided_regex="a", structured_outputs={"regex": "a"})
    assert house.model().calls[-1].sampling.grammar == Grammar("regex", "a")


async def test_one_required_call_alone(house: House) -> None:
    await chat(house, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert json.loads(house.model().calls[-1].sampling.grammar.text)["maxItems"] == 1


# --- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"messages": []}, "messages", "a list of 1 to"),
        ({"messages": [{"content": "a"}]}, "messages[0]", "an object with `role` and `content`"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0]", "a text, or a list of texts; got 5"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0]",
            "parts of text alone",
        ),
        ({"temperature": 2.5}, "temperature", "a number >= 0.0 and <= 2.0; got 2.5"),
        ({"top_p": -1}, "top_p", "got -1"),
        ({"n": 0}, "n", "strictly positive"),
        ({"n": 99}, "n", "must be <= 16; got 99"),
        ({"max_tokens": 0}, "max_tokens", "strictly positive"),
        ({"stop": [""]}, "stop", "not empty"),
        ({"presence_penalty": 3}, "presence_penalty", "got 3"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "token ids"),
        ({"logit_bias": {"٣": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {str(1 << 31): 1}}, "logit_bias", "token ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "a list of 1 to 256 token ids"),
        ({"logprobs": 3}, "logprobs", "true or false"),
        ({"top_logprobs": 3}, "top_logprobs", "only be given with `logprobs`"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "<= 20"),
        ({"stream_options": {}}, "stream_options", "only be given with `stream`"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "JSON schema"),
        ({"tool_choice": "required"}, "tool_choice", "without `tools`"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "x"}}}, "tool_choice", "one of `tools`"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "must not be given with `guided_regex`"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json", "with `response_format`"),
        ({"tools": TOOLS, "tool_choice": "time", "guided_regex": "a"}, "guided_regex", "with a `tool_choice` that"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
            "must not be given with a `tool_choice` that requires a call",
        ),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "options that are true or false"),
        ({"model": 5}, "model", "the name of a model"),
        ({"continue_final_message": True}, "continue_final_message", "with `add_generation_prompt`: false"),
        ({"continue_final_message": 1}, "continue_final_message", "true or false"),
    ],
)
async def test_what_is_refused(house: House, change: Any, param: str, message: str) -> None:
    answer = await house.post("/v1/chat/completions", {"model": "Speaker", "messages": HELLO, **change})
    assert answer.status == 400
    told = answer.json["error"]
    assert set(told) == {"message", "type", "param", "code"}
    assert (told["type"], told["param"]) == ("invalid_request_error", param)
    assert message in told["message"]
    assert not house.model().calls


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"use_beam_search": True, "n": 2, "best_of": 99}, "best_of"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"echo": "yes"}, "echo"),
    ],
)
async def test_completions_that_are_refused(house: House, change: Any, param: str) -> None:
    answer = await house.post("/v1/completions", {"model": "Speaker", "prompt": "a", **change})
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "change", [{"input": ""}, {"input": []}, {"input": [1, "a"]}, {"dimensions": 4}, {"encoding_format": "hex"}]
)
async def test_embeddings_that_are_refused(house: House, change: Any) -> None:
    answer = await house.post("/v1/embeddings", {"model": "Speaker", "input": "a", **change})
    assert answer.status == 400


async def test_paths_and_models_that_are_not_there(house: House) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405)):
        answer = await house.ask(method, path)
        assert answer.status == status
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
    lost = await house.post("/v1/chat/completions", {"model": "nobody", "messages": HELLO})
    assert (lost.status, lost.json["error"]["code"]) == (404, "model_not_found")


async def test_a_fault_in_mid_stream(house: House) -> None:
    ask = {"model": "Speaker", "prompt": "!fault a", "stream": True}
    first, fault, done = events((await house.post("/v1/completions", ask)).body)
    assert first["choices"][0]["text"] == "a"
    assert fault["error"]["type"] == "server_error"
    assert done == "[DONE]"
    before = await house.post("/v1/completions", {"model": "Speaker", "prompt": "a !fault", "stream": True})
    assert before.status == 500


class Other(Speaker):
    pass


async def test_several_models() -> None:
    async with speaking(Speaker, Other) as house:
        cards = (await house.ask("GET", "/v1/models")).json["data"]
        assert [card["id"] for card in cards if card["parent"] is None] == ["Other", "Speaker"]
        lost = await house.post("/v1/completions", {"prompt": "a"})
        assert lost.status == 400
        assert "Other, Speaker" in lost.json["error"]["message"]
        assert (await house.post("/v1/completions", {"model": "Other", "prompt": "a"})).json["model"] == "Other"
