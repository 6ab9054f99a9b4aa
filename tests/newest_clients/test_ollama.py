"""ollama: chats, completions, embeddings, models and errors."""

import asyncio
import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from newest_clients.conftest import KEY

ollama: Any = pytest.importorskip("ollama")

pytestmark = pytest.mark.filterwarnings("ignore")


class Color(BaseModel):
    name: Literal["red", "blue"]
    amount: Literal[1, 2]


def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: its name.
    """
    return f"sun in {city}"


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture
def client(url: str) -> Any:
    return ollama.Client(host=url)


def test_chat(client: Any) -> None:
    response = client.chat("Scripted", messages=user("say good day to you"))
    assert (response.message.role, response.message.content) == ("assistant", "good day to you")
    assert (response.model, response.done, response.done_reason) == ("Scripted", True, "stop")
    assert (response.prompt_eval_count, response.eval_count) == (5, 4)
    assert response.total_duration > 0
    assert response.created_at.endswith("Z")


@pytest.mark.parametrize("name", ["Scripted", "Scripted:latest"])
def test_chat_stream(client: Any, name: str) -> None:
    *chunks, last = list(client.chat(name, messages=user("say good day"), stream=True))
    assert "".join(chunk.message.content for chunk in (*chunks, last)) == "good day"
    assert (last.done, last.done_reason) == (True, "stop")


def test_options(client: Any) -> None:
    cut = client.chat("Scripted", messages=user("say a b c"), options={"num_predict": 2, "num_ctx": 4096})
    assert (cut.message.content, cut.done_reason) == ("a b", "length")
    options = {"temperature": 0, "seed": 1, "num_predict": 6}
    first, again = (client.chat("tiny-llama", messages=user("the cat"), options=options) for _ in range(2))
    assert first.message.content == again.message.content
    stop = first.message.content[2:3]
    stopped = client.chat("tiny-llama", messages=user("the cat"), options={**options, "stop": [stop]})
    assert stop not in stopped.message.content


def test_durations_add_up(client: Any) -> None:
    for stream in (False, True):
        response = client.chat("tiny-llama", messages=user("the"), options={"num_predict": 6}, stream=stream)
        last = [*response][-1] if stream else response
        assert last.load_duration + last.prompt_eval_duration + last.eval_duration == pytest.approx(
            last.total_duration, abs=3
        )


def test_thinking(client: Any) -> None:
    response = client.chat("Scripted", messages=user("say <think>so it is</think> yes"), think=True)
    assert (response.message.thinking, response.message.content.strip()) == ("so it is", "yes")
    hidden = client.chat("Scripted", messages=user("say <think>so it is</think> yes"), think=False)
    assert hidden.message.thinking is None


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: Any, stream: bool) -> None:
    messages = user('call weather {"city": "Oslo"}')
    found = client.chat("Scripted", messages=messages, tools=[weather], stream=stream)
    parts = [*found] if stream else [found]
    message = next(part.message for part in parts if part.message.tool_calls)
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})
    result = {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
    after = client.chat("Scripted", messages=[*messages, message, result], tools=[weather])
    assert after.message.content == "the result is sun in Oslo"


def test_format(client: Any) -> None:
    response = client.chat(
        "tiny-llama", messages=user("a color"), format=Color.model_json_schema(), options={"num_predict": 100}
    )
    Color.model_validate_json(response.message.content)
    text = client.generate("tiny-llama", "a", format="json", options={"num_predict": 60, "temperature": 0})
    assert text.response.lstrip().startswith("{")
    assert text.done_reason == "length" or isinstance(json.loads(text.response), dict)


def test_logprobs(client: Any) -> None:
    response = client.chat(
        "tiny-llama", messages=user("the"), logprobs=True, top_logprobs=2, options={"num_predict": 3}
    )
    assert len(response.logprobs) == 3
    assert len(response.logprobs[0].top_logprobs) == 2


def test_generate(client: Any) -> None:
    response = client.generate("Scripted", "say good day", system="be brief")
    assert (response.response, response.done_reason) == ("good day", "stop")
    assert client.generate("Scripted", "say a", raw=True).response == "a"
    chunks = list(client.generate("Scripted", "say a b", stream=True))
    assert "".join(chunk.response for chunk in chunks) == "a b"


def test_load(client: Any) -> None:
    assert client.generate("Scripted").done_reason == "load"
    assert client.chat("Scripted").done_reason == "load"


def test_embeddings(client: Any) -> None:
    response = client.embed("Angles", ["0", "90"])
    assert [list(vector) for vector in response.embeddings] == [
        pytest.approx([1, 0], abs=1e-6),
        pytest.approx([0, 1], abs=1e-6),
    ]
    assert response.prompt_eval_count == 2
    assert len(client.embed("Angles", "0", dimensions=1).embeddings[0]) == 1
    assert list(client.embeddings("Angles", "0").embedding) == pytest.approx([1, 0], abs=1e-6)


def test_models(client: Any, url: str) -> None:
    listed = {model.model: model for model in client.list().models}
    assert {"Scripted:latest", "tiny-llama:latest"} <= listed.keys()
    tiny = listed["tiny-llama:latest"]
    assert tiny.size > 1000
    assert (tiny.details.format, tiny.details.family) == ("safetensors", "llama")
    assert tiny.details.parameter_size[-1] in "KM"
    assert {"Scripted:latest", "tiny-llama:latest"} <= {model.model for model in client.ps().models}
    shown = client.show("tiny-llama")
    assert shown.modelinfo["general.parameter_count"] > 1000
    assert {"completion", "tools"} <= {*shown.capabilities}


def test_pull(client: Any) -> None:
    assert client.pull("Scripted").status == "success"
    assert [each.status for each in client.pull("Scripted", stream=True)] == ["success"]
    with pytest.raises(ollama.ResponseError) as error:
        client.pull("none")
    assert error.value.status_code == 404


def test_errors(client: Any) -> None:
    with pytest.raises(ollama.ResponseError) as error:
        client.chat("none", messages=user("a"))
    assert error.value.status_code == 404
    for more in ({"options": {"temperature": -1}}, {"format": {"type": "nothing"}, "model": "tiny-llama"}):
        with pytest.raises(ollama.ResponseError) as error:
            client.chat(**{"model": "Scripted", "messages": user("a"), **more})
        assert error.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="context"):
        client.generate("Scripted", "a", context=[1, 2])


def test_keys(keyed: str) -> None:
    good = ollama.Client(host=keyed, headers={"Authorization": f"Bearer {KEY}"})
    assert good.chat("Scripted", messages=user("say a")).message.content == "a"
    with pytest.raises(ollama.ResponseError) as error:
        ollama.Client(host=keyed).chat("Scripted", messages=user("a"))
    assert error.value.status_code == 401


async def test_async_and_aborts(url: str) -> None:
    client = ollama.AsyncClient(host=url)
    responses = await asyncio.gather(*(client.chat("Scripted", messages=user(f"say {i}")) for i in range(8)))
    assert [response.message.content for response in responses] == [str(i) for i in range(8)]
    stream = await client.chat("Scripted", messages=user("say a b c d"), stream=True)
    async for _ in stream:
        break
    await stream.aclose()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.chat("Scripted", messages=user("wait")), 0.5)
    assert (await client.chat("Scripted", messages=user("say a"))).message.content == "a"
