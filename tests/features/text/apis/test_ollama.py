"""Ollama's API: chats, prompts, embeddings, models and errors, also with its client."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ollama
import pytest
import pytest_asyncio
from safetensors import safe_open

import dragoman
from dragoman_text.apis.ollama.routes import format_count
from dragoman_text.limits import MAX_TEXTS
from text_models import make_model
from text_server import TextServer, lines, serve

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("ignore::ResourceWarning")]
ECHO = """
import numpy as np

import dragoman
from dragoman.core.calls import Embed, Embedded, Generate
from dragoman.core.tensor import Tensor
from dragoman.core.text import Generation, PromptInfo, Text, Token

class Echo(dragoman.Model):
    placement = "inline"

    def generate(self, call: Generate) -> Generation:
        return Generation((Text(0, 0, "a", (Token(5, "a", -0.5),), 1, "eos_token", whole="a"),), (PromptInfo("b", 1),))

    def embed(self, call: Embed) -> Embedded:
        return Embedded(Tensor.of(np.ones((len(call.inputs), 2), np.float32)), 1)
"""
HELLO: list[Any] = [{"role": "user", "content": "hello you"}]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name":"weather","arguments":{"city":"Oslo"}}</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[TextServer]:
    async with serve() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server: TextServer) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(host=server.url) as client:
        yield client


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """Return a chat that the model answers with the text, and then the role."""
    messages = [{"role": "user", "content": " ".join(text.split(" ")[::-1])}]
    return {"model": "ReverseModel", "messages": messages, **fields}


async def test_a_stream_is_the_default(server: TextServer) -> None:
    response = await server.post("/api/chat", chat("you hello"))
    assert response.headers["content-type"] == "application/x-ndjson"
    *chunks, last = lines(response.body)
    assert [each["message"]["content"] for each in chunks] == ["you", " hello", " user:"]
    assert all(each["done"] is False and each["message"]["role"] == "assistant" for each in chunks)
    assert all(each["created_at"].endswith("Z") for each in chunks)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert (last["prompt_eval_count"], last["eval_count"]) == (3, 4)
    assert isinstance(last["total_duration"], int)


async def test_the_client(client: ollama.AsyncClient, server: TextServer) -> None:
    result = await client.chat("ReverseModel:latest", messages=HELLO, options={"num_predict": 1, "seed": -1})
    assert (result.message.content, result.done_reason) == ("you", "length")
    generated = await client.generate("ReverseModel", "one two", raw=True, options={"temperature": 0, "stop": ["one"]})
    assert generated.response == "two"
    generated = await client.generate("ReverseModel", "hello", system="Hi.")
    assert generated.response == "hello user: Hi. system:"
    streamed = [part async for part in await client.generate("ReverseModel", "one two", raw=True, stream=True)]
    assert "".join(part.response or "" for part in streamed) == "two one"
    embedded = await client.embed("ReverseModel", ["a", "b c"], dimensions=2)
    assert [list(vector) for vector in embedded.embeddings] == [pytest.approx([0.6, 0.8])] * 2
    assert embedded.prompt_eval_count == 3
    assert list((await client.embeddings("ReverseModel", "a")).embedding) == pytest.approx([0.6, 0.8, 0.0])
    listed = await client.list()
    assert [model.model for model in listed.models] == ["ReverseModel:latest"]
    shown = await client.show("ReverseModel")
    assert shown.capabilities == ["completion", "tools", "embedding"]
    assert [model.model for model in (await client.ps()).models] == ["ReverseModel:latest"]
    assert (await server.post("/api/show", {"name": "ReverseModel"})).status == 200
    version = (await server.request("GET", "/api/version")).json
    assert tuple(map(int, version["version"].split("."))) >= (
        0,
        12,
        11,
    )  # clients compare it with the versions of Ollama
    assert version["dragoman"] == dragoman.__version__


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (f"Well. {CALL} So.", {"tools": [WEATHER]}),
        (f"{CALL} {CALL}", {"tools": [WEATHER]}),
        ("<think> a b </think> c", {}),
        ("<think> a b </think> c", {"think": False}),
        ("a b", {"logprobs": True, "top_logprobs": 1}),
    ],
)
async def test_stream_and_whole_are_equal(server: TextServer, text: str, fields: Any) -> None:
    whole = (await server.post("/api/chat", chat(text, stream=False, **fields))).json
    chunks = lines((await server.post("/api/chat", chat(text, **fields))).body)
    for name in ("content", "thinking"):
        assert "".join(each["message"].get(name, "") for each in chunks) == whole["message"].get(name, "")
    calls = [call["function"] for each in chunks for call in each["message"].get("tool_calls", ())]
    assert calls == [call["function"] for call in whole["message"].get("tool_calls", ())]
    assert [p for each in chunks for p in each.get("logprobs", ())] == whole.get("logprobs", [])
    assert ("thinking" in whole["message"]) == ("think" in text and fields.get("think") is not False)


async def test_tools_of_the_client(client: ollama.AsyncClient, server: TextServer) -> None:
    result = await client.chat(**chat(CALL), tools=[WEATHER])
    (call,) = result.message.tool_calls or [None]
    assert call is not None
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})
    tool = {"role": "tool", "tool_name": "weather", "content": "rain"}
    history = [*HELLO, result.message.model_dump(exclude_none=True), tool]
    await client.chat("ReverseModel", messages=history, tools=[WEATHER], think="low")
    sent = server.model().calls[-1].prompts[0]
    assert sent.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert sent.options == {"enable_thinking": True, "reasoning_effort": "low"}
    for think, options in ((True, {"enable_thinking": True}), (False, {"enable_thinking": False}), (None, {})):
        await client.chat("ReverseModel", messages=HELLO, think=think)
        assert server.model().calls[-1].prompts[0].options == options


async def test_formats_and_options_reach_the_model(server: TextServer) -> None:
    schema = {"type": "object"}
    options = {"repeat_penalty": 1.5, "top_k": 3, "seed": 5, "num_ctx": 4096, "mirostat": 1}
    response = await server.post("/api/chat", chat("a", format=schema, options=options, keep_alive="5m"))
    sampling = server.model().calls[-1].sampling
    assert json.loads(sampling.grammar.text) == schema
    assert (sampling.repetition_penalty, sampling.top_k, sampling.seed) == (1.5, 3, 5)
    assert response.headers["x-ignored-parameters"] == "keep_alive, num_ctx, mirostat"
    await server.post("/api/generate", {"model": "ReverseModel", "prompt": "a", "format": "json"})
    assert server.model().calls[-1].sampling.grammar.kind == "json_object"


async def test_a_top_p_of_0_is_greedy(server: TextServer) -> None:
    for path, body in (("chat", chat("a")), ("generate", {"model": "ReverseModel", "prompt": "a"})):
        response = await server.post(f"/api/{path}", {**body, "options": {"top_p": 0, "temperature": 0.7}})
        assert (response.status, server.model().calls[-1].sampling.do_sample) == (200, False)


async def test_truncate_is_on_unless_it_is_false(server: TextServer) -> None:
    for fields, drops in (({}, True), ({"truncate": True}, True), ({"truncate": False}, False)):
        await server.post("/api/chat", chat("a", **fields))
        assert server.model().calls[-1].prompts[0].drops_turns is drops
        response = await server.post("/api/embed", {"model": "ReverseModel", "input": "a", **fields})
        assert response.status == 200
        assert server.model().embedded.truncate == (0 if drops else None)


async def test_no_messages_load_the_model(server: TextServer) -> None:
    result = (await server.post("/api/chat", {"model": "ReverseModel", "messages": []})).json
    assert (result["done_reason"], result["message"]["content"]) == ("load", "")
    result = (await server.post("/api/generate", {"model": "ReverseModel"})).json
    assert (result["done_reason"], result["response"]) == ("load", "")


async def test_keep_alive_of_the_client(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(ECHO)
    async with (
        serve(tmp_path, load_on_demand=True, unload_idle_s=1000.0) as server,
        ollama.AsyncClient(host=server.url) as client,
    ):

        async def expiry_s(name: str = "a") -> float | None:
            """Return the seconds until a model is unloaded, None if it is not loaded."""
            models = {each.model: each for each in (await client.ps()).models}
            if name + ":latest" not in models:
                return None
            model = models[name + ":latest"]
            assert model.expires_at is not None
            assert model.size == len(ECHO)
            return float((model.expires_at - datetime.now(UTC)).total_seconds())

        async def loads() -> list[bytes]:
            metrics = (await server.request("GET", "/metrics")).body.splitlines()
            return [line for line in metrics if line.startswith(b"dragoman_model_loads_total")]

        async def until_unloaded(name: str = "a") -> None:
            async with asyncio.timeout(60):
                while (remaining_s := await expiry_s(name)) is not None:
                    assert remaining_s < 60, "`keep_alive` has no effect"
                    await asyncio.sleep(0)

        assert await expiry_s() is None
        assert (await client.generate("a")).done_reason == "load"
        assert await expiry_s() == pytest.approx(1000, abs=60)
        assert await expiry_s("b") is None
        assert (await client.generate("a", "x", keep_alive=-1)).response == "a"
        assert await expiry_s() == pytest.approx((1 << 63) / 1e9, rel=1e-3)
        await client.chat("a", HELLO, keep_alive="1h30m")
        assert await expiry_s() == pytest.approx(5400, abs=60)
        loaded = await client.embed("b", "", keep_alive=200)
        assert (loaded.model, loaded.embeddings, loaded.prompt_eval_count) == ("b", [], None)
        assert await expiry_s("b") == pytest.approx(200, abs=60)
        await server.post("/api/embed", {"model": "b", "keep_alive": 0})
        await until_unloaded("b")
        assert (await client.embeddings("b", "")).embedding == []
        assert await expiry_s("b") == pytest.approx(1000, abs=60)
        await client.embed("a", "x", keep_alive=300.5)
        assert await expiry_s() == pytest.approx(300, abs=60)
        await client.chat("a", HELLO)  # which changes nothing
        assert await expiry_s() == pytest.approx(300, abs=60)
        for _ in range(2):  # a model that is not loaded stays so
            before = await loads()
            assert (await client.chat("a", [], keep_alive=0)).done_reason == "unload"
            assert await loads() == before
            await until_unloaded()
        assert (await client.generate("a", "x", keep_alive="1ms")).response == "a"
        await until_unloaded()
        assert [p.message.content async for p in await client.chat("a", HELLO, stream=True, keep_alive="0")] == [
            "a",
            "",
        ]
        await until_unloaded()
        assert (await client.generate("a", keep_alive=500)).done_reason == "load"
        assert await expiry_s() == pytest.approx(500, abs=60)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("chat", {"messages": 5}, 400, "`messages` must be a list"),
        ("chat", {"messages": [5]}, 400, "`messages[0]` must be"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": [5]}]}, 400, "`images` must be a list"),
        ("chat", {"messages": HELLO, "think": "much"}, 400, "`think` must be"),
        ("chat", {"messages": HELLO, "think": []}, 400, "`think` must be"),
        ("chat", {"messages": HELLO, "format": "xml"}, 400, "`format` must be"),
        ("chat", {"messages": HELLO, "options": 5}, 400, "`options` must be"),
        ("chat", {"messages": HELLO, "options": {"num_predict": "x"}}, 400, "`num_predict` must be"),
        ("chat", {"messages": HELLO, "tools": [5]}, 400, "`tools[0]` must be"),
        ("chat", {"messages": HELLO, "model": "missing"}, 404, "'missing' is not found; there are ReverseModel"),
        ("chat", {"keep_alive": 0}, 400, "unless models are loaded on demand"),
        ("chat", {"messages": HELLO, "keep_alive": "soon"}, 400, "`keep_alive` must be a number of seconds"),
        ("generate", {"keep_alive": True}, 400, "`keep_alive` must be a number of seconds"),
        ("generate", {"prompt": "a", "suffix": 5}, 400, "`suffix` must be a string"),
        ("generate", {"prompt": 5}, 400, "`prompt` must be"),
        ("embed", {"input": [""]}, 400, "`input` must be"),
        ("embed", {"input": 0}, 400, "`input` must be"),
        ("embed", {"input": ["a"] * (MAX_TEXTS + 1)}, 400, f"a list of at most {MAX_TEXTS} strings"),
        ("embed", {"input": "a", "truncate": "yes"}, 400, "`truncate` must be true or false"),
        ("embed", {"input": "a", "dimensions": 9}, 400, "`dimensions` must be"),
        ("show", {"model": "missing"}, 404, "not found"),
    ],
)
async def test_errors(server: TextServer, path: str, body: Any, status: int, message: str) -> None:
    response = await server.post(f"/api/{path}", {"model": "ReverseModel", **body})
    assert response.status == status, response.body
    assert list(response.json) == ["error"]
    assert message in response.json["error"]


async def test_an_error_in_a_stream_is_its_last_line(server: TextServer) -> None:
    assert lines((await server.post("/api/chat", chat("a !fault"))).body)[-1] == {"error": "generated !fault"}


async def test_pull_succeeds_for_a_served_model(client: ollama.AsyncClient, server: TextServer) -> None:
    assert (await client.pull("ReverseModel")).status == "success"
    assert [each.status async for each in await client.pull("ReverseModel:latest", stream=True)] == ["success"]
    for name in ("none", "none:latest"):
        with pytest.raises(ollama.ResponseError, match="downloads no models") as missing:
            await client.pull(name)
        assert missing.value.status_code == 404
    response = await server.post("/api/pull", {"name": "ReverseModel"})
    assert (response.headers["content-type"], response.json) == ("application/x-ndjson", {"status": "success"})


async def test_the_facts_of_a_folder(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny-llama")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    count = safetensors_count(folder)
    async with serve(str(tmp_path)) as server, ollama.AsyncClient(host=server.url) as client:
        for (model,) in ((await client.list()).models, (await client.ps()).models):
            assert model.size == size
            assert model.details is not None
            assert (model.details.format, model.details.family) == ("safetensors", "llama")
            assert model.details.parameter_size == f"{count / 1000:.0f}K"
            assert model.details.quantization_level == "F32"
        shown = await client.show("tiny-llama")
        assert shown.modelinfo is not None
        assert shown.modelinfo["general.parameter_count"] == count
        assert "messages" in (shown.template or "")
        metadata = (await server.request("GET", "/v2/models/tiny-llama")).json
        assert "chat_template_text" not in metadata["details"]  # only its existence
        for stream in (False, True):
            body = chat("a b", stream=stream, options={"num_predict": 4})
            last = lines((await server.post("/api/chat", {**body, "model": "tiny-llama"})).body.rstrip() + b"\n")[-1]
            durations = [last[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")]
            assert all(duration > 0 for duration in durations)
            assert sum(durations) == pytest.approx(last["total_duration"], abs=3)


def safetensors_count(folder: Path) -> int:
    """Return the number of parameters in the files of a folder."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


async def test_numbers_of_parameters_as_ollama_writes_them() -> None:
    expected = {0: "", 999: "999", 134_515_008: "134.52M", 8_000_000_000: "8B", 8_030_261_312: "8.0B", 7_000_000: "7M"}
    assert {count: format_count(count) for count in expected} == expected
