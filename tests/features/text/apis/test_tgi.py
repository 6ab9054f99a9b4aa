"""TGI's API: exact responses, limits and error types."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dragoman.core.text import RawPrompt
from text_server import ReverseModel, TextServer, events, serve


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve() as server:
        yield server


async def test_generate(server: TextServer) -> None:
    response = await server.post("/generate", {"inputs": "a é", "parameters": {"details": True}})
    assert response.status == 200
    assert response.headers["content-type"] == "application/json"
    assert (
        response.body
        == (
            '{"generated_text":"é a","details":{"finish_reason":"eos_token","generated_tokens":3,"seed":null,'
            '"prefill":[],"tokens":[{"id":374,"text":"é","logprob":-0.5,"special":false},'
            '{"id":107,"text":" a","logprob":-1.0,"special":false},'
            '{"id":2,"text":"</s>","logprob":-0.25,"special":true}]}}'
        ).encode()
    )


async def test_the_root_gives_a_list_and_generate_an_object(server: TextServer) -> None:
    assert (await server.post("/", {"inputs": "a b"})).body == b'[{"generated_text":"b a"}]'
    assert (await server.post("/generate", {"inputs": "a b"})).body == b'{"generated_text":"b a"}'
    assert (await server.post("/models/ReverseModel", {"inputs": "a b"})).body == b'[{"generated_text":"b a"}]'
    both = await server.post("/generate", {"inputs": ["a b", "c"]})
    assert both.body == b'[{"generated_text":"b a"},{"generated_text":"c"}]'


@pytest.mark.parametrize(
    "path", ["/generate_stream", "/", "/models/ReverseModel", "/models/ReverseModel/generate_stream"]
)
async def test_streams(server: TextServer, path: str) -> None:
    body = {"inputs": "a é", "parameters": {"max_new_tokens": 2}, "stream": True}
    response = await server.post(path, body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-accel-buffering"] == "no"
    assert (
        response.body
        == (
            'data:{"index":1,"token":{"id":374,"text":"é","logprob":-0.5,"special":false},'
            '"generated_text":null,"details":null}\n\n'
            'data:{"index":2,"token":{"id":107,"text":" a","logprob":-1.0,"special":false},"generated_text":"é a",'
            '"details":{"finish_reason":"length","generated_tokens":2,"seed":null,"input_length":2}}\n\n'
        ).encode()
    )


async def test_null_is_the_same_as_absent(server: TextServer) -> None:
    names = "best_of temperature repetition_penalty frequency_penalty top_k top_p typical_p seed truncate grammar "
    names += "top_n_tokens adapter_id max_new_tokens stop watermark"
    parameters = dict.fromkeys(names.split())
    response = await server.post("/", {"inputs": "a b", "parameters": parameters, "stream": None})
    assert response.json == [{"generated_text": "b a"}]
    sampling = server.model().calls[-1].sampling
    assert sampling.max_new_tokens is None
    assert not sampling.do_sample


async def test_timing_and_usage_headers(server: TextServer) -> None:
    response = await server.post("/generate", {"inputs": "a bé c", "parameters": {"watermark": True, "nothing": 1}})
    assert response.headers["x-compute-characters"] == "6"
    assert (response.headers["x-prompt-tokens"], response.headers["x-generated-tokens"]) == ("3", "4")
    assert float(response.headers["x-compute-time"]) > 0
    for name in ("x-total-time", "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token"):
        assert int(response.headers[name]) >= 0
    assert response.headers["x-ignored-parameters"] == "nothing, watermark"


@pytest.mark.parametrize(
    ("parameters", "do_sample"),
    [
        ({}, False),
        ({"temperature": 1.0}, False),
        ({"top_p": 1.0}, False),
        ({"temperature": 0.5}, True),
        ({"top_k": 5}, True),
        ({"typical_p": 0.5}, True),
        ({"do_sample": True}, True),
    ],
)
async def test_parameters_that_enable_sampling(server: TextServer, parameters: Any, do_sample: bool) -> None:
    result = (await server.post("/generate", {"inputs": "a", "parameters": {**parameters, "details": True}})).json
    assert server.model().calls[-1].sampling.do_sample == do_sample
    assert (result["details"]["seed"] is not None) == do_sample


async def test_stop_strings_are_included(server: TextServer) -> None:
    for name in ("stop", "stop_sequences"):
        result = (
            await server.post("/generate", {"inputs": "a b c", "parameters": {name: ["b"], "details": True}})
        ).json
        assert (result["generated_text"], result["details"]["finish_reason"]) == ("c b", "stop_sequence")


async def test_return_full_text_and_top_n_tokens(server: TextServer) -> None:
    parameters = {"return_full_text": True, "top_n_tokens": 2, "details": True, "max_new_tokens": 1}
    result = (await server.post("/generate", {"inputs": "a b", "parameters": parameters})).json
    assert result["generated_text"] == "a bb"
    assert [t["text"] for t in result["details"]["top_tokens"][0]] == ["b", "b1"]


async def test_info_and_health(server: TextServer) -> None:
    result = (await server.request("GET", "/info")).json
    assert (result["model_id"], result["max_total_tokens"], result["max_input_tokens"]) == ("reverse", 64, 63)
    assert (result["max_best_of"], result["max_stop_sequences"], result["max_client_batch_size"]) == (2, 4, 4)
    assert (await server.request("GET", "/models/ReverseModel/info")).json == result
    for path, body in (("/health", b""), ("/", b'{"status":"alive"}')):
        health = await server.request("GET", path)
        assert (health.status, health.body) == (200, body)
    unhealthy = await server.request("GET", "/models/missing/health")
    assert unhealthy.status == 404


async def test_tokenize(server: TextServer) -> None:
    assert (await server.post("/tokenize", {"inputs": "hé du"})).json == [
        {"id": number, "text": text, "start": start, "stop": stop}
        for number, text, start, stop in ((478, "hé", 0, 2), (227, " du", 2, 5))
    ]
    result = (await server.post("/chat_tokenize", {"messages": [{"role": "user", "content": "hi"}]})).json
    assert result["templated_text"] == "user: hi"
    assert [t["text"] for t in result["tokenize_response"]] == ["user:", " hi"]


async def test_ignored_fields_of_tokenize_are_reported(server: TextServer) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    more = {"inputs": "a", "parameters": {"truncate": 5}, "add_special_tokens": False}
    for path, body in (("/tokenize", more), ("/chat_tokenize", {**chat, "max_tokens": 5, "stream": True})):
        plain = await server.post(path, body)
        assert "x-ignored-parameters" not in plain.headers
        response = await server.post(path, {**body, "foo": 1, "tool_prompt": "x"})
        assert (response.status, response.headers["x-ignored-parameters"]) == (200, "foo, tool_prompt")
        assert response.json == plain.json
    wrong = await server.post("/tokenize", {"inputs": "a", "add_special_tokens": 5})
    assert (wrong.status, wrong.json["error_type"]) == (422, "validation")
    assert "`add_special_tokens` must be true or false; got 5" in wrong.json["error"]


async def test_add_special_tokens(server: TextServer) -> None:
    for path in ("/generate", "/generate_stream"):
        for fields, raw in (({}, False), ({"add_special_tokens": True}, False), ({"add_special_tokens": False}, True)):
            response = await server.post(path, {"inputs": "a", **fields})
            assert (response.status, "x-ignored-parameters" in response.headers) == (200, False)
            assert isinstance(server.model().calls[-1].prompts[0], RawPrompt) == raw


async def test_tokenize_in_the_format_of_vllm(server: TextServer) -> None:
    result = (await server.post("/tokenize", {"model": "tgi", "prompt": "hé du"})).json
    assert result == {"count": 2, "max_model_len": 64, "tokens": [478, 227], "token_strs": None}
    body = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True, "add_special_tokens": False}
    assert (await server.post("/tokenize", body)).json["token_strs"] == ["user:", " hi"]
    assert (await server.post("/tokenize", {"prompt": "a", "add_special_tokens": 5})).status == 422
    assert (await server.post("/tokenize", {"model": "missing", "prompt": "a"})).status == 404
    assert (await server.post("/tokenize", {"prompt": [1]})).status == 422
    assert (await server.post("/tokenize", {"messages": []})).status == 422
    assert set((await server.request("GET", "/version")).json) == {"version"}


# --- errors --------------------------------------------------------------------------------------------------

INVALID: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0}, "`temperature` must be a number that is strictly positive; got 0"),
    ({"temperature": -1}, "`temperature`"),
    ({"temperature": "hot"}, '`temperature` must be a number that is strictly positive; got "hot"'),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be a number that is strictly positive"),
    ({"frequency_penalty": 2.5}, "`frequency_penalty` must be a number >= -2.0 and <= 2.0"),
    ({"top_p": 0}, "`top_p` must be a number > 0.0 and <= 1.0"),
    ({"top_p": 1.5}, "`top_p`"),
    ({"typical_p": 0}, "`typical_p`"),
    ({"top_k": 0}, "`top_k` must be an integer that is strictly positive; got 0"),
    ({"top_k": 1.5}, "`top_k`"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be an integer that is strictly positive"),
    ({"max_new_tokens": True}, "`max_new_tokens`"),
    ({"stop": ["a"] * 5}, "`stop` must be a list of at most 4 non-empty strings"),
    ({"stop": [""]}, "`stop`"),
    ({"stop": [1]}, "`stop`"),
    ({"best_of": 3, "do_sample": True}, "`best_of` must be an integer >= 1 and <= 2; got 3"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ({"seed": -1}, "`seed`"),
    ({"truncate": 0}, "`truncate`"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be an integer >= 0 and <= 5"),
    ({"details": "yes"}, "`details` must be true or false"),
    ({"do_sample": 1}, "`do_sample` must be true or false"),
    ({"grammar": {"type": "regex"}}, "`grammar`"),
    ({"grammar": {"type": "verse", "value": "x"}}, "`grammar`"),
    ({"adapter_id": 5}, "`adapter_id` must be a string"),
]


@pytest.mark.parametrize(("parameters", "message"), INVALID, ids=str)
async def test_invalid_parameters_are_rejected(server: TextServer, parameters: Any, message: str) -> None:
    body = {"inputs": "a", "parameters": parameters}
    response = await server.post("/generate", body)
    assert response.status == 422
    assert set(response.json) == {"error", "error_type"}
    assert response.json["error_type"] == "validation"
    assert response.json["error"].startswith("Input validation error: ")
    assert message in response.json["error"]
    streamed = await server.post("/generate_stream", body)  # TGI: in the stream, under status 200
    assert streamed.status == 200
    (error,) = events(streamed.body)
    assert error["error_type"] == "validation"
    assert not server.model().calls


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body is empty"),
        (b"{]", "not valid JSON"),
        ([1], "must be a JSON object"),
        ({}, "`inputs` must be a string"),
        ({"inputs": ""}, "`inputs` cannot be empty"),
        ({"inputs": ["a"] * 5}, "at most 4"),
        ({"inputs": "a", "parameters": "b"}, "`parameters` must be an object"),
        ({"inputs": "a", "stream": "yes"}, "`stream` must be true or false"),
        ({"inputs": "a " * 70}, "the context 64"),
    ],
)
async def test_invalid_bodies_are_rejected(server: TextServer, body: Any, message: str) -> None:
    response = await server.post("/", body)
    assert (response.status, response.json["error_type"]) == (422, "validation")
    assert message in response.json["error"]


async def test_conflicts_in_a_stream(server: TextServer) -> None:
    for parameters in ({"best_of": 2, "do_sample": True}, {"decoder_input_details": True}):
        (error,) = events((await server.post("/generate_stream", {"inputs": "a", "parameters": parameters})).body)
        assert "not supported when streaming" in error["error"]


async def test_generation_errors(server: TextServer) -> None:
    response = await server.post("/generate", {"inputs": "a !fault"})
    assert (response.status, response.json["error_type"]) == (424, "generation")
    before = await server.post("/generate_stream", {"inputs": "a !fault"})
    assert before.status == 200
    assert events(before.body)[0]["error_type"] == "generation"
    streamed = events((await server.post("/generate_stream", {"inputs": "!fault a"})).body)
    assert streamed[0]["token"]["text"] == "a"
    assert streamed[1]["error_type"] == "generation"
    assert len(streamed) == 2


class Other(ReverseModel):
    pass


async def test_model_selection() -> None:
    async with serve(ReverseModel, Other) as server:
        for path in ("/", "/generate", "/generate_stream"):
            response = await server.post(path, {"inputs": "a"})
            assert (response.status, response.json["error_type"]) == (400, "validation")
            assert "Other, ReverseModel" in response.json["error"]
        assert (await server.post("/models/Other/generate", {"inputs": "a"})).status == 200
        missing = await server.post("/models/missing/generate", {"inputs": "a"})
        assert (missing.status, missing.json["error_type"]) == (404, "not_found")


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/", {"inputs": "a"}),
    ("/generate", {"inputs": "a"}),
    ("/generate_stream", {"inputs": "a"}),
    ("/tokenize", {"inputs": "a"}),
    ("/chat_tokenize", {"messages": [{"role": "user", "content": "a"}]}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=lambda each: each if isinstance(each, str) else "")
async def test_model_names_in_bodies(path: str, body: dict[str, Any]) -> None:
    async with serve(ReverseModel, Other) as server:  # without a default model
        response = await server.post(path, {**body, "model": "Other"})
        assert response.status == 200
        assert "x-ignored-parameters" not in response.headers
        assert (await server.post(path, {**body, "model": "missing"})).status == 400
        at_model = await server.post(f"/models/ReverseModel{path}".rstrip("/"), {**body, "model": "Other"})
        assert (at_model.status, at_model.headers["x-ignored-parameters"]) == (200, "model")
        same = await server.post(f"/models/ReverseModel{path}".rstrip("/"), {**body, "model": "ReverseModel"})
        assert "x-ignored-parameters" not in same.headers
        assert len(server.model("Other").calls) == (0 if "tokenize" in path else 1)
    async with serve() as server:
        for name, ignored in (
            ("missing", "model"),
            ("tgi", None),
            ("ReverseModel", None),
            (None, None),
            ("http://a:80/b", None),
        ):
            response = await server.post(path, {**body, "model": name})
            assert (response.status, response.headers.get("x-ignored-parameters")) == (200, ignored)
        wrong = await server.post(path, {**body, "model": 5})
        error = events(wrong.body)[0] if path == "/generate_stream" else wrong.json
        assert (error["error_type"], error["error"]) == (
            "validation",
            "Input validation error: `model` must be a string; got 5",
        )


async def test_a_full_queue_is_reported_as_overloaded() -> None:
    async with serve(max_queue=1) as server:
        _, waiting = await server.send("POST", "/generate", {"inputs": "!wait"})
        while not server.model().active:
            await asyncio.sleep(0)
        response = await server.post("/generate", {"inputs": "a"})
        assert (response.status, response.json["error_type"]) == (429, "overloaded")
        server.model().gate.set()
        waiting.close()


async def test_strict_mode_rejects_unknown_parameters() -> None:
    async with serve(strict_parameters=True) as server:
        response = await server.post("/generate", {"inputs": "a", "parameters": {"temprature": 1}})
        assert response.status == 422
        assert "unknown parameters: `temprature`" in response.json["error"]
        assert (await server.post("/invocations", {"inputs": "a", "paramters": {}})).status == 424
        completion = await server.post("/v1/completions", {"model": "ReverseModel", "prompt": "a", "max_token": 1})
        assert completion.status == 400
        for path, body in REQUESTS[1:]:
            if path != "/generate_stream":
                response = await server.post(path, {**body, "foo": 1})
                assert (response.status, "unknown parameters: `foo`" in response.json["error"]) == (422, True)


async def test_strict_mode_rejects_parameters_without_effect() -> None:
    async with serve(strict_parameters=True) as server:
        for path, body, status, name in (
            ("/generate", {"inputs": "a", "parameters": {"watermark": True}}, 422, "watermark"),
            ("/generate", {"inputs": "a", "model": "missing"}, 422, "model"),
            ("/tokenize", {"inputs": "a", "model": "missing"}, 422, "model"),
            ("/invocations", {"inputs": "a", "parameters": {"stop": True}}, 424, "stop"),
        ):
            response = await server.post(path, body)
            assert response.status == status
            assert f"parameters that have no effect here: `{name}`; expected none of them" in response.json["error"]
        (error,) = events((await server.post("/generate_stream", {"inputs": "a", "model": "missing"})).body)
        assert "`model`" in error["error"]
        for path, parameters in (("/generate", {"watermark": False}), ("/invocations", {"stop": False})):
            assert (await server.post(path, {"inputs": "a", "parameters": parameters})).status == 200
