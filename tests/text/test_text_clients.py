"""The clients that people have, as they are, against a server: text-generation, huggingface_hub and openai."""

import asyncio
import warnings
from collections.abc import AsyncIterator
from typing import Any

import pytest

from .text_house import House, speaking

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import huggingface_hub
    import openai
    import text_generation
    from text_generation import errors as tgi_errors

# What a client's own library finds fault with in that client is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20", "ignore::ResourceWarning")

MESSAGES: list[Any] = [{"role": "user", "content": "hello big world"}]
ANSWER = "world big hello user:"


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with speaking() as made:
        yield made


# --- text-generation -----------------------------------------------------------------------------------------


async def test_text_generation_plain(house: House) -> None:
    client = text_generation.Client(house.url)
    answer = await asyncio.to_thread(client.generate, "one two three", max_new_tokens=2)
    assert answer.generated_text == "three two"
    assert answer.details.finish_reason == "length"
    assert answer.details.generated_tokens == 2
    assert [t.text for t in answer.details.tokens] == ["three", " two"]
    assert answer.details.seed is None


async def test_text_generation_at_a_models_own_path(house: House) -> None:
    client = text_generation.Client(f"{house.url}/models/someone/Speaker")
    assert (await asyncio.to_thread(client.generate, "one two")).generated_text == "two one"
    client = text_generation.Client(f"{house.url}/models/Speaker")
    answer = await asyncio.to_thread(client.generate, "one two", do_sample=True, seed=3, decoder_input_details=True)
    assert answer.generated_text == "two one"
    assert answer.details.seed == 3
    assert [t.logprob for t in answer.details.prefill] == [None, -0.125]


async def test_text_generation_best_of(house: House) -> None:
    client = text_generation.Client(house.url)
    answer = await asyncio.to_thread(client.generate, "one two three", best_of=2, do_sample=True)
    assert answer.generated_text == "three two one"
    assert [s.generated_text for s in answer.details.best_of_sequences] == ["two one"]


async def test_text_generation_stream(house: House) -> None:
    client = text_generation.Client(house.url)
    pieces = await asyncio.to_thread(lambda: list(client.generate_stream("one two three")))
    assert "".join(p.token.text for p in pieces if not p.token.special) == "three two one"
    assert pieces[-1].generated_text == "three two one"
    assert pieces[-1].details.finish_reason == "eos_token"
    assert all(p.details is None for p in pieces[:-1])


async def test_text_generation_faults(house: House) -> None:
    client = text_generation.Client(house.url)
    long = " ".join("x" * 100)
    for ask in (lambda: client.generate(long), lambda: list(client.generate_stream(long))):
        with pytest.raises(tgi_errors.ValidationError):
            await asyncio.to_thread(ask)
    for ask in (lambda: client.generate("!fault"), lambda: list(client.generate_stream("!fault a"))):
        with pytest.raises(tgi_errors.GenerationError):
            await asyncio.to_thread(ask)
    for name in ("nobody", "someone/nobody"):
        with pytest.raises(tgi_errors.NotFoundError):
            await asyncio.to_thread(text_generation.Client(f"{house.url}/models/{name}").generate, "a")


async def test_text_generation_chat(house: House) -> None:
    client = text_generation.Client(house.url)
    messages = [text_generation.types.Message(**MESSAGES[0])]
    answer = await asyncio.to_thread(client.chat, messages, max_tokens=2)
    assert answer.choices[0].message.content == "world big"

    def until_finished() -> str:  # the client itself stumbles over the [DONE] behind that, TGI's as well
        text = ""
        for piece in client.chat(messages, stream=True):
            text += piece.choices[0].delta.content
            if piece.choices[0].finish_reason:
                break
        return text

    assert await asyncio.to_thread(until_finished) == ANSWER


async def test_text_generation_with_asyncio(house: House) -> None:
    client = text_generation.AsyncClient(house.url)
    answer = await client.generate("one two three")
    assert answer.generated_text == "three two one"
    pieces = [piece async for piece in client.generate_stream("one two three", max_new_tokens=1)]
    assert [p.token.text for p in pieces] == ["three"]
    with pytest.raises(tgi_errors.ValidationError):
        await client.generate(" ".join("x" * 100))


# --- huggingface_hub -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/invocations", "/models/Speaker", "/generate"])
async def test_hub_text_generation(house: House, path: str) -> None:
    client = huggingface_hub.InferenceClient(base_url=house.url + path)
    assert await asyncio.to_thread(client.text_generation, "one two three") == "three two one"
    told = await asyncio.to_thread(client.text_generation, "one two three", details=True, max_new_tokens=2)
    assert told.details is not None
    assert told.details.finish_reason == "length"
    assert [t.text for t in told.details.tokens] == ["three", " two"]


async def test_hub_text_generation_stream(house: House) -> None:
    client = huggingface_hub.InferenceClient(base_url=house.url)

    def ask(details: bool) -> list[Any]:
        return list(client.text_generation("one two three", stream=True, details=details))

    assert "".join(await asyncio.to_thread(ask, False)).replace("</s>", "") == "three two one"
    pieces = await asyncio.to_thread(ask, True)
    assert pieces[-1].generated_text == "three two one"
    assert [p.index for p in pieces] == [1, 2, 3, 4]


async def test_hub_text_generation_with_asyncio(house: House) -> None:
    client = huggingface_hub.AsyncInferenceClient(base_url=house.url)
    assert await client.text_generation("one two three", max_new_tokens=1) == "three"


async def test_hub_faults(house: House) -> None:
    client = huggingface_hub.InferenceClient(base_url=house.url)
    long = " ".join("x" * 100)
    for ask in (
        lambda: client.text_generation(long),
        lambda: list(client.text_generation(long, stream=True)),
        lambda: list(client.text_generation(long, stream=True, details=True)),
    ):
        with pytest.raises(huggingface_hub.errors.ValidationError, match="context 64"):
            await asyncio.to_thread(ask)
    with pytest.raises(huggingface_hub.errors.GenerationError, match="would not say"):
        await asyncio.to_thread(client.text_generation, "!fault")


async def test_hub_chat(house: House) -> None:
    client = huggingface_hub.InferenceClient(base_url=house.url)
    answer = await asyncio.to_thread(client.chat_completion, MESSAGES)
    assert answer.choices[0].message.content == ANSWER
    pieces = await asyncio.to_thread(lambda: list(client.chat_completion(MESSAGES, stream=True)))
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == ANSWER
    assert pieces[-1].choices[0].finish_reason == "stop"
    there = huggingface_hub.InferenceClient(base_url=f"{house.url}/models/Speaker")
    assert (await asyncio.to_thread(there.chat_completion, MESSAGES)).choices[0].message.content == ANSWER


# --- openai --------------------------------------------------------------------------------------------------


@pytest.fixture
async def client(house: House) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_openai_from_a_thread(house: House) -> None:
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as made:
        answer = await asyncio.to_thread(made.completions.create, model="Speaker", prompt="one two")
        assert answer.choices[0].text == "two one"


async def test_openai_models(client: openai.AsyncOpenAI) -> None:
    assert [m.id async for m in client.models.list()] == ["Speaker", "Speaker:pirate"]
    assert (await client.models.retrieve("Speaker")).object == "model"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")


async def test_openai_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="Speaker", messages=MESSAGES, max_completion_tokens=2, logprobs=True, top_logprobs=2, n=2
    )
    assert [c.message.content for c in answer.choices] == ["world big", "big hello"]
    assert {c.finish_reason for c in answer.choices} == {"length"}
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content
    assert [(t.token, t.logprob) for t in content] == [("world", -0.5), (" big", -1.0)]
    assert [t.token for t in content[0].top_logprobs] == ["world", "world1"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 4, 8)


async def test_openai_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tgi", messages=MESSAGES, stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: ANSWER, 1: "big hello user:"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    assert len({chunk.id for chunk in chunks}) == 1


async def test_openai_completion(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="Speaker", prompt=["a b c", "d e f"], stop=[" b"], max_tokens=5)
    assert [c.text for c in answer.choices] == ["c b a", "f e d"]
    answer = await client.completions.create(model="Speaker", prompt=[[1, 2], [3]], logprobs=1, echo=True)
    assert [c.text for c in answer.choices] == ["1 22 1", "33"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 1, 3, 4, 6]


async def test_openai_completion_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="Speaker", prompt=["a b", "c"], stream=True)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "b a", 1: "c"}


async def test_openai_embeddings(client: openai.AsyncOpenAI) -> None:
    answer = await client.embeddings.create(model="Speaker", input=["a b", "c"])  # in base64, as the client asks for it
    assert [[round(x, 6) for x in d.embedding] for d in answer.data] == [[0.6, 0.8, 0.0]] * 2
    assert answer.usage.total_tokens == 3
    short = await client.embeddings.create(model="Speaker", input="a", dimensions=1, encoding_format="float")
    assert short.data[0].embedding == [1.0]


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
CALLING = '= {"name": "weather", "arguments": {"city": "Oslo"}}'


async def test_openai_tools(client: openai.AsyncOpenAI, house: House) -> None:
    called: list[Any] = [
        {"role": '=<tool_call>{"name":"weather","arguments":{"city":"Oslo"}}</tool_call>', "content": ""}
    ]
    answer = await client.chat.completions.create(model="Speaker", messages=called, tools=TOOLS)
    assert house.model().calls[-1].prompts[0].tools == tuple(TOOLS)
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_openai_adds_up_a_stream_itself(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="Speaker", messages=MESSAGES) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert (message.role, message.content) == ("assistant", ANSWER)


async def test_openai_adds_up_a_stream_of_calls_itself(client: openai.AsyncOpenAI) -> None:
    call = '{"name":"weather","arguments": {"city": "Oslo"} }'
    asked: list[Any] = [{"role": f"=[ {call} , {call} ] !end", "content": ""}]
    async with client.chat.completions.stream(
        model="Speaker", messages=asked, tools=TOOLS, tool_choice="required", stop=["!end"]
    ) as stream:
        kinds = [event.type async for event in stream]
        choice = (await stream.get_final_completion()).choices[0]
    assert kinds.count("tool_calls.function.arguments.delta") > 2
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls or []
    assert [made.function.arguments for made in calls] == ['{"city": "Oslo"}'] * 2
    assert calls[0].id != calls[1].id


@pytest.mark.parametrize(
    ("raise_", "ask"),
    [
        (openai.NotFoundError, {"model": "nobody", "messages": MESSAGES}),
        (openai.BadRequestError, {"model": "Speaker", "messages": []}),
        (openai.BadRequestError, {"model": "Speaker", "messages": MESSAGES, "temperature": 3}),
        (openai.InternalServerError, {"model": "Speaker", "messages": [{"role": "user", "content": "!fault"}]}),
    ],
)
async def test_openai_faults(client: openai.AsyncOpenAI, raise_: type[Exception], ask: Any) -> None:
    with pytest.raises(raise_):
        await client.chat.completions.create(**ask)


async def test_openai_fault_in_mid_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="Speaker", messages=[{"role": "user", "content": "!fault well"}], stream=True
    )
    text = ""
    with pytest.raises(openai.APIError, match="would not say"):
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "well"
