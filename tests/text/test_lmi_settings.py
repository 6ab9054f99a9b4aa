"""What an operator says of a model to LMI's API: mistakes in it are told when the model is loaded."""

from pathlib import Path
from typing import Any

import pytest

import dragoman
from dragoman.core.calls import Load, Request
from dragoman.core.errors import InvalidInput

from .test_lmi import folder
from .text_house import speaking

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
        ({"output_formatter": "mine.py:answer"}, "'mine.py:answer' is no function; got int"),
        ({"output_formatter": "../mine.py:good"}, "must be file.py:function, with a file in the model's folder"),
        ({"output_formatter": "verse"}, "output_formatter must be one of json, jsonlines, sse, none or file.py:func"),
        ({"tgi_compat": "perhaps"}, "tgi_compat must be true or false; got 'perhaps'"),
        ({"formatter_folder": "/nowhere"}, "formatter_folder must be a folder; got '/nowhere'"),
        ({"tgi_compatible": True}, "there is no setting 'tgi_compatible'; there are output_formatter"),
    ],
)
async def test_mistakes_are_told_when_the_model_is_loaded(
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
        assert "there is no protocol_setting 'lmu'; there are lmi" in deployment.reason


async def test_formatters_beside_serving_properties(tmp_path: Path) -> None:
    folder(tmp_path)
    beside = tmp_path / "described"
    beside.mkdir()
    (beside / "serving.properties").write_text("option.model_id=../said\noption.output_formatter=mine.py:write\n")
    (beside / "mine.py").write_text("def write(answer):\n    return answer['generated_text'].upper()\n")
    async with speaking(str(beside)) as house:
        assert (await house.post("/invocations", {"inputs": "a b"})).body == b"B A"
