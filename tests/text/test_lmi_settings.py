"""What an operator says of a model to LMI's API: mistakes in it are told when the model is loaded."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import dragoman
from dragoman.core.calls import Load, Request
from dragoman.core.errors import InvalidInput
from dragoman.server import settings_for

from .test_lmi import folder
from .text_house import Speaker, lines, speaking

MINE = """
import json

answer = 5

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

def pieces(value):
    yield value

class Kept:
    def __call__(self, value):
        return value

kept = Kept()
"""


@pytest.mark.parametrize("name", ["good", "optional", "kept"])
async def test_functions_that_will_do(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path, input_formatter=f"mine.py:{name}", output_formatter=f"mine.py:{name}")
    (tmp_path / "said" / "mine.py").write_text(MINE)
    async with speaking(path) as house:
        assert (await house.post("/invocations", {"inputs": "a b"})).json == {"generated_text": "b a"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output_formatter": "mine.py:lost"}, "output_formatter 'mine.py:lost' cannot be imported: .* has no 'lost'"),
        ({"output_formatter": "gone.py:good"}, "output_formatter 'gone.py:good': there is no file 'gone.py' in 'said'"),
        ({"output_formatter": "bad.py:good"}, "'bad.py:good' cannot be imported: .*SyntaxError"),
        ({"output_formatter": "late.py:good"}, "'late.py:good' cannot be imported: NameError: name 'nothing'"),
        (
            {"input_formatter": "mine.py:two"},
            r"input_formatter 'mine.py:two' must take one argument; it takes .value, ",
        ),
        ({"input_formatter": "mine.py:none"}, "'mine.py:none' must take one argument; it takes .."),
        ({"input_formatter": "mine.py:later"}, "must be a plain function; got one with async or yield"),
        ({"output_formatter": "mine.py:pieces"}, "must be a plain function; got one with async or yield"),
        ({"output_formatter": "mine.py:answer"}, "'mine.py:answer' is not a function: got int"),
        ({"output_formatter": "../mine.py:good"}, "must be file.py:function, with a file in the model's folder"),
        ({"output_formatter": "verse"}, "output_formatter must be one of json, jsonlines, sse, none or file.py:func"),
        ({"tgi_compat": "perhaps"}, "tgi_compat must be true or false; got 'perhaps'"),
        ({"formatter_folder": "/nowhere"}, "formatter_folder must be a folder; got '/nowhere'"),
        ({"tgi_compatible": True}, "there is no setting 'tgi_compatible'; there are output_formatter"),
    ],
)
async def test_invalid_settings_are_reported_when_the_model_is_loaded(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    path = folder(tmp_path, **settings)
    (tmp_path / "said" / "mine.py").write_text(MINE)
    (tmp_path / "said" / "bad.py").write_text("def good(:")
    (tmp_path / "said" / "late.py").write_text("nothing.here")
    async with dragoman.open_engine(path, control_token="t") as engine:
        (deployment,) = engine.deployments()
        assert deployment.state == "UNAVAILABLE"
        assert deployment.reason.startswith("failed to load 'said', model 'said': ")
        with pytest.raises(InvalidInput, match=message):
            await engine.call(Request(Load("t"), "said"))


async def test_a_protocol_that_takes_no_settings(tmp_path: Path) -> None:
    path = folder(tmp_path)
    told = tmp_path / "said" / "dragoman.toml"
    told.write_text(told.read_text().replace("protocols.lmi", "protocols.lmu"))
    async with dragoman.open_engine(path) as engine:
        (deployment,) = engine.deployments()
        assert "unknown protocol setting 'lmu': expected one of lmi" in deployment.reason


async def test_formatters_beside_serving_properties(tmp_path: Path) -> None:
    folder(tmp_path)
    beside = tmp_path / "described"
    beside.mkdir()
    (beside / "serving.properties").write_text("option.model_id=../said\noption.output_formatter=mine.py:write\n")
    (beside / "mine.py").write_text("def write(answer):\n    return answer['generated_text'].upper()\n")
    async with speaking(str(beside)) as house:
        assert (await house.post("/invocations", {"inputs": "a b"})).body == b"B A"


# --- Bedrock's schema ----------------------------------------------------------------------------------------


async def test_bedrocks_schema(tmp_path: Path) -> None:
    async with speaking(folder(tmp_path, bedrock_compat=True)) as house:
        answer = await house.post("/invocations", {"prompt": "a b é", "max_gen_len": 2})
        assert answer.headers["content-type"] == "application/json"
        assert (
            answer.body
            == (
                '{"body": {"generation": "é b", "prompt_token_count": 3, "generation_token_count": 2, '
                '"stop_reason": "length"}, "metering": {"inputTokenCount": 3, "outputTokenCount": 2}, '
                '"content_type": "application/json"}'
            ).encode()
        )
        sampling = house.model("said").calls[-1].sampling
        assert (sampling.do_sample, sampling.temperature, sampling.top_p) == (True, 0.5, 0.9)
        await house.post("/invocations", {"prompt": "a", "temperature": 0})
        assert not house.model("said").calls[-1].sampling.do_sample
        assert house.model("said").calls[-1].sampling.max_new_tokens == 512
        # Everything else is asked as before.
        assert (await house.post("/invocations", {"inputs": "a b"})).json == {"generated_text": "b a"}
        chat = await house.post("/invocations", {"messages": [{"role": "user", "content": "a"}]})
        assert chat.json["object"] == "chat.completion"


async def test_bedrocks_streams(tmp_path: Path) -> None:
    async with speaking(folder(tmp_path, bedrock_compat=True)) as house:
        forwarded = {"x-amzn-sagemaker-forwarded-api": "InvokeEndpointWithResponseStream"}
        answer = await house.post("/invocations", {"prompt": "a b", "max_gen_len": 2}, forwarded)
        assert answer.headers["content-type"] == "application/jsonlines"
        assert answer.body == (
            b'{"body": {"generation": "b", "prompt_token_count": 2, "generation_token_count": 1, "stop_reason": null}, '
            b'"metering": {"outputTokenCount": 1, "inputTokenCount": 2}, "content_type": "application/jsonlines"}\n'
            b'{"body": {"generation": " a", "prompt_token_count": null, "generation_token_count": 2, '
            b'"stop_reason": "length"}, "metering": {"outputTokenCount": 2}, "content_type": "application/jsonlines"}\n'
        )
        failed = lines((await house.post("/invocations", {"prompt": "!fault b", "stream": True})).body)
        assert [line["body"]["stop_reason"] for line in failed] == [None, "error"]
        assert failed[-1]["error"] == {"error_code": 424, "error_msg": "it would not say that"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ""}, "`prompt` must be a text that is not empty"),
        ({"prompt": ["a"]}, "`prompt` must be a text"),
        ({"prompt": "a", "max_gen_len": 0}, "`max_gen_len` must be an integer that is strictly positive"),
        ({"prompt": "a", "temperature": -1}, "`temperature` must be"),
        ({"prompt": "a", "top_p": 2}, "`top_p` must be"),
    ],
)
async def test_what_bedrocks_schema_refuses(tmp_path: Path, body: dict[str, Any], message: str) -> None:
    async with speaking(folder(tmp_path, bedrock_compat=True)) as house:
        answer = await house.post("/invocations", body)
        assert (answer.status, answer.json["code"]) == (424, 424)
        assert message in answer.json["error"]


# --- statuses ------------------------------------------------------------------------------------------------


async def test_statuses_that_the_operator_chooses(tmp_path: Path) -> None:
    chosen = "bad_request=422, throttle_error=429,timeout=408,wlm_error=500"
    async with speaking(folder(tmp_path), Speaker, lmi_http_codes=chosen, max_queue=1, timeout_s=0.2) as house:
        several = await house.post("/invocations", {"inputs": "a"})
        assert (several.status, several.json["code"], several.json["type"]) == (422, 422, "BadRequestException")
        assert (await house.post("/predictions/nobody", {"inputs": "a"})).status == 404
        waiting = asyncio.create_task(house.post("/predictions/Speaker", {"inputs": "!wait"}))
        while not house.model().active:
            await asyncio.sleep(0.001)
        full = await house.post("/predictions/Speaker", {"inputs": "a"})
        assert (full.status, full.json["type"]) == (429, "WlmCapacityException")
        late = await waiting
        assert (late.status, late.json["code"], late.json["type"]) == (408, 408, "TimeoutException")
    for wrong in ("bad_request", "nothing=400", "timeout=200", "timeout=4000", "timeout=x"):
        with pytest.raises(InvalidInput, match=r"setting 'lmi_http_codes': expected name=status, .* got "):
            async with speaking(Speaker, lmi_http_codes=wrong):
                pass


def test_statuses_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVING_BAD_REQUEST_HTTP_CODE", "422")
    monkeypatch.setenv("SERVING_THROTTLE_ERROR_HTTP_CODE", "429")
    assert settings_for([str(tmp_path)]).lmi_http_codes == "bad_request=422,throttle_error=429"
    monkeypatch.setenv("SERVING_TIMEOUT_HTTP_CODE", "soon")
    with pytest.raises(InvalidInput, match="invalid value of environment variable SERVING_TIMEOUT_HTTP_CODE: 'soon'"):
        settings_for([str(tmp_path)])


async def test_several_texts_are_told_in_details_unless_these_are_refused(tmp_path: Path) -> None:
    async with speaking(Speaker) as house:
        told = (await house.post("/invocations", {"inputs": "a b", "parameters": {"n": 2, "do_sample": True}})).json
        assert [each["generated_text"] for each in told["details"]["best_of_sequences"]] == ["a"]
        for more in ({"best_of": 3, "do_sample": True}, {"num_beams": 3}):
            ask = {"inputs": "a b c", "parameters": {"n": 1, **more}}
            found = (await house.post("/invocations", ask)).json["details"]["best_of_sequences"]
            assert [each["generated_text"] for each in found] == ["b a", "a"]
        bare = await house.post("/invocations", {"inputs": "a b", "parameters": {"num_beams": 2, "details": False}})
        assert bare.json.keys() == {"generated_text"}
