"""Conversations of OpenAI's API: items that the server keeps, of the key that created them."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
import websockets

from access.access_models import KeyFile
from dragoman.core.record_calls import AppendRecord, ReadRecord, SaveRecord
from dragoman.core.state_store import StateStore
from dragoman.engine.record_store import RecordStore
from features.text.apis.test_open_responses import CALL, WEATHER, message
from text_server import ReverseModel, TextServer, serve, typed_events

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/conversations"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[TextServer]:
    async with serve(ReverseModel) as server:
        yield server


async def create(server: TextServer, headers: Any = None, **fields: Any) -> str:
    response = await server.post(PATH, fields, headers)
    assert response.status == 200, response.body
    id_: str = response.json["id"]
    return id_


async def respond(server: TextServer, value: Any, **fields: Any) -> Any:
    response = await server.post("/v1/responses", {"model": "ReverseModel", "input": value, **fields})
    assert response.status == 200, response.body
    return typed_events(response.body)[-1]["response"] if fields.get("stream") else response.json


async def texts(server: TextServer, id_: str) -> list[tuple[str, str]]:
    page = (await server.request("GET", f"{PATH}/{id_}/items?order=asc&limit=100")).json
    return [(item["role"], item["content"][0]["text"]) for item in page["data"] if item["type"] == "message"]


async def test_a_conversation_with_the_sdk(server: TextServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        items: Any = [message("user", "one", id="msg_mine")]
        conversation = await client.conversations.create(items=items, metadata={"topic": "a"})
        assert (conversation.object, conversation.metadata) == ("conversation", {"topic": "a"})
        response = await client.responses.create(model="ReverseModel", input="two", conversation=conversation.id)
        assert response.conversation is not None
        assert response.conversation.id == conversation.id
        assert response.output_text == "two user: one user:"
        listed = await client.conversations.items.list(conversation.id, order="asc")
        assert [item.type for item in listed.data] == ["message"] * 3
        assert listed.data[0].id == "msg_mine"
        added = await client.conversations.items.create(conversation.id, items=[message("user", "three")])
        assert [item.type for item in added.data] == ["message"]
        one = await client.conversations.items.retrieve("msg_mine", conversation_id=conversation.id)
        assert one.type == "message"
        await client.conversations.items.delete("msg_mine", conversation_id=conversation.id)
        with pytest.raises(openai.NotFoundError):
            await client.conversations.items.retrieve("msg_mine", conversation_id=conversation.id)
        updated = await client.conversations.update(conversation.id, metadata={"topic": "b"})
        assert (await client.conversations.retrieve(conversation.id)) == updated
        assert updated.metadata == {"topic": "b"}
        assert (await client.conversations.delete(conversation.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(conversation.id)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"store": False}, {"conversation": None}])
async def test_a_response_appends_its_items(server: TextServer, fields: Any) -> None:
    id_ = await create(server)
    reference = {"id": id_} if "conversation" in fields else id_
    first = await respond(server, "one", **{**fields, "conversation": reference})
    assert first["conversation"] == {"id": id_}
    second = await respond(server, "two", conversation=id_)
    assert await texts(server, id_) == [
        ("user", "one"),
        ("assistant", "one user:"),
        ("user", "two"),
        ("assistant", second["output"][0]["content"][0]["text"]),
    ]
    count = await server.post(
        "/v1/responses/input_tokens", {"model": "ReverseModel", "input": "a", "conversation": id_}
    )
    assert count.json["input_tokens"] > 8


async def test_calls_and_results_are_items(server: TextServer) -> None:
    id_ = await create(server)
    first = await respond(server, CALL, conversation=id_, tools=[WEATHER])
    call = next(item for item in first["output"] if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    assert (await server.post(f"{PATH}/{id_}/items", {"items": [result]})).status == 200
    second = await respond(server, "so?", conversation=id_, tools=[WEATHER])
    assert "rain tool:" in second["output"][0]["content"][0]["text"]


async def test_a_response_that_fails_appends_nothing(server: TextServer) -> None:
    id_ = await create(server)
    body = {"model": "ReverseModel", "input": "!fault a", "conversation": id_}
    assert (await server.post("/v1/responses", body)).status == 500
    assert typed_events((await server.post("/v1/responses", {**body, "stream": True})).body)[-1]["type"].endswith(
        "failed"
    )
    assert await texts(server, id_) == []


async def test_responses_at_once_lose_no_items(server: TextServer) -> None:
    id_ = await create(server)
    await asyncio.gather(*(respond(server, f"n{i}", conversation=id_) for i in range(10)))
    found = await texts(server, id_)
    assert len(found) == 20
    assert {text for role, text in found if role == "user"} == {f"n{i}" for i in range(10)}


async def test_a_conversation_over_a_websocket(server: TextServer) -> None:
    id_ = await create(server)
    async with websockets.connect(f"ws://127.0.0.1:{server.port}/v1/responses") as socket:
        for text in ("one", "two"):
            event = {"type": "response.create", "model": "ReverseModel", "input": text, "conversation": id_}
            await socket.send(json.dumps(event))
            while json.loads(await socket.recv())["type"] != "response.completed":
                pass
    assert [text for role, text in await texts(server, id_) if role == "user"] == ["one", "two"]


async def test_conversations_of_another_key_are_not_found(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.toml")
    one, two = ({"authorization": f"Bearer {keys.add(name)}"} for name in ("one", "two"))
    async with serve(api_keys=str(keys.path)) as server:
        id_ = await create(server, one, items=[message("user", "a", id="msg_a")])
        item = {"items": [message("user", "b")]}
        requests: list[tuple[str, str, Any]] = [
            ("GET", f"{PATH}/{id_}", None),
            ("POST", f"{PATH}/{id_}", {"metadata": {}}),
            ("GET", f"{PATH}/{id_}/items", None),
            ("POST", f"{PATH}/{id_}/items", item),
            ("GET", f"{PATH}/{id_}/items/msg_a", None),
            ("DELETE", f"{PATH}/{id_}/items/msg_a", None),
            ("POST", "/v1/responses", {"model": "ReverseModel", "input": "a", "conversation": id_}),
            ("DELETE", f"{PATH}/{id_}", None),
        ]
        for method, path, body in requests:
            assert (await server.request(method, path, body, two)).status == 404, (method, path)
        for method, path, body in requests:
            assert (await server.request(method, path, body, one)).status == 200, (method, path)


async def test_a_record_of_another_kind_is_not_found(server: TextServer) -> None:
    id_ = await create(server)
    stored = await respond(server, "a")
    for path in (f"{PATH}/{stored['id']}", f"{PATH}/{stored['id']}/items", f"/v1/responses/{id_}"):
        assert (await server.request("GET", path)).status == 404
    assert (await server.request("DELETE", f"/v1/responses/{id_}")).status == 404
    assert (await server.request("DELETE", f"{PATH}/{stored['id']}")).status == 404
    assert (await server.request("GET", f"{PATH}/{id_}")).status == 200
    body = {"model": "ReverseModel", "input": "a", "previous_response_id": id_}
    assert (await server.post("/v1/responses", body)).status == 404


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("", {"items": 5}, "`items` must be a list"),
        ("", {"items": [5]}, "`items[0]` must be an object"),
        ("", {"items": [{"type": "x"}]}, "`items[0]`: expected a message"),
        ("", {"metadata": 5}, "`metadata` must be an object"),
        ("/items", {}, "`items` must be a list"),
        ("/items", {"items": [message("user", "a", id="msg_a")]}, "`items[0]`: `id` must be one that no other item"),
        ("/items", {"items": [message("user", "a")] * 2 + [message("user", 5)]}, "`items[2]`"),  # type: ignore[arg-type]
        ("response", {"conversation": 5}, "`conversation` must be the id"),
        ("response", {"conversation": {}}, "`conversation` must be the id"),
        ("response", {"conversation": "conv_a", "previous_response_id": "resp_a"}, "`conversation` must not be given"),
    ],
)
async def test_invalid_requests(server: TextServer, path: str, body: Any, text: str) -> None:
    id_ = await create(server, items=[message("user", "a", id="msg_a")])
    if path == "response":
        response = await server.post("/v1/responses", {"model": "ReverseModel", "input": "a", **body})
    else:
        response = await server.post(f"{PATH}/{id_}{path}" if path else PATH, body)
    assert response.status == 400, response.body
    assert text in response.json["error"]["message"]
    assert await texts(server, id_) == [("user", "a")]


async def test_pages_of_items(server: TextServer) -> None:
    id_ = await create(server, items=[message("user", str(i)) for i in range(3)])
    page = (await server.request("GET", f"{PATH}/{id_}/items?limit=2")).json
    assert ([item["content"][0]["text"] for item in page["data"]], page["has_more"]) == (["2", "1"], True)
    rest = (await server.request("GET", f"{PATH}/{id_}/items?after={page['last_id']}")).json
    assert ([item["content"][0]["text"] for item in rest["data"]], rest["has_more"]) == (["0"], False)
    assert (await server.request("GET", f"{PATH}/{id_}/items?limit=0")).status == 400


async def test_without_a_store() -> None:
    async with serve(max_stored_responses=0) as server:
        for path, body in ((PATH, {}), ("/v1/responses", {"input": "a", "conversation": "conv_a"})):
            response = await server.post(path, {**body, **({} if path == PATH else {"model": "ReverseModel"})})
            assert (response.status, "max_stored_responses" in response.body.decode()) == (400, True)


async def test_appended_values_outlive_a_restart(tmp_path: Path) -> None:
    store = StateStore(str(tmp_path))
    records = RecordStore(5, table=store.table("records"))
    assert records.answer(AppendRecord("me", "a", b"x", SaveRecord("me", "b", b"other"))) is False
    assert records.answer(ReadRecord("me", "b")) == b"other"
    records.answer(SaveRecord("me", "a", b"1", {"p": b"part"}))
    assert records.answer(AppendRecord("me", "a", b"2")) is True
    assert records.answer(AppendRecord("you", "a", b"3")) is False
    store.close()
    store = StateStore(str(tmp_path))
    records = RecordStore(5, table=store.table("records"))
    assert records.answer(ReadRecord("me", "a")) == b"12"
    assert records.answer(ReadRecord("me", "p", is_part=True)) == b"part"
    store.close()
