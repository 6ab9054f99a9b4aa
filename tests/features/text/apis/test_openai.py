"""OpenAI's API: responses, tools, response formats, limits and errors."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import dragoman
from dragoman import Generate, errors
from dragoman.core.calls import Embed, Embedded
from dragoman.core.text import Generation, Grammar, PromptInfo, RawPrompt, Text, Token, merge_chunks
from dragoman_text.apis.common.completion_parser import parser_for
from dragoman_text.apis.common.completions import Offsets
from dragoman_text.apis.common.openai_format import format_logprob, format_prompt_logprobs
from dragoman_text.apis.common.tools import ChatChunk, collect_calls, parse_tools
from text_server import ReverseModel, TextServer, events, serve, token_id

HELLO: list[Any] = [{"role": "user", "content": "hello you"}]


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve() as server:
        yield server


async def chat(server: TextServer, **body: Any) -> Any:
    response = await server.post("/v1/chat/completions", {"model": "ReverseModel", "messages": HELLO, **body})
    assert response.status == 200, response.body
    return response.json


def messages_for(text: str) -> list[Any]:
    """Return messages to which the model responds with this text first."""
    return [{"role": f"={text} ", "content": "."}]


async def test_chat_completion_fields(server: TextServer) -> None:
    result = await chat(server)
    fields = ["id", "object", "created", "model", "system_fingerprint", "choices", "usage", "prompt_logprobs"]
    assert list(result) == fields
    assert result["object"] == "chat.completion"
    assert result["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "you hello user:"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert result["usage"]["total_tokens"] == 7


async def test_stream_events(server: TextServer) -> None:
    body = {"model": "ReverseModel", "messages": HELLO, "stream": True, "max_tokens": 1}
    response = await server.post("/v1/chat/completions", body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.body.endswith(b"\n\ndata: [DONE]\n\n")
    first, last, done = events(response.body)
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


async def test_streams_for_the_name_tgi_have_every_delta_field(server: TextServer) -> None:
    body = {"model": "tgi", "messages": HELLO, "stream": True, "max_tokens": 2}
    result = events((await server.post("/v1/chat/completions", body)).body)[:-1]
    assert [each["choices"][0]["delta"] for each in result] == [
        {"role": "assistant", "content": text, "tool_calls": None} for text in ("", "you", " hello")
    ]


async def test_prompt_logprobs_in_the_format_of_vllm(server: TextServer) -> None:
    expected = [None, {"108": {"logprob": -0.125, "rank": None, "decoded_token": " b"}}]
    body = {"model": "ReverseModel", "prompt": ["a b", "c"], "prompt_logprobs": 0}
    result = (await server.post("/v1/completions", body)).json["choices"]
    assert [choice["prompt_logprobs"] for choice in result] == [expected, [None]]
    streamed = events((await server.post("/v1/completions", {**body, "prompt": "a b", "stream": True})).body)[:-1]
    assert [each["choices"][0].get("prompt_logprobs") for each in streamed] == [expected, None, None]
    result = await chat(server, messages=[{"role": "a", "content": "b"}], prompt_logprobs=0)
    assert [len(each or ()) for each in result["prompt_logprobs"]] == [0, 1]
    assert (await chat(server))["prompt_logprobs"] is None
    plain = await server.post("/v1/completions", {"model": "ReverseModel", "prompt": "a"})
    assert plain.json["choices"][0]["prompt_logprobs"] is None
    body = {"model": "ReverseModel", "messages": [{"role": "a", "content": "b"}], "prompt_logprobs": 0, "stream": True}
    first, *rest = events((await server.post("/v1/chat/completions", {**body, "n": 2})).body)[:-1]
    assert first["prompt_logprobs"] == result["prompt_logprobs"]
    assert not any("prompt_logprobs" in each for each in rest)


async def test_max_tokens_0_with_echo_returns_the_prompt(server: TextServer) -> None:
    body = {"model": "ReverseModel", "prompt": ["a b", "c"], "max_tokens": 0, "echo": True, "logprobs": 0}
    result = (await server.post("/v1/completions", body)).json
    assert [(c["text"], c["finish_reason"]) for c in result["choices"]] == [("a b", "length"), ("c", "length")]
    assert result["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.125]
    assert (result["usage"]["prompt_tokens"], result["usage"]["completion_tokens"]) == (3, 0)
    streamed = events((await server.post("/v1/completions", {**body, "prompt": "a b", "stream": True})).body)
    assert [each["choices"][0]["text"] for each in streamed[:-1]] == ["a b"]


class WithoutPromptInfo(dragoman.Model):
    """Generate "b" without information about the prompt."""

    placement = "inline"

    def generate(self, call: Generate) -> Generation:
        return Generation((Text(0, 0, "b", (Token(1, "b", 0.0),), 1, "eos_token", whole="b"),))


async def test_prompt_logprobs_of_a_model_without_prompt_info() -> None:
    async with serve(WithoutPromptInfo) as server:
        body = {"messages": HELLO, "prompt_logprobs": 1}
        result = (await server.post("/v1/chat/completions", body)).json
        assert (result["choices"][0]["message"]["content"], result["prompt_logprobs"]) == ("b", None)
        response = await server.post("/v1/chat/completions", {**body, "stream": True})
        assert [each["choices"][0]["delta"].get("content") for each in events(response.body)[:-1]] == ["", "b"]
        body = {"prompt": "a b", "echo": True, "logprobs": 1}
        (choice,) = (await server.post("/v1/completions", body)).json["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == ("a bb", [3])
        (chunk, _) = events((await server.post("/v1/completions", {**body, "stream": True})).body)
        assert chunk["choices"][0]["logprobs"] == choice["logprobs"]


# --- token ids ------------------------------------------------------------------------------------------------


def ids_of(text: str) -> list[int]:
    """Return the token ids of words that the model generates; "." is the end of the text."""
    return [2 if word == "." else token_id(word) for word in text.split(" ")]


async def test_token_ids_of_completions(server: TextServer) -> None:
    body = {"prompt": ["a b", "c d e"], "n": 2, "return_token_ids": True}
    choices = (await server.post("/v1/completions", body)).json["choices"]
    expected = [("b a .", "a b"), ("a .", "a b"), ("e d c .", "c d e"), ("d c .", "c d e")]
    assert [(c["token_ids"], c["prompt_token_ids"]) for c in choices] == [(ids_of(a), ids_of(b)) for a, b in expected]
    streamed = events((await server.post("/v1/completions", {**body, "stream": True})).body)[:-1]
    parts = [chunk["choices"][0] for chunk in streamed]
    for index, (generated, prompt) in enumerate(expected):
        first, *rest = [part for part in parts if part["index"] == index]
        assert first["prompt_token_ids"] == ids_of(prompt)
        assert not any("prompt_token_ids" in part for part in rest)
        assert [i for part in (first, *rest) for i in part["token_ids"]] == ids_of(generated)
    for off in ({}, {"return_token_ids": False}):
        (choice,) = (await server.post("/v1/completions", {"prompt": "a b", **off})).json["choices"]
        assert {"token_ids", "prompt_token_ids"}.isdisjoint(choice)


async def test_token_ids_of_held_back_text_are_sent() -> None:
    async with serve(HoldsBack) as server:
        body = {"prompt": "a", "return_token_ids": True, "stream": True}
        chunks = [each["choices"][0] for each in events((await server.post("/v1/completions", body)).body)[:-1]]
        assert [(each["text"], each["token_ids"]) for each in chunks] == [("", [1]), ("st return", [2])]
        assert chunks[0]["prompt_token_ids"] is None
        body = {"messages": HELLO, "return_token_ids": True, "stream": True}
        streamed = events((await server.post("/v1/chat/completions", body)).body)[:-1]
        assert [each["choices"][0].get("token_ids") for each in streamed] == [None, [1], [2]]


async def test_token_ids_of_chats(server: TextServer) -> None:
    body = {"messages": [{"role": "user", "content": "b <think>a</think>c"}], "n": 2, "return_token_ids": True}
    whole = (await server.post("/v1/chat/completions", body)).json
    prompt, completions = "user: b <think>a</think>c", ["<think>a</think>c b user: .", "b user: ."]
    assert whole["prompt_token_ids"] == ids_of(prompt)
    assert [choice["token_ids"] for choice in whole["choices"]] == [ids_of(each) for each in completions]
    streamed = events((await server.post("/v1/chat/completions", {**body, "stream": True})).body)[:-1]
    assert [i for i, chunk in enumerate(streamed) if "prompt_token_ids" in chunk] == [0]
    assert streamed[0]["prompt_token_ids"] == ids_of(prompt)
    parts = [chunk["choices"][0] for chunk in streamed]
    for index, expected in enumerate(completions):
        found = [i for part in parts if part["index"] == index for i in part.get("token_ids", ())]
        assert found == ids_of(expected)
    hidden = (await server.post("/v1/chat/completions", {**body, "include_reasoning": False})).json
    assert "token_ids" not in hidden["choices"][0]


async def test_truncations_reach_the_model(server: TextServer) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO})):
        for count, expected in ((3, 3), (-1, 0), (None, None)):
            await server.post(path, {**body, "truncate_prompt_tokens": count, "truncation_side": "right"})
            sampling = server.model().calls[-1].sampling
            assert (sampling.truncate, sampling.truncation_side) == (expected, "right")
        for invalid in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2}, {"truncation_side": "top"}):
            response = await server.post(path, {**body, **invalid})
            assert (response.status, response.json["error"]["param"]) == (400, next(iter(invalid)))


# --- token offsets --------------------------------------------------------------------------------------------


class HoldsBack(dragoman.Model):
    """Generate "st return", whose first token is held back as a possible stop string."""

    placement = "inline"

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        prompt, count = str(call.prompts[0]), call.sampling.truncate or 2
        kept = ("This", " is")[:count] if call.sampling.truncation_side == "right" else (" the", " end")[-count:]
        prompt_tokens = tuple(Token(i, text, -1.0) for i, text in enumerate(kept))
        first, second = Token(1, "st", -0.5), Token(2, " return", -0.25)
        chunks = (
            Generation((Text(0, 0, "", (first,), 1),), (PromptInfo(prompt, len(prompt_tokens), 0, prompt_tokens),)),
            Generation((Text(0, 0, "st return", (second,), 2, "length", whole="st return"),)),
        )
        for chunk in chunks if call.stream else (merge_chunks(chunks),):
            yield chunk


@pytest.mark.parametrize(
    ("more", "text", "offsets"),
    [
        ({}, "st return", [0, 2]),
        ({"echo": True}, "This is the endst return", [7, 11, 15, 17]),
        ({"echo": True, "truncate_prompt_tokens": 1}, "This is the endst return", [11, 15, 17]),
        (
            {"echo": True, "truncate_prompt_tokens": 2, "truncation_side": "right"},
            "This is the endst return",
            [0, 4, 15, 17],
        ),
        (
            {"prompt": "This is This is", "echo": True, "truncate_prompt_tokens": 2, "truncation_side": "right"},
            "This is This isst return",
            [0, 4, 15, 17],
        ),
    ],
)
async def test_text_offsets(more: Any, text: str, offsets: list[int]) -> None:
    async with serve(HoldsBack) as server:
        body = {"prompt": "This is the end", "logprobs": 2, **more}
        (choice,) = (await server.post("/v1/completions", body)).json["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)
        chunks = events((await server.post("/v1/completions", {**body, "stream": True})).body)[:-1]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(each["text"] for each in choices) == text
        assert [at for each in choices for at in each["logprobs"]["text_offset"]] == offsets


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=3), st.integers(0, 6)), max_size=8))
def test_offsets_do_not_depend_on_held_back_text(steps: list[tuple[str, int]]) -> None:
    offsets, whole, sent, result = Offsets(5), "".join(text for text, _ in steps), 0, []
    generated = 0
    for i, (text, held_back) in enumerate(steps):
        generated += len(text)
        last = i + 1 == len(steps)
        upto = generated if last else max(sent, generated - held_back)
        result += offsets.of(whole[sent:upto], [Token(i, text)], last=last)
        sent = upto
    assert result == [5 + sum(len(text) for text, _ in steps[:i]) for i in range(len(steps))]


def test_offsets_of_tokens_that_do_not_join_to_the_text() -> None:
    partial = Token(1, "\N{REPLACEMENT CHARACTER}")
    offsets = Offsets()
    chunks = [("", [partial]), ("水", [partial]), ("", [Token(2, " x")]), (" x b", [Token(3, " b")])]
    assert [offsets.of(text, tokens, last=False) for text, tokens in chunks] == [[0], [0], [1], [3]]
    assert offsets.of("", [Token(4, "</s>", special=True)], last=True) == [5]
    offsets = Offsets()
    mismatched = [offsets.of("z", [Token(i, "x")], last=False)[0] for i in range(500)]
    assert mismatched[-64:] == list(range(436, 500))


def test_ranks_in_prompt_logprobs() -> None:
    top = Token(7, "x", -0.5), Token(5, "a", -1.0)
    known, beyond = Token(5, "a", -1.0, top=top), Token(6, "b", -9.0, top=top)
    assert [
        [(id_, each["rank"]) for id_, each in (entry or {}).items()]
        for entry in format_prompt_logprobs([known, beyond])
    ] == [
        [("7", 1), ("5", 2)],
        [("7", 1), ("5", 2), ("6", None)],
    ]


def test_logprobs_of_a_partial_character_have_no_bytes() -> None:
    assert format_logprob(Token(1, "é", -1.0))["bytes"] == [195, 169]
    assert format_logprob(Token(1, " \N{REPLACEMENT CHARACTER}", -1.0))["bytes"] is None
    assert format_logprob(Token(1, "\N{REPLACEMENT CHARACTER}", -1.0, data=b"\xf0"))["bytes"] == [240]
    assert format_logprob(Token(1, "", -1.0))["bytes"] == []


async def test_continuous_usage_stats(server: TextServer) -> None:
    body = {
        "model": "ReverseModel",
        "prompt": "a b",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    result = events((await server.post("/v1/completions", body)).body)
    assert [t["usage"]["completion_tokens"] for t in result[:-1]] == [1, 2, 3, 3]
    # Without `include_usage` it has no effect, as in vLLM.
    alone = {**body, "stream_options": {"continuous_usage_stats": True}}
    for path, prompt in (("/v1/completions", {}), ("/v1/chat/completions", {"messages": HELLO})):
        result = events((await server.post(path, {**alone, **prompt})).body)
        assert not any(chunk.get("usage") for chunk in result[:-1])


class OneCompletion(dragoman.Model):
    """Generate one completion per prompt, regardless of `n`, without a finish reason."""

    placement = "inline"

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        for i, prompt in enumerate(call.prompts):
            yield Generation((Text(i, 0, "so", (Token(5, "so", -0.5),), 1),), (PromptInfo(str(prompt), 2),))
            if prompt == "!fault":
                raise errors.ModelFailed("generated !fault")


async def test_a_model_without_embeddings() -> None:
    async with serve(OneCompletion) as server:
        response = await server.post("/v1/embeddings", {"model": "OneCompletion", "input": "a"})
    assert (response.status, response.json["error"]["message"]) == (
        400,
        "model 'OneCompletion' does not support embeddings",
    )


async def test_a_model_without_embeddings_beside_one_that_has_them() -> None:
    async with serve(OneCompletion, ReverseModel) as server:
        response = await server.post("/v1/embeddings", {"model": "OneCompletion", "input": "a"})
        able = await server.post("/v1/embeddings", {"model": "ReverseModel", "input": "a"})
    message = "model 'OneCompletion' does not support embeddings; there are ReverseModel"
    assert (response.status, response.json["error"]["message"]) == (400, message)
    assert able.status == 200


async def test_streams_end_with_usage_for_any_model_output() -> None:
    usage = {"stream": True, "stream_options": {"include_usage": True}, "n": 3}
    async with serve(OneCompletion) as server:
        for path, body, counts in (
            ("/v1/chat/completions", {"messages": HELLO}, (2, 1)),
            ("/v1/completions", {"prompt": ["a", "b"]}, (4, 2)),
            ("/invocations", {"messages": HELLO}, (2, 1)),
        ):
            *before, last, end = events((await server.post(path, {**body, **usage})).body)
            assert (last["model"], last["choices"], end) == ("OneCompletion", [], "[DONE]")
            assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == counts
            assert {chunk["usage"] for chunk in before} == {None}
        *_, last, end = events((await server.post("/v1/completions", {"prompt": "!fault", **usage})).body)
        assert (set(last), end) == ({"error"}, "[DONE]")


async def test_sampling_is_the_default_and_temperature_0_is_greedy(server: TextServer) -> None:
    await chat(server, temperature=0, seed=-5)
    assert not server.model().calls[-1].sampling.do_sample
    await chat(server)
    assert server.model().calls[-1].sampling.do_sample
    await chat(server, use_beam_search=True, n=3, temperature=0)
    assert server.model().calls[-1].sampling.num_beams == 3
    for more, beams in (({}, 2), ({"n": 3}, 3), ({"n": 2, "best_of": 4}, 4)):
        body = {"model": "ReverseModel", "prompt": "a", "use_beam_search": True, **more}
        assert (await server.post("/v1/completions", body)).status == 200
        assert server.model().calls[-1].sampling.num_beams == beams


@pytest.mark.parametrize("name", ["", "tgi", "dummy", None, "http://127.0.0.1:8080", "https://a.org/v1/"])
async def test_placeholder_names_select_the_default_model(server: TextServer, name: str | None) -> None:
    response = await server.post("/v1/chat/completions", {"model": name, "messages": HELLO})
    assert response.json["model"] == "ReverseModel"
    assert (await server.post("/v1/completions", {"model": name, "prompt": "a"})).status == 200
    assert (await server.post("/v1/embeddings", {"model": name, "input": "a"})).status == 200


async def test_model_names_of_the_hugging_face_hub(server: TextServer) -> None:
    for name in ("someone/ReverseModel", "someone/ReverseModel:pirate"):
        assert (await server.post("/v1/completions", {"model": name, "prompt": "a"})).json["model"] == "ReverseModel"
    assert server.model().calls[-1].sampling.adapter == "pirate"
    assert (await server.post("/v1/completions", {"model": "ReverseModel/other", "prompt": "a"})).status == 404


async def test_adapters_are_listed_as_models(server: TextServer) -> None:
    cards = (await server.request("GET", "/v1/models")).json["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("ReverseModel", None),
        ("pirate", "ReverseModel"),
        ("ReverseModel:pirate", "ReverseModel"),
    ]
    assert (await server.request("GET", "/v1/models/pirate")).json == cards[1]
    assert (await server.request("GET", "/v1/models/ReverseModel:pirate")).json == cards[2]
    for path, body in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "a"})):
        response = await server.post(f"/v1/{path}", {"model": "ReverseModel:pirate", **body})
        assert response.json["model"] == "ReverseModel"
        assert server.model().calls[-1].sampling.adapter == "pirate"


async def test_model_names_in_paths_take_precedence(server: TextServer) -> None:
    response = await server.post("/models/ReverseModel/v1/chat/completions", {"model": "whatever", "messages": HELLO})
    assert response.json["model"] == "ReverseModel"


async def test_messages_are_normalized_for_templates(server: TextServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    await chat(server, messages=messages, chat_template_kwargs={"enable_thinking": False})
    prompt = server.model().calls[-1].prompts[0]
    assert prompt.messages[0] == {"role": "system", "content": "be\nkind"}
    assert prompt.messages[0]["content"].parts == ("be", "kind")
    assert prompt.messages[1]["content"] is None
    assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
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
        ({"structured_outputs": {"grammar": "start: /::=/"}}, Grammar("lark", "start: /::=/")),
        ({"guided_grammar": '# a comment\nroot ::= "a"'}, Grammar("gbnf", '# a comment\nroot ::= "a"')),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            Grammar("structural_tag", '{"type": "structural_tag", "format": {"type": "any_text"}}'),
        ),
        ({"structured_outputs": {"structural_tag": '{"format": {}}'}}, Grammar("structural_tag", '{"format": {}}')),
    ],
)
async def test_grammars(server: TextServer, form: Any, grammar: Grammar | None) -> None:
    await chat(server, **form)
    assert server.model().calls[-1].sampling.grammar == grammar


UNIQUE: Any = {"type": "array", "items": {"type": "integer", "not": {"const": 3}}, "uniqueItems": True}
REDUCED = {"type": "array", "items": {"type": "integer"}}
UNIQUE_ARGUMENTS: Any = {"type": "object", "properties": {"x": UNIQUE}}


def _format(**options: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": UNIQUE, **options}}}


@pytest.mark.parametrize(
    ("form", "ignored"),
    [
        (_format(), "response_format.uniqueItems, response_format.not"),
        (_format(strict=False) | {"unknown": 1}, "unknown, response_format.uniqueItems, response_format.not"),
        ({"guided_json": UNIQUE}, "guided_json.uniqueItems, guided_json.not"),
        ({"structured_outputs": {"json": UNIQUE}}, "structured_outputs.uniqueItems, structured_outputs.not"),
    ],
)
async def test_keywords_of_a_schema_that_are_not_enforced_are_named(
    server: TextServer, form: Any, ignored: str
) -> None:
    for stream in (False, True):
        body = {"model": "ReverseModel", "messages": HELLO, **form, "stream": stream}
        response = await server.post("/v1/chat/completions", body)
        assert (response.status, response.headers["x-ignored-parameters"]) == (200, ignored)
        assert server.model().calls[-1].sampling.grammar == Grammar("json_schema", json.dumps(REDUCED))


async def test_keywords_that_cannot_be_enforced_are_rejected_in_strict_mode(server: TextServer) -> None:
    body = {"model": "ReverseModel", "messages": HELLO}
    message = '`{}` must not contain keywords that cannot be enforced, with strict validation; got "uniqueItems", "not"'
    response = await server.post("/v1/chat/completions", {**body, **_format(strict=True)})
    assert (response.status, response.json["error"]["message"]) == (400, message.format("response_format"))
    tool = {"type": "function", "function": {"name": "f", "parameters": UNIQUE_ARGUMENTS}}
    response = await server.post("/v1/chat/completions", {**body, "tools": [tool], "tool_choice": "required"})
    assert response.headers["x-ignored-parameters"] == "tools.uniqueItems, tools.not"
    strict = {"type": "function", "function": {"name": "f", "parameters": UNIQUE_ARGUMENTS, "strict": True}}
    response = await server.post("/v1/chat/completions", {**body, "tools": [strict], "tool_choice": "required"})
    assert (response.status, response.json["error"]["message"]) == (400, message.format("tools"))
    async with serve(strict_parameters=True) as other:
        response = await other.post("/v1/chat/completions", {**body, **_format()})
        assert (response.status, response.json["error"]["message"]) == (400, message.format("response_format"))
        response = await other.post("/v1/chat/completions", {**body, **REQUIRED_CALL})
        assert response.status == 400
        assert "`response_format` must not be given with a `tool_choice`" in response.json["error"]["message"]


REQUIRED_CALL: Any = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
}


async def test_the_format_of_a_message_does_not_apply_to_a_required_call(server: TextServer) -> None:
    body = {"model": "ReverseModel", "messages": HELLO}
    response = await server.post("/v1/chat/completions", {**body, **REQUIRED_CALL})
    assert (response.status, response.headers["x-ignored-parameters"]) == (200, "response_format")
    grammar = server.model().calls[-1].sampling.grammar
    await server.post("/v1/chat/completions", {**body, **REQUIRED_CALL, "response_format": None})
    assert server.model().calls[-1].sampling.grammar == grammar


async def test_detokenize(server: TextServer) -> None:
    for path in ("/detokenize", "/models/ReverseModel/detokenize"):
        response = await server.post(path, {"model": "ReverseModel", "tokens": [5, 1, 2]})
        assert (response.status, response.json) == (200, {"prompt": "5 1 2"})
    invalid: list[Any] = [None, "a", [1, "a"], [-1], [True], {}]
    for tokens in invalid:
        response = await server.post("/detokenize", {"tokens": tokens})
        assert (response.status, response.json["error"]["param"]) == (400, "tokens")
    assert (await server.post("/detokenize", {"model": "missing", "tokens": [1]})).status == 404


WITH_UNKNOWN_FIELDS: list[tuple[str, Any, str]] = [
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


async def test_unknown_fields_are_reported_and_rejected_in_strict_mode(server: TextServer) -> None:
    for path, body, ignored in WITH_UNKNOWN_FIELDS:
        response = await server.post(path, body)
        assert (response.status, response.headers["x-ignored-parameters"]) == (200, ignored)
    for path, body in (("/tokenize", {"prompt": "a", "return_token_strs": True}), ("/detokenize", {"tokens": [5]})):
        assert "x-ignored-parameters" not in (await server.post(path, body)).headers
    async with serve(strict_parameters=True) as strict:
        for path, body, ignored in WITH_UNKNOWN_FIELDS:
            response = await strict.post(path, body)
            assert response.status == (422 if path == "/tokenize" else 400)  # a path of TGI
            error = response.json["error"]
            message = error if isinstance(error, str) else error["message"]
            assert f"unknown parameters: `{ignored.split(', ')[0].replace('%20', ' ')}`" in message
        assert (await strict.post("/detokenize", {"model": "ReverseModel", "tokens": [5]})).status == 200


async def test_add_special_tokens(server: TextServer) -> None:
    async def post_and_get_prompts(path: str, **body: Any) -> Any:
        assert (await server.post(path, {"model": "ReverseModel", **body})).status == 200
        return server.model().calls[-1].prompts

    for more, raw in (({}, False), ({"add_special_tokens": True}, False), ({"add_special_tokens": False}, True)):
        prompts = await post_and_get_prompts("/v1/completions", prompt=["a", "b"], **more)
        assert [isinstance(prompt, RawPrompt) for prompt in prompts] == [raw, raw]
        (prompts,) = await post_and_get_prompts("/v1/chat/completions", messages=HELLO, **more)
        assert prompts.special_tokens is more.get("add_special_tokens", False)
    assert await post_and_get_prompts("/v1/completions", prompt=[1, 2], add_special_tokens=False) == ((1, 2),)


# --- tools ---------------------------------------------------------------------------------------------------

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "time")
]
OSLO = '{"city":"Oslo"}'


async def test_tool_calls(server: TextServer) -> None:
    body = {"messages": messages_for('<tool_call>{"name":"time","arguments":{}}</tool_call>'), "tools": TOOLS}
    message = (await chat(server, **body))["choices"][0]
    assert message["finish_reason"] == "tool_calls"
    (call,) = message["message"]["tool_calls"]
    assert call["function"] == {"name": "time", "arguments": "{}"}
    assert re.fullmatch("[a-z0-9]{9}", call["id"])  # as Mistral's templates require
    streamed = await server.post("/v1/chat/completions", {"model": "ReverseModel", **body, "stream": True})
    *chunks_, end = events(streamed.body)
    assert end == "[DONE]"
    choices = [each["choices"][0] for each in chunks_]
    assert [each["finish_reason"] for each in choices] == [None] * (len(chunks_) - 1) + ["tool_calls"]
    (first, *rest) = [chunk for each in choices for chunk in each["delta"].get("tool_calls") or ()]
    assert re.fullmatch("[a-z0-9]{9}", first.pop("id"))
    assert first == {"index": 0, "type": "function", "function": {"name": "time", "arguments": ""}}
    assert rest == [{"index": 0, "function": {"arguments": "{}"}}]


async def test_parallel_tool_calls(server: TextServer) -> None:
    both = '<tool_call>{"name":"time","arguments":{}}</tool_call>' * 2
    for parallel, count in ((True, 2), (False, 1)):
        result = await chat(server, messages=messages_for(both), tools=TOOLS, parallel_tool_calls=parallel)
        assert len(result["choices"][0]["message"]["tool_calls"]) == count


async def test_tool_choice_required(server: TextServer) -> None:
    await chat(server, tools=TOOLS, tool_choice="required")
    grammar = server.model().calls[-1].sampling.grammar
    schema = json.loads(grammar.text)
    assert schema["items"]["anyOf"][0]["properties"] == {
        "name": {"const": "time"},
        "arguments": {"$ref": "#/$defs/time"},
    }
    assert schema["$defs"] == {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    choice = {"type": "function", "function": {"name": "weather"}}
    result = await chat(server, messages=messages_for(OSLO), tools=TOOLS, tool_choice=choice)
    assert json.loads(server.model().calls[-1].sampling.grammar.text) == TOOLS[0]["function"]["parameters"]
    assert result["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    await chat(server, tools=TOOLS, tool_choice="none")
    assert server.model().calls[-1].prompts[0].tools == ()


REQUIRED = f'[ {{ "name": "time", "arguments": {{}} }}, {{"name":"weather","arguments":{OSLO} }} ]'


async def test_a_format_with_tools_allows_calls(server: TextServer) -> None:
    for format_, choice, kind in (
        ({"type": "json_object"}, "auto", "structural_tag"),
        ({"type": "json_object"}, "none", "json_object"),
        ({"type": "text"}, "auto", None),
    ):
        await chat(server, tools=TOOLS, tool_choice=choice, response_format=format_)
        grammar = server.model().calls[-1].sampling.grammar
        assert (grammar and grammar.kind) == kind
    await chat(server, tools=TOOLS, guided_regex="a")
    assert server.model().calls[-1].sampling.grammar == Grammar("regex", "a")  # of the whole text


def feed_characters(text: str, choice: Any, *, cut: bool, **tools: Any) -> list[ChatChunk]:
    """Parse a text one character at a time."""
    parser = parser_for(replace(parse_tools(TOOLS, choice), **tools))
    return [parser.feed(c, last=i + 1 == len(text), cut=cut) for i, c in enumerate(text)]


def merge_deltas(chunks: list[ChatChunk]) -> ChatChunk:
    return ChatChunk([part for chunk in chunks for part in chunk.parts])


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
        # of a model that ignores the grammar
        ('[{"arguments":{},"name":"time"}]', False, "", [("time", "{}")]),
        ("I would rather not", False, "I would rather not", []),
        ("I would rather", True, "I would rather", []),
    ],
)
def test_parse_required_calls(text: str, cut: bool, content: str, calls: Any) -> None:
    whole = parser_for(parse_tools(TOOLS, "required")).feed(text, last=True, cut=cut)
    for chunk in (whole, merge_deltas(feed_characters(text, "required", cut=cut))):
        assert chunk.content == content
        assert [(call.name, call.arguments) for call in collect_calls(chunk)] == calls


def test_required_calls_are_streamed() -> None:
    chunks = feed_characters(REQUIRED, "required", cut=False)
    assert not chunks[-1].deltas
    assert sum(bool(chunk.deltas) for chunk in chunks) > len(OSLO)
    single = collect_calls(merge_deltas(feed_characters(REQUIRED, "required", cut=False, single=True)))
    assert [call.name for call in single] == ["time"]


@pytest.mark.parametrize("text", ["", " \n", f" {OSLO}\n ", OSLO[:5]])
def test_arguments_of_a_named_function(text: str) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    whole = parser_for(parse_tools(TOOLS, choice)).feed(text, last=True, cut=False)
    assert [(call.name, call.arguments) for call in collect_calls(whole)] == [("weather", text.strip())]
    if text:
        assert collect_calls(merge_deltas(feed_characters(text, "weather", cut=False)))[0].arguments == text.strip()


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
async def test_finish_reasons_of_required_calls(
    server: TextServer, choice: str, text: str, tokens: int, arguments: str | None, reason: str
) -> None:
    messages = [{"role": f"={text} !end", "content": ""}]
    body = {"messages": messages, "tools": TOOLS, "tool_choice": choice, "max_tokens": tokens, "stop": ["!end"]}
    choice_ = (await chat(server, **body))["choices"][0]
    assert choice_["finish_reason"] == reason
    expected = [] if arguments is None else [arguments]
    assert [call["function"]["arguments"] for call in choice_["message"].get("tool_calls") or ()] == expected
    assert choice_["message"]["content"] == (None if expected else "")
    streamed = events(
        (await server.post("/v1/chat/completions", {"model": "ReverseModel", **body, "stream": True})).body
    )
    deltas = [each["choices"][0]["delta"] for each in streamed[:-1]]
    chunks = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert "".join(chunk["function"]["arguments"] for chunk in chunks) == "".join(expected)
    assert sum("id" in chunk for chunk in chunks) == len(expected)
    assert streamed[-2]["choices"][0]["finish_reason"] == reason


async def test_a_function_without_parameters_takes_none(server: TextServer) -> None:
    await chat(server, tools=[{"type": "function", "function": {"name": "now"}}], tool_choice="now")
    schema = json.loads(server.model().calls[-1].sampling.grammar.text)
    assert (schema["properties"], schema["additionalProperties"]) == ({}, False)


async def test_references_in_the_schema_of_a_tool(server: TextServer) -> None:
    place = {"type": "object", "properties": {"in": {"$ref": "#/$defs/Place"}, "$ref": {"type": "string"}}}
    parameters = {"$defs": {"Place": place}, "anyOf": [{"$ref": "#/$defs/Place"}, {"$ref": "#"}]}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    await chat(server, tools=[tool], tool_choice="required")
    moved = json.loads(server.model().calls[-1].sampling.grammar.text)["$defs"]["go"]
    assert moved["anyOf"] == [{"$ref": "#/$defs/go/$defs/Place"}, {"$ref": "#/$defs/go"}]
    assert moved["$defs"]["Place"]["properties"] == {
        "in": {"$ref": "#/$defs/go/$defs/Place"},
        "$ref": {"type": "string"},
    }


async def test_allowed_tools(server: TextServer) -> None:
    def allowed_tools(mode: str, *names: str) -> Any:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    await chat(server, tools=TOOLS, tool_choice=allowed_tools("required", "time"))
    assert list(json.loads(server.model().calls[-1].sampling.grammar.text)["$defs"]) == ["time"]
    await chat(server, tools=TOOLS, tool_choice=allowed_tools("auto", "weather"))
    assert server.model().calls[-1].prompts[0].tools == tuple(TOOLS[:1])
    for choice in (allowed_tools("auto"), allowed_tools("auto", "time", "nothing"), allowed_tools("maybe", "time")):
        response = await server.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, "tool_choice": choice})
        assert (response.status, response.json["error"]["param"]) == (400, "tool_choice")


async def test_tool_prompt_is_ignored(server: TextServer) -> None:
    body = {"model": "ReverseModel", "messages": HELLO, "tools": TOOLS, "tool_prompt": "use these"}
    response = await server.post("/v1/chat/completions", body)
    assert (response.status, response.headers["x-ignored-parameters"]) == (200, "tool_prompt")


async def test_text_format_with_a_regex_under_two_names(server: TextServer) -> None:
    await chat(server, response_format={"type": "text"}, guided_regex="a", structured_outputs={"regex": "a"})
    assert server.model().calls[-1].sampling.grammar == Grammar("regex", "a")


async def test_required_calls_without_parallel_tool_calls(server: TextServer) -> None:
    await chat(server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert json.loads(server.model().calls[-1].sampling.grammar.text)["maxItems"] == 1


# --- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"messages": []}, "messages", "a list of 1 to"),
        ({"messages": [{"content": "a"}]}, "messages[0]", "an object with `role` and `content`"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0]", "a string, or a list of parts; got 5"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0]",
            "must be a data: URL",
        ),
        ({"temperature": 2.5}, "temperature", "a number >= 0.0 and <= 2.0; got 2.5"),
        ({"top_p": 0}, "top_p", "a number > 0.0 and <= 1.0; got 0"),
        ({"n": 0}, "n", "strictly positive"),
        ({"max_tokens": 10**18}, "max_tokens", "strictly positive and <= 2147483647; got 1000000000000000000"),
        ({"seed": 2**63}, "seed", f"and <= {2**63 - 1}; got"),
        ({"n": 99}, "n", "must be <= 16; got 99"),
        ({"max_tokens": 0}, "max_tokens", "strictly positive"),
        ({"stop": [""]}, "stop", "non-empty"),
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
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"stream": True, "stream_options": []}, "stream_options", "an object"),
        ({"model": 5}, "model", "the name of a model"),
        ({"continue_final_message": True}, "continue_final_message", "with `add_generation_prompt`: false"),
        ({"continue_final_message": 1}, "continue_final_message", "true or false"),
    ],
)
async def test_invalid_chats_are_rejected(server: TextServer, change: Any, param: str, message: str) -> None:
    response = await server.post("/v1/chat/completions", {"model": "ReverseModel", "messages": HELLO, **change})
    assert response.status == 400
    error = response.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]
    assert not server.model().calls


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"suffix": 5}, "suffix"),
        ({"suffix": "x", "prompt": [1, 2]}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"use_beam_search": True, "n": 2, "best_of": 99}, "best_of"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"echo": "yes"}, "echo"),
    ],
)
async def test_invalid_completions_are_rejected(server: TextServer, change: Any, param: str) -> None:
    response = await server.post("/v1/completions", {"model": "ReverseModel", "prompt": "a", **change})
    assert (response.status, response.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "change",
    [
        *({"input": value} for value in ("", [], [1, "a"], ["a"] * 2049, [[1]] * 2049)),
        {"dimensions": 4},
        {"encoding_format": "hex"},
    ],
)
async def test_invalid_embeddings_are_rejected(server: TextServer, change: Any) -> None:
    response = await server.post("/v1/embeddings", {"model": "ReverseModel", "input": "a", **change})
    assert response.status == 400


class ShortInputs(dragoman.Model):
    """Rejects each truncation as too short."""

    placement = "inline"

    def embed(self, call: Embed) -> Embedded:
        raise errors.InvalidInput(f"truncate: expected at least 3 tokens, got {call.truncate}{call.truncation_side}")


async def test_truncations_of_embeddings_reach_the_model() -> None:
    async with serve(ShortInputs) as server:
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"})):
            response = await server.post(path, {**body, "truncate_prompt_tokens": 2, "truncation_side": "left"})
            message = "`truncate_prompt_tokens`: expected at least 3 tokens, got 2left"
            assert (response.status, response.json["error"]["message"]) == (400, message)
            for invalid in ({"truncate_prompt_tokens": 0}, {"truncation_side": "Left"}):
                response = await server.post(path, {**body, **invalid})
                assert (response.status, response.json["error"]["param"]) == (400, next(iter(invalid)))


async def test_unknown_paths_and_models(server: TextServer) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405)):
        response = await server.request(method, path)
        assert response.status == status
        assert set(response.json["error"]) == {"message", "type", "param", "code"}
    response = await server.post("/v1/chat/completions", {"model": "missing", "messages": HELLO})
    assert (response.status, response.json["error"]["code"]) == (404, "model_not_found")


async def test_an_error_in_a_stream(server: TextServer) -> None:
    body = {"model": "ReverseModel", "prompt": "!fault a", "stream": True}
    first, error, done = events((await server.post("/v1/completions", body)).body)
    assert first["choices"][0]["text"] == "a"
    assert error["error"]["type"] == "server_error"
    assert done == "[DONE]"
    failed = await server.post("/v1/completions", {"model": "ReverseModel", "prompt": "a !fault", "stream": True})
    assert failed.status == 500


class Other(ReverseModel):
    pass


async def test_several_models() -> None:
    async with serve(ReverseModel, Other) as server:
        cards = (await server.request("GET", "/v1/models")).json["data"]
        assert [card["id"] for card in cards if card["parent"] is None] == ["Other", "ReverseModel"]
        response = await server.post("/v1/completions", {"prompt": "a"})
        assert response.status == 400
        assert "Other, ReverseModel" in response.json["error"]["message"]
        assert (await server.post("/v1/completions", {"model": "Other", "prompt": "a"})).json["model"] == "Other"
