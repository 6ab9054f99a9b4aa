"""huggingface_hub: text generation, chats, embeddings and errors of `InferenceClient`."""

import json
from typing import Any

import pytest

from newest_clients.conftest import KEY

hub: Any = pytest.importorskip("huggingface_hub")

pytestmark = pytest.mark.filterwarnings("ignore")
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture(params=["base_url", "model"])
def client(url: str, request: pytest.FixtureRequest) -> Any:
    """A client of the endpoint of one model, by the address as `base_url` or as the name of the model."""
    return hub.InferenceClient(**{request.param: f"{url}/models/Scripted"})


def test_text_generation(client: Any) -> None:
    assert client.text_generation("say good day") == "good day"
    result = client.text_generation("say a b c", details=True, max_new_tokens=2)
    assert (result.generated_text, result.details.finish_reason, result.details.generated_tokens) == (
        "a b",
        "length",
        2,
    )
    assert [token.text for token in result.details.tokens] == ["a", " b"]


def test_text_generation_stream(client: Any) -> None:
    assert "".join(client.text_generation("say good day", stream=True)) == "good day"
    *_, last = client.text_generation("say good day", stream=True, details=True)
    assert (last.generated_text, last.details.finish_reason) == ("good day", "eos_token")


def test_grammars(url: str) -> None:
    client = hub.InferenceClient(base_url=f"{url}/models/tiny-llama")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    text = client.text_generation("a", grammar={"type": "json", "value": schema}, max_new_tokens=60)
    assert json.loads(text)["a"] in (1, 2)
    assert client.text_generation("a", grammar={"type": "regex", "value": "[ab]{3}"}, max_new_tokens=9) in {
        a + b + c for a in "ab" for b in "ab" for c in "ab"
    }


def test_sampling(url: str) -> None:
    client = hub.InferenceClient(base_url=f"{url}/models/tiny-llama")
    options = {"do_sample": True, "seed": 1, "temperature": 0.9, "top_k": 5, "top_p": 0.9, "max_new_tokens": 5}
    assert client.text_generation("the cat", **options) == client.text_generation("the cat", **options)
    stop = client.text_generation("the cat", max_new_tokens=8)[2:3]
    assert client.text_generation("the cat", max_new_tokens=8, stop=[stop]).count(stop) <= 1


@pytest.mark.parametrize("stream", [False, True])
def test_chat(url: str, stream: bool) -> None:
    client = hub.InferenceClient(base_url=f"{url}/v1")
    found = client.chat_completion(user("say good day"), model="Scripted", max_tokens=9, stream=stream)
    text = (
        "".join(chunk.choices[0].delta.content or "" for chunk in found) if stream else found.choices[0].message.content
    )
    assert text == "good day"


def test_chat_options(url: str) -> None:
    client = hub.InferenceClient(base_url=url)
    result = client.chat_completion(
        user("the"), model="tiny-llama", max_tokens=3, logprobs=True, top_logprobs=2, seed=1, temperature=0.9
    )
    assert len(result.choices[0].logprobs.content[0].top_logprobs) == 2
    assert result.usage.completion_tokens == 3
    format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1, 2]}}}
    result = client.chat.completions.create(
        messages=user("a"), model="tiny-llama", response_format=format_, max_tokens=20
    )
    assert json.loads(result.choices[0].message.content) in (1, 2)


def test_tools(url: str) -> None:
    client = hub.InferenceClient(base_url=url)
    messages = user('call weather {"city": "Oslo"}')
    message = client.chat_completion(messages, model="Scripted", tools=[WEATHER]).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    after = client.chat_completion([*messages, message, result], model="Scripted", tools=[WEATHER])
    assert after.choices[0].message.content == "the result is sun"


def test_the_address_as_the_name_of_the_model(url: str) -> None:
    client = hub.InferenceClient(base_url=f"{url}/models/Scripted/v1")
    assert client.chat_completion(user("say a"), model="tgi").choices[0].message.content == "a"
    one = hub.InferenceClient(model=f"{url}/models/Scripted")
    assert one.chat_completion(user("say a")).choices[0].message.content == "a"


def test_feature_extraction(url: str) -> None:
    client = hub.InferenceClient(base_url=f"{url}/models/Angles/embed")
    assert client.feature_extraction("0")[0] == pytest.approx([1, 0], abs=1e-6)
    assert client.feature_extraction("90", normalize=True, truncate=True)[0] == pytest.approx([0, 1], abs=1e-6)


async def test_async(url: str) -> None:
    client = hub.AsyncInferenceClient(base_url=f"{url}/models/Scripted")
    assert await client.text_generation("say a") == "a"
    parts = [part async for part in await client.text_generation("say a b", stream=True)]
    assert "".join(parts) == "a b"
    chat = await client.chat_completion(user("say a"))
    assert chat.choices[0].message.content == "a"


def test_endpoint_info(url: str) -> None:
    info = hub.InferenceClient(provider="hf-inference").get_endpoint_info(model=f"{url}/models/Scripted")
    assert info["max_total_tokens"] == 4096


def test_errors(url: str, keyed: str) -> None:
    client = hub.InferenceClient(base_url=f"{url}/models/Scripted")
    with pytest.raises(hub.errors.ValidationError):
        client.text_generation("a", max_new_tokens=-1)
    with pytest.raises(hub.errors.TextGenerationError, match="unknown model"):
        hub.InferenceClient(base_url=f"{url}/models/none").text_generation("a")
    with pytest.raises(hub.errors.HfHubHTTPError) as error:
        hub.InferenceClient(base_url=keyed, token="wrong").chat_completion(user("a"), model="Scripted")
    assert error.value.response.status_code == 401
    good = hub.InferenceClient(base_url=keyed, token=KEY)
    assert good.chat_completion(user("say a"), model="Scripted").choices[0].message.content == "a"
