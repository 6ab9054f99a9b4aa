"""Anthropic's Messages API: blocks, events, tools, token counting and errors, also with its SDK."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from text_server import CONTEXT, TextServer, serve, typed_events

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("ignore::ResourceWarning")]
PATH = "/v1/messages"
HELLO: list[Any] = [{"role": "user", "content": "hello you"}]
WEATHER: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name":"weather","arguments":{"city":"Oslo"}}</tool_call>'

RESULT = {"type": "tool_result", "tool_use_id": "x"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[TextServer]:
    async with serve() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server: TextServer) -> AsyncIterator[Any]:
    """Import the SDK when a test runs: collection in another process of pytest-xdist does not need it."""
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="-", max_retries=0) as client:
        yield client


def request(text: str, **fields: Any) -> dict[str, Any]:
    """Return a request that the model answers with the text, and then the role."""
    messages = [{"role": "user", "content": " ".join(text.split(" ")[::-1])}]
    return {"model": "ReverseModel", "max_tokens": 50, "messages": messages, **fields}


async def test_a_message_with_every_field(server: TextServer) -> None:
    response = await server.post(f"{PATH}?beta=true", request("you hello"), {"anthropic-version": "2023-06-01"})
    assert response.status == 200
    assert response.headers["request-id"] == response.headers["x-request-id"]
    message = response.json
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "ReverseModel",
        "content": [{"type": "text", "text": "you hello user:"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 4,
        },
    }


async def test_the_events_of_a_stream_in_their_order(server: TextServer) -> None:
    found = typed_events((await server.post(PATH, request(f"A {CALL}", stream=True, tools=[WEATHER]))).body)
    kinds = [(each["type"], each.get("index")) for each in found]
    assert kinds[0] == ("message_start", None)
    assert kinds[1] == ("ping", None)
    assert kinds[-2:] == [("message_delta", None), ("message_stop", None)]
    assert found[0]["message"]["content"] == []
    assert found[0]["message"]["usage"]["output_tokens"] == 0
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    starts = [each["content_block"] for each in found if each["type"] == "content_block_start"]
    assert [start["type"] for start in starts][:2] == ["text", "tool_use"]
    assert starts[1]["input"] == {}
    stops = [each["index"] for each in found if each["type"] == "content_block_stop"]
    assert stops == list(range(len(starts)))


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("one two", {}),
        (f"Well. {CALL} So.", {"tools": [WEATHER]}),
        (f"{CALL} {CALL}", {"tools": [WEATHER]}),
        ("<think> a b </think> c", {}),
        ("one two", {"max_tokens": 1}),
        ("one two", {"stop_sequences": ["two"]}),
    ],
)
async def test_stream_and_whole_are_equal(client: Any, text: str, fields: Any) -> None:
    body = request(text, **fields)
    whole = await client.messages.create(**body)
    async with client.messages.stream(**body) as stream:
        streamed = await stream.get_final_message()
    assert comparable(streamed) == comparable(whole)
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def comparable(message: Any) -> Any:
    values = [block.model_dump() for block in message.content]
    return [{k: v for k, v in value.items() if k not in ("id", "signature")} for value in values]


async def test_one_tool_call_at_a_time(server: TextServer) -> None:
    body = request(f"{CALL} {CALL}", tools=[WEATHER])
    for choice in ({"type": "auto"}, {"type": "any"}):
        for is_single, count in ((False, 2), (True, 1)):
            fields = {"tool_choice": {**choice, "disable_parallel_tool_use": is_single}}
            content = (await server.post(PATH, {**body, **fields})).json["content"]
            assert [block["name"] for block in content if block["type"] == "tool_use"] == ["weather"] * count


async def test_leading_system_messages_are_one(server: TextServer) -> None:
    system = [{"type": "text", "text": text} for text in ("a", "b")]
    messages = [{"role": "system", "content": "c"}, *HELLO, {"role": "system", "content": "d"}, *HELLO]
    for fields, expected in (
        ({"system": system, "messages": messages}, ["a\nb\n\nc", "d"]),
        ({"system": "a", "messages": messages[1:]}, ["a", "d"]),
        ({"messages": messages}, ["c", "d"]),
    ):
        response = await server.post(PATH, {"model": "ReverseModel", "max_tokens": 9, **fields})
        assert response.status == 200, response.json
        (prompt,) = server.model().calls[-1].prompts
        assert [each["content"] for each in prompt.messages if each["role"] == "system"] == expected


async def test_stop_reasons_and_thinking(client: Any) -> None:
    message = await client.messages.create(**request("<think> a </think> b"))
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].type == "thinking"
    assert message.content[0].thinking == "a"
    assert message.content[0].signature
    assert (await client.messages.create(**request("a b", max_tokens=1))).stop_reason == "max_tokens"
    # more than the context is the rest of it
    assert (await client.messages.create(**request("a b", max_tokens=10 * CONTEXT))).stop_reason == "end_turn"


async def test_tools_and_their_results(client: Any, server: TextServer) -> None:
    message = await client.messages.create(**request(CALL, tools=[WEATHER], tool_choice={"type": "auto"}))
    use = message.content[1]  # after the name of the tool, which the model repeats
    assert use.type == "tool_use"
    assert (use.name, use.input, message.stop_reason) == ("weather", {"city": "Oslo"}, "tool_use")
    assert use.id.startswith("toolu_")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]}
    history: list[Any] = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [use.model_dump()]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        {"role": "user", "content": "Well?"},
    ]
    await client.messages.create(model="ReverseModel", max_tokens=5, messages=history, tools=[WEATHER], system="Hi.")
    sent = server.model().calls[-1].prompts[0]
    assert [(m["role"], m["content"]) for m in sent.messages] == [
        ("system", "Hi."),
        ("user", "weather?"),
        ("assistant", None),
        ("tool", "rain"),
        ("user", "And?\nWell?"),
    ]
    assert sent.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert sent.tools[0]["function"]["parameters"] == WEATHER["input_schema"]


async def test_thinking_may_be_omitted(server: TextServer) -> None:
    body = request("<think>a</think>b", thinking={"type": "adaptive", "display": "omitted"})
    message = (await server.post(PATH, body)).json
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][0]["thinking"] == ""
    assert message["content"][0]["signature"]
    events = typed_events((await server.post(PATH, {**body, "stream": True})).body)
    kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert kinds[0] == "signature_delta"
    assert "thinking_delta" not in kinds


async def test_system_prefill_thinking_and_format_reach_the_model(server: TextServer) -> None:
    schema = {"type": "object", "properties": {}}
    body = request(
        "a",
        system=[{"type": "text", "text": "x-anthropic-billing-header: 7"}, {"type": "text", "text": "Be brief."}],
        thinking={"type": "disabled"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    )
    body["messages"] = [*body["messages"], {"role": "assistant", "content": "It"}]
    assert (await server.post(PATH, body)).status == 200
    call = server.model().calls[-1]
    chat = call.prompts[0]
    assert chat.messages[0]["content"] == "Be brief."
    assert not chat.add_generation_prompt
    assert chat.options == {"reasoning_effort": "low", "enable_thinking": False, "continue_final_message": True}
    assert json.loads(call.sampling.grammar.text) == schema
    assert call.sampling.shorten


@pytest.mark.parametrize("fields", [{"top_p": 0}, {"temperature": 0}])
async def test_a_top_p_or_temperature_of_0_is_greedy(server: TextServer, fields: dict[str, Any]) -> None:
    assert (await server.post(PATH, request("a", **fields))).status == 200
    assert not server.model().calls[-1].sampling.do_sample


async def test_count_tokens(client: Any) -> None:
    count = await client.messages.count_tokens(model="ReverseModel", messages=HELLO, tools=[WEATHER], system="Hi.")
    used = await client.messages.create(
        model="ReverseModel", max_tokens=3, messages=HELLO, tools=[WEATHER], system="Hi."
    )
    assert count.input_tokens == used.usage.input_tokens == 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "`max_tokens` must be"),
        ({"max_tokens": 0}, "`max_tokens` must be"),
        ({"messages": []}, "`messages` must be a list"),
        ({"messages": [5]}, "`messages[0]` must be"),
        ({"messages": [{"role": "user", "content": 5}]}, "`messages[0]`: `content` must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "must have blocks of text or image"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "earlier tool_use",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": []}]}]}, "earlier tool_use"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}, "must have blocks"),
        ({"tools": {"a": 1}}, "`tools` must be a list"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "are not supported"),
        ({"tools": [{"name": "a"}]}, "`tools[0]` must be"),
        ({"tools": [WEATHER], "tool_choice": {"type": "other"}}, "`tool_choice` must be"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "no"}}, "must name one of"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "`thinking` must be"),
        ({"output_config": {"format": {"type": "xml"}}}, "`output_config.format` must be"),
        ({"output_config": {"effort": 5}}, "`output_config.effort` must be a string"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, '`tools[0]` must be {"name": ..., "input_schema"'),
        ({"system": [5]}, "`system` must have blocks"),
        ({"temperature": 2}, "`temperature` must be"),
        ({"stop_sequences": [5]}, "`stop_sequences` must be"),
    ],
)
async def test_invalid_requests(server: TextServer, fields: Any, message: str) -> None:
    response = await server.post(PATH, {"model": "ReverseModel", "max_tokens": 5, "messages": HELLO, **fields})
    assert response.status == 400, response.body
    assert list(response.json) == ["type", "error", "request_id"]
    assert response.json["error"]["type"] == "invalid_request_error"
    assert message in response.json["error"]["message"]
    assert response.json["request_id"] == response.headers["request-id"]


async def test_errors_of_the_sdk(client: Any, server: TextServer) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**{**request("a"), "model": "missing"})
    with pytest.raises(anthropic.InternalServerError, match="generated !fault"):
        await client.messages.create(**request("!fault"))
    with pytest.raises(anthropic.APIStatusError, match="generated !fault"):
        async with client.messages.stream(**request("a !fault")) as stream:
            await stream.get_final_message()
    response = await server.request("GET", PATH)
    assert response.status == 405
    assert response.json["error"]["type"] == "invalid_request_error"


async def test_keys_in_both_headers() -> None:
    async with serve(api_key="a-key-of-some-length") as server:
        for headers in ({"x-api-key": "a-key-of-some-length"}, {"authorization": "Bearer a-key-of-some-length"}):
            assert (await server.post(PATH, request("a"), headers)).status == 200
        response = await server.post(PATH, request("a"), {"x-api-key": "other"})
        assert response.status == 401
        assert response.json["error"]["type"] == "authentication_error"


async def test_models_in_the_shape_of_this_api(client: Any, server: TextServer) -> None:
    found = [model async for model in client.models.list()]
    assert [(model.id, model.type, model.display_name) for model in found] == [
        (name, "model", name) for name in ("ReverseModel", "pirate", "ReverseModel:pirate")
    ]
    assert found[0].created_at.year >= 2026
    assert (found[0].lifecycle, found[0].max_input_tokens, found[0].max_tokens) == ("active", CONTEXT, CONTEXT)
    assert await client.models.retrieve("ReverseModel") == found[0]
    by_two = [model.id async for model in client.models.list(limit=2)]
    assert by_two == [model.id for model in found]
    page = await client.models.list(before_id="ReverseModel:pirate", limit=1)
    assert ([model.id for model in page.data], page.has_more) == (["pirate"], True)
    plain = (await server.request("GET", "/v1/models")).json  # OpenAI's
    assert (plain["object"], plain["data"][0]["object"]) == ("list", "model")


async def test_errors_of_models_in_the_shape_of_this_api(client: Any, server: TextServer) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        await client.models.retrieve("none")
    header = {"anthropic-version": "2023-06-01"}
    assert (await server.request("GET", "/v1/models?limit=1000", None, header)).status == 200
    for query in ("limit=0", "limit=1001", "limit=x", "after_id=none", "after_id=pirate&before_id=pirate"):
        response = await server.request("GET", f"/v1/models?{query}", None, header)
        assert (response.status, response.json["error"]["type"]) == (400, "invalid_request_error")
    response = await server.request("DELETE", "/v1/models/ReverseModel", None, header)
    assert (response.status, response.json["error"]["type"]) == (405, "invalid_request_error")
