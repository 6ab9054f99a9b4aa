"""Images in the requests of every chat API, also with the clients of OpenAI, Anthropic and Ollama."""

import asyncio
import json
import threading
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from text_server import TextServer, serve

pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ollama
    import openai
    import PIL.Image

    import vision_models
    from dragoman.core.calls import Generate
    from dragoman.core.chunks import Take, pushes
    from dragoman.core.errors import Overloaded
    from dragoman.core.spec import ModelSpec
    from dragoman.core.text import Chat, FinishReason, Generation, Text
    from dragoman_text.generation.image_queue import ImageQueue
    from dragoman_text.generation.loading import LocalEngine
    from dragoman_text.generation.vision import load_processor
    from dragoman_text.runtimes.text_model import TextModel
    from vision_models import VisionReference, file_of, image

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("ignore")]
NEW = 5
PICTURE = image(7)
DATA = file_of(PICTURE)
URL = f"data:image/png;base64,{DATA}"
SETTINGS = (
    "[model]\nparameters = {max_images = 2, image_memory = 1, threads = 1, dtype = 'float32', cache_memory = 0.05}\n"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TextServer]:
    folder = tmp_path_factory.mktemp("vision") / "eyes"
    vision_models.save_model(folder)
    (folder / "dragoman.toml").write_text(SETTINGS)
    async with serve(str(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: TextServer) -> tuple[int, str]:
    """Return the tokens of the prompt and the completion of transformers, for the image before "what?"."""
    folder = Path(server.model("eyes").spec.uri)
    reference = VisionReference(folder, load_processor(folder))
    content = [{"type": "image"}, {"type": "text", "text": "what?"}]
    count, tokens = reference.generate([{"role": "user", "content": content}], [PICTURE], NEW)
    return count, reference.processor.tokenizer.decode(tokens, skip_special_tokens=True)


async def test_openai_chat(server: TextServer, expected: tuple[int, str]) -> None:
    parts: Any = [{"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, {"type": "text", "text": "what?"}]
    options: Any = {"max_tokens": NEW, "temperature": 0, "extra_body": {"ignore_eos": True}}
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        result = await client.chat.completions.create(
            model="eyes", messages=[{"role": "user", "content": parts}], **options
        )
        assert result.usage is not None
        assert (result.usage.prompt_tokens, result.choices[0].message.content) == expected


async def test_openai_responses(server: TextServer, expected: tuple[int, str]) -> None:
    content: Any = [
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_text", "text": "what?"},
    ]
    options: Any = {"max_output_tokens": NEW, "temperature": 0, "extra_body": {"ignore_eos": True}}
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        result = await client.responses.create(model="eyes", input=[{"role": "user", "content": content}], **options)
        assert result.usage is not None
        assert (result.usage.input_tokens, result.output_text) == expected
        continued = await client.responses.create(
            model="eyes", input="more", previous_response_id=result.id, max_output_tokens=1
        )
        assert continued.usage is not None
        assert continued.usage.input_tokens > expected[0]


async def test_anthropic(server: TextServer, expected: tuple[int, str]) -> None:
    import anthropic  # a second and a half

    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    messages: Any = [{"role": "user", "content": content}]
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        result = await client.messages.create(
            model="eyes", messages=messages, max_tokens=NEW, extra_body={"temperature": 0}
        )
        text = "".join(block.text for block in result.content if block.type == "text")
        assert result.usage.input_tokens == expected[0]
        assert expected[1].startswith(text)  # the API cannot ignore the end token
        counted = await client.messages.count_tokens(model="eyes", messages=messages)
        assert counted.input_tokens == expected[0]


async def test_ollama(server: TextServer, expected: tuple[int, str]) -> None:
    options = {"num_predict": NEW, "temperature": 0}
    async with ollama.AsyncClient(host=server.url) as client:
        message = {"role": "user", "content": "what?", "images": [DATA]}
        chat = await client.chat("eyes", messages=[message], options=options)
        assert (chat.prompt_eval_count, expected[1].startswith(chat.message.content or "")) == (expected[0], True)
        generated = await client.generate("eyes", "what?", images=[DATA], options=options)
        assert (generated.prompt_eval_count, generated.response) == (expected[0], chat.message.content)
        assert "vision" in ((await client.show("eyes")).capabilities or [])


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(DATA[i : i + 76] for i in range(0, len(DATA), 76)),
        DATA.replace("+", "-").replace("/", "_").rstrip("="),
    ],
    ids=["lines", "alphabet for URLs"],
)
async def test_base64_as_other_clients_write_it(server: TextServer, text: str) -> None:
    bodies = [{**chat(f"data:image/png;base64,{each}"), "max_tokens": NEW, "temperature": 0} for each in (text, DATA)]
    response, same = [await server.post("/v1/chat/completions", body) for body in bodies]
    assert (response.status, response.json["choices"]) == (200, same.json["choices"])


def chat(*urls: Any, role: str = "user") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "eyes", "messages": [{"role": role, "content": [*parts, {"type": "text", "text": "a"}]}]}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", chat("http://169.254.169.254/x.png"), "must be a data: URL"),
        ("/v1/chat/completions", chat("file:///etc/passwd"), "must be a data: URL"),
        ("/v1/chat/completions", chat("data:image/png,abc"), "must be a data: URL"),
        ("/v1/chat/completions", chat(5), "must be a data: URL"),
        ("/v1/chat/completions", chat(URL, role="system"), "must have parts of text alone"),
        ("/v1/chat/completions", chat(URL, URL, URL), "images: expected at most 2"),
        ("/v1/chat/completions", chat("data:image/png;base64,aGVsbG8="), "images[0]: expected an image"),
        (
            "/v1/responses",
            {"model": "eyes", "input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "`file_id` of an input_image is not supported",
        ),
        (
            "/v1/messages",
            {
                "model": "eyes",
                "max_tokens": 1,
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a/b"}}]}
                ],
            },
            'must be of type "base64"',
        ),
        (
            "/api/generate",
            {"model": "eyes", "prompt": "a", "images": [DATA], "raw": True},
            "`images` must not be given with `raw`",
        ),
        (
            "/api/chat",
            {"model": "eyes", "messages": [{"role": "user", "content": "a", "images": "abc"}]},
            "must be a list of image files in base64",
        ),
    ],
)
async def test_invalid_images(server: TextServer, path: str, body: Any, message: str) -> None:
    response = await server.post(path, body)
    assert response.status == 400
    assert message in json.dumps(response.json, ensure_ascii=False).replace('\\"', '"')


async def test_images_do_not_block_other_requests(server: TextServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an image is decoded, the event loop answers."""
    decoding, resume, decode = threading.Event(), threading.Event(), PIL.Image.open

    def wait(*arguments: Any, **options: Any) -> Any:
        decoding.set()
        assert resume.wait(60), "nothing else was answered"
        return decode(*arguments, **options)

    monkeypatch.setattr("PIL.Image.open", wait)
    request = asyncio.create_task(server.post("/v1/chat/completions", {**chat(URL), "max_tokens": 1}))
    assert await asyncio.to_thread(decoding.wait, 60)
    for _ in range(5):
        assert (await server.request("GET", "/v2/health/live")).status == 200
    assert not request.done()
    resume.set()
    assert (await request).status == 200


async def test_the_images_of_all_requests_together_are_limited(
    server: TextServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one image of 2 MB is processed, another one is rejected; then it is accepted."""
    url = f"data:image/bmp;base64,{'A' * 2_000_000}"
    started, resume, split = threading.Event(), threading.Event(), LocalEngine.split_call

    def wait(engine: LocalEngine, call: Any) -> Any:
        if not started.is_set():
            started.set()
            resume.wait(60)
        return split(engine, call)

    message = chat(url)["messages"][0]
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    anthropic_message = {"role": "user", "content": [{"type": "image", "source": source}]}
    rejected: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/chat/completions", {"messages": [message]}, 503),
        ("/v1/chat/completions", {"messages": [message], "stream": True}, 503),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}, 503),
        ("/v1/messages", {"messages": [anthropic_message], "max_tokens": 1}, 503),
        ("/v1/messages/count_tokens", {"messages": [anthropic_message]}, 503),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": [source["data"]]}]}, 503),
        ("/chat_tokenize", {"messages": [message]}, 429),
    ]
    monkeypatch.setattr(LocalEngine, "split_call", wait)
    try:
        first = asyncio.create_task(server.post("/v1/chat/completions", {"model": "eyes", "messages": [message]}))
        await asyncio.to_thread(started.wait, 60)
        for path, body, status in rejected:
            response = await server.post(path, {"model": "eyes", **body})
            assert response.status == status, (path, response.body[:200])
            assert b"(image_memory)" in response.body, path
        assert (await server.post("/v1/chat/completions", {**chat(), "max_tokens": 1})).status == 200
    finally:
        resume.set()
    assert (await first).status == 400  # it is no image
    for path, body, _ in rejected:
        assert (await server.post(path, {"model": "eyes", **body})).status in (400, 422), path


async def test_the_memory_of_processed_images_is_limited() -> None:
    images = ImageQueue(100)
    with images.reserve(60) as first:
        first(1000)  # alone it may have any size
        with pytest.raises(Overloaded), images.reserve(1):
            pass
    with images.reserve(60), images.reserve(30) as second, pytest.raises(Overloaded):
        second(20)
    with images.reserve(60), images.reserve(40):
        pass


async def test_processed_images_are_counted_until_their_calls_end() -> None:
    """A small file, such as one of a single color, can become large tensors."""

    class Engine:
        def split_call(self, call: Generate) -> list[Any]:
            return [SimpleNamespace(features={"pixel_values": SimpleNamespace(nbytes=600 << 20)})]

        @pushes
        async def generate(self, requests: list[Any], take: Take[Generation]) -> None:
            ends: tuple[FinishReason, ...] = ("", "length")
            for finish in ends:
                if (wait := take(Generation((Text(finish=finish),)))) is not None:
                    await wait

    model = TextModel(ModelSpec(name="eyes"))  # with the default of image_memory, 1 GiB
    model.text_engine = Engine()
    content = [{"type": "image", "base64": DATA}]
    call = Generate(prompts=(Chat(({"role": "user", "content": content},)),), stream=True)
    first = model.generate(call)
    await anext(first)
    with pytest.raises(Overloaded, match="image_memory"):
        await anext(model.generate(call))
    await first.aclose()
    assert len([chunk async for chunk in model.generate(call)]) == 2


async def test_a_cancelled_call_holds_the_queue_until_its_images_are_processed() -> None:
    images, started, resume, ended = ImageQueue(100), threading.Event(), threading.Event(), list[int]()

    def wait() -> None:
        started.set()
        resume.wait(60)

    first = asyncio.create_task(images.run(wait, 60))
    await asyncio.to_thread(started.wait, 60)
    first.cancel()
    second = asyncio.create_task(images.run(lambda: ended.append(2), 60))
    await asyncio.sleep(0)
    assert not first.done()
    resume.set()
    await second
    assert (first.cancelled(), ended) == (True, [2])
    images.close()
