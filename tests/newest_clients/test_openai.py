"""openai: chats, completions, Responses, embeddings, models and errors."""

import asyncio
import json
import math
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from newest_clients.conftest import KEY

openai: Any = pytest.importorskip("openai")

pytestmark = pytest.mark.filterwarnings("ignore")
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FLAT: Any = {"type": "function", "strict": False, **WEATHER["function"]}


class Color(BaseModel):
    name: Literal["red", "blue"]
    amount: Literal[1, 2]


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture
def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)


# --- chats -------------------------------------------------------------------------------------------------------


def test_chat(client: Any) -> None:
    response = client.chat.completions.create(model="Scripted", messages=user("say good day to you"))
    choice = response.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "good day to you",
        "stop",
    )
    assert (response.object, response.model) == ("chat.completion", "Scripted")
    assert (response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.total_tokens) == (5, 4, 9)


def test_chat_is_cut(client: Any) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        response = client.chat.completions.create(model="Scripted", messages=user("say a b c"), **{name: 2})
        assert (response.choices[0].message.content, response.choices[0].finish_reason) == ("a b", "length")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_roles(client: Any, role: str) -> None:
    messages = [{"role": role, "content": "be brief"}, *user("say a"), {"role": "assistant", "content": "a"}]
    response = client.chat.completions.create(model="Scripted", messages=[*messages, *user("say b")])
    assert response.choices[0].message.content == "b"


def test_content_parts(client: Any) -> None:
    parts = [{"type": "text", "text": "say"}, {"type": "text", "text": "hello"}]
    response = client.chat.completions.create(model="Scripted", messages=[{"role": "user", "content": parts}])
    assert response.choices[0].message.content in ("hello", "sayhello", "say\nhello")


def test_chat_stream(client: Any) -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="Scripted", messages=user("say good day"), stream=True, stream_options=options
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "good day"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert (last.choices, last.usage.completion_tokens) == ([], 2)


def test_chat_stream_helper(client: Any) -> None:
    with client.chat.completions.stream(model="Scripted", messages=user("say good day")) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == "good day"


def test_choices_seed_and_logprobs(client: Any) -> None:
    def create(seed: int) -> Any:
        return client.chat.completions.create(
            model="tiny-llama", messages=user("the cat"), n=2, seed=seed, logprobs=True, top_logprobs=2, max_tokens=5
        )

    first, again = create(1), create(1)
    assert [choice.index for choice in first.choices] == [0, 1]
    assert [c.message.content for c in first.choices] == [c.message.content for c in again.choices]
    for token in first.choices[0].logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


def test_stop(client: Any) -> None:
    more = {"model": "tiny-llama", "messages": user("the"), "max_tokens": 12, "temperature": 0}
    more["extra_body"] = {"skip_special_tokens": False, "ignore_eos": True}  # the random model may give nothing else
    text = client.chat.completions.create(**more).choices[0].message.content
    stop = text[len(text) // 2 :][:1]
    cut = client.chat.completions.create(**more, stop=[stop])
    assert cut.choices[0].message.content == text.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"


def test_json_object(client: Any) -> None:
    response = client.chat.completions.create(
        model="tiny-llama", messages=user("a"), response_format={"type": "json_object"}, max_tokens=60, temperature=0
    )
    content, reason = response.choices[0].message.content, response.choices[0].finish_reason
    assert content.lstrip().startswith("{")
    assert reason == "length" or isinstance(json.loads(content), dict)


def test_parse(client: Any) -> None:
    response = client.chat.completions.parse(model="tiny-llama", messages=user("a color"), response_format=Color)
    assert isinstance(response.choices[0].message.parsed, Color)


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: Any, stream: bool) -> None:
    messages = user('call weather {"city": "Oslo"}')
    if stream:
        with client.chat.completions.stream(model="Scripted", messages=messages, tools=[WEATHER]) as events:
            response = events.get_final_completion()
    else:
        response = client.chat.completions.create(model="Scripted", messages=messages, tools=[WEATHER])
    message = response.choices[0].message
    (call,) = message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Oslo"},
    )
    assert response.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    history = [
        *messages,
        message.model_dump(exclude_none=True, exclude={"tool_calls": {0: {"function": {"parsed_arguments"}}}}),
        result,
    ]
    after = client.chat.completions.create(model="Scripted", messages=history, tools=[WEATHER])
    assert after.choices[0].message.content == "the result is sun"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_tools(client: Any, choice: Any) -> None:
    response = client.chat.completions.create(
        model="tiny-llama", messages=user("a"), tools=[WEATHER], tool_choice=choice, max_tokens=200
    )
    call = response.choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    if response.choices[0].finish_reason != "length":
        assert isinstance(json.loads(call.function.arguments)["city"], str)


def test_no_tools(client: Any) -> None:
    response = client.chat.completions.create(
        model="Scripted", messages=user("say a"), tools=[WEATHER], tool_choice="none"
    )
    assert (response.choices[0].message.content, response.choices[0].message.tool_calls) == ("a", None)


def test_custom_tools(client: Any) -> None:
    tool = {"type": "custom", "custom": {"name": "run"}}
    response = client.chat.completions.create(
        model="Scripted", messages=user('call run {"input": "1 + 1"}'), tools=[tool]
    )
    (call,) = response.choices[0].message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "run", "1 + 1")


def test_reasoning(client: Any) -> None:
    response = client.chat.completions.create(
        model="Scripted", messages=user("say <think>so it is</think> yes"), reasoning_effort="low"
    )
    assert response.choices[0].message.reasoning_content == "so it is"
    assert response.choices[0].message.content.strip() == "yes"


async def test_async_and_concurrent(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        responses = await asyncio.gather(
            *(client.chat.completions.create(model="Scripted", messages=user(f"say {i}")) for i in range(8))
        )
    assert [response.choices[0].message.content for response in responses] == [str(i) for i in range(8)]


def test_raw_responses(client: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(model="Scripted", messages=user("say a"), verbosity="low")
    assert raw.request_id
    assert raw.headers["x-ignored-parameters"] == "verbosity"
    assert raw.parse().choices[0].message.content == "a"


# --- completions ---------------------------------------------------------------------------------------------------


def test_completions(client: Any) -> None:
    response = client.completions.create(model="Scripted", prompt=["say a b", "say c"])
    assert [(choice.index, choice.text, choice.finish_reason) for choice in response.choices] == [
        (0, "a b", "stop"),
        (1, "c", "stop"),
    ]
    tokens = client.completions.create(model="tiny-llama", prompt=[3, 4, 5], max_tokens=2, logprobs=1, echo=True)
    assert len(tokens.choices[0].logprobs.tokens) == 5


def test_completion_stream(client: Any) -> None:
    stream = client.completions.create(model="Scripted", prompt="say a b", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "a b"


# --- responses -----------------------------------------------------------------------------------------------------


def test_responses(client: Any) -> None:
    response = client.responses.create(model="Scripted", input="say good day", instructions="be brief")
    assert (response.output_text, response.status, response.instructions) == ("good day", "completed", "be brief")
    assert response.usage.output_tokens == 2
    items = [{"role": "user", "content": [{"type": "input_text", "text": "say a"}]}]
    assert client.responses.create(model="Scripted", input=items).output_text == "a"
    cut = client.responses.create(model="Scripted", input="say a b c", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_stored_responses(client: Any) -> None:
    first = client.responses.create(model="Scripted", input="say a")
    second = client.responses.create(model="Scripted", input="say b", previous_response_id=first.id)
    assert client.responses.retrieve(second.id).output_text == "b"
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["message"] * 3
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_response_tokens(client: Any) -> None:
    count = client.responses.input_tokens.count(model="Scripted", input="say good day")
    response = client.responses.create(model="Scripted", input="say good day")
    assert count.input_tokens == response.usage.input_tokens == 3
    compacted = client.responses.compact(model="Scripted", input="say good day")
    assert (compacted.object, compacted.output[-1].type) == ("response.compaction", "compaction")


def test_response_stream(client: Any) -> None:
    with client.responses.stream(model="Scripted", input="say good day") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "good day"
    assert final.output_text == "good day"


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_response_tools(client: Any, kind: str) -> None:
    tool = FLAT if kind == "function" else {"type": "custom", "name": "weather"}
    arguments = '{"city": "Oslo"}' if kind == "function" else '{"input": "Oslo"}'
    first = client.responses.create(model="Scripted", input=f"call weather {arguments}", tools=[tool])
    (call,) = first.output
    if kind == "function":
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Oslo"})
    else:
        assert (call.type, call.name, call.input) == ("custom_tool_call", "weather", "Oslo")
    result = {"type": f"{call.type}_output", "call_id": call.call_id, "output": "sun"}
    after = client.responses.create(model="Scripted", input=[result], tools=[tool], previous_response_id=first.id)
    assert after.output_text == "the result is sun"


def test_response_parse(client: Any) -> None:
    response = client.responses.parse(model="tiny-llama", input="a color", text_format=Color)
    assert isinstance(response.output_parsed, Color)


def test_response_reasoning(client: Any) -> None:
    response = client.responses.create(
        model="Scripted", input="say <think>so it is</think> yes", reasoning={"effort": "low", "summary": "auto"}
    )
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "so it is"


# --- embeddings and models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
def test_embeddings(client: Any, encoding: str | None) -> None:
    more = {} if encoding is None else {"encoding_format": encoding}
    response = client.embeddings.create(model="Angles", input=["0", "60"], **more)
    vector = response.data[1].embedding
    if encoding == "base64":
        assert isinstance(vector, str)
    else:
        assert vector == pytest.approx([0.5, math.sqrt(0.75)], abs=1e-6)
    assert response.usage.prompt_tokens == 2


def test_models(client: Any) -> None:
    names = {model.id for model in client.models.list()}
    assert {"Scripted", "Angles", "tiny-llama"} <= names
    assert client.models.retrieve("Scripted").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


# --- errors --------------------------------------------------------------------------------------------------------


def test_invalid_requests(client: Any) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 9}, "temperature"),
        ({"messages": []}, "messages"),
        ({"modalities": ["audio"], "audio": {"voice": "alloy", "format": "wav"}}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
    ]
    for change, param in wrong:
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**{"model": "Scripted", "messages": user("a"), **change})
        assert error.value.param in (param, "audio")
        assert error.value.type == "invalid_request_error"


def test_unknown_model_and_path(client: Any, url: str) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="none", messages=user("a"))
    assert error.value.code == "model_not_found"
    bare = openai.OpenAI(base_url=url, api_key="-", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="did you mean /v1/chat/completions"):
        bare.chat.completions.create(model="Scripted", messages=user("a"))
    slashes = openai.OpenAI(base_url=f"{url}//v1/", api_key="-", max_retries=0)
    assert slashes.chat.completions.create(model="Scripted", messages=user("say a")).choices[0].message.content == "a"


def test_keys(keyed: str) -> None:
    good = openai.OpenAI(base_url=f"{keyed}/v1", api_key=KEY, max_retries=0)
    assert good.chat.completions.create(model="Scripted", messages=user("say a")).choices[0].message.content == "a"
    with pytest.raises(openai.AuthenticationError) as error:
        openai.OpenAI(base_url=f"{keyed}/v1", api_key="wrong", max_retries=0).models.list()
    assert error.value.code == "invalid_api_key"
    assert error.value.request_id


def test_too_large(client: Any) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(model="Scripted", messages=user("a" * (2 << 20)))
    assert error.value.status_code == 413


def test_timeouts_and_aborts(client: Any) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).chat.completions.create(model="Scripted", messages=user("wait"))
    stream = client.chat.completions.create(model="Scripted", messages=user("say a b c d e"), stream=True)
    next(iter(stream))
    stream.close()
    assert client.chat.completions.create(model="Scripted", messages=user("say a")).choices[0].message.content == "a"
