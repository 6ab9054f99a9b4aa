"""Threads of Anthropic's Messages API: conversations that the server keeps, and its package that relies on them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from access.access_models import KeyFile, bearer
from newest_clients.served_models import Scripted
from rest.rest_server import RawResponse
from text_server import ReverseModel, TextServer, serve, typed_events

CREATE = {"type": "create"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def message(thread: Any, *messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "ReverseModel", "max_tokens": 20, "thread": thread, "messages": [*messages], **more}


def following(response: RawResponse) -> dict[str, Any]:
    assert response.status == 200, response
    return {"type": "continue", "previous_message_id": response.json["id"]}


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve(ReverseModel, Scripted) as server:
        yield server


async def prompt_of(server: TextServer) -> str:
    """Return the messages of the last call of the model, as `role: content`."""
    chat = server.model().calls[-1].prompts[0]
    return " ".join(f"{each['role']}: {each['content']}" for each in chat.messages)


async def test_a_thread_is_continued(server: TextServer) -> None:
    first = await server.post("/v1/messages", message(CREATE, user("a b"), system="be brief"))
    second = await server.post("/v1/messages", message(following(first), user("c")))
    third = await server.post("/v1/messages", message(following(second), user("d")))
    assert third.status == 200
    replies = [each.json["content"][0]["text"] for each in (first, second)]
    expected = f"system: be brief user: a b assistant: {replies[0]} user: c assistant: {replies[1]} user: d"
    assert await prompt_of(server) == expected
    other = await server.post("/v1/messages", message(following(first), user("e")))  # from an earlier response
    assert other.status == 200
    assert await prompt_of(server) == f"system: be brief user: a b assistant: {replies[0]} user: e"


async def test_a_streamed_response_is_continued(server: TextServer) -> None:
    events = typed_events((await server.post("/v1/messages", message(CREATE, user("a b"), stream=True))).body)
    id_ = next(event["message"]["id"] for event in events if event["type"] == "message_start")
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    thread = {"type": "continue", "previous_message_id": id_}
    assert (await server.post("/v1/messages", message(thread, user("c")))).status == 200
    assert await prompt_of(server) == f"user: a b assistant: {text} user: c"


async def test_a_response_that_continues_a_message_is_one_message_of_the_thread(server: TextServer) -> None:
    start = {"role": "assistant", "content": "so "}
    first = await server.post("/v1/messages", message(CREATE, user("a b"), start))
    assert (await server.post("/v1/messages", message(following(first), user("c")))).status == 200
    text = first.json["content"][0]["text"]
    assert await prompt_of(server) == f"user: a b assistant: so {text} user: c"
    blocks = [{"type": "text", "text": "x"}, {"type": "text", "text": "so "}]
    first = await server.post("/v1/messages", message(CREATE, user("a b"), {"role": "assistant", "content": blocks}))
    assert (await server.post("/v1/messages", message(following(first), user("c")))).status == 200
    text = first.json["content"][0]["text"]
    assert await prompt_of(server) == f"user: a b assistant: x\nso {text} user: c"


async def test_errors_name_the_message_of_the_request(server: TextServer) -> None:
    first = await server.post("/v1/messages", message(CREATE, user("a b")))
    response = await server.post("/v1/messages", message(following(first), user("c"), {"role": "robot", "content": ""}))
    assert response.status == 400
    assert "`messages[1]`" in response.json["error"]["message"]
    assert (await server.post("/v1/messages", message(following(first)))).status == 400
    for name, value in (("system", "s"), ("tools", [{"name": "f", "input_schema": {}}])):
        response = await server.post("/v1/messages", message(following(first), user("c"), **{name: value}))
        assert response.status == 400
        assert response.json["error"]["message"].startswith(f"`{name}` ")
    expected = """`thread` must be {"type": "create"} or {"type": "continue", "previous_message_id": ...}; got """
    for thread in ("x", {"type": "other"}, {"type": "continue"}, {"type": "continue", "previous_message_id": ""}):
        response = await server.post("/v1/messages", message(thread, user("c")))
        assert response.status == 400
        assert response.json["error"]["message"].startswith(expected)


async def test_an_unknown_thread_is_told_as_the_clients_expect(server: TextServer) -> None:
    thread = {"type": "continue", "previous_message_id": "msg_unknown"}
    response = await server.post("/v1/messages", message(thread, user("c")))
    assert (response.status, response.json["error"]["type"]) == (404, "not_found_error")
    error = response.json["error"]
    assert error["details"] == {"error_code": "thread_not_found"}
    expected = 'thread "msg_unknown" not found: it does not exist, or is no longer stored; send all messages'
    assert error["message"] == expected


async def test_without_a_store_threads_are_unsupported() -> None:
    async with serve(max_stored_responses=0) as server:
        response = await server.post("/v1/messages", message(CREATE, user("c")))
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert (response.status, response.json["error"]["type"]) == (400, "invalid_request_error")
        assert response.json["error"]["details"] == details
        assert (await server.post("/v1/messages", message(False, user("c")))).status == 200


async def test_a_thread_belongs_to_the_key_that_created_it(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.toml")
    mine, other = bearer(keys.add("mine")), bearer(keys.add("other"))
    async with serve(ReverseModel, api_keys=str(keys.path)) as server:
        first = await server.request("POST", "/v1/messages", message(CREATE, user("a")), mine)
        again = message(following(first), user("b"))
        assert (await server.request("POST", "/v1/messages", again, other)).status == 404
        assert (await server.request("POST", "/v1/messages", again, mine)).status == 200
        # A thread is not a stored response.
        assert (await server.request("GET", f"/v1/responses/{first.json['id']}", None, mine)).status == 404


# --- the package -----------------------------------------------------------------------------------------------


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sun in {city}"


CALL: list[Any] = [user('call weather {"city": "Oslo"}')]


@pytest.mark.parametrize("stored", [0, 10])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_tool_loop_of_the_package(stored: int, stream: bool) -> None:
    import anthropic

    tool = anthropic.beta_tool(weather)
    async with serve(Scripted, max_stored_responses=stored) as server:

        def run() -> list[Any]:
            client = anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0)
            runner: Any = client.beta.messages.tool_runner(
                model="Scripted", max_tokens=100, tools=[tool], messages=CALL, stream=stream
            )
            found = [each.get_final_message() if stream else each for each in runner]
            client.close()
            return found

        replies = await asyncio.to_thread(run)
    assert [reply.stop_reason for reply in replies] == ["tool_use", "end_turn"]
    assert replies[-1].content[0].text == "the result is sun in Oslo"


async def test_threads_of_the_package(server: TextServer) -> None:
    import anthropic

    def run() -> tuple[Any, ...]:
        client = anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0)
        thread = client.beta.messages.thread(model="ReverseModel", max_tokens=20)
        thread.send({"role": "user", "content": "my name is Zebulon"})
        answer = thread.send({"role": "user", "content": "what is it"})
        client.close()
        return thread.previous_message_id, answer

    id_, answer = await asyncio.to_thread(run)
    assert answer.id == id_
    assert "Zebulon" in await prompt_of(server)
