"""anthropic: messages, streams, tools and their loops, threads, counts, models and errors."""

import asyncio
import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from newest_clients.conftest import KEY

anthropic: Any = pytest.importorskip("anthropic")

pytestmark = pytest.mark.filterwarnings("ignore")
WEATHER: Any = {
    "name": "weather",
    "description": "the weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL: Any = [{"role": "user", "content": 'call weather {"city": "Oslo"}'}]


class Color(BaseModel):
    name: Literal["red", "blue"]
    amount: Literal[1, 2]


def user(text: Any) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture
def client(url: str) -> Any:
    return anthropic.Anthropic(base_url=url, api_key="-", max_retries=0)


def create(client: Any, text: Any, **more: Any) -> Any:
    return client.messages.create(**{"model": "Scripted", "max_tokens": 50, "messages": user(text), **more})


# --- messages ------------------------------------------------------------------------------------------------------


def test_message(client: Any) -> None:
    message = create(client, "say good day to you")
    assert (message.type, message.role, message.model) == ("message", "assistant", "Scripted")
    assert [(block.type, block.text) for block in message.content] == [("text", "good day to you")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (5, 4)
    assert message._request_id


def test_message_is_cut(client: Any) -> None:
    message = create(client, "say a b c", max_tokens=2)
    assert (message.content[0].text, message.stop_reason) == ("a b", "max_tokens")


def test_system_and_blocks(client: Any) -> None:
    for system in ("be brief", [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]):
        assert create(client, "say a", system=system).content[0].text == "a"
    blocks = [{"type": "text", "text": "say hello", "cache_control": {"type": "ephemeral"}}]
    assert create(client, blocks).content[0].text == "hello"


def test_history(client: Any) -> None:
    messages = [*user("say a"), {"role": "assistant", "content": "a"}, *user("say b")]
    assert create(client, "", messages=messages).content[0].text == "b"
    assert create(client, "", messages=[*user("x y"), *user("say c")]).content[0].text


def test_stop_sequences(client: Any) -> None:
    more = {"model": "tiny-llama", "max_tokens": 12}
    # at temperature 0 the random model of some builds of PyTorch gives special tokens alone
    more["extra_body"] = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
    plain = create(client, "the", **more).content[0].text
    stop = plain[len(plain) // 2 :][:1]
    message = create(client, "the", **more, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_stream(client: Any) -> None:
    with client.messages.stream(model="Scripted", max_tokens=50, messages=user("say good day")) as stream:
        assert "".join(stream.text_stream) == "good day"
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason, final.usage.output_tokens) == ("good day", "end_turn", 2)
    events = [event.type for event in create(client, "say a", stream=True)]
    assert events[0] == "message_start"
    assert events[-2:] == ["message_delta", "message_stop"]


def test_thinking(client: Any) -> None:
    message = create(client, "say <think>so it is</think> yes", thinking={"type": "adaptive"})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text.strip()) == ("so it is", "yes")
    history = [*user("x"), {"role": "assistant", "content": message.content}, *user("say a")]
    assert create(client, "", messages=history).content[0].text == "a"
    hidden = create(client, "say <think>so it is</think> yes", thinking={"type": "adaptive", "display": "omitted"})
    assert hidden.content[0].thinking == ""


async def test_async_and_concurrent(url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as client:
        messages = await asyncio.gather(
            *(client.messages.create(model="Scripted", max_tokens=9, messages=user(f"say {i}")) for i in range(8))
        )
    assert [message.content[0].text for message in messages] == [str(i) for i in range(8)]


def test_raw_responses(client: Any) -> None:
    raw = client.beta.messages.with_raw_response.create(
        model="Scripted", max_tokens=9, messages=user("say a"), speed="fast"
    )
    assert raw.headers["x-ignored-parameters"] == "speed"
    assert raw.parse().content[0].text == "a"


# --- tools ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: Any, stream: bool) -> None:
    more: Any = {"model": "Scripted", "max_tokens": 50, "messages": CALL, "tools": [WEATHER]}
    if stream:
        with client.messages.stream(**more) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**more)
    (use,) = message.content
    assert (use.type, use.name, use.input, message.stop_reason) == ("tool_use", "weather", {"city": "Oslo"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sun"}]}
    history = [*CALL, {"role": "assistant", "content": message.content}, *user([result])]
    after = client.messages.create(model="Scripted", max_tokens=50, messages=history, tools=[WEATHER])
    assert after.content[0].text == "the result is sun"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_required_tools(client: Any, choice: Any) -> None:
    message = create(client, "a", model="tiny-llama", max_tokens=200, tools=[WEATHER], tool_choice=choice)
    assert (message.content[0].type, message.content[0].name) == ("tool_use", "weather")


@anthropic.beta_tool  # type: ignore[untyped-decorator]
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sun in {city}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thread", [None, False])
def test_the_tool_loop(client: Any, stream: bool, thread: bool | None) -> None:
    more = {} if thread is None else {"thread": thread}
    runner = client.beta.messages.tool_runner(
        model="Scripted", max_tokens=50, tools=[weather], messages=CALL, stream=stream, **more
    )
    replies = [reply.get_final_message() if stream else reply for reply in runner]
    assert [reply.stop_reason for reply in replies] == ["tool_use", "end_turn"]
    assert replies[-1].content[0].text == "the result is sun in Oslo"


async def test_the_async_tool_loop(url: str) -> None:
    @anthropic.beta_async_tool  # type: ignore[untyped-decorator]
    async def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"rain in {city}"

    async with anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(model="Scripted", max_tokens=50, tools=[weather], messages=CALL)
        assert (await runner.until_done()).content[0].text == "the result is rain in Oslo"


def test_threads(client: Any) -> None:
    thread = client.beta.messages.thread(model="Scripted", max_tokens=50)
    first = thread.send(*user("say a b"))
    second = thread.send(*user("say c"))
    assert [first.content[0].text, second.content[0].text] == ["a b", "c"]
    assert second.usage.input_tokens > first.usage.input_tokens + 2  # the conversation before it
    with thread.stream(*user("say d")) as stream:
        assert stream.get_final_message().content[0].text == "d"
    other = thread.fork()
    assert other.send(*user("say e")).content[0].text == "e"
    assert len(thread.messages) == 6


def test_parse(client: Any) -> None:
    message = client.messages.parse(model="tiny-llama", max_tokens=100, messages=user("a color"), output_format=Color)
    assert isinstance(message.parsed_output, Color)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    raw = create(client, "a", model="tiny-llama", max_tokens=100, output_config=config)
    assert json.loads(raw.content[0].text)["a"] in (1, 2)


# --- counts, models, errors ----------------------------------------------------------------------------------------


def test_count_tokens(client: Any) -> None:
    count = client.messages.count_tokens(model="Scripted", messages=user("say good day"))
    assert count.input_tokens == create(client, "say good day").usage.input_tokens == 3
    assert client.beta.messages.count_tokens(model="Scripted", messages=user("a b")).input_tokens == 2


def test_models(client: Any) -> None:
    models = {model.id: model for model in client.models.list()}
    assert {"Scripted", "Angles", "tiny-llama"} <= models.keys()
    assert (models["Scripted"].type, models["Scripted"].display_name) == ("model", "Scripted")
    assert client.models.retrieve("Scripted").max_input_tokens == 4096
    assert [model.id for model in client.models.list(limit=1)] == [*models]
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("none")


def test_invalid_requests(client: Any) -> None:
    wrong: list[dict[str, Any]] = [
        {"messages": []},
        {"max_tokens": 0},
        {"container": "container_1"},
        {"extra_body": {"mcp_servers": [{"type": "url", "name": "a", "url": "https://a"}]}},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "a"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "a"}]}]},
    ]
    for change in wrong:
        with pytest.raises(anthropic.BadRequestError) as error:
            create(client, "a", **change)
        assert error.value.body["error"]["type"] == "invalid_request_error"
        assert error.value.body["request_id"] == error.value.request_id


def test_unknown_model_and_path(client: Any, url: str) -> None:
    with pytest.raises(anthropic.NotFoundError):
        create(client, "a", model="none")
    with pytest.raises(anthropic.NotFoundError, match="did you mean /v1/messages"):
        create(anthropic.Anthropic(base_url=f"{url}/v1", api_key="-", max_retries=0), "a")


def test_keys(keyed: str) -> None:
    good = anthropic.Anthropic(base_url=keyed, api_key=KEY, max_retries=0)
    assert create(good, "say a", extra_headers={"x-request-id": "of-a-good-caller"}).content[0].text == "a"
    for more in ({"api_key": "wrong"}, {"auth_token": "wrong", "api_key": None}):
        with pytest.raises(anthropic.AuthenticationError) as error:
            create(anthropic.Anthropic(base_url=keyed, max_retries=0, **more), "a")
        assert error.value.body["error"]["type"] == "authentication_error"
        assert error.value.request_id != "of-a-good-caller"
        assert error.value.request_id == error.value.body["request_id"]


def test_too_large(client: Any) -> None:
    with pytest.raises(anthropic.APIStatusError) as error:
        create(client, "a" * (2 << 20))
    assert error.value.status_code == 413


def test_timeouts_and_aborts(client: Any) -> None:
    with pytest.raises(anthropic.APITimeoutError):
        create(client.with_options(timeout=0.5), "wait")
    with client.messages.stream(model="Scripted", max_tokens=50, messages=user("say a b c d")) as stream:
        next(iter(stream))
    assert create(client, "say a").content[0].text == "a"
