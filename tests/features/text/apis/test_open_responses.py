"""The standard Open Responses, edition 2026-04-24: its 17 cases with their values."""

import base64
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import openai
import pytest
import pytest_asyncio

from text_server import ReverseModel, TextServer, serve, typed_events

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/responses"
WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name":"weather","arguments":{"city":"Oslo"}}</tool_call>'
# The required fields of a response, by the schema `ResponseResource`.
REQUIRED: Mapping[str, Any] = {
    "id": str,
    "object": str,
    "created_at": int,
    "completed_at": int | None,
    "status": str,
    "incomplete_details": dict | None,
    "model": str,
    "previous_response_id": str | None,
    "instructions": str | None,
    "output": list,
    "error": dict | None,
    "tools": list,
    "tool_choice": str | dict,
    "truncation": str,
    "parallel_tool_calls": bool,
    "text": dict,
    "top_p": int | float,
    "presence_penalty": int | float,
    "frequency_penalty": int | float,
    "top_logprobs": int,
    "temperature": int | float,
    "reasoning": dict | None,
    "usage": dict | None,
    "max_output_tokens": int | None,
    "max_tool_calls": int | None,
    "store": bool,
    "background": bool,
    "service_tier": str,
    "metadata": dict,
    "safety_identifier": str | None,
    "prompt_cache_key": str | None,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[TextServer]:
    async with serve(ReverseModel) as server:
        yield server


async def create(server: TextServer, value: Any, **fields: Any) -> Any:
    """Return a response that has every required field with a value of its type."""
    response = await server.post(PATH, {"model": "ReverseModel", "input": value, **fields})
    assert response.status == 200, response.body
    return check(response.json)


def check(response: Any) -> Any:
    wrong = [name for name, kind in REQUIRED.items() if name not in response or not isinstance(response[name], kind)]
    assert not wrong
    return response


def message(role: str, text: str, **fields: Any) -> Any:
    return {"type": "message", "role": role, "content": text, **fields}


async def test_every_required_field_has_a_value_of_its_type(server: TextServer) -> None:
    found = await create(server, [message("user", "one two")], text={"verbosity": None})
    assert (found["presence_penalty"], found["frequency_penalty"], found["service_tier"]) == (0.0, 0.0, "default")
    assert found["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert (found["object"], found["status"]) == ("response", "completed")
    assert found["usage"]["total_tokens"] == found["usage"]["input_tokens"] + found["usage"]["output_tokens"]
    (item,) = found["output"]
    assert (item["type"], item["role"], item["status"], item["phase"]) == (
        "message",
        "assistant",
        "completed",
        "final_answer",
    )
    assert item["content"][0]["text"] == "two one user:"
    found = await create(server, "one", presence_penalty=0.5, frequency_penalty=-0.5)
    assert (found["presence_penalty"], found["frequency_penalty"]) == (0.5, -0.5)


async def test_phases_of_earlier_messages_are_accepted_and_stored(server: TextServer) -> None:
    items = [
        message("assistant", "four", phase="commentary"),
        message("assistant", "is it", phase="final_answer"),
        message("user", "again"),
    ]
    found = await create(server, items)
    assert found["status"] == "completed"
    stored = (await server.request("GET", f"{PATH}/{found['id']}/input_items?order=asc")).json["data"]
    assert [item.get("phase") for item in stored] == ["commentary", "final_answer", None]
    response = await server.post(PATH, {"model": "ReverseModel", "input": [message("assistant", "a", phase="draft")]})
    assert response.status == 400
    assert '`input[0]`: `phase` must be "commentary"' in response.json["error"]["message"]


async def test_text_before_a_call_is_commentary(server: TextServer) -> None:
    """A client that sends the output back need not change it. The phase of a text that was cut is not known."""
    found = await create(server, f"{CALL} Well.", tools=[WEATHER])
    assert [item["type"] for item in found["output"]] == ["message", "function_call", "message"]
    assert [item.get("phase") for item in found["output"]] == ["commentary", None, "final_answer"]
    asked = [
        *found["output"],
        {"type": "function_call_output", "call_id": found["output"][1]["call_id"], "output": "a"},
    ]
    assert (await create(server, asked, tools=[WEATHER]))["status"] == "completed"
    cut = await create(server, "one two", max_output_tokens=1)
    assert (cut["status"], "phase" in cut["output"][0]) == ("incomplete", False)


async def test_a_stream_ends_with_a_complete_response_and_done(server: TextServer) -> None:
    body = {"model": "ReverseModel", "input": [message("user", "one two")], "stream": True}
    response = await server.post(PATH, body)
    assert response.body.endswith(b"\n\ndata: [DONE]\n\n")
    events = typed_events(response.body)
    for event in events:
        if "response" in event:
            check(event["response"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.completed", "completed")
    failed = await server.post(PATH, {**body, "input": "!fault a"})
    assert failed.body.endswith(b"\n\ndata: [DONE]\n\n")
    assert typed_events(failed.body)[-1]["type"] == "response.failed"


async def test_a_system_prompt_comes_first(server: TextServer) -> None:
    found = await create(server, [message("system", "Be a pirate."), message("user", "Hello.")])
    assert found["output"][0]["content"][0]["text"] == "Hello. user: pirate. a Be system:"


async def test_a_function_call_is_an_item_with_arguments(server: TextServer) -> None:
    found = await create(server, CALL, tools=[WEATHER])
    (call,) = [item for item in found["output"] if item["type"] == "function_call"]
    assert (call["name"], call["arguments"], call["status"]) == ("weather", '{"city":"Oslo"}', "completed")
    assert found["tools"] == [{**WEATHER, "description": None, "strict": None}]
    assert found["tool_choice"] == "auto"


async def test_an_image_is_a_part_of_the_message(server: TextServer) -> None:
    image = f"data:image/png;base64,{base64.b64encode(_PNG).decode()}"
    parts = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": image}]
    response = await server.post(PATH, {"model": "ReverseModel", "input": [message("user", parts)]})  # type: ignore[arg-type]
    assert response.status == 200, response.body
    prompt = server.model().calls[-1].prompts[0]
    assert len(prompt.images) == 1


async def test_several_turns_are_one_prompt(server: TextServer) -> None:
    turns = [message("user", "I am Alice."), message("assistant", "Hello Alice!"), message("user", "Who am I?")]
    await create(server, turns)
    messages = server.model().calls[-1].prompts[0].messages
    assert [(each["role"], each["content"]) for each in messages] == [
        ("user", "I am Alice."),
        ("assistant", "Hello Alice!"),
        ("user", "Who am I?"),
    ]


# --- compaction ------------------------------------------------------------------------------------------------------

TURNS = [message("user", "Launch on Tuesday."), message("assistant", "Understood.")]


async def compact(server: TextServer, status: int = 200, **fields: Any) -> Any:
    response = await server.post(f"{PATH}/compact", {"model": "ReverseModel", **fields})
    assert response.status == status, response.body
    return response.json


async def test_a_conversation_is_compacted_to_its_summary(server: TextServer) -> None:
    found = await compact(
        server, input=[message("system", "Be kind."), *TURNS], prompt_cache_key="k", instructions="Go."
    )
    assert (found["object"], found["id"][:5]) == ("response.compaction", "resp_")
    assert found["usage"]["total_tokens"] == found["usage"]["input_tokens"] + found["usage"]["output_tokens"] > 0
    system, summary = found["output"]
    assert (system["role"], system["content"]) == ("system", [{"type": "input_text", "text": "Be kind."}])
    assert (summary["type"], summary["id"][:4]) == ("compaction", "cmp_")
    asked = server.model().calls[-1].prompts[0].messages
    assert [each["role"] for each in asked] == ["system", "user", "assistant", "user"]
    assert asked[0]["content"].startswith("Go.")
    assert asked[-1]["content"].startswith("Summarize our conversation")
    assert server.model().calls[-1].sampling.max_new_tokens is None  # a limit might not fit into the context
    await create(server, [*found["output"], message("user", "When?")])
    messages = server.model().calls[-1].prompts[0].messages
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"].split(" ")[:2] == ["tasks.", "open"]  # what the model had written


async def test_what_a_user_said_last_is_summarized_with_the_rest(server: TextServer) -> None:
    """The request for the summary joins the last message of the user, as templates want that roles alternate."""
    await compact(server, input=[*TURNS, message("user", "Compress this.")])
    roles = [each["role"] for each in server.model().calls[-1].prompts[0].messages]
    assert roles == ["user", "assistant", "user"]
    parts = [{"type": "input_text", "text": "Compress this."}]
    await compact(server, input=[message("user", parts)])  # type: ignore[arg-type]
    (only,) = server.model().calls[-1].prompts[0].messages
    assert only["content"].startswith("Compress this.\n")


async def test_a_stored_response_is_compacted_by_its_id(server: TextServer) -> None:
    first = await create(server, "one")
    found = await compact(server, previous_response_id=first["id"])
    assert [item["type"] for item in found["output"]] == ["compaction"]
    missing = await compact(server, 404, previous_response_id="resp_none")
    assert (missing["error"]["code"], missing["error"]["param"]) == (
        "previous_response_not_found",
        "previous_response_id",
    )


async def test_a_compaction_with_the_sdk(server: TextServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        found = await client.responses.compact(model="ReverseModel", input="one two")
        assert found.object == "response.compaction"
        items: Any = [each.model_dump(exclude_none=True) for each in found.output]
        again = await client.responses.create(model="ReverseModel", input=[*items, {"role": "user", "content": "a"}])
    assert again.status == "completed"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model": None, "input": "a"}, "`model` must be a non-empty string"),
        ({}, "`input` must be"),
        ({"input": "a", "conversation": "conv_1"}, "`conversation`"),
    ],
)
async def test_compactions_that_are_rejected(server: TextServer, fields: Any, text: str) -> None:
    assert text in (await compact(server, 400, **fields))["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [None, 5, "gAAAA", "dragoman-1.%%%", "dragoman-1." + base64.b64encode(b"{}").decode(), "dragoman-1.\u00e9"],
)
async def test_a_compaction_of_another_server_is_rejected(server: TextServer, content: Any) -> None:
    item = {"type": "compaction", "encrypted_content": content}
    response = await server.post(PATH, {"model": "ReverseModel", "input": [item, message("user", "a")]})
    assert response.status == 400
    assert "`input[0]`: `encrypted_content` must be of a compaction of this server" in json.dumps(response.json)


_PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mP4z8AAAAMBAQAY3Y2wAAAAAElFTkSuQmCC")
