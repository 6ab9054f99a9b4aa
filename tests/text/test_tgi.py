"""TGI's answers to the byte, its limits, and its errors by type."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dragoman.core.text import RawPrompt

from .text_house import House, Speaker, events, speaking


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with speaking() as made:
        yield made


async def test_generate(house: House) -> None:
    answer = await house.post("/generate", {"inputs": "a é", "parameters": {"details": True}})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert (
        answer.body
        == (
            '{"generated_text":"é a","details":{"finish_reason":"eos_token","generated_tokens":3,"seed":null,'
            '"prefill":[],"tokens":[{"id":374,"text":"é","logprob":-0.5,"special":false},'
            '{"id":107,"text":" a","logprob":-1.0,"special":false},'
            '{"id":2,"text":"</s>","logprob":-0.25,"special":true}]}}'
        ).encode()
    )


async def test_the_root_gives_a_list_and_generate_an_object(house: House) -> None:
    assert (await house.post("/", {"inputs": "a b"})).body == b'[{"generated_text":"b a"}]'
    assert (await house.post("/generate", {"inputs": "a b"})).body == b'{"generated_text":"b a"}'
    assert (await house.post("/models/Speaker", {"inputs": "a b"})).body == b'[{"generated_text":"b a"}]'
    both = await house.post("/generate", {"inputs": ["a b", "c"]})
    assert both.body == b'[{"generated_text":"b a"},{"generated_text":"c"}]'


@pytest.mark.parametrize("path", ["/generate_stream", "/", "/models/Speaker", "/models/Speaker/generate_stream"])
async def test_streams(house: House, path: str) -> None:
    ask = {"inputs": "a é", "parameters": {"max_new_tokens": 2}, "stream": True}
    answer = await house.post(path, ask)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-accel-buffering"] == "no"
    assert (
        answer.body
        == (
            'data:{"index":1,"token":{"id":374,"text":"é","logprob":-0.5,"special":false},'
            '"generated_text":null,"details":null}\n\n'
            'data:{"index":2,"token":{"id":107,"text":" a","logprob":-1.0,"special":false},"generated_text":"é a",'
            '"details":{"finish_reason":"length","generated_tokens":2,"seed":null,"input_length":2}}\n\n'
        ).encode()
    )


async def test_null_is_as_good_as_absent(house: House) -> None:
    names = "best_of temperature repetition_penalty frequency_penalty top_k top_p typical_p seed truncate grammar "
    names += "top_n_tokens adapter_id max_new_tokens stop watermark"
    parameters = dict.fromkeys(names.split())
    answer = await house.post("/", {"inputs": "a b", "parameters": parameters, "stream": None})
    assert answer.json == [{"generated_text": "b a"}]
    sampling = house.model().calls[-1].sampling
    assert sampling.max_new_tokens is None
    assert not sampling.do_sample


async def test_what_it_took(house: House) -> None:
    answer = await house.post("/generate", {"inputs": "a bé c", "parameters": {"watermark": True, "nothing": 1}})
    assert answer.headers["x-compute-characters"] == "6"
    assert (answer.headers["x-prompt-tokens"], answer.headers["x-generated-tokens"]) == ("3", "4")
    assert float(answer.headers["x-compute-time"]) > 0
    for name in ("x-total-time", "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token"):
        assert int(answer.headers[name]) >= 0
    assert answer.headers["x-ignored-parameters"] == "nothing, watermark"


@pytest.mark.parametrize(
    ("parameters", "samples"),
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
async def test_what_samples(house: House, parameters: Any, samples: bool) -> None:
    told = (await house.post("/generate", {"inputs": "a", "parameters": {**parameters, "details": True}})).json
    assert house.model().calls[-1].sampling.do_sample == samples
    assert (told["details"]["seed"] is not None) == samples


async def test_stop_texts_stay_in_the_text(house: House) -> None:
    for name in ("stop", "stop_sequences"):
        told = (await house.post("/generate", {"inputs": "a b c", "parameters": {name: ["b"], "details": True}})).json
        assert (told["generated_text"], told["details"]["finish_reason"]) == ("c b", "stop_sequence")


async def test_full_text_and_likely_tokens(house: House) -> None:
    parameters = {"return_full_text": True, "top_n_tokens": 2, "details": True, "max_new_tokens": 1}
    told = (await house.post("/generate", {"inputs": "a b", "parameters": parameters})).json
    assert told["generated_text"] == "a bb"
    assert [t["text"] for t in told["details"]["top_tokens"][0]] == ["b", "b1"]


async def test_info_and_health(house: House) -> None:
    told = (await house.ask("GET", "/info")).json
    assert (told["model_id"], told["max_total_tokens"], told["max_input_tokens"]) == ("speaker", 64, 63)
    assert (told["max_best_of"], told["max_stop_sequences"], told["max_client_batch_size"]) == (2, 4, 4)
    assert (await house.ask("GET", "/models/Speaker/info")).json == told
    for path in ("/health", "/"):
        health = await house.ask("GET", path)
        assert (health.status, health.body) == (200, b"")
    unhealthy = await house.ask("GET", "/models/nobody/health")
    assert unhealthy.status == 404


async def test_tokens(house: House) -> None:
    assert (await house.post("/tokenize", {"inputs": "hé du"})).json == [
        {"id": number, "text": text, "start": start, "stop": stop}
        for number, text, start, stop in ((478, "hé", 0, 2), (227, " du", 2, 5))
    ]
    told = (await house.post("/chat_tokenize", {"messages": [{"role": "user", "content": "hi"}]})).json
    assert told["templated_text"] == "user: hi"
    assert [t["text"] for t in told["tokenize_response"]] == ["user:", " hi"]


async def test_what_has_no_effect_on_tokens_is_named(house: House) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    more = {"inputs": "a", "parameters": {"truncate": 5}, "add_special_tokens": False}
    for path, ask in (("/tokenize", more), ("/chat_tokenize", {**chat, "max_tokens": 5, "stream": True})):
        plain = await house.post(path, ask)
        assert "x-ignored-parameters" not in plain.headers
        answer = await house.post(path, {**ask, "foo": 1, "tool_prompt": "x"})
        assert (answer.status, answer.headers["x-ignored-parameters"]) == (200, "foo, tool_prompt")
        assert answer.json == plain.json
    wrong = await house.post("/tokenize", {"inputs": "a", "add_special_tokens": 5})
    assert (wrong.status, wrong.json["error_type"]) == (422, "validation")
    assert "`add_special_tokens` must be true or false; got 5" in wrong.json["error"]


async def test_inputs_may_be_taken_as_they_are(house: House) -> None:
    for path in ("/generate", "/generate_stream"):
        for given, bare in (({}, False), ({"add_special_tokens": True}, False), ({"add_special_tokens": False}, True)):
            answer = await house.post(path, {"inputs": "a", **given})
            assert (answer.status, "x-ignored-parameters" in answer.headers) == (200, False)
            assert isinstance(house.model().calls[-1].prompts[0], RawPrompt) == bare


async def test_tokens_as_vllms_clients_ask_for_them(house: House) -> None:
    told = (await house.post("/tokenize", {"model": "tgi", "prompt": "hé du"})).json
    assert told == {"count": 2, "max_model_len": 64, "tokens": [478, 227], "token_strs": None}
    ask = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True, "add_special_tokens": False}
    assert (await house.post("/tokenize", ask)).json["token_strs"] == ["user:", " hi"]
    assert (await house.post("/tokenize", {"prompt": "a", "add_special_tokens": 5})).status == 422
    assert (await house.post("/tokenize", {"model": "nobody", "prompt": "a"})).status == 404
    assert (await house.post("/tokenize", {"prompt": [1]})).status == 422
    assert (await house.post("/tokenize", {"messages": []})).status == 422
    assert set((await house.ask("GET", "/version")).json) == {"version"}


# --- errors --------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
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
    ({"stop": ["a"] * 5}, "`stop` must be a list of at most 4 texts"),
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
    ({"adapter_id": 5}, "`adapter_id` must be a text"),
]


@pytest.mark.parametrize(("parameters", "message"), BAD, ids=str)
async def test_bad_parameters(house: House, parameters: Any, message: str) -> None:
    body = {"inputs": "a", "parameters": parameters}
    answer = await house.post("/generate", body)
    assert answer.status == 422
    assert set(answer.json) == {"error", "error_type"}
    assert answer.json["error_type"] == "validation"
    assert answer.json["error"].startswith("Input validation error: ")
    assert message in answer.json["error"]
    streamed = await house.post("/generate_stream", body)  # TGI: in the stream, under status 200
    assert streamed.status == 200
    (told,) = events(streamed.body)
    assert told["error_type"] == "validation"
    assert not house.model().calls


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body is empty"),
        (b"{]", "not valid JSON"),
        ([1], "must be a JSON object"),
        ({}, "`inputs` must be a text"),
        ({"inputs": ""}, "`inputs` cannot be empty"),
        ({"inputs": ["a"] * 5}, "at most 4"),
        ({"inputs": "a", "parameters": "b"}, "`parameters` must be an object"),
        ({"inputs": "a", "stream": "yes"}, "`stream` must be true or false"),
        ({"inputs": "a " * 70}, "the context 64"),
    ],
)
async def test_bad_bodies(house: House, body: Any, message: str) -> None:
    answer = await house.post("/", body)
    assert (answer.status, answer.json["error_type"]) == (422, "validation")
    assert message in answer.json["error"]


async def test_conflicts_in_a_stream(house: House) -> None:
    for parameters in ({"best_of": 2, "do_sample": True}, {"decoder_input_details": True}):
        (told,) = events((await house.post("/generate_stream", {"inputs": "a", "parameters": parameters})).body)
        assert "not supported when streaming" in told["error"]


async def test_faults_of_generation(house: House) -> None:
    answer = await house.post("/generate", {"inputs": "a !fault"})
    assert (answer.status, answer.json["error_type"]) == (424, "generation")
    before = await house.post("/generate_stream", {"inputs": "a !fault"})
    assert before.status == 200
    assert events(before.body)[0]["error_type"] == "generation"
    amid = events((await house.post("/generate_stream", {"inputs": "!fault a"})).body)
    assert amid[0]["token"]["text"] == "a"
    assert amid[1]["error_type"] == "generation"
    assert len(amid) == 2


class Other(Speaker):
    pass


async def test_which_model_is_meant() -> None:
    async with speaking(Speaker, Other) as house:
        for path in ("/", "/generate", "/generate_stream"):
            answer = await house.post(path, {"inputs": "a"})
            assert (answer.status, answer.json["error_type"]) == (400, "validation")
            assert "Other, Speaker" in answer.json["error"]
        assert (await house.post("/models/Other/generate", {"inputs": "a"})).status == 200
        lost = await house.post("/models/nobody/generate", {"inputs": "a"})
        assert (lost.status, lost.json["error_type"]) == (404, "not_found")


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/", {"inputs": "a"}),
    ("/generate", {"inputs": "a"}),
    ("/generate_stream", {"inputs": "a"}),
    ("/tokenize", {"inputs": "a"}),
    ("/chat_tokenize", {"messages": [{"role": "user", "content": "a"}]}),
]


@pytest.mark.parametrize(("path", "ask"), ASKED, ids=lambda each: each if isinstance(each, str) else "")
async def test_a_body_names_a_model_that_is_there(path: str, ask: dict[str, Any]) -> None:
    async with speaking(Speaker, Other) as house:  # no default: only a name leads anywhere
        answer = await house.post(path, {**ask, "model": "Other"})
        assert answer.status == 200
        assert "x-ignored-parameters" not in answer.headers
        assert (await house.post(path, {**ask, "model": "nobody"})).status == 400
        there = await house.post(f"/models/Speaker{path}".rstrip("/"), {**ask, "model": "Other"})
        assert (there.status, there.headers["x-ignored-parameters"]) == (200, "model")
        same = await house.post(f"/models/Speaker{path}".rstrip("/"), {**ask, "model": "Speaker"})
        assert "x-ignored-parameters" not in same.headers
        assert len(house.model("Other").calls) == (0 if "tokenize" in path else 1)
    async with speaking() as house:
        for named, ignored in (("nobody", "model"), ("tgi", None), ("Speaker", None), (None, None)):
            answer = await house.post(path, {**ask, "model": named})
            assert (answer.status, answer.headers.get("x-ignored-parameters")) == (200, ignored)
        wrong = await house.post(path, {**ask, "model": 5})
        told = events(wrong.body)[0] if path == "/generate_stream" else wrong.json
        assert (told["error_type"], told["error"]) == (
            "validation",
            "Input validation error: `model` must be a text; got 5",
        )


async def test_a_full_queue_is_told_as_overloaded() -> None:
    async with speaking(max_queue=1) as house:
        _, waiting = await house.send("POST", "/generate", {"inputs": "!wait"})
        while not house.model().active:
            await asyncio.sleep(0)
        answer = await house.post("/generate", {"inputs": "a"})
        assert (answer.status, answer.json["error_type"]) == (429, "overloaded")
        house.model().gate.set()
        waiting.close()


async def test_strict_mode_refuses_what_it_does_not_know() -> None:
    async with speaking(strict_parameters=True) as house:
        answer = await house.post("/generate", {"inputs": "a", "parameters": {"temprature": 1}})
        assert answer.status == 422
        assert "unknown parameters: `temprature`" in answer.json["error"]
        assert (await house.post("/invocations", {"inputs": "a", "paramters": {}})).status == 424
        told = await house.post("/v1/completions", {"model": "Speaker", "prompt": "a", "max_token": 1})
        assert told.status == 400
        for path, ask in ASKED[1:]:
            if path != "/generate_stream":
                answer = await house.post(path, {**ask, "foo": 1})
                assert (answer.status, "unknown parameters: `foo`" in answer.json["error"]) == (422, True)


async def test_strict_mode_refuses_what_has_no_effect() -> None:
    async with speaking(strict_parameters=True) as house:
        for path, ask, status, name in (
            ("/generate", {"inputs": "a", "parameters": {"watermark": True}}, 422, "watermark"),
            ("/generate", {"inputs": "a", "model": "nobody"}, 422, "model"),
            ("/tokenize", {"inputs": "a", "model": "nobody"}, 422, "model"),
            ("/invocations", {"inputs": "a", "parameters": {"stop": True}}, 424, "stop"),
        ):
            answer = await house.post(path, ask)
            assert answer.status == status
            assert f"parameters that have no effect here: `{name}`; expected none of them" in answer.json["error"]
        (told,) = events((await house.post("/generate_stream", {"inputs": "a", "model": "nobody"})).body)
        assert "`model`" in told["error"]
        for path, parameters in (("/generate", {"watermark": False}), ("/invocations", {"stop": False})):
            assert (await house.post(path, {"inputs": "a", "parameters": parameters})).status == 200
