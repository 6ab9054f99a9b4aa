"""A language model and an encoder on one server: every API and client with the text engine."""

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import dragoman
from deploy.test_monitoring import check_query, dashboard_queries, page_queries
from text_server import TextServer, events

pytest.importorskip("torch")
pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import huggingface_hub
    import openai
    import text_generation
    import tritonclient.grpc
    import tritonclient.http

pytestmark = [
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]
PROMPT = "A class definition"


@dataclass(frozen=True)
class ServerThread:
    """A server in another thread, for blocking clients."""

    server: dragoman.Server

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.server.http_ports[0]}"

    @property
    def grpc_url(self) -> str:
        return self.server.grpc_url

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Send a request; return status and JSON."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"http://{self.url}{path}", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    import text_models

    folder = tmp_path_factory.mktemp("text")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text_models.make_model(folder / "story")
        _encoder(folder / "encoder")
    (folder / "story" / "dragoman.toml").write_text("[model]\nmax_queue = 0\nparameters = {threads = 1}\n")
    (folder / "encoder" / "dragoman.toml").write_text("[model]\nplacement = 'thread'\n")
    with _run_server(dragoman.Server(str(folder), http_port=0, grpc_port=0)) as server:
        yield server


@contextmanager
def _run_server(server: dragoman.Server) -> Iterator[ServerThread]:
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with server:
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(300)
        yield ServerThread(server)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def _encoder(folder: Path) -> None:
    import tokenizers
    import torch
    import transformers

    word_level = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1, "one": 2}, unk_token="[UNK]")
    )
    word_level.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=word_level, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=3, max_position_embeddings=32, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def post_json(server: ServerThread, path: str, body: Any) -> Any:
    status, response = server.post(path, body)
    assert status == 200, response
    return response


@pytest.fixture(scope="module")
def greedy(server: ServerThread) -> str:
    text: str = post_json(server, "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 10}})[
        "generated_text"
    ]
    return text


def test_engine_metrics(server: ServerThread) -> None:
    def fetch_metrics() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{server.url}/metrics", timeout=60) as response:
            lines = [line for line in response.read().decode().splitlines() if 'model="story"' in line]
        samples = [(line.partition("{")[0], float(line.rpartition(" ")[2])) for line in lines if "_bucket" not in line]
        return {name: sum(value for other, value in samples if other == name) for name, _ in samples}

    tokens = len(post_json(server, "/tokenize", {"inputs": PROMPT, "model": "story"}))
    post_json(server, "/generate", {"inputs": PROMPT})
    before = fetch_metrics()
    post_json(server, "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 5}})
    idle = ("queue_size", "batch_size", "cache_usage", "batch_max_tokens")
    end_s = time.monotonic() + 60
    while True:  # a step counts once it has sent its tokens
        after = fetch_metrics()
        new = {name.removeprefix("dragoman_text_"): after[name] - before[name] for name in after}
        has_ended = not any(after[f"dragoman_text_{name}"] for name in idle)
        if (has_ended and new["steps_total"] == new["step_seconds_count"] >= 5) or time.monotonic() > end_s:
            break
    parts = ("validation", "queue", "inference")
    assert [new[f"{part}_seconds_count"] for part in (*parts, "duration", "token")] == [1] * 5
    assert sum(new[f"{part}_seconds_sum"] for part in parts) == pytest.approx(new["duration_seconds_sum"])
    assert new["token_seconds_sum"] == pytest.approx(new["inference_seconds_sum"] / 5)
    assert (new["prompt_tokens_sum"], new["generated_tokens_sum"], new["max_new_tokens_sum"]) == (tokens, 5, 5)
    assert new["steps_total"] == new["step_seconds_count"] >= 5
    assert new["step_seconds_sum"] < new["inference_seconds_sum"]
    assert [after[f"dragoman_text_{name}"] for name in idle] == [0] * 4
    assert after["dragoman_text_cache_blocks"] > 0
    with ThreadPoolExecutor(1) as threads:  # while it generates, however often that takes
        running, end_s = threads.submit(time.sleep, 0), time.monotonic() + 60
        while not (during := fetch_metrics())["dragoman_text_cache_usage"]:
            assert time.monotonic() < end_s, "the use of the cache stays 0"
            if running.done():
                running = threads.submit(post_json, server, "/generate", {"inputs": PROMPT})
    assert 0 < during["dragoman_text_cache_usage"] < 1


def test_stop_reasons(server: ServerThread) -> None:
    def reasons(**fields: Any) -> tuple[str, Any]:
        body = {"model": "story", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
        choice = post_json(server, "/v1/completions", body)["choices"][0]
        return choice["finish_reason"], choice["stop_reason"]

    end = post_json(server, "/tokenize", {"model": "story", "prompt": "<|end|>", "add_special_tokens": False})[
        "tokens"
    ][0]
    only_end = {"logit_bias": {str(end): 100}}
    assert reasons(**only_end) == ("stop", None)  # the end token, not a stop token of the request
    assert reasons(**only_end, ignore_eos=True, stop_token_ids=[end]) == ("stop", end)
    assert reasons() == ("length", None)


def test_included_stop_strings_do_not_delay_tokens(server: ServerThread) -> None:
    def stream_tokens(**parameters: Any) -> list[str]:
        words = {"type": "regex", "value": "one two three four five six seven"}
        parameters_ = {"max_new_tokens": 8, "details": True, "grammar": words, **parameters}
        body = {"inputs": PROMPT, "parameters": parameters_}
        whole = post_json(server, "/generate", body)
        url, data = f"http://{server.url}/generate_stream", json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=120) as response:
            streamed = events(response.read())
        tokens = [token["text"] for token in whole["details"]["tokens"]]
        assert [event["token"]["text"] for event in streamed] == tokens
        assert streamed[-1]["generated_text"] == whole["generated_text"] == "".join(tokens)
        return tokens

    plain = stream_tokens()
    first, second, third = plain[1:4]
    assert stream_tokens(stop=[first + second + "§"]) == plain
    assert stream_tokens(stop=[first + "§", second + third]) == plain[:4]
    assert stream_tokens(stop=[second + third[:1]]) == [*plain[:3], third[:1]]


def test_tokenize_and_detokenize(server: ServerThread) -> None:
    def tokenize(**body: Any) -> list[int]:
        tokens: list[int] = post_json(server, "/tokenize", {"model": "story", **body})["tokens"]
        return tokens

    start, *rest = tokenize(prompt=PROMPT)
    assert tokenize(prompt=PROMPT, add_special_tokens=False) == rest
    assert post_json(server, "/detokenize", {"model": "story", "tokens": rest}) == {"prompt": PROMPT}
    start_text = post_json(server, "/detokenize", {"model": "story", "tokens": [start]})["prompt"]
    assert (
        post_json(server, "/detokenize", {"model": "story", "tokens": [start, *rest]})["prompt"] == start_text + PROMPT
    )
    assert post_json(server, "/detokenize", {"model": "story", "tokens": []}) == {"prompt": ""}
    status, result = server.post("/detokenize", {"model": "story", "tokens": [1 << 30]})
    assert (status, result["error"]["param"]) == (400, "tokens")
    messages = [{"role": "user", "content": "hi"}]
    chat = tokenize(messages=messages)
    assert tokenize(messages=messages, add_special_tokens=False) == chat
    assert tokenize(messages=messages, add_special_tokens=True) == [start, *chat]  # before those of the template


def test_continue_final_message(server: ServerThread) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello, I"}]
    continuing = {"add_generation_prompt": False, "continue_final_message": True}

    def apply_template(**more: Any) -> str:
        text: str = post_json(server, "/models/story/chat_tokenize", {"messages": messages, **more})["templated_text"]
        return text

    assert apply_template(**continuing).endswith("<|assistant|>Hello, I")
    assert apply_template(add_generation_prompt=False) == apply_template(**continuing) + "\n"
    chat_body = {"model": "story", "messages": messages, "max_tokens": 4, "temperature": 0, **continuing}
    continued = post_json(server, "/v1/chat/completions", chat_body)["choices"][0]["message"]["content"]
    completion_body = {"model": "story", "prompt": apply_template(**continuing), "max_tokens": 4, "temperature": 0}
    same = post_json(server, "/v1/completions", {**completion_body, "add_special_tokens": False})["choices"][0]["text"]
    assert continued == same


def test_what_the_template_cannot_show_is_written_as_text(server: ServerThread) -> None:
    """The template of this model describes tools, but shows no calls."""

    def prompt(**fields: Any) -> str:
        body = {"model": "story", **fields}
        tokens = post_json(server, "/tokenize", body)["tokens"]
        return str(post_json(server, "/detokenize", {"model": "story", "tokens": tokens})["prompt"])

    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3 C"},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "user", "content": "So?"},
    ]
    text = prompt(messages=messages, tools=[tool])
    assert "one\ntwo" in text
    assert json.dumps(tool) in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    assert "<tool_response>\n3 C\n</tool_response>" in text
    shown = post_json(server, "/api/show", {"model": "story"})
    assert shown["capabilities"] == ["completion", "tools"]
    with urllib.request.urlopen(f"http://{server.url}/v2/models/story", timeout=60) as response:
        template = json.loads(response.read())["details"]["chat_template"]
    assert (template["tools"], template["tool_calls"], template["content"]) == (True, False, ["text"])


def test_tool_calls_are_streamed_while_generated(server: ServerThread) -> None:
    """A grammar of the request replaces training: the model writes calls with `tool_choice` auto."""
    call_regex = r'Well\. <tool_call>\{"name": "f", "arguments": \{"a": "[a-z ]{12,20}"\}\}</tool_call>'
    body: Any = {
        "model": "story",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "temperature": 0,
    }
    with openai.OpenAI(base_url=f"http://{server.url}/v1", api_key="none", max_retries=0) as client:
        for grammar, count in ((call_regex, 1), (f"{call_regex}\n{call_regex}", 2)):
            chat = client.chat.completions
            whole = chat.create(**body, extra_body={"guided_regex": grammar}).choices[0]
            calls = [call.function.arguments for call in whole.message.tool_calls or ()]
            assert whole.finish_reason == "tool_calls"
            assert all(len(json.loads(arguments)["a"]) >= 12 for arguments in calls)
            content, streamed, chunks = "", [""] * count, 0
            for chunk in chat.create(**body, extra_body={"guided_regex": grammar}, stream=True):
                content += chunk.choices[0].delta.content or ""
                for text_chunk in chunk.choices[0].delta.tool_calls or ():
                    assert text_chunk.function is not None
                    streamed[text_chunk.index] += text_chunk.function.arguments or ""
                    chunks += 1
            assert (content, streamed) == (whole.message.content, calls)
            # A name and two chunks of arguments each: a busy machine sends several tokens in one chunk.
            assert chunks >= 3 * count
            assert chunk.choices[0].finish_reason == "tool_calls"


def test_prompts_as_text_and_as_tokens_are_equivalent(server: ServerThread) -> None:
    def complete(**body: Any) -> tuple[str, int]:
        request = {"model": "story", "max_tokens": 8, "temperature": 0, **body}
        response = post_json(server, "/v1/completions", request)
        return response["choices"][0]["text"], response["usage"]["prompt_tokens"]

    tokens = post_json(server, "/tokenize", {"model": "story", "prompt": PROMPT})["tokens"]
    assert complete(prompt=PROMPT) == complete(prompt=tokens)
    assert complete(prompt=PROMPT, add_special_tokens=False) == complete(prompt=tokens[1:])


def test_every_api_gives_the_same_text(server: ServerThread, greedy: str) -> None:
    parameters: Any = {"max_new_tokens": 10}
    assert post_json(server, "/invocations", {"inputs": PROMPT, "parameters": parameters})["generated_text"] == greedy
    assert post_json(server, "/", {"inputs": PROMPT, "parameters": parameters})[0]["generated_text"] == greedy
    completion = post_json(
        server, "/v1/completions", {"model": "story", "prompt": PROMPT, "max_tokens": 10, "temperature": 0}
    )
    assert completion["choices"][0]["text"] == greedy
    generated = post_json(server, "/v2/models/story/generate", {"text_input": PROMPT, "parameters": {"max_tokens": 10}})
    assert generated["text_output"] == greedy
    both = post_json(server, "/predictions/story", {"inputs": [PROMPT, "The"], "parameters": parameters})
    assert both[0]["generated_text"] == PROMPT + greedy


def test_text_generation_client(server: ServerThread, greedy: str) -> None:
    client = text_generation.Client(f"http://{server.url}")
    response = client.generate(PROMPT, max_new_tokens=10, decoder_input_details=True)
    assert response.generated_text == greedy
    assert "".join(t.text for t in response.details.tokens if not t.special) == greedy
    assert response.details.prefill[0].logprob is None
    chunks = list(client.generate_stream(PROMPT, max_new_tokens=10))
    assert "".join(p.token.text for p in chunks if not p.token.special) == greedy
    first, again = (client.generate(PROMPT, do_sample=True, seed=7, max_new_tokens=8) for _ in range(2))
    assert first == again
    assert first.details.seed == 7


def test_hub_client(server: ServerThread, greedy: str) -> None:
    client = huggingface_hub.InferenceClient(base_url=f"http://{server.url}")
    assert client.text_generation(PROMPT, max_new_tokens=10) == greedy
    chat = client.chat_completion([{"role": "user", "content": "How are you?"}], max_tokens=5)
    assert chat.usage.completion_tokens <= 5
    with pytest.raises(huggingface_hub.errors.ValidationError):
        client.text_generation("word " * 2000)


def test_openai_client(server: ServerThread, greedy: str) -> None:
    with openai.OpenAI(base_url=f"http://{server.url}/v1", api_key="-", max_retries=0) as client:
        assert {m.id for m in client.models.list()} == {"story", "encoder"}
        stream = client.completions.create(model="story", prompt=PROMPT, max_tokens=10, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == greedy
        messages: Any = [{"role": "user", "content": "Say yes or no."}]
        two = client.chat.completions.create(model="story", messages=messages, n=2, max_tokens=4, logprobs=True)
        assert [c.index for c in two.choices] == [0, 1]
        chosen = client.chat.completions.create(
            model="story", messages=messages, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
        )
        assert chosen.choices[0].message.content in ("yes", "no")
        # Not an object: a barely trained model may generate any number of spaces inside one.
        response_format: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["one", "two"]}}}
        structured = client.chat.completions.create(
            model="story", messages=messages, response_format=response_format, max_tokens=60
        )
        assert json.loads(structured.choices[0].message.content or "") in ("one", "two")
        vectors = client.embeddings.create(model="encoder", input=["one", "one two"])
        assert np.linalg.norm(vectors.data[0].embedding) == pytest.approx(1, abs=1e-5)
        with pytest.raises(openai.NotFoundError, match="'gpt' is not found; there are story"):
            client.completions.create(model="gpt", prompt="one")
        with pytest.raises(openai.BadRequestError, match=r"not support embeddings: .*\"huggingface\""):
            client.embeddings.create(model="story", input="one")


def test_token_ids_and_truncation(server: ServerThread) -> None:
    body = {"model": "story", "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    (choice,) = post_json(server, "/v1/completions", body)["choices"]
    prompt, generated = choice["prompt_token_ids"], choice["token_ids"]
    assert len(generated) == 3
    for tokens, text in ((prompt, PROMPT), (prompt + generated, PROMPT + choice["text"])):
        assert text in post_json(server, "/detokenize", {"model": "story", "tokens": tokens})["prompt"]
    # The token that marks the beginning stays.
    for side, kept in (("left", [prompt[0], prompt[-1]]), ("right", prompt[:2])):
        cut = {**body, "truncate_prompt_tokens": 2, "truncation_side": side}
        (choice,) = post_json(server, "/v1/completions", cut)["choices"]
        (expected,) = post_json(server, "/v1/completions", {**body, "prompt": kept})["choices"]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (kept, expected["token_ids"])
    cut = {**body, "prompt": prompt * 2000, "truncate_prompt_tokens": -1}
    result = post_json(server, "/v1/completions", cut)
    assert result["choices"][0]["finish_reason"] == "length"
    assert result["choices"][0]["prompt_token_ids"] == (prompt * 2000)[-result["usage"]["prompt_tokens"] :]


def test_a_tool_whose_schema_refers_to_itself(server: ServerThread) -> None:
    size = {"type": "integer", "maximum": 3, "minimum": 0}
    nested = {"anyOf": [{"$ref": "#/$defs/Box"}, {"type": "null"}]}
    box = {"type": "object", "properties": {"n": size, "in": nested}, "required": ["n", "in"]}
    parameters = {"$defs": {"Box": {**box, "additionalProperties": False}}, "$ref": "#/$defs/Box"}
    tool = {"type": "function", "function": {"name": "pack", "parameters": parameters}}
    body = {"model": "story", "messages": [{"role": "user", "content": "a"}], "tools": [tool], "max_tokens": 150}
    for choice in ("required", "pack"):
        request = {**body, "tool_choice": choice, "parallel_tool_calls": False, "seed": 1}
        choice_ = post_json(server, "/v1/chat/completions", request)["choices"][0]
        calls = [call["function"] for call in choice_["message"].get("tool_calls") or ()]
        assert choice_["finish_reason"] == "length" or [call["name"] for call in calls] == ["pack"]
        if choice_["finish_reason"] != "length":  # a barely trained model may generate many spaces
            assert set(json.loads(calls[0]["arguments"])) == {"n", "in"}


def test_the_only_capable_model_answers(server: ServerThread) -> None:
    assert post_json(server, "/v1/embeddings", {"input": "one"})["model"] == "encoder"
    vectors = post_json(server, "/predictions/encoder", {"inputs": ["one", "one two"]})
    assert vectors[0] == pytest.approx(post_json(server, "/predictions/encoder", {"inputs": "one"}), abs=1e-5)
    assert len(vectors) == 2
    assert len(vectors[0]) == 16
    assert post_json(server, "/invocations", {"inputs": "one", "model_name": "encoder"}) == pytest.approx(
        vectors[0], abs=1e-5
    )
    status, result = server.post("/invocations", {"inputs": "one", "model_name": "missing"})
    assert (status, result["type"]) == (404, "ModelNotFoundException")
    assert post_json(server, "/v1/completions", {"prompt": "one"})["model"] == "story"


def test_beam_search_and_best_of(server: ServerThread) -> None:
    result = post_json(server, "/invocations", {"inputs": PROMPT, "parameters": {"num_beams": 3, "details": True}})
    assert len(result["details"]["best_of_sequences"]) == 2
    parameters = {"best_of": 3, "do_sample": True, "details": True, "max_new_tokens": 5}
    result = post_json(server, "/invocations", {"inputs": PROMPT, "parameters": parameters})["details"]
    means = [
        np.mean([t["log_prob"] for t in tokens])
        for tokens in (result["tokens"], *(s["tokens"] for s in result["best_of_sequences"]))
    ]
    assert means == sorted(means, reverse=True)


# --- Open Inference, in tensors ------------------------------------------------------------------------------


def _tensor(module: Any, texts: list[str]) -> Any:
    tensor = module.InferInput("text_input", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([t.encode() for t in texts], object))
    return tensor


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_open_inference_tensors(server: ServerThread, greedy: str, wire: str) -> None:
    module: Any = tritonclient.http if wire == "http" else tritonclient.grpc
    url = server.url if wire == "http" else server.grpc_url
    with module.InferenceServerClient(url) as client:
        response = client.infer(
            "story",
            [_tensor(module, [PROMPT, "The"])],
            outputs=[module.InferRequestedOutput(n) for n in ("text_output", "finish_reason", "generated_tokens")],
            parameters={"max_tokens": 10, "m\u00e4rchen\u8a71": 1},  # unknown parameters are reported in a header
        )
    assert response.as_numpy("text_output")[0].decode() == greedy
    assert response.as_numpy("finish_reason")[0] in (b"length", b"eos_token")
    assert response.as_numpy("generated_tokens").shape == (2,)


@pytest.mark.parametrize(("values", "status"), [(10, 200), ((1 << 19) + 1, 400)])
def test_json_in_input_tensors_is_limited(server: ServerThread, values: int, status: int) -> None:
    prompt = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}
    options = {"max_tokens": 2, "unknown": [0] * values}
    options_tensor = {"name": "sampling_parameters", "shape": [1], "datatype": "BYTES", "data": [json.dumps(options)]}
    biases = json.dumps({str(token): -1 for token in range(values)})
    for body in (
        {"inputs": [prompt, options_tensor]},
        {"inputs": [prompt], "parameters": {"max_tokens": 2, "logit_bias": biases}},
    ):
        actual, response = server.post("/v2/models/story/infer", body)
        assert actual == status
        if status == 400:
            assert "too many values in JSON: expected at most 524288" in response["error"]


def test_inputs_of_tritons_llm_backends(server: ServerThread, greedy: str) -> None:
    """genai-perf sends limits as tensors, numbers in JSON as texts, and whether the prompt is repeated."""

    def infer(path: str, **inputs: tuple[str, Any]) -> tuple[int, Any]:
        tensors = [{"name": n, "shape": [1], "datatype": d, "data": [v]} for n, (d, v) in inputs.items()]
        return server.post(f"/v2/models/story/{path}", {"inputs": tensors})

    def text(**inputs: tuple[str, Any]) -> str:
        status, body = infer("infer", text_input=("BYTES", PROMPT), **inputs)
        assert status == 200, body
        return str(body["outputs"][0]["data"][0])

    options = json.dumps({"max_tokens": "10", "temperature": "0.0", "stop": ["1"]})
    assert text(max_tokens=("INT32", 10)) == greedy
    assert text(sampling_parameters=("BYTES", options), stream=("BOOL", True)) == greedy
    assert text(max_tokens=("INT32", 10), exclude_input_in_output=("BOOL", False)) == PROMPT + greedy
    assert text(max_tokens=("INT32", 10), exclude_input_in_output=("BOOL", True)) == greedy
    status, body = infer("infer", text_input=("BYTES", PROMPT), sampling_parameters=("BYTES", '{"max_tokens": "ten"}'))
    assert (status, body) == (400, {"error": '`max_tokens` must be an integer that is strictly positive; got "ten"'})
    prompt: tuple[str, Any] = ("BYTES", PROMPT)
    status, body = infer("infer_stream", text_input=prompt, exclude_input_in_output=("BOOL", False))
    assert (status, body["error"]) == (
        400, "input 'exclude_input_in_output': expected true, as a stream has only new text",
    )  # fmt: skip


def test_a_stream_over_grpc(server: ServerThread, greedy: str) -> None:
    import queue

    results: Any = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        client.async_stream_infer(
            "story",
            [_tensor(tritonclient.grpc, [PROMPT])],
            parameters={"max_tokens": 10},
            enable_empty_final_response=True,
        )
        text = ""
        while True:
            result, error = results.get(timeout=60)
            assert error is None
            response = result.get_response()
            if response.parameters["triton_final_response"].bool_param:
                break
            text += result.as_numpy("text_output")[0].decode()
        client.stop_stream()
    assert text == greedy


# --- concurrent requests -------------------------------------------------------------------------------------


def test_one_invalid_request_does_not_affect_seven_others(server: ServerThread) -> None:
    valid = [
        ("/invocations", {"inputs": f"The {word}", "parameters": {"max_new_tokens": 8, "do_sample": True, "seed": i}})
        for i, word in enumerate(["class", "function", "list", "value", "name", "return", "object"])
    ]
    sequential = [post_json(server, *each) for each in valid]
    invalid = ("/invocations", {"inputs": "The", "parameters": {"temperature": -1}})
    with ThreadPoolExecutor(8) as threads:
        failed = threads.submit(lambda: server.post(*invalid))
        concurrent = list(threads.map(lambda each: post_json(server, *each), valid))
    assert concurrent == sequential
    assert failed.result()[0] == 424


def test_context_errors_use_the_field_names_of_each_api(server: ServerThread) -> None:
    long_text, many = "word " * 2000, 10_000
    chat = {"model": "story", "messages": [{"role": "user", "content": long_text}]}
    for path, body, status, name in (
        ("/invocations", {"inputs": long_text}, 424, "inputs"),
        ("/generate", {"inputs": long_text}, 422, "inputs"),
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": many}}, 422, "max_new_tokens"),
        ("/v1/completions", {"model": "story", "prompt": long_text}, 400, "prompt"),
        ("/v1/completions", {"model": "story", "prompt": "a", "max_tokens": many, "stream": True}, 400, "max_tokens"),
        ("/v1/chat/completions", chat, 400, "messages"),
        ("/v2/models/story/generate", {"text_input": long_text}, 422, "text_input"),
        ("/v2/models/story/generate", {"text_input": "a", "parameters": {"adapter": "b"}}, 422, "adapter"),
        ("/generate", {"inputs": "a", "parameters": {"adapter_id": "b"}}, 422, "adapter_id"),
        ("/invocations", {"inputs": "a", "parameters": {"adapters": "b"}}, 424, "adapters"),
    ):
        actual, response = server.post(path, body)
        assert actual == status, response
        error = response["error"]
        if path.startswith("/v1"):
            assert (error["param"], error["code"]) == (name, "context_length_exceeded")
            error = error["message"]
        assert name in error.partition(": ")[2 if path == "/generate" else 0]
        assert ("unknown adapter 'b'" if name.startswith("adapter") else "context") in error


def test_an_unknown_adapter_is_an_unknown_model_of_openai(server: ServerThread) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        status, response = server.post(path, {"model": "story:b", **body})
        assert (status, response["error"]["code"]) == (404, "model_not_found")
        assert "unknown adapter 'b'" in response["error"]["message"]


async def test_two_hundred_disconnected_clients_leave_nothing(server: ServerThread) -> None:
    text_server = TextServer(server.server.http_ports[0])

    async def disconnect(i: int) -> None:
        reader, writer = await text_server.send("POST", "/generate_stream", {"inputs": f"{PROMPT} {i}"})
        await asyncio.wait_for(reader.readuntil(b"data:"), 120)
        writer.close()

    await asyncio.gather(*map(disconnect, range(200)))
    await text_server.wait_until_idle()
    response = await text_server.post("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}})
    assert response.status == 200


def test_the_queries_of_the_monitoring_page_select_samples_of_the_engine(server: ServerThread) -> None:
    body = {"model": "story", "prompt": PROMPT, "max_tokens": 4, "stream": True}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.url}/v1/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        assert b"[DONE]" in response.read()
    with urllib.request.urlopen(f"http://{server.url}/metrics", timeout=120) as response:
        families = [*text_string_to_metric_families(response.read().decode())]
    samples = [sample for family in families for sample in family.samples]
    queries = [query for query in (*page_queries(), *dashboard_queries()) if "dragoman_text_" in query.text]
    assert len(queries) >= 10
    assert all(check_query(query, samples) for query in queries)
