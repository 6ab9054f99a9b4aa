"""LMI: both schemas, output formatters, and errors before, during and after the first token."""

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

from text_server import ReverseModel, TextServer, events, lines, serve


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve() as server:
        yield server


def write_model(path: Path, **parameters: Any) -> str:
    """Write a model `custom`, a ReverseModel with LMI settings; return the repository's path."""
    model = path / "custom"
    model.mkdir(parents=True)
    tests = Path(__file__).parents[3]
    (model / "model.py").write_text(
        f"import sys\nsys.path.insert(0, {str(tests)!r})\nfrom text_server import ReverseModel\n\n\n"
        "class Custom(ReverseModel):\n    pass\n"
    )
    settings = "\n".join(f"{name} = {json.dumps(value)}" for name, value in parameters.items())
    (model / "dragoman.toml").write_text(f"[model]\nplacement = 'inline'\n[model.protocols.lmi]\n{settings}\n")
    return str(path)


# --- the rolling-batch schema --------------------------------------------------------------------------------


async def test_documented_response(server: TextServer) -> None:
    response = await server.post("/invocations", {"inputs": "What is Deep Learning?"})
    assert response.status == 200
    assert response.headers["content-type"] == "application/json"
    assert response.body == b'{"generated_text": "Learning? Deep is What"}'


async def test_documented_details(server: TextServer) -> None:
    response = await server.post("/predictions/ReverseModel", {"inputs": "a é", "parameters": {"details": True}})
    assert (
        response.body
        == (
            '{"generated_text": "é a", "details": {"finish_reason": "eos_token", "generated_tokens": 3, '
            '"inputs": "a é", "tokens": [{"id": 374, "text": "é", "log_prob": -0.5}, '
            '{"id": 107, "text": " a", "log_prob": -1.0}, '
            '{"id": 2, "text": "", "log_prob": -0.25, "special_token": true}]}}'
        ).encode()
    )


async def test_documented_stream(server: TextServer) -> None:
    body = {"inputs": "a b é", "parameters": {"max_new_tokens": 2, "foo": 1}, "stream": True}
    response = await server.post("/models/ReverseModel/invoke", body)
    assert response.headers["content-type"] == "application/jsonlines"
    assert response.headers["x-ignored-parameters"] == "foo"
    assert (
        response.body
        == (
            '{"token": {"id": 374, "text": "é", "log_prob": -0.5}}\n'
            '{"token": {"id": 108, "text": " b", "log_prob": -1.0}, "generated_text": "é b", '
            '"details": {"finish_reason": "length", "generated_tokens": 2, "inputs": "a b é"}}\n'
        ).encode()
    )


async def test_output_formatter_sse(server: TextServer) -> None:
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1, "output_formatter": "sse"}}
    response = await server.post("/invocations", body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.body == (
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
async def test_finish_reasons(server: TextServer, parameters: Any, reason: str, text: str) -> None:
    result = (
        await server.post("/invocations", {"inputs": "a b c d", "parameters": {**parameters, "details": True}})
    ).json
    assert (result["generated_text"], result["details"]["finish_reason"]) == (text, reason)


async def test_max_new_tokens_is_30_by_default(server: TextServer) -> None:
    result = (await server.post("/invocations", {"inputs": "w " * 39 + "w", "parameters": {"details": True}})).json
    assert result["details"]["generated_tokens"] == 30


async def test_full_text_and_prefill(server: TextServer) -> None:
    parameters = {"details": True, "return_full_text": True, "decoder_input_details": True, "top_n_tokens": 2}
    result = (
        await server.post("/invocations", {"inputs": "a b", "parameters": {**parameters, "max_new_tokens": 1}})
    ).json
    assert result["generated_text"] == "a bb"
    assert result["details"]["prefill"] == [
        {"id": 107, "text": "a", "log_prob": None},
        {"id": 108, "text": " b", "log_prob": -0.125},
    ]
    assert result["details"]["top_tokens"] == [
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
async def test_best_sequence_first_others_in_details(server: TextServer, parameters: Any, count: int) -> None:
    result = (
        await server.post("/invocations", {"inputs": "a b c", "parameters": {**parameters, "details": True}})
    ).json
    assert result["generated_text"] == "c b a"
    others = result["details"]["best_of_sequences"]
    assert [o["generated_text"] for o in others] == ["b a", "a"][: count - 1]
    assert set(others[0]) == {"finish_reason", "generated_tokens", "tokens", "generated_text"}


async def test_return_full_text_applies_to_every_sequence(server: TextServer) -> None:
    parameters = {"n": 2, "do_sample": True, "return_full_text": True}
    result = (await server.post("/invocations", {"inputs": "a b", "parameters": parameters})).json
    assert result["generated_text"] == "a bb a"
    assert result["details"]["best_of_sequences"][0]["generated_text"] == "a ba"
    listed = {"inputs": ["a b"], "parameters": {"n": 2, "do_sample": True}}
    (result,) = (await server.post("/invocations", listed)).json
    assert result["generated_text"] == "a bb a"
    assert result["details"]["best_of_sequences"][0]["generated_text"] == "a ba"


async def test_streams_of_several_sequences_send_the_best(server: TextServer) -> None:
    body = {"inputs": "a b c", "parameters": {"n": 2, "do_sample": True}, "stream": True}
    result = lines((await server.post("/invocations", body)).body)
    assert "".join(line["token"]["text"] for line in result) == result[-1]["generated_text"] == "c b a"
    assert not server.model().calls[-1].stream


async def test_sampling_needs_do_sample(server: TextServer, tmp_path: Path) -> None:
    await server.post("/invocations", {"inputs": "a", "parameters": {"temperature": 0.5, "top_p": 0.5}})
    assert not server.model().calls[-1].sampling.do_sample
    async with serve(write_model(tmp_path, infer_do_sample=True)) as configured:
        await configured.post("/invocations", {"inputs": "a", "parameters": {"temperature": 0.5}})
        assert configured.model("custom").calls[-1].sampling.do_sample


async def test_every_documented_parameter_reaches_the_model(server: TextServer) -> None:
    parameters = {
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
    response = await server.post("/invocations", {"inputs": "a", "parameters": parameters})
    assert response.status == 200
    assert "x-ignored-parameters" not in response.headers
    assert server.model().calls[-1].sampling == dragoman.Sampling(
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


async def test_lists_of_prompts_return_lists(server: TextServer) -> None:
    response = await server.post("/invocations", {"inputs": ["a b", "c"]})
    assert response.body == b'[{"generated_text": "a bb a"}, {"generated_text": "cc"}]'
    single = await server.post("/invocations", {"inputs": ["a b"], "parameters": {"return_full_text": False}})
    assert single.json == [{"generated_text": "b a"}]


async def test_dynamic_batch_schema(tmp_path: Path) -> None:
    async with serve(write_model(tmp_path, rolling_batch="disable", enable_streaming=True)) as server:
        response = await server.post("/invocations", {"inputs": "a b", "parameters": {"output_formatter": "json"}})
        assert response.json == [{"generated_text": "a bb a"}]
        streamed = await server.post("/invocations", {"inputs": ["a b", "c"]})
        assert streamed.headers["content-type"] == "application/jsonlines"
        assert streamed.body == (b'{"outputs": ["b", "c"]}\n{"outputs": [" a", ""]}\n{"outputs": ["", ""]}\n')
        # best_of is known only at the end, and is streamed token by token as well
        best = {"best_of": 2, "do_sample": True}
        together = await server.post("/invocations", {"inputs": ["a b", "c"], "parameters": best})
        assert together.body == streamed.body
        failed = await server.post(
            "/invocations", {"inputs": ["a", "!fault"], "parameters": {"output_formatter": "json"}}
        )
        assert failed.status == 424
        assert failed.json["code"] == 424
        assert failed.json["message"] == "invoke handler failure"
        for invalid, message in (
            ({"inputs": ["a", ""]}, "does not contain any content"),
            ({"inputs": "a", "parameters": {"max_new_tokens": -3}}, "`max_new_tokens` must be"),
            ([1], "must be a JSON object"),
            (b"{", "not valid JSON"),
            ({"inputs": " ".join("x" * 99)}, "the context 64"),
        ):
            response = await server.post("/invocations", invalid)
            assert (response.status, list(response.json)) == (424, ["code", "message", "error"])
            assert (response.json["code"], response.json["message"]) == (424, "invoke handler failure")
            assert message in response.json["error"]
        assert "generated !fault" in failed.json["error"]


async def test_dynamic_batch_schema_returns_text_only(tmp_path: Path) -> None:
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
    path = write_model(tmp_path, rolling_batch="disable")
    async with serve(path) as server:
        response = await server.post("/invocations", {"inputs": "a b", "parameters": more})
        assert response.json == [{"generated_text": "a bb a"}]
        name = "n, details, decoder_input_details, logprobs, top_n_tokens, prompt_logprobs"
        assert response.headers["x-ignored-parameters"] == name
        sampling = server.model("custom").calls[-1].sampling
        assert (sampling.n, sampling.best_of, sampling.top_logprobs, sampling.prompt_logprobs) == (1, 3, 0, None)
        await server.post("/invocations", {"inputs": "a b", "parameters": {"num_beams": 3}})
        assert (server.model("custom").calls[-1].sampling.n, server.model("custom").calls[-1].sampling.num_beams) == (
            1,
            3,
        )
        nothing = {"n": 1, "details": False, "decoder_input_details": None, "logprobs": 0, "best_of": 2}
        response = await server.post("/invocations", {"inputs": "a b", "parameters": {**nothing, "do_sample": True}})
        assert "x-ignored-parameters" not in response.headers
    async with serve(path, strict_parameters=True) as server:
        response = await server.post("/invocations", {"inputs": "a b", "parameters": {"n": 2, "details": True}})
        assert (response.status, response.json["code"]) == (424, 424)
        assert response.json["error"] == "parameters that have no effect here: `n`, `details`; expected none of them"
        assert not server.model("custom").calls


# --- a model's own settings ----------------------------------------------------------------------------------


async def test_tgi_compatibility(tmp_path: Path) -> None:
    async with serve(write_model(tmp_path, tgi_compat=True)) as server:
        (result,) = (await server.post("/invocations", {"inputs": "a b"})).json
        assert result["generated_text"] == "b a"
        assert result["details"]["inputs"] == "a b"
        assert result["details"]["prefill"] == []
        assert result["details"]["tokens"][0].items() >= {"log_prob": -0.5, "logprob": -0.5, "special": False}.items()
        stream = await server.post("/invocations", {"inputs": "a b", "stream": True})
        assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert stream.body.startswith(b'data: {"index": 1, "token": {"id": 108, "text": "b", "log_prob": -0.5')
        assert events(stream.body)[-1]["details"]["finish_reason"] == "eos_token"


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")
async def test_tgi_client_with_tgi_compat(tmp_path: Path) -> None:
    async with serve(write_model(tmp_path, tgi_compat=True)) as server:
        client = text_generation.Client(f"{server.url}/invocations")
        response = await asyncio.to_thread(client.generate, "a b", decoder_input_details=True)
        assert (response.generated_text, len(response.details.prefill)) == ("b a", 2)
        chunks = await asyncio.to_thread(lambda: list(client.generate_stream("a b")))
        assert chunks[-1].generated_text == "b a"


async def test_output_formatter_none(tmp_path: Path) -> None:
    async with serve(write_model(tmp_path, output_formatter="none")) as server:
        for stream in (False, True):
            response = await server.post("/invocations", {"inputs": "a b", "stream": stream})
            assert (response.body, response.headers["content-type"]) == (b"b a", "text/plain; charset=utf-8")
    async with serve(write_model(tmp_path / "sse", output_formatter="sse")) as server:
        for body in ({"inputs": "a b", "stream": True}, {"inputs": "a b"}):
            response = await server.post("/invocations", {**body, "parameters": {"output_formatter": "none"}})
            assert (response.body, response.headers["content-type"]) == (b"b a", "text/plain; charset=utf-8")


async def test_default_output_formatter(tmp_path: Path) -> None:
    async with serve(write_model(tmp_path, output_formatter="jsonlines")) as server:
        assert len(lines((await server.post("/invocations", {"inputs": "a b"})).body)) == 3
        other = await server.post("/invocations", {"inputs": "a b", "parameters": {"output_formatter": "json"}})
        assert other.json == {"generated_text": "b a"}
        invalid = await server.post("/invocations", {"inputs": "a b", "parameters": {"output_formatter": "../x.py:f"}})
        assert invalid.status == 424
        assert "must be one of json, jsonlines, sse" in invalid.json["error"]


async def test_custom_formatters(tmp_path: Path) -> None:
    path = write_model(tmp_path, input_formatter="mine.py:read", output_formatter="mine.py:write")
    (tmp_path / "custom" / "mine.py").write_text(
        "def read(body):\n    return {'inputs': body['question'], 'stream': body.get('stream', False)}\n\n\n"
        "def write(answer):\n"
        "    return answer['token']['text'].upper() if 'token' in answer else answer['generated_text'][::-1]\n"
    )
    async with serve(path) as server:
        response = await server.post("/invocations", {"question": "ab cd"})
        assert (response.body, response.headers["content-type"]) == (b"ba dc", "text/plain; charset=utf-8")
        assert (await server.post("/invocations", {"question": "ab cd", "stream": True})).body == b"CD AB"
        failed = await server.post("/invocations", {"quest": "ab cd"})
        assert failed.status == 424
        assert "input_formatter failed: KeyError: 'question'" in failed.json["error"]


# --- bodies of other types -----------------------------------------------------------------------------------

_FORM = (
    b'--x\r\ncontent-disposition: form-data; name="data"\r\n\r\na b\r\n'
    b'--x\r\ncontent-disposition: form-data; name="more"\r\n\r\nc\r\n--x--\r\n'
)


@pytest.mark.parametrize(
    ("kind", "body", "requested"),
    [
        ("text/plain", b"a b", {"generated_text": "b a"}),
        ("text/plain; charset=utf-8", "ä b".encode(), {"generated_text": "b ä"}),
        ("text/csv", b"id,inputs\n1,a b\n2,c\n", [{"generated_text": "a bb a"}, {"generated_text": "cc"}]),
        ("application/x-www-form-urlencoded", b"data=a+b", {"generated_text": "b a"}),
        ("multipart/form-data; boundary=x", _FORM, {"generated_text": "b a"}),
    ],
)
async def test_other_content_types(server: TextServer, kind: str, body: bytes, requested: Any) -> None:
    response = await server.post("/invocations", body, {"content-type": kind})
    assert response.json == requested


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
async def test_invalid_bodies_of_other_content_types(server: TextServer, kind: str, body: bytes) -> None:
    response = await server.post("/invocations", body, {"content-type": kind})
    assert response.status == 424
    assert response.json["error"].startswith("Input Parsing failed.")


_TWO = b'--x\r\ncontent-disposition: form-data; name="model_name"\r\n\r\nSecond\r\n' + _FORM


async def test_a_form_may_name_the_model() -> None:
    class Second(ReverseModel):
        pass

    async with serve(ReverseModel, Second) as server:
        for kind, body in (
            ("application/x-www-form-urlencoded", b"model_name=Second&text=a+b"),
            ("multipart/form-data; boundary=x", _TWO),
        ):
            before = len(server.model("Second").calls)
            response = await server.post("/invocations", body, {"content-type": kind})
            assert response.json == {"generated_text": "b a"}
            assert len(server.model("Second").calls) == before + 1
            response = await server.post("/invocations", body.replace(b"Second", b"missing"), {"content-type": kind})
            assert (response.status, response.json["type"]) == (404, "ModelNotFoundException")
            response = await server.post("/invocations", body.replace(b"model_name", b"model"), {"content-type": kind})
            assert (response.status, response.json["type"]) == (400, "BadRequestException")


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
async def test_invalid_payloads(server: TextServer, body: Any, message: str) -> None:
    response = await server.post("/invocations", body)
    assert response.status == 424
    assert response.json == {"error": response.json["error"], "code": 424}
    assert response.json["error"].startswith("Input Parsing failed. Ensure that the request payload is valid. ")
    assert message in response.json["error"]


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_token(server: TextServer, stream: bool) -> None:
    response = await server.post("/invocations", {"inputs": "a !fault", "stream": stream})
    assert response.status == 424
    if not stream:
        assert response.body == (
            b'{"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, '
            b'"inputs": null, "tokens": null}}'
        )
    else:
        assert response.json["code"] == 424
        assert "generated !fault" in response.json["error"]
    long = await server.post("/invocations", {"inputs": "a " * 99 + "a", "stream": stream})
    assert (long.status, set(long.json)) == (424, {"error", "code"})


@pytest.mark.parametrize("formatter", ["jsonlines", "sse"])
async def test_an_error_in_a_stream_ends_it_as_documented(server: TextServer, formatter: str) -> None:
    body = {"inputs": "!fault b a", "parameters": {"output_formatter": formatter}, "stream": True}
    response = await server.post("/invocations", body)
    assert response.status == 200
    last = (
        b'{"token": {"id": -1, "text": "", "log_prob": -1, "special_token": true}, "generated_text": "", '
        b'"details": {"finish_reason": "error", "generated_tokens": null, "inputs": null}}'
    )
    framed = last + b"\n" if formatter == "jsonlines" else b"data: " + last + b"\n\n"
    assert response.body.endswith(framed)
    assert response.body.count(b'"token"') == 3


async def test_unknown_models_and_methods(server: TextServer) -> None:
    response = await server.post("/predictions/missing", {"inputs": "a"})
    assert response.status == 404
    assert response.json["type"] == "ModelNotFoundException"
    assert response.json["code"] == 404
    invalid = await server.request("GET", "/invocations")
    assert (invalid.status, invalid.json["type"]) == (405, "MethodNotAllowedException")


class Other(ReverseModel):
    pass


async def test_model_selection() -> None:
    async with serve(ReverseModel, Other) as server:
        response = await server.post("/invocations", {"inputs": "a"})
        assert (response.status, response.json["type"]) == (400, "BadRequestException")
        assert "Other, ReverseModel" in response.json["message"]
        for path, headers in (
            ("/invocations?model_name=Other", {}),
            ("/invocations", {"model_name": "Other"}),
            ("/invocations", {"x-amzn-sagemaker-target-model": "Other.tar.gz"}),
            ("/invocations", {"x-amzn-sagemaker-custom-attributes": "trace=1;model_name=Other"}),
        ):
            before = len(server.model("Other").calls)
            assert (await server.post(path, {"inputs": "a"}, headers)).status == 200
            assert len(server.model("Other").calls) == before + 1
    async with serve(ReverseModel, Other, default_model="Other") as server:
        assert (await server.post("/invocations", {"inputs": "a"})).status == 200
        assert len(server.model("Other").calls) == 1


_CHAT = {"messages": [{"role": "user", "content": "a"}]}


class Sums(dragoman.Model):
    placement = "inline"

    def predict(self, x: np.ndarray) -> np.ndarray:
        return x + 1


async def test_a_single_model_answers_chats_for_any_name() -> None:
    async with serve(ReverseModel) as server:
        response = await server.post("/invocations", {**_CHAT, "model": "gpt-4o"})
        assert (response.status, response.json["model"]) == (200, "ReverseModel")


@pytest.mark.parametrize("default", ["", "ReverseModel"])
async def test_model_names_in_bodies(default: str) -> None:
    async with serve(ReverseModel, Other, Sums, **({"default_model": default} if default else {})) as server:
        for body in (
            {**_CHAT, "model": "Other"},
            {**_CHAT, "model": "someone/Other:pirate"},
            {"prompt": "a", "model": "Other"},
            {"inputs": "a", "model_name": "Other"},
            {"inputs": ["a"], "model_name": "Other"},
        ):
            before = len(server.model("Other").calls)
            response = await server.post("/invocations", body)
            assert (response.status, len(server.model("Other").calls)) == (200, before + 1)
            assert "x-ignored-parameters" not in response.headers
            unknown = {name: "missing" if name.startswith("model") else value for name, value in body.items()}
            before = len(server.model("ReverseModel").calls)
            response = await server.post("/invocations", unknown)
            if "model" not in body:
                assert (response.status, response.json["type"]) == (404, "ModelNotFoundException")
                assert "missing" in response.json["message"]
            elif default:  # LMI's clients send a `model` that LMI does not look at
                assert (response.status, len(server.model("ReverseModel").calls)) == (200, before + 1)
                server.model("ReverseModel").calls.clear()
            else:
                assert (response.status, response.json["type"]) == (400, "BadRequestException")
        for arrays in ({"inputs": [1.0], "model_name": "Sums"}, {"x": [1.0], "model_name": "Sums"}):
            assert (await server.post("/invocations", arrays)).json == {"predictions": [2.0]}
        assert not server.model("ReverseModel").calls
        for body in ({**_CHAT, "model": "lmi"}, {"prompt": "a", "model": "tgi"}, {"inputs": "a", "model_name": ""}):
            assert (await server.post("/invocations", body)).status == (200 if default else 400)
        assert len(server.model("ReverseModel").calls) == (3 if default else 0)


async def test_model_names_in_paths_take_precedence() -> None:
    async with serve(ReverseModel, Other) as server:
        for path in (
            "/models/ReverseModel/invoke",
            "/predictions/ReverseModel",
            "/invocations?model_name=ReverseModel",
        ):
            for name in ("Other", "missing"):
                assert (await server.post(path, {**_CHAT, "model": name})).status == 200
                response = await server.post(path, {"inputs": "a", "model_name": name})
                assert (response.status, response.headers["x-ignored-parameters"]) == (200, "model_name")
            response = await server.post(path, {"inputs": "a", "model_name": "ReverseModel"})
            assert "x-ignored-parameters" not in response.headers
        assert not server.model("Other").calls
        invalid = await server.post("/predictions/ReverseModel", {"inputs": "a", "model_name": 5})
        assert (invalid.status, invalid.json["error"]) == (424, "`model_name` must be a string; got 5")
    async with serve(ReverseModel, Other, strict_parameters=True) as server:
        assert (await server.post("/models/ReverseModel/invoke", {**_CHAT, "model": "Other"})).status == 200
        assert (await server.post("/invocations", {"inputs": "a", "model_name": "Other"})).status == 200
        response = await server.post("/models/ReverseModel/invoke", {"inputs": "a", "model_name": "Other"})
        assert response.status == 424
        assert "parameters that have no effect here: `model_name`" in response.json["error"]


async def test_version_selection(tmp_path: Path) -> None:
    for version in ("1", "2"):
        (tmp_path / "custom" / version).mkdir(parents=True)
        (tmp_path / "custom" / version / "model.py").write_text(
            "import dragoman\nfrom dragoman import Generation, Text\n\n\n"
            "class Custom(dragoman.Model):\n    placement = 'inline'\n\n    def generate(self, call):\n"
            f"        return Generation((Text(0, 0, '{version}', (), 1, 'eos_token', whole='{version}'),))\n"
        )
    async with serve(str(tmp_path), version_policy="all") as server:
        for path, headers, version in (
            ("/predictions/custom", {}, "2"),
            ("/predictions/custom/1", {}, "1"),
            ("/invocations?model_version=1", {}, "1"),
            ("/invocations?model_name=custom&model_version=2", {}, "2"),
            ("/invocations", {"x-amzn-sagemaker-custom-attributes": "model_version=1"}, "1"),
            ("/predictions/custom", {"model_version": "1"}, "1"),
        ):
            assert (await server.post(path, {"inputs": "a"}, headers)).json == {"generated_text": version}
        assert (await server.post("/invocations?model_name=custom&model_version=9", {"inputs": "a"})).status == 404


async def test_adapters_are_named_by_field_or_header(server: TextServer) -> None:
    await server.post("/invocations", {"inputs": "a", "adapters": ["one"]})
    assert server.model().calls[-1].sampling.adapter == "one"
    await server.post("/invocations", {"inputs": "a"}, {"x-amzn-sagemaker-adapter-identifier": "two"})
    assert server.model().calls[-1].sampling.adapter == "two"
    assert (await server.request("GET", "/models/ReverseModel/adapters")).json == {"adapters": [{"name": "pirate"}]}


async def test_openai_bodies_get_openai_responses(server: TextServer) -> None:
    response = await server.post("/invocations", {"messages": [{"role": "user", "content": "a b"}]})
    assert response.json["choices"][0]["message"]["content"] == "b a user:"
    completed = await server.post("/invocations", {"prompt": "a b", "max_tokens": 1})
    assert completed.json["choices"][0]["text"] == "b"


@pytest.mark.parametrize("formatter", ["jsonlines", "jsonlines_chat"])
async def test_chats_stream_as_json_lines_if_configured(tmp_path: Path, formatter: str) -> None:
    async with serve(write_model(tmp_path, output_formatter=formatter)) as server:
        for words, end in (("a b", "finish_reason"), ("!fault a", "error")):
            body = {
                "messages": [{"role": "user", "content": words}],
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            response = await server.post("/invocations", body)
            assert (response.status, response.headers["content-type"]) == (200, "application/jsonlines")
            assert "cache-control" not in response.headers
            result = lines(response.body)
            assert result[0]["object"] == "chat.completion.chunk"
            assert "usage" in result[-1] if end == "finish_reason" else set(result[-1]) == {"error"}
        whole = await server.post("/invocations", {"prompt": "a b"})
        assert whole.json["choices"][0]["text"] == "b a"
        separate = await server.post("/v1/completions", {"prompt": "a b", "stream": True})
        assert separate.headers["content-type"] == "text/event-stream; charset=utf-8"


# --- health and management -----------------------------------------------------------------------------------


class Broken(dragoman.Model):
    placement = "inline"

    def load(self) -> None:
        raise ValueError("no weights")


class NotText(dragoman.Model):
    placement = "inline"

    def infer(self, call: dragoman.Infer) -> dict[str, Any]:
        return {}


async def test_ping() -> None:
    async with serve() as server:
        response = await server.request("GET", "/ping")
        assert (response.status, response.json) == (200, {"ReverseModel": {"status": "Healthy"}})
    async with serve(ReverseModel, Broken) as server:
        response = await server.request("GET", "/ping")
        assert (response.status, response.json["Broken"]) == (500, {"status": "FAILED"})


async def test_models_are_listed_for_openai_as_at_its_own_path() -> None:
    """Without `/v1` in the base URL of a client; models that are not of language are listed for DJL Serving only."""
    async with serve(ReverseModel, NotText) as server:
        listed, cards = [(await server.request("GET", path)).json for path in ("/models?limit=1", "/v1/models")]
        assert len(listed["models"]) == 1
        assert [card["id"] for card in listed["data"]] == [card["id"] for card in cards["data"]]
        assert "NotText" not in {card["id"] for card in listed["data"]}


async def test_models_are_unloaded_and_loaded(tmp_path: Path) -> None:
    token = {"authorization": "Bearer open"}
    async with serve(write_model(tmp_path), control_token="open") as server:
        assert (await server.request("GET", "/models")).json == {
            "models": [{"modelName": "custom", "modelUrl": "custom", "status": "READY"}],
            "object": "list",
            "data": [
                {"id": id_, "object": "model", "created": 0, "owned_by": "dragoman"}
                for id_ in ("custom", "pirate", "custom:pirate")
            ],
        }
        assert (await server.request("DELETE", "/models/custom")).status == 401
        unloaded = await server.request("DELETE", "/models/custom", headers=token)
        assert unloaded.json == {"status": 'Model "custom" unregistered'}
        assert (await server.request("GET", "/models/custom")).status == 404
        loaded = await server.post("/models?model_name=custom", None, token)
        assert loaded.json == {"status": 'Model "custom" registered.'}
        again = await server.post("/models", {"model_name": "custom", "url": "custom"}, token)
        assert again.status == 200
        assert (await server.request("GET", "/models/custom")).json[0]["status"] == "READY"
        assert (await server.request("GET", "/models?limit=x")).status == 424
