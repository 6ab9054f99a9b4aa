"""LMI's promises: both schemas, every formatter to the byte, errors before, during and after the first token."""

import asyncio
import json
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dragoman

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import text_generation

from .text_house import House, Speaker, events, lines, speaking


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with speaking() as made:
        yield made


def folder(path: Path, **parameters: Any) -> str:
    """A folder whose `said` is the speaker with parameters."""
    model = path / "said"
    model.mkdir(parents=True)
    tests = Path(__file__).parents[1]
    (model / "model.py").write_text(
        f"import sys\nsys.path.insert(0, {str(tests)!r})\nfrom text.text_house import Speaker\n\n\n"
        "class Said(Speaker):\n    pass\n"
    )
    told = "\n".join(f"{name} = {json.dumps(value)}" for name, value in parameters.items())
    (model / "dragoman.toml").write_text(f"[model]\nplacement = 'inline'\n[model.protocols.lmi]\n{told}\n")
    return str(path)


# --- the rolling-batch schema --------------------------------------------------------------------------------


async def test_the_documented_answer(house: House) -> None:
    answer = await house.post("/invocations", {"inputs": "What is Deep Learning?"})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.body == b'{"generated_text": "Learning? Deep is What"}'


async def test_the_documented_details(house: House) -> None:
    answer = await house.post("/predictions/Speaker", {"inputs": "a é", "parameters": {"details": True}})
    assert (
        answer.body
        == (
            '{"generated_text": "é a", "details": {"finish_reason": "eos_token", "generated_tokens": 3, '
            '"inputs": "a é", "tokens": [{"id": 374, "text": "é", "log_prob": -0.5}, '
            '{"id": 107, "text": " a", "log_prob": -1.0}, '
            '{"id": 2, "text": "", "log_prob": -0.25, "special_token": true}]}}'
        ).encode()
    )


async def test_the_documented_stream(house: House) -> None:
    ask = {"inputs": "a b é", "parameters": {"max_new_tokens": 2, "foo": 1}, "stream": True}
    answer = await house.post("/models/Speaker/invoke", ask)
    assert answer.headers["content-type"] == "application/jsonlines"
    assert answer.headers["x-ignored-parameters"] == "foo"
    assert (
        answer.body
        == (
            '{"token": {"id": 374, "text": "é", "log_prob": -0.5}}\n'
            '{"token": {"id": 108, "text": " b", "log_prob": -1.0}, "generated_text": "é b", '
            '"details": {"finish_reason": "length", "generated_tokens": 2, "inputs": "a b é"}}\n'
        ).encode()
    )


async def test_server_sent_events_by_request(house: House) -> None:
    ask = {"inputs": "a", "parameters": {"max_new_tokens": 1, "output_formatter": "sse"}}
    answer = await house.post("/invocations", ask)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.body == (
        b'data: {"token": {"id": 107, "text": "a", "log_prob": -0.5}, "generated_text": "a", '
        b'"details": {"finish_reason": "length", "generated_tokens": 1, "inputs": "a"}}\n\n'
    )


@pytest.mark.parametrize(
    ("parameters", "reason", "text"),
    [
        ({}, "eos_token", "d c b a"),
        ({"max_new_tokens": 2}, "length", "d c"),
        ({"stop_sequences": ["b"]}, "stop_sequence", "d c"),
        ({"stop": ["b"]}, "stop_sequence", "d c"),
        ({"stop": ["c"], "include_stop_str_in_output": True}, "stop_sequence", "d c"),
    ],
)
async def test_why_it_ends(house: House, parameters: Any, reason: str, text: str) -> None:
    told = (await house.post("/invocations", {"inputs": "a b c d", "parameters": {**parameters, "details": True}})).json
    assert (told["generated_text"], told["details"]["finish_reason"]) == (text, reason)


async def test_thirty_tokens_unless_it_says_otherwise(house: House) -> None:
    told = (await house.post("/invocations", {"inputs": "w " * 39 + "w", "parameters": {"details": True}})).json
    assert told["details"]["generated_tokens"] == 30


async def test_full_text_and_prefill(house: House) -> None:
    parameters = {"details": True, "return_full_text": True, "decoder_input_details": True, "top_n_tokens": 2}
    told = (await house.post("/invocations", {"inputs": "a b", "parameters": {**parameters, "max_new_tokens": 1}})).json
    assert told["generated_text"] == "a bb"
    assert told["details"]["prefill"] == [
        {"id": 107, "text": "a", "log_prob": None},
        {"id": 108, "text": " b", "log_prob": -0.125},
    ]
    assert told["details"]["top_tokens"] == [
        [{"id": 108, "text": "b", "log_prob": -0.5}, {"id": 109, "text": "b1", "log_prob": -1.5}]
    ]


@pytest.mark.parametrize(
    ("parameters", "count"),
    [
        ({"best_of": 3, "do_sample": True}, 3),
        ({"n": 2, "do_sample": True}, 2),
        ({"n": 2, "best_of": 4, "do_sample": True}, 2),
        ({"num_beams": 3}, 3),
        ({"num_beams": 3, "n": 2}, 3),
    ],
)
async def test_the_best_first_and_the_others_beside_it(house: House, parameters: Any, count: int) -> None:
    told = (await house.post("/invocations", {"inputs": "a b c", "parameters": {**parameters, "details": True}})).json
    assert told["generated_text"] == "c b a"
    others = told["details"]["best_of_sequences"]
    assert [o["generated_text"] for o in others] == ["b a", "a"][: count - 1]
    assert set(others[0]) == {"finish_reason", "generated_tokens", "tokens", "generated_text"}


async def test_the_prompt_is_in_front_of_all_texts_or_of_none(house: House) -> None:
    parameters = {"n": 2, "do_sample": True, "return_full_text": True}
    told = (await house.post("/invocations", {"inputs": "a b", "parameters": parameters})).json
    assert told["generated_text"] == "a bb a"
    assert told["details"]["best_of_sequences"][0]["generated_text"] == "a ba"
    listed = {"inputs": ["a b"], "parameters": {"n": 2, "do_sample": True}}
    (told,) = (await house.post("/invocations", listed)).json
    assert told["generated_text"] == "a bb a"
    assert told["details"]["best_of_sequences"][0]["generated_text"] == "a ba"


async def test_a_stream_of_several_is_held_until_the_best_is_known(house: House) -> None:
    ask = {"inputs": "a b c", "parameters": {"n": 2, "do_sample": True}, "stream": True}
    told = lines((await house.post("/invocations", ask)).body)
    assert "".join(line["token"]["text"] for line in told) == told[-1]["generated_text"] == "c b a"
    assert not house.model().calls[-1].stream


async def test_sampling_needs_do_sample(house: House, tmp_path: Path) -> None:
    await house.post("/invocations", {"inputs": "a", "parameters": {"temperature": 0.5, "top_p": 0.5}})
    assert not house.model().calls[-1].sampling.do_sample
    async with speaking(folder(tmp_path, infer_do_sample=True)) as newer:
        await newer.post("/invocations", {"inputs": "a", "parameters": {"temperature": 0.5}})
        assert newer.model("said").calls[-1].sampling.do_sample


async def test_every_parameter_of_the_document_arrives(house: House) -> None:
    given = {
        "do_sample": True,
        "seed": 5,
        "temperature": 0.5,
        "repetition_penalty": 1.5,
        "top_k": 7,
        "top_p": 0.5,
        "max_new_tokens": 9,
        "typical_p": 0.5,
        "truncate": 8,
        "ignore_eos_token": True,
        "min_p": 0.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "n": 2,
        "best_of": 3,
        "length_penalty": 2,
        "early_stopping": True,
        "stop_token_ids": [1, 2],
        "include_stop_str_in_output": True,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "min_length": 3,
        "bad_sequences": ["x"],
        "stop_sequences": ["y"],
        "stop": ["z"],
    }
    answer = await house.post("/invocations", {"inputs": "a", "parameters": given})
    assert answer.status == 200
    assert "x-ignored-parameters" not in answer.headers
    assert house.model().calls[-1].sampling == dragoman.Sampling(
        do_sample=True,
        seed=5,
        temperature=0.5,
        repetition_penalty=1.5,
        top_k=7,
        top_p=0.5,
        max_new_tokens=9,
        shorten=True,
        typical_p=0.5,
        truncate=8,
        ignore_eos=True,
        min_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        n=2,
        best_of=3,
        length_penalty=2.0,
        early_stopping=True,
        stop_token_ids=(1, 2),
        include_stop=True,
        top_logprobs=2,
        prompt_logprobs=1,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        min_new_tokens=3,
        bad_words=("x",),
        stop=("y", "z"),
    )


# --- the dynamic-batch schema --------------------------------------------------------------------------------


async def test_lists_in_lists_out(house: House) -> None:
    answer = await house.post("/invocations", {"inputs": ["a b", "c"]})
    assert answer.body == b'[{"generated_text": "a bb a"}, {"generated_text": "cc"}]'
    alone = await house.post("/invocations", {"inputs": ["a b"], "parameters": {"return_full_text": False}})
    assert alone.json == [{"generated_text": "b a"}]


async def test_the_dynamic_schema_alone(tmp_path: Path) -> None:
    async with speaking(folder(tmp_path, rolling_batch="disable", enable_streaming=True)) as house:
        answer = await house.post("/invocations", {"inputs": "a b", "parameters": {"output_formatter": "json"}})
        assert answer.json == [{"generated_text": "a bb a"}]
        streamed = await house.post("/invocations", {"inputs": ["a b", "c"]})
        assert streamed.headers["content-type"] == "application/jsonlines"
        assert streamed.body == (b'{"outputs": ["b", "c"]}\n{"outputs": [" a", ""]}\n{"outputs": ["", ""]}\n')
        # the best of several, which is known at the end alone: token by token all the same
        best = {"best_of": 2, "do_sample": True}
        together = await house.post("/invocations", {"inputs": ["a b", "c"], "parameters": best})
        assert together.body == streamed.body
        failed = await house.post(
            "/invocations", {"inputs": ["a", "!fault"], "parameters": {"output_formatter": "json"}}
        )
        assert failed.status == 424
        assert failed.json["code"] == 424
        assert failed.json["message"] == "invoke handler failure"
        for wrong, told in (
            ({"inputs": ["a", ""]}, "does not contain any content"),
            ({"inputs": "a", "parameters": {"max_new_tokens": -3}}, "`max_new_tokens` must be"),
            ([1], "must be a JSON object"),
            (b"{", "not valid JSON"),
            ({"inputs": " ".join("x" * 99)}, "the context 64"),
        ):
            answer = await house.post("/invocations", wrong)
            assert (answer.status, list(answer.json)) == (424, ["code", "message", "error"])
            assert (answer.json["code"], answer.json["message"]) == (424, "invoke handler failure")
            assert told in answer.json["error"]
        assert "would not say" in failed.json["error"]


async def test_the_dynamic_schema_gives_a_text_alone(tmp_path: Path) -> None:
    more = {
        "details": True,
        "decoder_input_details": True,
        "n": 2,
        "best_of": 3,
        "do_sample": True,
        "logprobs": 2,
        "top_n_tokens": 1,
        "prompt_logprobs": 0,
    }
    path = folder(tmp_path, rolling_batch="disable")
    async with speaking(path) as house:
        answer = await house.post("/invocations", {"inputs": "a b", "parameters": more})
        assert answer.json == [{"generated_text": "a bb a"}]
        named = "n, details, decoder_input_details, logprobs, top_n_tokens, prompt_logprobs"
        assert answer.headers["x-ignored-parameters"] == named
        sampling = house.model("said").calls[-1].sampling
        assert (sampling.n, sampling.best_of, sampling.top_logprobs, sampling.prompt_logprobs) == (1, 3, 0, None)
        await house.post("/invocations", {"inputs": "a b", "parameters": {"num_beams": 3}})
        assert (house.model("said").calls[-1].sampling.n, house.model("said").calls[-1].sampling.num_beams) == (1, 3)
        nothing = {"n": 1, "details": False, "decoder_input_details": None, "logprobs": 0, "best_of": 2}
        answer = await house.post("/invocations", {"inputs": "a b", "parameters": {**nothing, "do_sample": True}})
        assert "x-ignored-parameters" not in answer.headers
    async with speaking(path, strict_parameters=True) as house:
        answer = await house.post("/invocations", {"inputs": "a b", "parameters": {"n": 2, "details": True}})
        assert (answer.status, answer.json["code"]) == (424, 424)
        assert answer.json["error"] == "parameters that have no effect here: `n`, `details`; expected none of them"
        assert not house.model("said").calls


# --- a model's own settings ----------------------------------------------------------------------------------


async def test_tgi_compatibility(tmp_path: Path) -> None:
    async with speaking(folder(tmp_path, tgi_compat=True)) as house:
        (told,) = (await house.post("/invocations", {"inputs": "a b"})).json
        assert told["generated_text"] == "b a"
        assert told["details"]["inputs"] == "a b"
        assert told["details"]["prefill"] == []
        assert told["details"]["tokens"][0].items() >= {"log_prob": -0.5, "logprob": -0.5, "special": False}.items()
        stream = await house.post("/invocations", {"inputs": "a b", "stream": True})
        assert stream.headers["content-type"] == "text/event-stream"
        assert stream.body.startswith(b'data: {"index": 1, "token": {"id": 108, "text": "b", "log_prob": -0.5')
        assert events(stream.body)[-1]["details"]["finish_reason"] == "eos_token"


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")
async def test_tgis_own_client_with_that(tmp_path: Path) -> None:
    async with speaking(folder(tmp_path, tgi_compat=True)) as house:
        client = text_generation.Client(f"{house.url}/invocations")
        answer = await asyncio.to_thread(client.generate, "a b", decoder_input_details=True)
        assert (answer.generated_text, len(answer.details.prefill)) == ("b a", 2)
        pieces = await asyncio.to_thread(lambda: list(client.generate_stream("a b")))
        assert pieces[-1].generated_text == "b a"


async def test_nothing_but_the_text(tmp_path: Path) -> None:
    async with speaking(folder(tmp_path, output_formatter="none")) as house:
        for stream in (False, True):
            answer = await house.post("/invocations", {"inputs": "a b", "stream": stream})
            assert (answer.body, answer.headers["content-type"]) == (b"b a", "text/plain; charset=utf-8")
    async with speaking(folder(tmp_path / "sse", output_formatter="sse")) as house:
        for ask in ({"inputs": "a b", "stream": True}, {"inputs": "a b"}):
            answer = await house.post("/invocations", {**ask, "parameters": {"output_formatter": "none"}})
            assert (answer.body, answer.headers["content-type"]) == (b"b a", "text/plain; charset=utf-8")


async def test_the_operators_formatter(tmp_path: Path) -> None:
    async with speaking(folder(tmp_path, output_formatter="jsonlines")) as house:
        assert len(lines((await house.post("/invocations", {"inputs": "a b"})).body)) == 3
        other = await house.post("/invocations", {"inputs": "a b", "parameters": {"output_formatter": "json"}})
        assert other.json == {"generated_text": "b a"}
        wrong = await house.post("/invocations", {"inputs": "a b", "parameters": {"output_formatter": "../x.py:f"}})
        assert wrong.status == 424
        assert "must be one of json, jsonlines, sse" in wrong.json["error"]


async def test_formatters_of_ones_own(tmp_path: Path) -> None:
    path = folder(tmp_path, input_formatter="mine.py:read", output_formatter="mine.py:write")
    (tmp_path / "said" / "mine.py").write_text(
        "def read(body):\n    return {'inputs': body['question'], 'stream': body.get('stream', False)}\n\n\n"
        "def write(answer):\n"
        "    return answer['token']['text'].upper() if 'token' in answer else answer['generated_text'][::-1]\n"
    )
    async with speaking(path) as house:
        answer = await house.post("/invocations", {"question": "ab cd"})
        assert (answer.body, answer.headers["content-type"]) == (b"ba dc", "text/plain; charset=utf-8")
        assert (await house.post("/invocations", {"question": "ab cd", "stream": True})).body == b"CD AB"
        failed = await house.post("/invocations", {"quest": "ab cd"})
        assert failed.status == 424
        assert "input_formatter failed: KeyError: 'question'" in failed.json["error"]


# --- bodies of other types -----------------------------------------------------------------------------------

_FORM = (
    b'--x\r\ncontent-disposition: form-data; name="data"\r\n\r\na b\r\n'
    b'--x\r\ncontent-disposition: form-data; name="more"\r\n\r\nc\r\n--x--\r\n'
)


@pytest.mark.parametrize(
    ("kind", "body", "wanted"),
    [
        ("text/plain", b"a b", {"generated_text": "b a"}),
        ("text/plain; charset=utf-8", "ä b".encode(), {"generated_text": "b ä"}),
        ("text/csv", b"id,inputs\n1,a b\n2,c\n", [{"generated_text": "a bb a"}, {"generated_text": "cc"}]),
        ("application/x-www-form-urlencoded", b"data=a+b", {"generated_text": "b a"}),
        ("multipart/form-data; boundary=x", _FORM, {"generated_text": "b a"}),
    ],
)
async def test_other_types(house: House, kind: str, body: bytes, wanted: Any) -> None:
    answer = await house.post("/invocations", body, {"content-type": kind})
    assert answer.json == wanted


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/csv", b"id\n1\n"),
        ("text/csv", b'inputs\n"' + b"x" * 200000 + b'"\n'),
        ("text/plain", b"\xff"),
        ("text/plain", b""),
        ("application/x-www-form-urlencoded", b"=&=&"),
        ("multipart/form-data; boundary=x", b""),
        ("multipart/form-data", b"--x\r\n\r\na"),
        ("multipart/form-data; boundary=x", b"--y\r\n\r\na"),
    ],
)
async def test_broken_bodies_of_other_types(house: House, kind: str, body: bytes) -> None:
    answer = await house.post("/invocations", body, {"content-type": kind})
    assert answer.status == 424
    assert answer.json["error"].startswith("Input Parsing failed.")


_TWO = b'--x\r\ncontent-disposition: form-data; name="model_name"\r\n\r\nSecond\r\n' + _FORM


async def test_a_form_may_name_the_model() -> None:
    class Second(Speaker):
        pass

    async with speaking(Speaker, Second) as house:
        for kind, body in (
            ("application/x-www-form-urlencoded", b"model_name=Second&text=a+b"),
            ("multipart/form-data; boundary=x", _TWO),
        ):
            before = len(house.model("Second").calls)
            answer = await house.post("/invocations", body, {"content-type": kind})
            assert answer.json == {"generated_text": "b a"}
            assert len(house.model("Second").calls) == before + 1
            answer = await house.post("/invocations", body.replace(b"Second", b"nobody"), {"content-type": kind})
            assert (answer.status, answer.json["type"]) == (404, "ModelNotFoundException")
            answer = await house.post("/invocations", body.replace(b"model_name", b"model"), {"content-type": kind})
            assert (answer.status, answer.json["type"]) == (400, "BadRequestException")


# --- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body is empty"),
        (b"{", "not valid JSON"),
        (b"[" * 999 + b"]" * 999, "nests too deep"),
        ([], "must be a JSON object"),
        ({}, "should be a json object specifying the 'inputs' field. Received payload {}"),
        ({"inputs": 5}, "The 'inputs' field must be a string"),
        ({"inputs": ["a", None]}, "Received type <class 'NoneType'>"),
        ({"inputs": ""}, "does not contain any content"),
        ({"inputs": []}, "does not contain any content"),
        ({"inputs": "a", "parameters": [1]}, "'parameters' must be provided as an object of key-value pairs"),
    ],
)
async def test_payloads_that_are_none(house: House, body: Any, message: str) -> None:
    answer = await house.post("/invocations", body)
    assert answer.status == 424
    assert answer.json == {"error": answer.json["error"], "code": 424}
    assert answer.json["error"].startswith("Input Parsing failed. Ensure that the request payload is valid. ")
    assert message in answer.json["error"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_before_the_first_token(house: House, stream: bool) -> None:
    answer = await house.post("/invocations", {"inputs": "a !fault", "stream": stream})
    assert answer.status == 424
    if not stream:
        assert answer.body == (
            b'{"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, '
            b'"inputs": null, "tokens": null}}'
        )
    else:
        assert answer.json["code"] == 424
        assert "would not say" in answer.json["error"]
    long = await house.post("/invocations", {"inputs": "a " * 99 + "a", "stream": stream})
    assert (long.status, set(long.json)) == (424, {"error", "code"})


@pytest.mark.parametrize("formatter", ["jsonlines", "sse"])
async def test_a_fault_in_mid_stream_ends_it_as_documented(house: House, formatter: str) -> None:
    ask = {"inputs": "!fault b a", "parameters": {"output_formatter": formatter}, "stream": True}
    answer = await house.post("/invocations", ask)
    assert answer.status == 200
    last = (
        b'{"token": {"id": -1, "text": "", "log_prob": -1, "special_token": true}, "generated_text": "", '
        b'"details": {"finish_reason": "error", "generated_tokens": null, "inputs": null}}'
    )
    framed = last + b"\n" if formatter == "jsonlines" else b"data: " + last + b"\n\n"
    assert answer.body.endswith(framed)
    assert answer.body.count(b'"token"') == 3


async def test_paths_and_models_that_are_not_there(house: House) -> None:
    answer = await house.post("/predictions/nobody", {"inputs": "a"})
    assert answer.status == 404
    assert answer.json["type"] == "ModelNotFoundException"
    assert answer.json["code"] == 404
    wrong = await house.ask("GET", "/invocations")
    assert (wrong.status, wrong.json["type"]) == (405, "MethodNotAllowedException")


class Other(Speaker):
    pass


async def test_which_model_is_meant() -> None:
    async with speaking(Speaker, Other) as house:
        answer = await house.post("/invocations", {"inputs": "a"})
        assert (answer.status, answer.json["type"]) == (400, "BadRequestException")
        assert "Other, Speaker" in answer.json["message"]
        for path, headers in (
            ("/invocations?model_name=Other", {}),
            ("/invocations", {"model_name": "Other"}),
            ("/invocations", {"x-amzn-sagemaker-target-model": "Other.tar.gz"}),
            ("/invocations", {"x-amzn-sagemaker-custom-attributes": "trace=1;model_name=Other"}),
        ):
            before = len(house.model("Other").calls)
            assert (await house.post(path, {"inputs": "a"}, headers)).status == 200
            assert len(house.model("Other").calls) == before + 1
    async with speaking(Speaker, Other, default_model="Other") as house:
        assert (await house.post("/invocations", {"inputs": "a"})).status == 200
        assert len(house.model("Other").calls) == 1


_CHAT = {"messages": [{"role": "user", "content": "a"}]}


class Sums(dragoman.Model):
    placement = "inline"

    def predict(self, x: np.ndarray) -> np.ndarray:
        return x + 1


async def test_the_only_model_answers_a_chat_that_names_any() -> None:
    async with speaking(Speaker) as house:
        answer = await house.post("/invocations", {**_CHAT, "model": "gpt-4o"})
        assert (answer.status, answer.json["model"]) == (200, "Speaker")


@pytest.mark.parametrize("default", ["", "Speaker"])
async def test_the_body_names_the_model(default: str) -> None:
    async with speaking(Speaker, Other, Sums, **({"default_model": default} if default else {})) as house:
        for body in (
            {**_CHAT, "model": "Other"},
            {**_CHAT, "model": "someone/Other:pirate"},
            {"prompt": "a", "model": "Other"},
            {"inputs": "a", "model_name": "Other"},
            {"inputs": ["a"], "model_name": "Other"},
        ):
            before = len(house.model("Other").calls)
            answer = await house.post("/invocations", body)
            assert (answer.status, len(house.model("Other").calls)) == (200, before + 1)
            assert "x-ignored-parameters" not in answer.headers
            unknown = {name: "nobody" if name.startswith("model") else value for name, value in body.items()}
            before = len(house.model("Speaker").calls)
            answer = await house.post("/invocations", unknown)
            if "model" not in body:
                assert (answer.status, answer.json["type"]) == (404, "ModelNotFoundException")
                assert "nobody" in answer.json["message"]
            elif default:  # LMI's clients send a `model` that LMI does not look at
                assert (answer.status, len(house.model("Speaker").calls)) == (200, before + 1)
                house.model("Speaker").calls.clear()
            else:
                assert (answer.status, answer.json["type"]) == (400, "BadRequestException")
        for arrays in ({"inputs": [1.0], "model_name": "Sums"}, {"x": [1.0], "model_name": "Sums"}):
            assert (await house.post("/invocations", arrays)).json == {"predictions": [2.0]}
        assert not house.model("Speaker").calls
        for body in ({**_CHAT, "model": "lmi"}, {"prompt": "a", "model": "tgi"}, {"inputs": "a", "model_name": ""}):
            assert (await house.post("/invocations", body)).status == (200 if default else 400)
        assert len(house.model("Speaker").calls) == (3 if default else 0)


async def test_the_path_goes_before_the_body() -> None:
    async with speaking(Speaker, Other) as house:
        for path in ("/models/Speaker/invoke", "/predictions/Speaker", "/invocations?model_name=Speaker"):
            for named in ("Other", "nobody"):
                assert (await house.post(path, {**_CHAT, "model": named})).status == 200
                answer = await house.post(path, {"inputs": "a", "model_name": named})
                assert (answer.status, answer.headers["x-ignored-parameters"]) == (200, "model_name")
            answer = await house.post(path, {"inputs": "a", "model_name": "Speaker"})
            assert "x-ignored-parameters" not in answer.headers
        assert not house.model("Other").calls
        wrong = await house.post("/predictions/Speaker", {"inputs": "a", "model_name": 5})
        assert (wrong.status, wrong.json["error"]) == (424, "`model_name` must be a text; got 5")
    async with speaking(Speaker, Other, strict_parameters=True) as house:
        assert (await house.post("/models/Speaker/invoke", {**_CHAT, "model": "Other"})).status == 200
        assert (await house.post("/invocations", {"inputs": "a", "model_name": "Other"})).status == 200
        answer = await house.post("/models/Speaker/invoke", {"inputs": "a", "model_name": "Other"})
        assert answer.status == 424
        assert "parameters that have no effect here: `model_name`" in answer.json["error"]


async def test_which_version_is_meant(tmp_path: Path) -> None:
    for version in ("1", "2"):
        (tmp_path / "said" / version).mkdir(parents=True)
        (tmp_path / "said" / version / "model.py").write_text(
            "import dragoman\nfrom dragoman import Generation, Text\n\n\n"
            "class Said(dragoman.Model):\n    placement = 'inline'\n\n    def generate(self, call):\n"
            f"        return Generation((Text(0, 0, '{version}', (), 1, 'eos_token', whole='{version}'),))\n"
        )
    async with speaking(str(tmp_path), version_policy="all") as house:
        for path, headers, version in (
            ("/predictions/said", {}, "2"),
            ("/predictions/said/1", {}, "1"),
            ("/invocations?model_version=1", {}, "1"),
            ("/invocations?model_name=said&model_version=2", {}, "2"),
            ("/invocations", {"x-amzn-sagemaker-custom-attributes": "model_version=1"}, "1"),
            ("/predictions/said", {"model_version": "1"}, "1"),
        ):
            assert (await house.post(path, {"inputs": "a"}, headers)).json == {"generated_text": version}
        assert (await house.post("/invocations?model_name=said&model_version=9", {"inputs": "a"})).status == 404


async def test_adapters_are_named_by_field_or_header(house: House) -> None:
    await house.post("/invocations", {"inputs": "a", "adapters": ["one"]})
    assert house.model().calls[-1].sampling.adapter == "one"
    await house.post("/invocations", {"inputs": "a"}, {"x-amzn-sagemaker-adapter-identifier": "two"})
    assert house.model().calls[-1].sampling.adapter == "two"
    assert (await house.ask("GET", "/models/Speaker/adapters")).json == {"adapters": [{"name": "pirate"}]}


async def test_openais_bodies_are_answered_as_openai_does(house: House) -> None:
    answer = await house.post("/invocations", {"messages": [{"role": "user", "content": "a b"}]})
    assert answer.json["choices"][0]["message"]["content"] == "b a user:"
    completed = await house.post("/invocations", {"prompt": "a b", "max_tokens": 1})
    assert completed.json["choices"][0]["text"] == "b"


@pytest.mark.parametrize("formatter", ["jsonlines", "jsonlines_chat"])
async def test_chats_stream_in_lines_where_the_operator_says_so(tmp_path: Path, formatter: str) -> None:
    async with speaking(folder(tmp_path, output_formatter=formatter)) as house:
        for words, end in (("a b", "finish_reason"), ("!fault a", "error")):
            ask = {
                "messages": [{"role": "user", "content": words}],
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            answer = await house.post("/invocations", ask)
            assert (answer.status, answer.headers["content-type"]) == (200, "application/jsonlines")
            assert "cache-control" not in answer.headers
            told = lines(answer.body)
            assert told[0]["object"] == "chat.completion.chunk"
            assert "usage" in told[-1] if end == "finish_reason" else set(told[-1]) == {"error"}
        whole = await house.post("/invocations", {"prompt": "a b"})
        assert whole.json["choices"][0]["text"] == "b a"
        apart = await house.post("/v1/completions", {"prompt": "a b", "stream": True})
        assert apart.headers["content-type"] == "text/event-stream"


# --- health and management -----------------------------------------------------------------------------------


class Broken(dragoman.Model):
    placement = "inline"

    def load(self) -> None:
        raise ValueError("no weights")


async def test_ping() -> None:
    async with speaking() as house:
        answer = await house.ask("GET", "/ping")
        assert (answer.status, answer.json) == (200, {"Speaker": {"status": "Healthy"}})
    async with speaking(Speaker, Broken) as house:
        answer = await house.ask("GET", "/ping")
        assert (answer.status, answer.json["Broken"]) == (500, {"status": "FAILED"})


async def test_models_come_and_go(tmp_path: Path) -> None:
    token = {"authorization": "Bearer open"}
    async with speaking(folder(tmp_path), control_token="open") as house:
        assert (await house.ask("GET", "/models")).json == {
            "models": [{"modelName": "said", "modelUrl": "said", "status": "READY"}]
        }
        assert (await house.ask("DELETE", "/models/said")).status == 401
        gone = await house.ask("DELETE", "/models/said", headers=token)
        assert gone.json == {"status": 'Model "said" unregistered'}
        assert (await house.ask("GET", "/models/said")).status == 404
        there = await house.post("/models?model_name=said", None, token)
        assert there.json == {"status": 'Model "said" registered.'}
        again = await house.post("/models", {"model_name": "said", "url": "said"}, token)
        assert again.status == 200
        assert (await house.ask("GET", "/models/said")).json[0]["status"] == "READY"
        assert (await house.ask("GET", "/models?limit=x")).status == 424
