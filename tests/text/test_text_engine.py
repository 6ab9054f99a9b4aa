"""A folder with a language model and an encoder behind one server: every API, every client, the engine itself."""

import asyncio
import json
import threading
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

import dragoman

from .text_house import House, events

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
class Running:
    """A server in a thread of its own, for clients that block."""

    server: dragoman.Server

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.server.http_ports[0]}"

    @property
    def grpc_url(self) -> str:
        return self.server.grpc_url

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of one request."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"http://{self.url}{path}", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as fault:
            with fault:
                return fault.code, json.loads(fault.read())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    import text_models

    folder = tmp_path_factory.mktemp("text")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text_models.make(folder / "story", steps=12)
        _encoder(folder / "encoder")
    (folder / "story" / "dragoman.toml").write_text("[model]\nmax_queue = 0\nparameters = {threads = 1}\n")
    (folder / "encoder" / "dragoman.toml").write_text("[model]\nplacement = 'thread'\n")
    with _running(dragoman.Server(str(folder), http_port=0, grpc_port=0)) as running:
        yield running


@contextmanager
def _running(server: dragoman.Server) -> Iterator[Running]:
    ready, done = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with server:
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(300)
        yield Running(server)
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def _encoder(folder: Path) -> None:
    import tokenizers
    import torch
    import transformers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1, "one": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=3, max_position_embeddings=32, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ask(served: Running, path: str, body: Any) -> Any:
    status, answer = served.post(path, body)
    assert status == 200, answer
    return answer


@pytest.fixture(scope="module")
def greedy(served: Running) -> str:
    text: str = ask(served, "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 10}})["generated_text"]
    return text


def test_what_the_engine_measures_is_told(served: Running) -> None:
    def told() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{served.url}/metrics", timeout=60) as answer:
            lines = [line for line in answer.read().decode().splitlines() if 'model="story"' in line]
        found = [(line.partition("{")[0], float(line.rpartition(" ")[2])) for line in lines if "_bucket" not in line]
        return {name: sum(value for other, value in found if other == name) for name, _ in found}

    tokens = len(ask(served, "/tokenize", {"inputs": PROMPT, "model": "story"}))
    ask(served, "/generate", {"inputs": PROMPT})
    before = told()
    ask(served, "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 5}})
    after = told()
    new = {name.removeprefix("dragoman_text_"): after[name] - before[name] for name in after}
    parts = ("validation", "queue", "inference")
    assert [new[f"{part}_seconds_count"] for part in (*parts, "duration", "token")] == [1] * 5
    assert sum(new[f"{part}_seconds_sum"] for part in parts) == pytest.approx(new["duration_seconds_sum"])
    assert new["token_seconds_sum"] == pytest.approx(new["inference_seconds_sum"] / 5)
    assert (new["prompt_tokens_sum"], new["generated_tokens_sum"], new["max_new_tokens_sum"]) == (tokens, 5, 5)
    assert new["steps_total"] == new["step_seconds_count"] >= 5
    assert new["step_seconds_sum"] < new["inference_seconds_sum"]
    assert (after["dragoman_text_queue_size"], after["dragoman_text_batch_size"]) == (0, 0)


def test_what_stopped_a_text(served: Running) -> None:
    def told(**body: Any) -> tuple[str, Any]:
        given = {"model": "story", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **body}
        choice = ask(served, "/v1/completions", given)["choices"][0]
        return choice["finish_reason"], choice["stop_reason"]

    end = ask(served, "/tokenize", {"model": "story", "prompt": "<|end|>", "add_special_tokens": False})["tokens"][0]
    sure = {"logit_bias": {str(end): 100}}
    assert told(**sure) == ("stop", None)  # the model's own end, which no caller asked for
    assert told(**sure, ignore_eos=True, stop_token_ids=[end]) == ("stop", end)
    assert told() == ("length", None)


def test_a_stop_text_that_stays_holds_nothing_back(served: Running) -> None:
    def told(**parameters: Any) -> list[str]:
        words = {"type": "regex", "value": "one two three four five six seven"}
        given = {"max_new_tokens": 8, "details": True, "grammar": words, **parameters}
        body = {"inputs": PROMPT, "parameters": given}
        whole = ask(served, "/generate", body)
        url, data = f"http://{served.url}/generate_stream", json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=120) as answer:
            streamed = events(answer.read())
        tokens = [token["text"] for token in whole["details"]["tokens"]]
        assert [event["token"]["text"] for event in streamed] == tokens
        assert streamed[-1]["generated_text"] == whole["generated_text"] == "".join(tokens)
        return tokens

    plain = told()
    first, second, third = plain[1:4]
    assert told(stop=[first + second + "§"]) == plain
    assert told(stop=[first + "§", second + third]) == plain[:4]
    assert told(stop=[second + third[:1]]) == [*plain[:3], third[:1]]


def test_tokens_and_their_text(served: Running) -> None:
    def tokens(**body: Any) -> list[int]:
        found: list[int] = ask(served, "/tokenize", {"model": "story", **body})["tokens"]
        return found

    start, *rest = tokens(prompt=PROMPT)
    assert tokens(prompt=PROMPT, add_special_tokens=False) == rest
    assert ask(served, "/detokenize", {"model": "story", "tokens": rest}) == {"prompt": PROMPT}
    beginning = ask(served, "/detokenize", {"model": "story", "tokens": [start]})["prompt"]
    assert ask(served, "/detokenize", {"model": "story", "tokens": [start, *rest]})["prompt"] == beginning + PROMPT
    assert ask(served, "/detokenize", {"model": "story", "tokens": []}) == {"prompt": ""}
    status, told = served.post("/detokenize", {"model": "story", "tokens": [1 << 30]})
    assert (status, told["error"]["param"]) == (400, "tokens")
    messages = [{"role": "user", "content": "hi"}]
    chat = tokens(messages=messages)
    assert tokens(messages=messages, add_special_tokens=False) == chat
    assert tokens(messages=messages, add_special_tokens=True) == [start, *chat]  # behind the template's own


def test_a_chat_may_go_on_with_its_last_message(served: Running) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello, I"}]
    going_on = {"add_generation_prompt": False, "continue_final_message": True}

    def templated(**more: Any) -> str:
        told: str = ask(served, "/models/story/chat_tokenize", {"messages": messages, **more})["templated_text"]
        return told

    assert templated(**going_on).endswith("<|assistant|>Hello, I")
    assert templated(add_generation_prompt=False) == templated(**going_on) + "\n"
    few = {"model": "story", "messages": messages, "max_tokens": 4, "temperature": 0, **going_on}
    said = ask(served, "/v1/chat/completions", few)["choices"][0]["message"]["content"]
    plain = {"model": "story", "prompt": templated(**going_on), "max_tokens": 4, "temperature": 0}
    same = ask(served, "/v1/completions", {**plain, "add_special_tokens": False})["choices"][0]["text"]
    assert said == same


def test_calls_that_the_model_writes_come_as_it_writes_them(served: Running) -> None:
    """A grammar of the caller's makes the model write what a trained one would; whether it calls is left to it."""
    written = r'Well\. <tool_call>\{"name": "f", "arguments": \{"a": "[a-z ]{12,20}"\}\}</tool_call>'
    asked: Any = {
        "model": "story",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "temperature": 0,
    }
    with openai.OpenAI(base_url=f"http://{served.url}/v1", api_key="none", max_retries=0) as client:
        for grammar, count in ((written, 1), (f"{written}\n{written}", 2)):
            chat = client.chat.completions
            whole = chat.create(**asked, extra_body={"guided_regex": grammar}).choices[0]
            calls = [call.function.arguments for call in whole.message.tool_calls or ()]
            assert whole.finish_reason == "tool_calls"
            assert all(len(json.loads(arguments)["a"]) >= 12 for arguments in calls)
            content, came, pieces = "", [""] * count, 0
            for chunk in chat.create(**asked, extra_body={"guided_regex": grammar}, stream=True):
                content += chunk.choices[0].delta.content or ""
                for piece in chunk.choices[0].delta.tool_calls or ():
                    assert piece.function is not None
                    came[piece.index] += piece.function.arguments or ""
                    pieces += 1
            assert (content, came) == (whole.message.content, calls)
            # A name and two chunks of arguments each: a busy machine sends several tokens in one chunk.
            assert pieces >= 3 * count
            assert chunk.choices[0].finish_reason == "tool_calls"


def test_a_prompt_without_special_tokens_is_one_of_its_tokens(served: Running) -> None:
    def told(**body: Any) -> tuple[str, int]:
        few = {"model": "story", "max_tokens": 8, "temperature": 0, **body}
        answer = ask(served, "/v1/completions", few)
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]

    whole = ask(served, "/tokenize", {"model": "story", "prompt": PROMPT})["tokens"]
    assert told(prompt=PROMPT) == told(prompt=whole)
    assert told(prompt=PROMPT, add_special_tokens=False) == told(prompt=whole[1:])


def test_every_api_gives_the_same_text(served: Running, greedy: str) -> None:
    few: Any = {"max_new_tokens": 10}
    assert ask(served, "/invocations", {"inputs": PROMPT, "parameters": few})["generated_text"] == greedy
    assert ask(served, "/", {"inputs": PROMPT, "parameters": few})[0]["generated_text"] == greedy
    done = ask(served, "/v1/completions", {"model": "story", "prompt": PROMPT, "max_tokens": 10, "temperature": 0})
    assert done["choices"][0]["text"] == greedy
    told = ask(served, "/v2/models/story/generate", {"text_input": PROMPT, "parameters": {"max_tokens": 10}})
    assert told["text_output"] == greedy
    both = ask(served, "/predictions/story", {"inputs": [PROMPT, "The"], "parameters": few})
    assert both[0]["generated_text"] == PROMPT + greedy


def test_text_generation(served: Running, greedy: str) -> None:
    client = text_generation.Client(f"http://{served.url}")
    answer = client.generate(PROMPT, max_new_tokens=10, decoder_input_details=True)
    assert answer.generated_text == greedy
    assert "".join(t.text for t in answer.details.tokens if not t.special) == greedy
    assert answer.details.prefill[0].logprob is None
    pieces = list(client.generate_stream(PROMPT, max_new_tokens=10))
    assert "".join(p.token.text for p in pieces if not p.token.special) == greedy
    first, again = (client.generate(PROMPT, do_sample=True, seed=7, max_new_tokens=8) for _ in range(2))
    assert first == again
    assert first.details.seed == 7


def test_hub(served: Running, greedy: str) -> None:
    client = huggingface_hub.InferenceClient(base_url=f"http://{served.url}")
    assert client.text_generation(PROMPT, max_new_tokens=10) == greedy
    chat = client.chat_completion([{"role": "user", "content": "How are you?"}], max_tokens=5)
    assert chat.usage.completion_tokens <= 5
    with pytest.raises(huggingface_hub.errors.ValidationError):
        client.text_generation("word " * 2000)


def test_openai(served: Running, greedy: str) -> None:
    with openai.OpenAI(base_url=f"http://{served.url}/v1", api_key="-", max_retries=0) as client:
        assert {m.id for m in client.models.list()} == {"story", "encoder"}
        stream = client.completions.create(model="story", prompt=PROMPT, max_tokens=10, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == greedy
        messages: Any = [{"role": "user", "content": "Say yes or no."}]
        two = client.chat.completions.create(model="story", messages=messages, n=2, max_tokens=4, logprobs=True)
        assert [c.index for c in two.choices] == [0, 1]
        only = client.chat.completions.create(
            model="story", messages=messages, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
        )
        assert only.choices[0].message.content in ("yes", "no")
        # A text, and no object: a model that has learnt little may put any number of spaces between the parts of one.
        shaped: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["one", "two"]}}}
        told = client.chat.completions.create(model="story", messages=messages, response_format=shaped, max_tokens=60)
        assert json.loads(told.choices[0].message.content or "") in ("one", "two")
        vectors = client.embeddings.create(model="encoder", input=["one", "one two"])
        assert np.linalg.norm(vectors.data[0].embedding) == pytest.approx(1, abs=1e-5)
        with pytest.raises(openai.BadRequestError, match="does not support"):
            client.embeddings.create(model="story", input="one")


def test_a_tool_whose_schema_refers_to_itself(served: Running) -> None:
    size = {"type": "integer", "maximum": 3, "minimum": 0}
    nested = {"anyOf": [{"$ref": "#/$defs/Box"}, {"type": "null"}]}
    box = {"type": "object", "properties": {"n": size, "in": nested}, "required": ["n", "in"]}
    parameters = {"$defs": {"Box": {**box, "additionalProperties": False}}, "$ref": "#/$defs/Box"}
    tool = {"type": "function", "function": {"name": "pack", "parameters": parameters}}
    body = {"model": "story", "messages": [{"role": "user", "content": "a"}], "tools": [tool], "max_tokens": 150}
    for choice in ("required", "pack"):
        asked = {**body, "tool_choice": choice, "parallel_tool_calls": False, "seed": 1}
        told = ask(served, "/v1/chat/completions", asked)["choices"][0]
        calls = [call["function"] for call in told["message"].get("tool_calls") or ()]
        assert told["finish_reason"] == "length" or [call["name"] for call in calls] == ["pack"]
        if told["finish_reason"] != "length":  # a model that has learnt little may put much space between the parts
            assert set(json.loads(calls[0]["arguments"])) == {"n", "in"}


def test_the_only_model_that_can(served: Running) -> None:
    assert ask(served, "/v1/embeddings", {"input": "one"})["model"] == "encoder"
    vectors = ask(served, "/predictions/encoder", {"inputs": ["one", "one two"]})
    assert vectors[0] == pytest.approx(ask(served, "/predictions/encoder", {"inputs": "one"}), abs=1e-5)
    assert len(vectors) == 2
    assert len(vectors[0]) == 16
    assert ask(served, "/invocations", {"inputs": "one", "model_name": "encoder"}) == pytest.approx(
        vectors[0], abs=1e-5
    )
    status, told = served.post("/invocations", {"inputs": "one", "model_name": "nobody"})
    assert (status, told["type"]) == (404, "ModelNotFoundException")
    assert ask(served, "/v1/completions", {"prompt": "one"})["model"] == "story"


def test_beams_and_the_others_beside_the_best(served: Running) -> None:
    told = ask(served, "/invocations", {"inputs": PROMPT, "parameters": {"num_beams": 3, "details": True}})
    assert len(told["details"]["best_of_sequences"]) == 2
    drawn = {"best_of": 3, "do_sample": True, "details": True, "max_new_tokens": 5}
    told = ask(served, "/invocations", {"inputs": PROMPT, "parameters": drawn})["details"]
    means = [
        np.mean([t["log_prob"] for t in tokens])
        for tokens in (told["tokens"], *(s["tokens"] for s in told["best_of_sequences"]))
    ]
    assert means == sorted(means, reverse=True)


# --- Open Inference, in tensors ------------------------------------------------------------------------------


def _tensor(module: Any, texts: list[str]) -> Any:
    made = module.InferInput("text_input", [len(texts)], "BYTES")
    made.set_data_from_numpy(np.array([t.encode() for t in texts], object))
    return made


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_tensors_in_tensors_out(served: Running, greedy: str, wire: str) -> None:
    module: Any = tritonclient.http if wire == "http" else tritonclient.grpc
    url = served.url if wire == "http" else served.grpc_url
    with module.InferenceServerClient(url) as client:
        answer = client.infer(
            "story",
            [_tensor(module, [PROMPT, "The"])],
            outputs=[module.InferRequestedOutput(n) for n in ("text_output", "finish_reason", "generated_tokens")],
            parameters={"max_tokens": 10, "m\u00e4rchen\u8a71": 1},  # what nobody knows is told in a header
        )
    assert answer.as_numpy("text_output")[0].decode() == greedy
    assert answer.as_numpy("finish_reason")[0] in (b"length", b"eos_token")
    assert answer.as_numpy("generated_tokens").shape == (2,)


@pytest.mark.parametrize(("values", "status"), [(10, 200), ((1 << 19) + 1, 400)])
def test_json_in_texts_beside_a_prompt_is_bounded(served: Running, values: int, status: int) -> None:
    prompt = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}
    options = {"max_tokens": 2, "unknown": [0] * values}
    companion = {"name": "sampling_parameters", "shape": [1], "datatype": "BYTES", "data": [json.dumps(options)]}
    biases = json.dumps({str(token): -1 for token in range(values)})
    for body in (
        {"inputs": [prompt, companion]},
        {"inputs": [prompt], "parameters": {"max_tokens": 2, "logit_bias": biases}},
    ):
        found, answer = served.post("/v2/models/story/infer", body)
        assert found == status
        if status == 400:
            assert "too many values in JSON: expected at most 524288" in answer["error"]


def test_a_stream_over_grpc(served: Running, greedy: str) -> None:
    import queue

    found: Any = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(served.grpc_url) as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        client.async_stream_infer(
            "story",
            [_tensor(tritonclient.grpc, [PROMPT])],
            parameters={"max_tokens": 10},
            enable_empty_final_response=True,
        )
        text = ""
        while True:
            result, error = found.get(timeout=60)
            assert error is None
            response = result.get_response()
            if response.parameters["triton_final_response"].bool_param:
                break
            text += result.as_numpy("text_output")[0].decode()
        client.stop_stream()
    assert text == greedy


# --- together ------------------------------------------------------------------------------------------------


def test_one_bad_and_seven_good(served: Running) -> None:
    good = [
        ("/invocations", {"inputs": f"The {word}", "parameters": {"max_new_tokens": 8, "do_sample": True, "seed": i}})
        for i, word in enumerate(["class", "function", "list", "value", "name", "return", "object"])
    ]
    alone = [ask(served, *each) for each in good]
    bad = ("/invocations", {"inputs": "The", "parameters": {"temperature": -1}})
    with ThreadPoolExecutor(8) as threads:
        wrong = threads.submit(lambda: served.post(*bad))
        together = list(threads.map(lambda each: ask(served, *each), good))
    assert together == alone
    assert wrong.result()[0] == 424


def test_what_does_not_fit_into_the_context_is_told_in_the_callers_words(served: Running) -> None:
    long, much = "word " * 2000, 10_000
    chat = {"model": "story", "messages": [{"role": "user", "content": long}]}
    for path, body, status, name in (
        ("/invocations", {"inputs": long}, 424, "inputs"),
        ("/generate", {"inputs": long}, 422, "inputs"),
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": much}}, 422, "max_new_tokens"),
        ("/v1/completions", {"model": "story", "prompt": long}, 400, "prompt"),
        ("/v1/completions", {"model": "story", "prompt": "a", "max_tokens": much, "stream": True}, 400, "max_tokens"),
        ("/v1/chat/completions", chat, 400, "messages"),
        ("/v2/models/story/generate", {"text_input": long}, 422, "text_input"),
        ("/v2/models/story/generate", {"text_input": "a", "parameters": {"adapter": "b"}}, 422, "adapter"),
        ("/generate", {"inputs": "a", "parameters": {"adapter_id": "b"}}, 422, "adapter_id"),
        ("/invocations", {"inputs": "a", "parameters": {"adapters": "b"}}, 424, "adapters"),
    ):
        got, answer = served.post(path, body)
        assert got == status, answer
        told = answer["error"]
        if path.startswith("/v1"):
            assert (told["param"], told["code"]) == (name, "context_length_exceeded")
            told = told["message"]
        assert name in told.partition(": ")[2 if path == "/generate" else 0]
        assert ("there is no 'b'" if name.startswith("adapter") else "context") in told


async def test_two_hundred_who_leave_leave_nothing_behind(served: Running) -> None:
    house = House(served.server.http_ports[0], served.server)
    service = house.model("story")._loaded.service

    async def leave(i: int) -> None:
        reader, writer = await house.send("POST", "/generate_stream", {"inputs": f"{PROMPT} {i}"})
        await asyncio.wait_for(reader.readuntil(b"data:"), 120)
        writer.close()

    await asyncio.gather(*map(leave, range(200)))
    async with asyncio.timeout(120):
        while service.active or service._jobs:
            await asyncio.sleep(0.01)
    answer = await house.post("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}})
    assert answer.status == 200
