"""LlamaIndex: its packages for servers with OpenAI's API and for Ollama."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel

llama_index: Any = pytest.importorskip("llama_index.core")
from llama_index.core.llms import ChatMessage  # noqa: E402
from llama_index.core.tools import FunctionTool  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Color(BaseModel):
    """A color and how much of it."""

    name: Literal["red", "blue"]
    amount: Literal[1, 2]


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sun in {city}"


def model(url: str, package: str, name: str = "Scripted") -> Any:
    if package == "ollama":
        ollama: Any = pytest.importorskip("llama_index.llms.ollama")
        return ollama.Ollama(model=name, base_url=url, context_window=4096, request_timeout=60)
    openai: Any = pytest.importorskip("llama_index.llms.openai_like")
    options = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096, "max_retries": 0}
    return openai.OpenAILike(model=name, api_base=f"{url}/v1", api_key="-", max_tokens=50, **options)


PACKAGES = ("openai", "ollama")
HELLO = [ChatMessage(role="user", content="say good day")]


@pytest.mark.parametrize("package", PACKAGES)
def test_chat(url: str, package: str) -> None:
    response = model(url, package).chat(HELLO)
    assert response.message.content == "good day"
    history = [ChatMessage(role="system", content="be brief"), *HELLO, response.message]
    again = model(url, package).chat([*history, ChatMessage(role="user", content="say a")])
    assert again.message.content == "a"


@pytest.mark.parametrize("package", PACKAGES)
def test_stream(url: str, package: str) -> None:
    chunks = list(model(url, package).stream_chat(HELLO))
    assert "".join(chunk.delta or "" for chunk in chunks) == "good day"
    assert chunks[-1].message.content == "good day"


@pytest.mark.parametrize("package", PACKAGES)
def test_complete(url: str, package: str) -> None:
    assert model(url, package).complete("say a b").text == "a b"
    assert [*model(url, package).stream_complete("say a b")][-1].text == "a b"


@pytest.mark.parametrize("package", PACKAGES)
async def test_async(url: str, package: str) -> None:
    assert (await model(url, package).achat(HELLO)).message.content == "good day"
    stream = await model(url, package).astream_chat(HELLO)
    assert [chunk async for chunk in stream][-1].message.content == "good day"


@pytest.mark.parametrize("package", PACKAGES)
def test_tools(url: str, package: str) -> None:
    tool = FunctionTool.from_defaults(weather)
    response = model(url, package).chat_with_tools([tool], user_msg='call weather {"city": "Oslo"}')
    (call,) = model(url, package).get_tool_calls_from_response(response)
    assert (call.tool_name, call.tool_kwargs) == ("weather", {"city": "Oslo"})
    result = model(url, package).predict_and_call([tool], user_msg='call weather {"city": "Oslo"}')
    assert "sun in Oslo" in str(result.response)


def test_structured_output(url: str) -> None:
    structured = model(url, "openai").as_structured_llm(Color)
    call = 'call Color {"name": "red", "amount": 2}'
    assert structured.chat([ChatMessage(role="user", content=call)]).raw == Color(name="red", amount=2)


@pytest.mark.parametrize("package", PACKAGES)
async def test_an_agent(url: str, package: str) -> None:
    workflow: Any = pytest.importorskip("llama_index.core.agent.workflow")
    agent = workflow.FunctionAgent(tools=[weather], llm=model(url, package))
    response = await agent.run('call weather {"city": "Oslo"}')
    assert "the result is sun in Oslo" in str(response)


@pytest.mark.parametrize("package", PACKAGES)
def test_embeddings(url: str, package: str) -> None:
    if package == "ollama":
        embeddings: Any = pytest.importorskip("llama_index.embeddings.ollama")
        embedding = embeddings.OllamaEmbedding(model_name="Angles", base_url=url)
    else:
        embeddings = pytest.importorskip("llama_index.embeddings.openai_like")
        embedding = embeddings.OpenAILikeEmbedding(model_name="Angles", api_base=f"{url}/v1", api_key="-")
    assert embedding.get_text_embedding("0") == pytest.approx([1, 0], abs=1e-6)
    assert [*map(list, embedding.get_text_embedding_batch(["0", "90"]))] == [
        pytest.approx([1, 0], abs=1e-6),
        pytest.approx([0, 1], abs=1e-6),
    ]
