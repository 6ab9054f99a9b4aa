"""Sampling defaults of a model and of TensorRT-LLM, and parameters without effect in strict mode."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import architectures

from dragoman_text.generation.generation_config import default_sampling, end_tokens
from text_server import TextServer, serve

from .test_lmi import write_model

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = list(range(20, 32))
FILE = {
    "do_sample": False,  # not read, as in vLLM
    "temperature": 0.9,
    "top_k": 1,
    "repetition_penalty": 1.6,
    "max_new_tokens": 5,
    "eos_token_id": [2, 3],
    "no_repeat_ngram_size": 3,
    "top_p": 7,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("defaults") / "tiny"
    architectures.save_model(folder, "llama")
    (folder / "generation_config.json").write_text(json.dumps(FILE))
    template = json.loads((folder / "tokenizer_config.json").read_bytes())
    template["chat_template"] = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    return folder


def repository(folder: Path, settings: str = "") -> str:
    """Write the settings of the model; return the folder that holds it."""
    options = f"[model.parameters]\nthreads = 1\ndtype = 'float32'\ncache_memory = 0.05\n{settings}\n"
    (folder / "dragoman.toml").write_text(options)
    return str(folder.parent)


async def complete(server: TextServer, **body: Any) -> str:
    response = await server.post("/v1/completions", {"prompt": PROMPT, "ignore_eos": True, **body})
    assert response.status == 200, response.body
    text: str = response.json["choices"][0]["text"]
    return text


async def test_defaults_of_the_model_apply_to_openais_apis(folder: Path) -> None:
    async with serve(repository(folder)) as server:
        penalized = await complete(server, temperature=0, repetition_penalty=1.6)
        plain = await complete(server, temperature=0, repetition_penalty=1)
        assert penalized != plain
        assert {await complete(server) for _ in range(4)} == {penalized}
        assert await complete(server, temperature=0) == penalized, "greedy decoding keeps the penalty"
        assert await complete(server, top_k=-1, repetition_penalty=1, temperature=0) == plain
        assert len({await complete(server, top_k=0, temperature=2, seed=seed) for seed in range(4)}) > 1
        chat = {"messages": [{"role": "user", "content": "w5 w6 w7"}], "ignore_eos": True}
        for more, count in (({}, 5), ({"max_tokens": 9}, 9)):
            response = await server.post("/v1/chat/completions", {**chat, **more})
            assert response.json["usage"]["completion_tokens"] == count
        assert len(penalized.split()) > 5, "the default of /v1/completions is smaller than the context"
        # LMI's and TGI's documents define greedy defaults.
        prompt = " ".join(f"w{token}" for token in PROMPT)
        body = {"inputs": prompt, "parameters": {"max_new_tokens": 16, "ignore_eos_token": True}}
        assert (await server.post("/invocations", body)).json["generated_text"].split() == plain.split()
        metadata = (await server.request("GET", "/v2/models/tiny")).json
        assert "'repetition_penalty': 1.6" in str(metadata)
    async with serve(repository(folder, "generation_config = false")) as server:
        assert await complete(server, temperature=0) == plain


def item(role: str, count: int) -> dict[str, str]:
    return {"role": role, "content": " ".join(["w5"] * count)}


async def test_responses_tell_the_defaults_and_drop_the_oldest_turns(folder: Path) -> None:
    turns = [[item("user", 6), item("assistant", 5)] for _ in range(3)]
    system, last = item("system", 2), item("user", 4)
    async with serve(repository(folder, "max_context = 32")) as server:

        async def respond(items: Any, **fields: Any) -> tuple[int, Any]:
            body = {"input": items, "max_output_tokens": 8, "top_k": 1, "ignore_eos": True, **fields}
            response = await server.post("/v1/responses", body)
            return response.status, response.json

        _, default = await respond("w5")
        assert (default["temperature"], default["top_p"]) == (0.9, 1.0)
        _, chosen = await respond("w5", temperature=0.25, top_p=0.5)
        assert (chosen["temperature"], chosen["top_p"], chosen["truncation"]) == (0.25, 0.5, "disabled")
        events = await server.post("/v1/responses", {"input": "w5", "max_output_tokens": 1, "stream": True})
        assert events.body.count(b'"temperature":0.9') == 3  # created, in_progress, incomplete
        conversation = [system, *(each for turn in turns for each in turn), last]
        status, error = await respond(conversation)
        assert (status, error["error"]["code"]) == (400, "context_length_exceeded")
        status, shortened = await respond(conversation, truncation="auto")
        assert (status, shortened["truncation"]) == (200, "auto"), shortened
        _, expected = await respond([system, *turns[-1], last])
        assert shortened["usage"]["input_tokens"] == expected["usage"]["input_tokens"] == 17
        assert shortened["output"][0]["content"] == expected["output"][0]["content"]
        _, whole = await respond([system, *turns[-1], last], truncation="auto")
        assert whole["usage"]["input_tokens"] == 17, "nothing is dropped that fits"
        status, error = await respond([item("user", 3), item("user", 40)], truncation="auto")
        assert (status, error["error"]["code"]) == (400, "context_length_exceeded")


def test_defaults_are_checked_and_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = {"temperature": 0.9, "top_k": 1, "repetition_penalty": 1.6, "max_new_tokens": 5}
    assert default_sampling(folder) == expected
    assert "`top_p` must be a number >= 0.0 and <= 1.0; got 7" in caplog.text
    assert "not applied: no_repeat_ngram_size" in caplog.text


def test_end_tokens_are_those_of_the_file_and_of_the_tokenizer(folder: Path) -> None:
    class Vocabulary:
        class tokenizer:  # noqa: N801
            eos_token_id = 7

    vocabulary: Any = Vocabulary()
    assert end_tokens(folder, vocabulary) == {2, 3, 7}
    assert end_tokens(folder / "none", vocabulary) == {7}


HELLO = [{"role": "user", "content": "a"}]
WITHOUT_EFFECT: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/completions", {"prompt": "a", "temperature": 0, "seed": 3}, 400, "`seed`"),
    ("/v1/chat/completions", {"messages": HELLO, "temperature": 0, "top_p": 0.5}, 400, "`top_p`"),
    ("/v1/completions", {"prompt": "a", "length_penalty": 2}, 400, "`length_penalty`"),
    ("/invocations", {"inputs": "a", "parameters": {"temperature": 0.5, "top_k": 4}}, 424, "`temperature`, `top_k`"),
    ("/generate", {"inputs": "a", "parameters": {"seed": 0}}, 422, "`seed`"),
]


async def test_parameters_without_effect_are_rejected_in_strict_mode() -> None:
    async with serve() as server:
        for path, body, _, _ in WITHOUT_EFFECT:
            assert (await server.post(path, body)).status == 200
    async with serve(strict_parameters=True) as server:
        for path, body, status, names in WITHOUT_EFFECT:
            response = await server.post(path, body)
            error = response.json["error"]
            message = error if isinstance(error, str) else error["message"]
            assert response.status == status
            assert message.endswith(f"parameters that have no effect here: {names}; expected none of them")
        neutral = {"prompt": "a", "temperature": 0, "top_p": 1, "length_penalty": 1.0}
        assert (await server.post("/v1/completions", neutral)).status == 200
        assert not [call for call in server.model().calls if call.sampling.seed is not None]


async def test_sampling_defaults_of_tensorrt_llm(tmp_path: Path) -> None:
    async with serve(write_model(tmp_path, rolling_batch="trtllm")) as server:
        for parameters, expected in (
            ({"do_sample": True}, (5, 0.85, 0.8)),
            ({"do_sample": True, "top_k": 0, "temperature": 1.0}, (0, 0.85, 1.0)),
            ({"top_p": 0.5}, (0, 0.5, 1.0)),
        ):
            assert (await server.post("/invocations", {"inputs": "a b", "parameters": parameters})).status == 200
            sampling = server.model("custom").calls[-1].sampling
            assert (sampling.top_k, sampling.top_p, sampling.temperature) == expected
