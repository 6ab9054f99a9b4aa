"""Third-party clients: text-generation, huggingface_hub and openai."""

import asyncio
import warnings
from collections.abc import AsyncIterator
from typing import Any

import pytest

from text_server import TextServer, serve

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import huggingface_hub
    import openai
    import text_generation
    from text_generation import errors as tgi_errors

# Warnings raised inside the clients themselves.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20", "ignore::ResourceWarning")

MESSAGES: list[Any] = [{"role": "user", "content": "hello big world"}]
RESPONSE = "world big hello user:"


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve() as server:
        yield server


# --- text-generation -----------------------------------------------------------------------------------------


async def test_text_generation(server: TextServer) -> None:
    client = text_generation.Client(server.url)
    response = await asyncio.to_thread(client.generate, "one two three", max_new_tokens=2)
    assert response.generated_text == "three two"
    assert response.details.finish_reason == "length"
    assert response.details.generated_tokens == 2
    assert [t.text for t in response.details.tokens] == ["three", " two"]
    assert response.details.seed is None


async def test_text_generation_at_a_models_own_path(server: TextServer) -> None:
    client = text_generation.Client(f"{server.url}/models/someone/ReverseModel")
    assert (await asyncio.to_thread(client.generate, "one two")).generated_text == "two one"
    client = text_generation.Client(f"{server.url}/models/ReverseModel")
    response = await asyncio.to_thread(client.generate, "one two", do_sample=True, seed=3, decoder_input_details=True)
    assert response.generated_text == "two one"
    assert response.details.seed == 3
    assert [t.logprob for t in response.details.prefill] == [None, -0.125]


async def test_text_generation_best_of(server: TextServer) -> None:
    client = text_generation.Client(server.url)
    response = await asyncio.to_thread(client.generate, "one two three", best_of=2, do_sample=True)
    assert response.generated_text == "three two one"
    assert [s.generated_text for s in response.details.best_of_sequences] == ["two one"]


async def test_text_generation_stream(server: TextServer) -> None:
    client = text_generation.Client(server.url)
    chunks = await asyncio.to_thread(lambda: list(client.generate_stream("one two three")))
    assert "".join(p.token.text for p in chunks if not p.token.special) == "three two one"
    assert chunks[-1].generated_text == "three two one"
    assert chunks[-1].details.finish_reason == "eos_token"
    assert all(p.details is None for p in chunks[:-1])


async def test_text_generation_errors(server: TextServer) -> None:
    client = text_generation.Client(server.url)
    long_prompt = " ".join("x" * 100)
    for send in (lambda: client.generate(long_prompt), lambda: list(client.generate_stream(long_prompt))):
        with pytest.raises(tgi_errors.ValidationError):
            await asyncio.to_thread(send)
    for send in (lambda: client.generate("!fault"), lambda: list(client.generate_stream("!fault a"))):
        with pytest.raises(tgi_errors.GenerationError):
            await asyncio.to_thread(send)
    for name in ("missing", "someone/missing"):
        with pytest.raises(tgi_errors.NotFoundError):
            await asyncio.to_thread(text_generation.Client(f"{server.url}/models/{name}").generate, "a")


async def test_text_generation_chat(server: TextServer) -> None:
    client = text_generation.Client(server.url)
    messages = [text_generation.types.Message(**MESSAGES[0])]
    response = await asyncio.to_thread(client.chat, messages, max_tokens=2)
    assert response.choices[0].message.content == "world big"

    def until_finished() -> str:  # the client cannot parse the [DONE] that follows, TGI's neither
        text = ""
        for chunk in client.chat(messages, stream=True):
            text += chunk.choices[0].delta.content
            if chunk.choices[0].finish_reason:
                break
        return text

    assert await asyncio.to_thread(until_finished) == RESPONSE


async def test_text_generation_with_asyncio(server: TextServer) -> None:
    client = text_generation.AsyncClient(server.url)
    response = await client.generate("one two three")
    assert response.generated_text == "three two one"
    chunks = [chunk async for chunk in client.generate_stream("one two three", max_new_tokens=1)]
    assert [p.token.text for p in chunks] == ["three"]
    with pytest.raises(tgi_errors.ValidationError):
        await client.generate(" ".join("x" * 100))


# --- huggingface_hub -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/invocations", "/models/ReverseModel", "/generate"])
async def test_hub_text_generation(server: TextServer, path: str) -> None:
    client = huggingface_hub.InferenceClient(base_url=server.url + path)
    assert await asyncio.to_thread(client.text_generation, "one two three") == "three two one"
    result = await asyncio.to_thread(client.text_generation, "one two three", details=True, max_new_tokens=2)
    assert result.details is not None
    assert result.details.finish_reason == "length"
    assert [t.text for t in result.details.tokens] == ["three", " two"]


async def test_hub_text_generation_stream(server: TextServer) -> None:
    client = huggingface_hub.InferenceClient(base_url=server.url)

    def send(details: bool) -> list[Any]:
        return list(client.text_generation("one two three", stream=True, details=details))

    assert "".join(await asyncio.to_thread(send, False)).replace("</s>", "") == "three two one"
    chunks = await asyncio.to_thread(send, True)
    assert chunks[-1].generated_text == "three two one"
    assert [p.index for p in chunks] == [1, 2, 3, 4]


async def test_hub_text_generation_with_asyncio(server: TextServer) -> None:
    client = huggingface_hub.AsyncInferenceClient(base_url=server.url)
    assert await client.text_generation("one two three", max_new_tokens=1) == "three"


async def test_hub_errors(server: TextServer) -> None:
    client = huggingface_hub.InferenceClient(base_url=server.url)
    long_prompt = " ".join("x" * 100)
    for send in (
        lambda: client.text_generation(long_prompt),
        lambda: list(client.text_generation(long_prompt, stream=True)),
        lambda: list(client.text_generation(long_prompt, stream=True, details=True)),
    ):
        with pytest.raises(huggingface_hub.errors.ValidationError, match="context 64"):
            await asyncio.to_thread(send)
    with pytest.raises(huggingface_hub.errors.GenerationError, match="generated !fault"):
        await asyncio.to_thread(client.text_generation, "!fault")


async def test_hub_chat(server: TextServer) -> None:
    client = huggingface_hub.InferenceClient(base_url=server.url)
    response = await asyncio.to_thread(client.chat_completion, MESSAGES)
    assert response.choices[0].message.content == RESPONSE
    chunks = await asyncio.to_thread(lambda: list(client.chat_completion(MESSAGES, stream=True)))
    assert "".join(p.choices[0].delta.content or "" for p in chunks) == RESPONSE
    assert chunks[-1].choices[0].finish_reason == "stop"
    at_model = huggingface_hub.InferenceClient(base_url=f"{server.url}/models/ReverseModel")
    assert (await asyncio.to_thread(at_model.chat_completion, MESSAGES)).choices[0].message.content == RESPONSE


# --- openai --------------------------------------------------------------------------------------------------


@pytest.fixture
async def client(server: TextServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_openai_from_a_thread(server: TextServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as openai_client:
        response = await asyncio.to_thread(openai_client.completions.create, model="ReverseModel", prompt="one two")
        assert response.choices[0].text == "two one"


async def test_models_of_openai_without_v1_in_the_url(server: TextServer) -> None:
    async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        assert [m.id async for m in client.models.list()] == ["ReverseModel", "pirate", "ReverseModel:pirate"]
        with pytest.raises(openai.NotFoundError, match="did you mean /v1/chat/completions"):
            await client.chat.completions.create(model="ReverseModel", messages=[{"role": "user", "content": "a"}])


async def test_openai_models(client: openai.AsyncOpenAI) -> None:
    assert [m.id async for m in client.models.list()] == ["ReverseModel", "pirate", "ReverseModel:pirate"]
    assert (await client.models.retrieve("ReverseModel")).object == "model"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("missing")


async def test_openai_chat(client: openai.AsyncOpenAI) -> None:
    response = await client.chat.completions.create(
        model="ReverseModel", messages=MESSAGES, max_completion_tokens=2, logprobs=True, top_logprobs=2, n=2
    )
    assert [c.message.content for c in response.choices] == ["world big", "big hello"]
    assert {c.finish_reason for c in response.choices} == {"length"}
    content = response.choices[0].logprobs and response.choices[0].logprobs.content
    assert content
    assert [(t.token, t.logprob) for t in content] == [("world", -0.5), (" big", -1.0)]
    assert [t.token for t in content[0].top_logprobs] == ["world", "world1"]
    assert response.usage is not None
    assert (response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.total_tokens) == (4, 4, 8)


async def test_openai_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tgi", messages=MESSAGES, stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: RESPONSE, 1: "big hello user:"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    assert len({chunk.id for chunk in chunks}) == 1


async def test_openai_completion(client: openai.AsyncOpenAI) -> None:
    response = await client.completions.create(
        model="ReverseModel", prompt=["a b c", "d e f"], stop=[" b"], max_tokens=5
    )
    assert [c.text for c in response.choices] == ["c b a", "f e d"]
    response = await client.completions.create(model="ReverseModel", prompt=[[1, 2], [3]], logprobs=1, echo=True)
    assert [c.text for c in response.choices] == ["1 22 1", "33"]
    assert response.choices[0].logprobs is not None
    assert response.choices[0].logprobs.text_offset == [0, 1, 3, 4, 6]


async def test_openai_completion_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="ReverseModel", prompt=["a b", "c"], stream=True)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "b a", 1: "c"}


async def test_openai_embeddings(client: openai.AsyncOpenAI) -> None:
    response = await client.embeddings.create(
        model="ReverseModel", input=["a b", "c"]
    )  # in base64, the client's default
    assert [[round(x, 6) for x in d.embedding] for d in response.data] == [[0.6, 0.8, 0.0]] * 2
    assert response.usage.total_tokens == 3
    short = await client.embeddings.create(model="ReverseModel", input="a", dimensions=1, encoding_format="float")
    assert short.data[0].embedding == [1.0]


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]


async def test_openai_tools(client: openai.AsyncOpenAI, server: TextServer) -> None:
    messages: list[Any] = [
        {"role": '=<tool_call>{"name":"weather","arguments":{"city":"Oslo"}}</tool_call>', "content": ""}
    ]
    response = await client.chat.completions.create(model="ReverseModel", messages=messages, tools=TOOLS)
    assert server.model().calls[-1].prompts[0].tools == tuple(TOOLS)
    assert response.choices[0].finish_reason == "tool_calls"


async def test_openai_accumulates_a_stream(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="ReverseModel", messages=MESSAGES) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert (message.role, message.content) == ("assistant", RESPONSE)


async def test_openai_accumulates_streamed_tool_calls(client: openai.AsyncOpenAI) -> None:
    call = '{"name":"weather","arguments": {"city": "Oslo"} }'
    messages: list[Any] = [{"role": f"=[ {call} , {call} ] !end", "content": ""}]
    async with client.chat.completions.stream(
        model="ReverseModel", messages=messages, tools=TOOLS, tool_choice="required", stop=["!end"]
    ) as stream:
        kinds = [event.type async for event in stream]
        choice = (await stream.get_final_completion()).choices[0]
    assert kinds.count("tool_calls.function.arguments.delta") > 2
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls or []
    assert [call_.function.arguments for call_ in calls] == ['{"city": "Oslo"}'] * 2
    assert calls[0].id != calls[1].id


@pytest.mark.parametrize(
    ("expected", "body"),
    [
        (openai.NotFoundError, {"model": "missing", "messages": MESSAGES}),
        (openai.BadRequestError, {"model": "ReverseModel", "messages": []}),
        (openai.BadRequestError, {"model": "ReverseModel", "messages": MESSAGES, "temperature": 3}),
        (openai.InternalServerError, {"model": "ReverseModel", "messages": [{"role": "user", "content": "!fault"}]}),
    ],
)
async def test_openai_errors(client: openai.AsyncOpenAI, expected: type[Exception], body: Any) -> None:
    with pytest.raises(expected):
        await client.chat.completions.create(**body)


async def test_openai_error_in_a_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="ReverseModel", messages=[{"role": "user", "content": "!fault well"}], stream=True
    )
    text = ""
    with pytest.raises(openai.APIError, match="generated !fault"):
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "well"
