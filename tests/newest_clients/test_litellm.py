"""litellm: its providers for OpenAI, vLLM, Anthropic, Ollama and rerankers, each with its own requests and parsers."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

litellm: Any = pytest.importorskip("litellm")

pytestmark = pytest.mark.filterwarnings("ignore")
PROVIDERS = ("openai", "hosted_vllm", "anthropic", "ollama_chat")
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@pytest.fixture
def base(url: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments that address the model `Scripted` through the provider of the test."""
    provider = request.param
    address = url if provider in ("anthropic", "ollama_chat", "ollama", "text-completion-openai") else f"{url}/v1"
    return {"model": f"{provider}/Scripted", "api_base": address, "api_key": "-", "num_retries": 0}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("base", PROVIDERS, indirect=True)
def test_chat(base: dict[str, Any]) -> None:
    response = litellm.completion(**base, messages=user("say good day to you"), max_tokens=50)
    assert response.choices[0].message.content == "good day to you"
    assert response.choices[0].finish_reason == "stop"
    assert response.usage.completion_tokens == 4
    short = litellm.completion(**base, messages=user("say good day to you"), max_tokens=2)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("good day", "length")


@pytest.mark.parametrize("base", PROVIDERS, indirect=True)
def test_chat_stream(base: dict[str, Any]) -> None:
    stream = litellm.completion(**base, messages=user("say good day to you"), max_tokens=50, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "good day to you"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]


@pytest.mark.parametrize("base", PROVIDERS, indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_tools(base: dict[str, Any], stream: bool) -> None:
    messages: list[Any] = user('call weather {"city": "Oslo"}')
    response = litellm.completion(**base, messages=messages, tools=TOOLS, max_tokens=50, stream=stream)
    if stream:
        response = litellm.stream_chunk_builder(list(response))
    (call,) = response.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    assert response.choices[0].finish_reason == "tool_calls"
    messages += [
        response.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "sun"},
    ]
    after = litellm.completion(**base, messages=messages, tools=TOOLS, max_tokens=50)
    assert after.choices[0].message.content == "the result is sun"


@pytest.mark.parametrize("base", PROVIDERS, indirect=True)
def test_reasoning(base: dict[str, Any]) -> None:
    messages = user("say <think>so it is</think> yes")
    message = litellm.completion(**base, messages=messages, max_tokens=50).choices[0].message
    assert (message.reasoning_content, message.content.strip()) == ("so it is", "yes")


class Color(BaseModel):
    name: str
    amount: int


@pytest.mark.parametrize("base", ["openai", "hosted_vllm"], indirect=True)
def test_structured_output(base: dict[str, Any]) -> None:
    schema: dict[str, Any] = {"properties": {"name": {"enum": ["red", "blue"]}, "amount": {"enum": [1, 2]}}}
    schema |= {"type": "object", "required": ["name", "amount"], "additionalProperties": False}
    response = litellm.completion(
        **{**base, "model": base["model"].replace("Scripted", "tiny-llama")},
        messages=user("a color"),
        max_tokens=100,
        response_format={"type": "json_schema", "json_schema": {"name": "Color", "schema": schema, "strict": True}},
    )
    color = Color.model_validate_json(response.choices[0].message.content)
    assert (color.name in ("red", "blue"), color.amount in (1, 2)) == (True, True)


@pytest.mark.parametrize("base", ["text-completion-openai", "ollama"], indirect=True)
def test_completion(base: dict[str, Any]) -> None:
    if base["model"].startswith("text"):
        base["api_base"] += "/v1"
        response = litellm.text_completion(**base, prompt="say good day", max_tokens=50)
        assert response.choices[0].text == "good day"
    else:
        response = litellm.completion(**base, messages=user("say good day"), max_tokens=50)
        assert "day" in response.choices[0].message.content  # litellm wraps the message in a template of its own


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "ollama"])
def test_embeddings(url: str, provider: str) -> None:
    address = url if provider == "ollama" else f"{url}/v1"
    response = litellm.embedding(f"{provider}/Angles", input=["0", "90"], api_base=address, api_key="-")
    vectors = [data["embedding"] for data in response.data]
    assert vectors[0] == pytest.approx([1, 0], abs=1e-6)
    assert vectors[1] == pytest.approx([0, 1], abs=1e-6)


@pytest.mark.parametrize("provider", ["hosted_vllm", "cohere", "jina_ai", "huggingface"])
def test_rerank(url: str, provider: str) -> None:
    path = {"cohere": "/v2/rerank", "jina_ai": "/v1/rerank", "huggingface": "/models/SharedWords/rerank"}
    response = litellm.rerank(
        model=f"{provider}/SharedWords",
        query="a b",
        documents=["b", "a b c", "d"],
        top_n=2,
        api_base=url + path.get(provider, ""),
        api_key="-",
    )
    results = [(each["index"], each["relevance_score"]) for each in response.results]
    assert results[:2] == [(1, 2.0), (0, 1.0)]
    assert len(results) == (3 if provider == "huggingface" else 2)  # TEI has no `top_n`


def test_responses(url: str) -> None:
    base = {"model": "openai/Scripted", "api_base": f"{url}/v1", "api_key": "-"}
    response = litellm.responses(**base, input="say good day")
    assert response.output[0].content[0].text == "good day"
    events = list(litellm.responses(**base, input="say good day", stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "good day"


async def test_messages_adapter(url: str) -> None:
    """Anthropic's API on the side of the caller, OpenAI's on the wire."""
    response = await litellm.anthropic.messages.acreate(
        model="hosted_vllm/Scripted",
        api_base=f"{url}/v1",
        api_key="-",
        max_tokens=50,
        messages=user("say good day"),
    )
    assert [block["text"] for block in response["content"] if block["type"] == "text"] == ["good day"]
    assert response["stop_reason"] == "end_turn"


def test_errors(url: str) -> None:
    base = {"api_base": f"{url}/v1", "api_key": "-", "num_retries": 0}
    with pytest.raises(litellm.NotFoundError):
        litellm.completion("openai/missing", messages=user("a"), **base)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion("openai/Scripted", messages=user("a"), temperature=3, **base)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion("openai/tiny-llama", messages=user("word " * 2000), **base)
