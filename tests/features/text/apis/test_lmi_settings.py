"""LMI settings of a model and of the server; invalid ones are reported when the model is loaded."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import dragoman
from dragoman.core.calls import Load, Request
from dragoman.core.errors import InvalidInput
from dragoman.engine_setup import settings_for
from text_server import ReverseModel, lines, serve

from .test_lmi import write_model

FORMATTERS = """
import json

number = 5

def good(value):
    return value

def optional(value, more=1):
    return value

def two(value, other):
    return value

def none():
    return 1

async def later(value):
    return value

def generator(value):
    yield value

class Callable:
    def __call__(self, value):
        return value

callable_object = Callable()
"""


@pytest.mark.parametrize(
    ("value", "is_set"), [("true", True), ("True", True), ("1", True), (1, True), ("FALSE", False), ("0", False)]
)
async def test_words_of_switches(tmp_path: Path, value: Any, is_set: bool) -> None:
    async with serve(write_model(tmp_path, tgi_compat=value)) as server:
        found = (await server.post("/invocations", {"inputs": "a b"})).json
        assert isinstance(found, list) is is_set


@pytest.mark.parametrize("name", ["good", "optional", "callable_object"])
async def test_valid_formatter_functions(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path, input_formatter=f"mine.py:{name}", output_formatter=f"mine.py:{name}")
    (tmp_path / "custom" / "mine.py").write_text(FORMATTERS)
    async with serve(path) as server:
        assert (await server.post("/invocations", {"inputs": "a b"})).json == {"generated_text": "b a"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"output_formatter": "mine.py:missing"},
            "output_formatter 'mine.py:missing' cannot be imported: .* has no 'missing'",
        ),
        (
            {"output_formatter": "missing.py:good"},
            "output_formatter 'missing.py:good': file 'missing.py' not found in 'custom'",
        ),
        ({"output_formatter": "bad.py:good"}, "'bad.py:good' cannot be imported: .*SyntaxError"),
        ({"output_formatter": "late.py:good"}, "'late.py:good' cannot be imported: NameError: name 'nothing'"),
        (
            {"input_formatter": "mine.py:two"},
            r"input_formatter 'mine.py:two' must take one argument; it takes .value, ",
        ),
        ({"input_formatter": "mine.py:none"}, "'mine.py:none' must take one argument; it takes .."),
        ({"input_formatter": "mine.py:later"}, "must be a plain function; got one with async or yield"),
        ({"output_formatter": "mine.py:generator"}, "must be a plain function; got one with async or yield"),
        ({"output_formatter": "mine.py:number"}, "'mine.py:number' is not a function: got int"),
        ({"output_formatter": "../mine.py:good"}, "must be file.py:function, with a file in the model's folder"),
        ({"output_formatter": "verse"}, "output_formatter must be one of json, jsonlines, sse, none or file.py:func"),
        ({"tgi_compat": "perhaps"}, "tgi_compat must be true or false; got 'perhaps'"),
        ({"formatter_folder": "/nowhere"}, "formatter_folder must be a folder; got '/nowhere'"),
        ({"tgi_compatible": True}, "unknown setting 'tgi_compatible', expected one of output_formatter"),
    ],
)
async def test_invalid_settings_are_reported_when_the_model_is_loaded(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    path = write_model(tmp_path, **settings)
    (tmp_path / "custom" / "mine.py").write_text(FORMATTERS)
    (tmp_path / "custom" / "bad.py").write_text("def good(:")
    (tmp_path / "custom" / "late.py").write_text("nothing.here")
    async with dragoman.open_engine(path, control_token="t") as engine:
        (deployment,) = engine.deployments()
        assert deployment.state == "UNAVAILABLE"
        assert deployment.reason.startswith("failed to load 'custom', model 'custom': ")
        with pytest.raises(InvalidInput, match=message):
            await engine.call(Request(Load("t"), "custom"))


async def test_settings_of_an_unknown_protocol_are_rejected(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    config = tmp_path / "custom" / "dragoman.toml"
    config.write_text(config.read_text().replace("protocols.lmi", "protocols.lmu"))
    async with dragoman.open_engine(path) as engine:
        (deployment,) = engine.deployments()
        assert "unknown protocol setting 'lmu': expected one of lmi" in deployment.reason


async def test_formatters_in_the_folder_of_serving_properties(tmp_path: Path) -> None:
    write_model(tmp_path)
    properties = tmp_path / "described"
    properties.mkdir()
    (properties / "serving.properties").write_text("option.model_id=../custom\noption.output_formatter=mine.py:write\n")
    (properties / "mine.py").write_text("def write(answer):\n    return answer['generated_text'].upper()\n")
    async with serve(str(properties)) as server:
        assert (await server.post("/invocations", {"inputs": "a b"})).body == b"B A"


# --- Bedrock's schema ----------------------------------------------------------------------------------------


async def test_bedrock_schema(tmp_path: Path) -> None:
    async with serve(write_model(tmp_path, bedrock_compat=True)) as server:
        response = await server.post("/invocations", {"prompt": "a b é", "max_gen_len": 2})
        assert response.headers["content-type"] == "application/json"
        assert (
            response.body
            == (
                '{"body": {"generation": "é b", "prompt_token_count": 3, "generation_token_count": 2, '
                '"stop_reason": "length"}, "metering": {"inputTokenCount": 3, "outputTokenCount": 2}, '
                '"content_type": "application/json"}'
            ).encode()
        )
        sampling = server.model("custom").calls[-1].sampling
        assert (sampling.do_sample, sampling.temperature, sampling.top_p) == (True, 0.5, 0.9)
        await server.post("/invocations", {"prompt": "a", "temperature": 0})
        assert not server.model("custom").calls[-1].sampling.do_sample
        assert server.model("custom").calls[-1].sampling.max_new_tokens == 512
        # Other requests keep their schema.
        assert (await server.post("/invocations", {"inputs": "a b"})).json == {"generated_text": "b a"}
        chat = await server.post("/invocations", {"messages": [{"role": "user", "content": "a"}]})
        assert chat.json["object"] == "chat.completion"


async def test_bedrock_streams(tmp_path: Path) -> None:
    async with serve(write_model(tmp_path, bedrock_compat=True)) as server:
        forwarded = {"x-amzn-sagemaker-forwarded-api": "InvokeEndpointWithResponseStream"}
        response = await server.post("/invocations", {"prompt": "a b", "max_gen_len": 2}, forwarded)
        assert response.headers["content-type"] == "application/jsonlines"
        assert response.body == (
            b'{"body": {"generation": "b", "prompt_token_count": 2, "generation_token_count": 1, "stop_reason": null}, '
            b'"metering": {"outputTokenCount": 1, "inputTokenCount": 2}, "content_type": "application/jsonlines"}\n'
            b'{"body": {"generation": " a", "prompt_token_count": null, "generation_token_count": 2, '
            b'"stop_reason": "length"}, "metering": {"outputTokenCount": 2}, "content_type": "application/jsonlines"}\n'
        )
        failed = lines((await server.post("/invocations", {"prompt": "!fault b", "stream": True})).body)
        assert [line["body"]["stop_reason"] for line in failed] == [None, "error"]
        assert failed[-1]["error"] == {"error_code": 424, "error_msg": "generated !fault"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ""}, "`prompt` must be a non-empty string"),
        ({"prompt": ["a"]}, "`prompt` must be a string"),
        ({"prompt": "a", "max_gen_len": 0}, "`max_gen_len` must be an integer that is strictly positive"),
        ({"prompt": "a", "temperature": -1}, "`temperature` must be"),
        ({"prompt": "a", "top_p": 2}, "`top_p` must be"),
    ],
)
async def test_invalid_bedrock_requests(tmp_path: Path, body: dict[str, Any], message: str) -> None:
    async with serve(write_model(tmp_path, bedrock_compat=True)) as server:
        response = await server.post("/invocations", body)
        assert (response.status, response.json["code"]) == (424, 424)
        assert message in response.json["error"]


# --- statuses ------------------------------------------------------------------------------------------------


async def test_configured_status_codes(tmp_path: Path) -> None:
    codes = "bad_request=422, throttle_error=429,timeout=408,wlm_error=500"
    async with serve(write_model(tmp_path), ReverseModel, lmi_http_codes=codes, max_queue=1, timeout_s=0.2) as server:
        several = await server.post("/invocations", {"inputs": "a"})
        assert (several.status, several.json["code"], several.json["type"]) == (422, 422, "BadRequestException")
        assert (await server.post("/predictions/missing", {"inputs": "a"})).status == 404
        waiting = asyncio.create_task(server.post("/predictions/ReverseModel", {"inputs": "!wait"}))
        while not server.model().active:
            await asyncio.sleep(0.001)
        full = await server.post("/predictions/ReverseModel", {"inputs": "a"})
        assert (full.status, full.json["type"]) == (429, "WlmCapacityException")
        late = await waiting
        assert (late.status, late.json["code"], late.json["type"]) == (408, 408, "TimeoutException")
    for codes in ("bad_request", "nothing=400", "timeout=200", "timeout=4000", "timeout=x"):
        with pytest.raises(InvalidInput, match=r"setting 'lmi_http_codes': expected name=status, .* got "):
            async with serve(ReverseModel, lmi_http_codes=codes):
                pass


def test_status_codes_from_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVING_BAD_REQUEST_HTTP_CODE", "422")
    monkeypatch.setenv("SERVING_THROTTLE_ERROR_HTTP_CODE", "429")
    assert settings_for([str(tmp_path)]).lmi_http_codes == "bad_request=422,throttle_error=429"
    monkeypatch.setenv("SERVING_TIMEOUT_HTTP_CODE", "soon")
    with pytest.raises(InvalidInput, match="invalid value of environment variable SERVING_TIMEOUT_HTTP_CODE: 'soon'"):
        settings_for([str(tmp_path)])


async def test_several_sequences_are_returned_in_details_unless_disabled(tmp_path: Path) -> None:
    async with serve(ReverseModel) as server:
        result = (await server.post("/invocations", {"inputs": "a b", "parameters": {"n": 2, "do_sample": True}})).json
        assert [each["generated_text"] for each in result["details"]["best_of_sequences"]] == ["a"]
        for more in ({"best_of": 3, "do_sample": True}, {"num_beams": 3}):
            body = {"inputs": "a b c", "parameters": {"n": 1, **more}}
            sequences = (await server.post("/invocations", body)).json["details"]["best_of_sequences"]
            assert [each["generated_text"] for each in sequences] == ["b a", "a"]
        without_details = await server.post(
            "/invocations", {"inputs": "a b", "parameters": {"num_beams": 2, "details": False}}
        )
        assert without_details.json.keys() == {"generated_text"}
