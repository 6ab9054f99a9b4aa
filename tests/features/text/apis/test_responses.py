"""OpenAI's Responses API: items, events, tools, formats, the store and errors."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response as ResponseType
from pydantic import TypeAdapter

import dragoman
from access.access_models import KeyFile
from dragoman import Generate
from dragoman.core.errors import InvalidInput
from dragoman.core.record_calls import DeleteRecord, ReadRecord, SaveRecord
from dragoman.core.text import Generation
from dragoman.engine import record_store
from dragoman.engine.record_store import RecordStore
from text_server import ReverseModel, TextServer, serve, typed_events

pytestmark = pytest.mark.asyncio(loop_scope="module")
WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name":"weather","arguments":{"city":"Oslo"}}</tool_call>'
PATH = "/v1/responses"


class ShortModel(dragoman.Model):
    """Rejects every prompt, after a moment."""

    placement = "inline"

    async def generate(self, call: Generate) -> Generation:
        await asyncio.sleep(0)
        raise InvalidInput("max_new_tokens: expected at most 5, got 9")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[TextServer]:
    async with serve(ReverseModel, ShortModel) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server: TextServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


async def create(server: TextServer, value: Any, *, status: int = 200, **fields: Any) -> Any:
    response = await server.post(PATH, {"model": "ReverseModel", "input": value, **fields})
    assert response.status == status, response.body
    return response.json


async def test_a_response_has_every_field_of_the_sdks_type(server: TextServer) -> None:
    result = await create(server, "hello you", metadata={"a": "b"}, max_output_tokens=2)
    response = TypeAdapter(ResponseType).validate_python(result)
    assert response.output_text == "you hello"
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.total_tokens == 5
    (message,) = result["output"]
    assert message["id"].startswith("msg_")
    assert result["id"].startswith("resp_")
    assert message["content"] == [{"type": "output_text", "text": "you hello", "annotations": [], "logprobs": []}]


async def test_the_events_of_a_stream_in_their_order(server: TextServer) -> None:
    response = await server.post(PATH, {"model": "ReverseModel", "input": "hello you", "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = typed_events(response.body)
    deltas = ["response.output_text.delta"] * 3
    assert [each["type"].removeprefix("response.") for each in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *(delta.removeprefix("response.") for delta in deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == []
    assert found[2]["item"]["content"] == []
    assert found[2]["item"]["status"] == "in_progress"
    completed = found[-1]["response"]
    assert completed["output"] == [found[-2]["item"]]
    assert completed["output"][0]["content"][0] == found[-3]["part"]
    assert "".join(e["delta"] for e in found if e["type"] == deltas[0]) == found[-4]["text"] == "you hello user:"
    assert completed["usage"]["output_tokens"] == 4


def comparable(response: Any) -> Any:
    """Return the output of a response without its random ids."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("one two", {}),
        (f"Well. {CALL} So.", {"tools": [WEATHER]}),
        (f"{CALL} {CALL}", {"tools": [WEATHER]}),
        ("<think> a b </think> c", {}),
        (f"<think> a {CALL}", {"tools": [WEATHER]}),
        ("one two", {"max_output_tokens": 1}),
        ("one two", {"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
        ("", {}),
    ],
)
async def test_stream_and_whole_are_equal(server: TextServer, text: str, fields: Any) -> None:
    body = {"model": "ReverseModel", "input": [{"role": "user", "content": reverse(text)}], **fields}
    whole = (await server.post(PATH, body)).json
    found = typed_events((await server.post(PATH, {**body, "stream": True})).body)
    assert comparable(found[-1]["response"]) == comparable(whole)
    assert found[-1]["type"] == f"response.{whole['status']}"
    assert found[-1]["response"]["usage"] == whole["usage"]
    done = [each["item"] for each in found if each["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"]
    for event in found:
        if event["type"].endswith(".delta"):
            assert event["item_id"] == done[event["output_index"]]["id"]


def reverse(text: str) -> str:
    """Return the words in reverse order: the model answers with the text, then the role."""
    return " ".join(text.split(" ")[::-1])


async def test_tools_with_the_sdk(client: openai.AsyncOpenAI) -> None:
    tools: Any = [{**WEATHER, "strict": True}]
    result = await client.responses.create(
        model="ReverseModel", input=reverse(f"Well. {CALL}"), tools=tools, instructions="Be brief."
    )
    text, call, *_ = result.output
    assert text.type == "message"
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", '{"city":"Oslo"}')
    result = await client.responses.create(
        model="ReverseModel",
        tools=tools,
        input=[
            {"role": "user", "content": "weather?"},
            {"type": "function_call", "call_id": call.call_id, "name": "weather", "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ],
    )
    assert "rain tool:" in result.output_text


async def test_the_sdks_stream_helper(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="ReverseModel", input=f"=<think> a </think> {CALL}", tools=[WEATHER]) as s:
        kinds = [event.type async for event in s]
        final = await s.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.usage is not None


async def test_instructor_sends_a_format_with_the_tool_that_it_requires(server: TextServer) -> None:
    schema = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
    result = await create(
        server,
        reverse(CALL),
        text={"format": {"type": "json_schema", "name": "weather", "strict": True, "schema": schema}},
        tools=[{"type": "function", "name": "weather", "parameters": schema, "description": "Extracted"}],
        tool_choice={"type": "function", "name": "weather"},
    )
    grammar = server.model().calls[-1].sampling.grammar
    assert json.loads(grammar.text) == schema
    assert result["status"] == "completed"


async def test_a_null_type_is_that_of_a_message(server: TextServer) -> None:
    await create(server, [{"type": None, "role": "user", "content": "a"}])
    assert server.model().calls[-1].prompts[0].messages == ({"role": "user", "content": "a"},)


async def test_text_format_and_reasoning_reach_the_model(server: TextServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format_ = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    result = await create(server, "a", text={"format": format_}, reasoning={"effort": "low"}, instructions="Go.")
    call = server.model().calls[-1]
    assert json.loads(call.sampling.grammar.text) == schema
    assert call.prompts[0].options == {"reasoning_effort": "low", "enable_thinking": True}
    assert call.prompts[0].messages[0] == {"role": "system", "content": "Go."}
    assert result["text"]["format"]["name"] == "x"
    assert result["reasoning"]["effort"] == "low"


async def test_a_conversation_by_the_id_of_the_previous_response(
    client: openai.AsyncOpenAI, server: TextServer
) -> None:
    first = await client.responses.create(model="ReverseModel", input="one", instructions="Not inherited.")
    second = await client.responses.create(model="ReverseModel", input="two", previous_response_id=first.id)
    messages = server.model().calls[-1].prompts[0].messages
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == first.output_text
    assert (await client.responses.retrieve(second.id)).output_text == second.output_text
    items = await client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in items.data] == ["message"] * 3
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="ReverseModel", input="two", previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(second.id)


async def test_references_to_items_of_stored_responses(client: openai.AsyncOpenAI, server: TextServer) -> None:
    asked: Any = [{"role": "user", "content": "one"}, {"role": "user", "content": "two", "id": "mine"}]
    first = await client.responses.create(model="ReverseModel", input=asked)
    answer = first.output[0].id
    assert answer is not None
    new: Any = {"role": "user", "content": "three"}
    items: Any = [{"type": "item_reference", "id": "mine"}, {"id": answer}, new]
    second = await client.responses.create(model="ReverseModel", input=items)
    messages = server.model().calls[-1].prompts[0].messages
    assert [m["content"] for m in messages] == ["two", first.output_text, "three"]
    stored = (await client.responses.input_items.list(second.id, order="asc")).data
    assert [item.id for item in stored[:2]] == ["mine", answer]
    await client.responses.delete(second.id)  # the items are of the first response
    await client.responses.create(model="ReverseModel", input=items)
    following: Any = [new, {"type": "item_reference", "id": second.output[0].id}]
    with pytest.raises(openai.NotFoundError, match=r"`input\[1\]`: item .* not found"):
        await client.responses.create(model="ReverseModel", input=following)
    with pytest.raises(openai.BadRequestError, match=r"in the conversation once"):
        await client.responses.create(model="ReverseModel", input=items, previous_response_id=first.id)
    with pytest.raises(openai.NotFoundError):  # the id of a response is none of an item, nor the reverse
        await client.responses.create(model="ReverseModel", input=[{"type": "item_reference", "id": first.id}])
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="ReverseModel", input="a", previous_response_id=answer)
    other = {"authorization": "Bearer another"}
    assert (await server.post(PATH, {"model": "ReverseModel", "input": items}, other)).status == 404


async def test_a_streamed_response_is_stored_before_its_last_event(server: TextServer) -> None:
    found = typed_events((await server.post(PATH, {"model": "ReverseModel", "input": "a", "stream": True})).body)
    stored = (await server.request("GET", f"{PATH}/{found[-1]['response']['id']}")).json
    assert stored == found[-1]["response"]
    unstored = await create(server, "a", store=False)
    assert unstored["store"] is False
    assert (await server.request("GET", f"{PATH}/{unstored['id']}")).status == 404


async def test_responses_of_another_key_are_not_found(server: TextServer) -> None:
    response = await server.post(PATH, {"model": "ReverseModel", "input": "a"}, {"authorization": "Bearer one"})
    path = f"{PATH}/{response.json['id']}"
    for method, end in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        other = await server.request(method, path + end, None, {"authorization": "Bearer two"})
        assert other.status == 404, (method, end)
    own = await server.request("POST", f"{path}/cancel", None, {"authorization": "Bearer one"})
    assert (own.status, "only responses created with `background`" in own.body.decode()) == (400, True)
    assert (await server.request("GET", path, None, {"authorization": "Bearer one"})).status == 200


async def test_a_key_of_one_model_stores_its_responses(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.toml")
    headers = {"authorization": f"Bearer {keys.add('bound', models=['ReverseModel'])}"}
    async with serve(api_keys=str(keys.path)) as server:
        first = await server.post(PATH, {"model": "ReverseModel", "input": "a"}, headers)
        assert first.status == 200, first.body
        following = {"model": "ReverseModel", "input": "b", "previous_response_id": first.json["id"], "stream": True}
        second = typed_events((await server.post(PATH, following, headers)).body)[-1]
        assert second["type"] == "response.completed"
        path = f"{PATH}/{second['response']['id']}"
        for method in ("GET", "DELETE"):
            assert (await server.request(method, path, None, headers)).status == 200


async def test_responses_are_stored_for_the_key_that_was_accepted(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.toml")
    one, two = ({"x-api-key": keys.add(name), "authorization": "Bearer"} for name in ("one", "two"))
    async with serve(api_keys=str(keys.path)) as server:
        response = await server.post(PATH, {"model": "ReverseModel", "input": "a"}, one)
        statuses = [
            (await server.request("GET", f"{PATH}/{response.json['id']}", None, headers)).status
            for headers in (one, two)
        ]
        assert statuses == [200, 404]


async def test_without_a_store() -> None:
    async with serve(max_stored_responses=0) as server:
        assert (await create(server, "a", store=True))["store"] is False
        result = await create(server, "a", previous_response_id="resp_1", status=400)
        assert "max_stored_responses" in result["error"]["message"]
        result = await create(server, [{"type": "item_reference", "id": "msg_1"}], status=400)
        assert "max_stored_responses" in result["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": None}, "`input` must be a non-empty string"),
        ({"input": 5}, "`input` must be a non-empty string"),
        ({"input": []}, "`input` must be a non-empty string"),
        ({"input": [5]}, "`input[0]` must be an object"),
        ({"input": [{"type": "item_reference", "id": 5}]}, "`input[0]`: expected a message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "must be a data: URL"),
        ({"input": [{"role": "user", "content": 5}]}, "`input[0]`: `content` must be"),
        ({"input": [{"type": "reasoning", "summary": 5}]}, "`input[0]`: `summary` must be"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "a"}]}, "earlier call"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, '"web_search" are not supported'),
        ({"input": "a", "tools": [{"type": "function", "function": {"name": "a"}}]}, "`tools[0]` must be"),
        ({"input": "a", "tools": 5}, "`tools` must be a list"),
        (
            {"input": "a", "tools": [{"type": "function", "name": "a b"}]},
            '`tools[0]` must be {"type": "function", "name": ..., "parameters": {a JSON schema}}, with a name of 1 to',
        ),
        ({"input": "a", "tool_choice": "required"}, "`tool_choice` must not be given without `tools`"),
        ({"input": "a", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "b"}}, "must name one of"),
        ({"input": "a", "tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "`tool_choice` must be"),
        ({"input": "a", "background": True}, "`background` is not supported"),
        ({"input": "a", "prompt": {"id": "p"}}, "`prompt` is not supported"),
        ({"input": "a", "truncation": ["auto"]}, "`truncation` must be"),
        ({"input": "a", "include": 5}, "`include` must be a list of strings"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "`text.format` must be"),
        ({"input": "a", "text": 5}, "`text` must be an object"),
        ({"input": "a", "reasoning": {"effort": 5}}, "`reasoning.effort` must be"),
        ({"input": "a", "max_output_tokens": 100}, None),
        ({"input": "a", "temperature": 9}, "`temperature` must be"),
        ({"input": "a", "store": "yes"}, "`store` must be true or false"),
    ],
)
async def test_invalid_requests(server: TextServer, fields: Any, message: str | None) -> None:
    response = await server.post(PATH, {"model": "ReverseModel", **fields})
    if message is None:
        assert response.status == 200
        return
    assert response.status == 400, response.body
    assert message in response.json["error"]["message"]
    assert response.json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_engine_name_the_field(server: TextServer, stream: bool) -> None:
    body = {"model": "ShortModel", "input": "a", "max_output_tokens": 9, "stream": stream}
    response = await server.post(PATH, body)
    assert (response.status, response.json["error"]["param"]) == (400, "max_output_tokens")


async def test_an_error_in_a_stream_is_a_failed_response(server: TextServer, client: openai.AsyncOpenAI) -> None:
    body = {"model": "ReverseModel", "input": "!fault a", "stream": True}
    *_, text, part, item, last = typed_events((await server.post(PATH, body)).body)
    assert last["type"] == "response.failed"
    assert (text["type"], text["text"]) == ("response.output_text.done", "a")
    assert (part["type"], part["content_index"], part["output_index"]) == ("response.content_part.done", 0, 0)
    assert item["item"] == last["response"]["output"][0]
    assert (item["item"]["status"], item["item"]["content"][0]["text"]) == ("incomplete", "a")
    assert last["response"]["usage"]["output_tokens"] == 1
    assert last["response"]["error"] == {"code": "server_error", "message": "generated !fault"}
    assert (await server.request("GET", f"{PATH}/{last['response']['id']}")).status == 404
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="missing", input="a")


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up"])
async def test_pages_of_input_items(server: TextServer, query: str) -> None:
    id_ = (await create(server, [{"role": "user", "content": str(i)} for i in range(3)]))["id"]
    page = (await server.request("GET", f"{PATH}/{id_}/input_items?limit=2")).json
    assert [item["content"] for item in page["data"]] == ["2", "1"]
    assert page["has_more"]
    rest = (await server.request("GET", f"{PATH}/{id_}/input_items?after={page['last_id']}")).json
    assert [item["content"] for item in rest["data"]] == ["0"]
    assert not rest["has_more"]
    assert (await server.request("GET", f"{PATH}/{id_}/input_items?{query}")).status == 400


async def test_the_record_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    store = RecordStore(2, lambda: now)
    for id_ in "ab":
        store.answer(SaveRecord("me", id_, b"x"))
    assert store.answer(ReadRecord("me", "a")) == b"x"  # b is now the least recently used
    store.answer(SaveRecord("me", "c", b"y"))
    assert [store.answer(ReadRecord("me", id_)) for id_ in "abc"] == [b"x", None, b"y"]
    assert store.answer(ReadRecord("you", "a")) is None
    assert store.answer(DeleteRecord("you", "a")) is False
    now = record_store.MAX_AGE_S + 1
    assert store.answer(ReadRecord("me", "a")) is None
    assert (len(store), store.bytes) == (0, 0)
    monkeypatch.setattr(record_store, "MAX_BYTES", 2000)
    store.answer(SaveRecord("me", "d", b"x" * 1000))
    store.answer(SaveRecord("me", "e", b"x" * 1000))
    assert store.answer(ReadRecord("me", "d")) is None
    assert store.answer(DeleteRecord("me", "e")) is True
    store.answer(SaveRecord("me", "f", b"", {"part": b"x" * 3000}))
    assert (len(store), store.bytes) == (0, 0)
    store.answer(SaveRecord("me", "g", b"g", {"part": b"p"}))
    store.answer(SaveRecord("me", "h", b"h", {"part": b"q"}))
    store.answer(DeleteRecord("me", "g"))
    assert store.answer(ReadRecord("me", "part", is_part=True)) == b"q"
    store.answer(SaveRecord("me", "h", b"without the part"))
    assert store.answer(ReadRecord("me", "part", is_part=True)) is None
    store.answer(DeleteRecord("me", "h"))
    assert store.bytes == 0


async def test_input_tokens_are_those_of_the_response(client: openai.AsyncOpenAI, server: TextServer) -> None:
    tools = [WEATHER]
    first = await client.responses.create(model="ReverseModel", input="a b c", instructions="be brief", tools=tools)
    count = await client.responses.input_tokens.count(
        model="ReverseModel", input="a b c", instructions="be brief", tools=tools
    )
    assert first.usage is not None
    assert count.object == "response.input_tokens"
    assert count.input_tokens == first.usage.input_tokens
    after = await client.responses.create(model="ReverseModel", input="d", previous_response_id=first.id)
    count = await client.responses.input_tokens.count(
        model="ReverseModel", input="d", previous_response_id=first.id, personality="friendly"
    )
    assert after.usage is not None
    assert count.input_tokens == after.usage.input_tokens > first.usage.input_tokens - 5
    invalid = await server.post(f"{PATH}/input_tokens", {"model": "ReverseModel"})
    assert (invalid.status, invalid.json["error"]["param"]) == (400, "input")
    missing = await server.post(f"{PATH}/input_tokens", {"model": "none", "input": "a"})
    assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")


async def test_a_response_is_created_at_no_id(server: TextServer) -> None:
    response = await server.post(f"{PATH}/resp_1", {})
    assert (response.status, response.headers["allow"]) == (405, "DELETE, GET, HEAD, OPTIONS")
