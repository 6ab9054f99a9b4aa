"""LangChain: the packages for OpenAI, Anthropic and Ollama."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel

pytest.importorskip("langchain_core")

pytestmark = pytest.mark.filterwarnings("ignore")


class Color(BaseModel):
    """A color and how much of it."""

    name: Literal["red", "blue"]
    amount: Literal[1, 2]


def weather(city: str) -> str:
    """Return the weather of a city."""
    return city


def chat(url: str, package: str, model: str = "Scripted") -> Any:
    """A chat model of one of the packages; `openai-responses` is that of OpenAI with the other API."""
    if package == "anthropic":
        anthropic: Any = pytest.importorskip("langchain_anthropic")
        return anthropic.ChatAnthropic(model=model, base_url=url, api_key="-", max_tokens=100, max_retries=0)
    if package == "ollama":
        ollama: Any = pytest.importorskip("langchain_ollama")
        return ollama.ChatOllama(model=model, base_url=url, num_predict=100)
    openai: Any = pytest.importorskip("langchain_openai")
    responses = package == "openai-responses"
    return openai.ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key="-", max_retries=0, use_responses_api=responses, max_tokens=100
    )


PACKAGES = ("openai", "openai-responses", "anthropic", "ollama")


@pytest.mark.parametrize("package", PACKAGES)
def test_chat(url: str, package: str) -> None:
    model = chat(url, package)
    response = model.invoke("say good day to you")
    assert response.text == "good day to you"
    assert response.usage_metadata["output_tokens"] >= 4
    chunks = list(model.stream("say good day to you"))
    assert "".join(chunk.text for chunk in chunks) == "good day to you"


@pytest.mark.parametrize("package", PACKAGES)
def test_tools(url: str, package: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = chat(url, package).bind_tools([weather])
    question = HumanMessage('call weather {"city": "Oslo"}')
    answer = model.invoke([question])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    after = model.invoke([question, answer, ToolMessage("sun", tool_call_id=call["id"])])
    assert after.text == "the result is sun"
    streamed = None
    for chunk in model.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [(each["name"], each["args"]) for each in streamed.tool_calls] == [("weather", {"city": "Oslo"})]


@pytest.mark.parametrize(
    ("package", "method"),
    [
        ("openai", "json_schema"),
        ("openai", "function_calling"),
        ("openai-responses", "json_schema"),
        ("anthropic", "function_calling"),
        ("ollama", "json_schema"),
    ],
)
def test_structured_output(url: str, package: str, method: str) -> None:
    structured = chat(url, package, "tiny-llama").with_structured_output(Color, method=method)
    assert isinstance(structured.invoke("a color"), Color)


def test_completions(url: str) -> None:
    openai: Any = pytest.importorskip("langchain_openai")
    model = openai.OpenAI(model="Scripted", base_url=f"{url}/v1", api_key="-", max_retries=0)
    assert model.invoke("say good day") == "good day"
    assert "".join(model.stream("say good day")) == "good day"


@pytest.mark.parametrize("package", ["openai", "ollama"])
def test_embeddings(url: str, package: str) -> None:
    if package == "openai":
        openai: Any = pytest.importorskip("langchain_openai")
        model = openai.OpenAIEmbeddings(
            model="Angles", base_url=f"{url}/v1", api_key="-", check_embedding_ctx_length=False
        )
    else:
        ollama: Any = pytest.importorskip("langchain_ollama")
        model = ollama.OllamaEmbeddings(model="Angles", base_url=url)
    assert model.embed_query("90") == pytest.approx([0, 1], abs=1e-6)
    assert model.embed_documents(["0", "90"])[0] == pytest.approx([1, 0], abs=1e-6)
