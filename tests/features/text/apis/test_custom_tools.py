"""Custom tools of OpenAI's APIs, whose input is a text: whole, in streams, and their calls as history."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from dragoman.core.text import Text
from dragoman_text.apis.common.completion_parser import CompletionParser
from dragoman_text.apis.common.tools import collect_calls, parse_tools
from newest_clients.served_models import Scripted
from text_server import ReverseModel, TextServer, events, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")
CODE = 'print("a\\n")'
RUN: Any = {"type": "custom", "custom": {"name": "run", "description": "Run Python."}}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL: list[Any] = [{"role": "user", "content": 'call run {"input": "print(\\"a\\\\n\\")"}'}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[TextServer]:
    async with serve(Scripted, ReverseModel) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server: TextServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


async def test_chat(client: openai.AsyncOpenAI) -> None:
    response = await client.chat.completions.create(model="Scripted", messages=CALL, tools=[RUN, WEATHER])
    choice = response.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("run", CODE)
    history = [*CALL, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "a"}]
    after = await client.chat.completions.create(model="Scripted", messages=history, tools=[RUN])
    assert after.choices[0].message.content == "the result is a"


async def test_chat_stream(server: TextServer) -> None:
    body = {"model": "Scripted", "messages": CALL, "tools": [RUN], "stream": True}
    *chunks, done = events((await server.post("/v1/chat/completions", body)).body)
    deltas = [each["choices"][0]["delta"].get("tool_calls", [None])[0] for each in chunks]
    first, *rest = [each for each in deltas if each]
    assert first.pop("id")
    assert first == {"index": 0, "type": "custom", "custom": {"name": "run", "input": ""}}
    assert "".join(each["custom"]["input"] for each in rest) == CODE
    assert (chunks[-1]["choices"][0]["finish_reason"], done) == ("tool_calls", "[DONE]")


async def test_responses(client: openai.AsyncOpenAI) -> None:
    tool: Any = {"type": "custom", "name": "run"}
    first = await client.responses.create(model="Scripted", input=CALL, tools=[tool])
    (call,) = first.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.input) == ("run", CODE)
    assert [each.type for each in first.tools] == ["custom"]
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "a"}
    after = await client.responses.create(model="Scripted", input=[result], tools=[tool], previous_response_id=first.id)
    assert after.output_text == "the result is a"
    history: Any = [*CALL, call.model_dump(exclude_none=True), result]
    after = await client.responses.create(model="Scripted", input=history, tools=[tool])
    assert after.output_text == "the result is a"


async def test_responses_stream(client: openai.AsyncOpenAI) -> None:
    tool: Any = {"type": "custom", "name": "run"}
    async with client.responses.stream(model="Scripted", input=CALL, tools=[tool]) as stream:
        seen = [event async for event in stream]
        final = await stream.get_final_response()
    kinds = [event.type for event in seen]
    assert kinds.index("response.custom_tool_call_input.delta") < kinds.index("response.custom_tool_call_input.done")
    done = next(event for event in seen if event.type == "response.custom_tool_call_input.done")
    assert done.input == CODE
    (call,) = final.output
    assert call.type == "custom_tool_call"
    assert (call.id, call.input) == (done.item_id, CODE)


async def test_the_model_is_shown_a_function(server: TextServer) -> None:
    choice = {"type": "custom", "custom": {"name": "run"}}
    body = {"model": "ReverseModel", "messages": CALL, "tools": [RUN, WEATHER], "tool_choice": choice}
    assert (await server.post("/v1/chat/completions", body)).status == 200
    call = server.model("ReverseModel").calls[-1]
    offered = call.prompts[0].tools[0]["function"]
    assert (offered["name"], offered["description"]) == ("run", "Run Python.")
    assert offered["parameters"]["required"] == ["input"]
    assert '"input"' in call.sampling.grammar.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_grammars_are_rejected(server: TextServer, path: str) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    custom = {"name": "run", "format": grammar}
    tool = {"type": "custom", "custom": custom} if "chat" in path else {"type": "custom", **custom}
    body = {"model": "Scripted", "messages": CALL} if "chat" in path else {"model": "Scripted", "input": CALL}
    response = await server.post(path, {**body, "tools": [tool]})
    assert response.status == 400
    assert "`format` of a custom tool must be" in response.json["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a\\u00e9"}', "aé"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"other": "a"}', '{"other": "a"}'),
        ('"a"', "a"),
        ('{"input": "a\\n b', "a\n b"),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "', ""),
        ('{"inp', '{"inp'),
        ("[" * 2000, "[" * 2000),
    ],
)
async def test_arguments_of_any_form(arguments: str, expected: str) -> None:
    tools = parse_tools([RUN], {"type": "custom", "custom": {"name": "run"}})
    for size in (1, 3, 100):
        parser = CompletionParser(tools, splits_reasoning=False)
        parts: list[Any] = []
        for at in range(0, len(arguments), size):
            is_last = at + size >= len(arguments)
            text = Text(text=arguments[at : at + size], finish="length" if is_last else "")
            parts += parser.feed(text).parts
        (call,) = collect_calls(type(parser.feed(Text()))(parts))
        assert (call.name, call.arguments, call.is_custom) == ("run", expected, True)
