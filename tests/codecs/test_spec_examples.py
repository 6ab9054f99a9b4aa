"""Every example of the specification of content types and codecs, with its typos corrected, through a server."""

import asyncio
import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import requests
from pandas.testing import assert_frame_equal

import dragoman
from dragoman import Infer, InferenceRequest, InferenceResponse, Tensor
from dragoman.codecs import (
    Base64Codec,
    DatetimeCodec,
    NumpyCodec,
    NumpyRequestCodec,
    PandasCodec,
    StringCodec,
    StringRequestCodec,
)
from dragoman.codecs.decode import decode_inputs, decode_request, encode_answer


class Foo(dragoman.Model):
    """Return the decoded call, encoded again, and its Python types."""

    placement = "thread"
    name = "foo"

    def infer(self, call: Infer) -> Any:
        value = decode_request(call)
        seen = {k: type(v).__name__ for k, v in value.items()} if isinstance(value, dict) else type(value).__name__
        response = encode_answer(value)
        return dragoman.Inference(response.outputs, {**response.parameters, "seen": json.dumps(seen)})


async def infer(body: Any, *models: Any, model: str = "foo") -> dict[str, Any]:
    """Return the JSON of the response to a body that `requests` posts."""
    async with dragoman.Server(*(models or (Foo,)), http_port=0, grpc_port=-1) as server:
        url = f"{server.http_url}/v2/models/{model}/infer"
        response = await asyncio.to_thread(requests.post, url, json=body, timeout=60)
    found: dict[str, Any] = response.json()
    assert response.status_code == 200, found
    return found


# --- usage -----------------------------------------------------------------------------------------------

PEOPLE = {
    "parameters": {"content_type": "pd"},
    "inputs": [
        {
            "name": "First Name",
            "datatype": "BYTES",
            "parameters": {"content_type": "str"},
            "shape": [2],
            "data": ["Joanne", "Michael"],
        },
        {"name": "Age", "datatype": "INT32", "shape": [2], "data": [34, 22]},
    ],
}
DATAFRAME = pd.DataFrame({"First Name": ["Joanne", "Michael"], "Age": [34, 22]})


async def test_a_data_frame_in_json() -> None:
    response = await infer(PEOPLE)
    assert json.loads(response["parameters"]["seen"]) == "DataFrame"
    back = PandasCodec.decode_response(InferenceResponse.from_dict(response))
    assert_frame_equal(back, DATAFRAME.astype({"Age": "int32"}))


async def test_a_data_frame_by_a_codec_and_requests() -> None:
    inference_request = PandasCodec.encode_request(DATAFRAME)
    raw_request = inference_request.to_dict()
    raw_response = await infer(raw_request)
    inference_response = InferenceResponse.from_dict(raw_response)
    assert_frame_equal(PandasCodec.decode_response(inference_response), DATAFRAME)


# --- NaN -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64"])
async def test_nan(datatype: str) -> None:
    one = {"name": "foo", "parameters": {"content_type": "np"}, "datatype": datatype, "shape": [2, 2]}
    response = await infer({"inputs": [{**one, "data": [1.25, 2.5, None, 4.5]}]})
    assert json.loads(response["parameters"]["seen"]) == {"foo": "ndarray"}
    assert response["outputs"][0]["data"] == [1.25, 2.5, None, 4.5]
    back = NumpyCodec.decode_output(InferenceResponse.from_dict(response).outputs[0])
    np.testing.assert_array_equal(back, [[1.25, 2.5], [np.nan, 4.5]])


# --- NumPy -----------------------------------------------------------------------------------------------


async def test_an_array() -> None:
    foo = np.array([[1, 2], [3, 4]])
    one = {"name": "foo", "parameters": {"content_type": "np"}, "datatype": "INT32", "shape": [2, 2]}
    response = await infer({"inputs": [{**one, "data": [1, 2, 3, 4]}]})
    assert NumpyCodec.decode_output(InferenceResponse.from_dict(response).outputs[0]).tolist() == foo.tolist()
    result = await infer(NumpyRequestCodec.encode_request(foo).to_dict())
    assert json.loads(result["parameters"]["seen"]) == "ndarray"
    assert NumpyRequestCodec.decode_response(InferenceResponse.from_dict(result)).tolist() == foo.tolist()
    inference_request = InferenceRequest(inputs=[NumpyCodec.encode_input("foo", foo)])
    assert (await infer(inference_request.to_dict()))["outputs"][0]["data"] == [1, 2, 3, 4]


async def test_n_is_n_by_1() -> None:
    assert NumpyCodec.encode_input("foo", np.arange(3)).shape == [3, 1]
    response = await infer(NumpyRequestCodec.encode_request(np.arange(3)).to_dict())
    assert response["outputs"][0]["shape"] == [3, 1]


async def test_np_and_str_of_a_request_use_the_first_input() -> None:
    second = {"name": "second", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    first = {"name": "first", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    response = await infer({"parameters": {"content_type": "np"}, "inputs": [first, second]})
    assert [o["data"] for o in response["outputs"]] == [[1, 2]]
    response = await infer({"parameters": {"content_type": "str"}, "inputs": [second, first]})
    assert [o["data"] for o in response["outputs"]] == [["x"]]


# --- pandas ----------------------------------------------------------------------------------------------


async def test_columns_of_text() -> None:
    foo = pd.DataFrame({"A": ["a1", "a2", "a3", "a4"], "B": ["b1", "b2", "b3", "b4"], "C": ["c1", "c2", "c3", "c4"]})
    inputs = [{"name": n, "data": foo[n].tolist(), "datatype": "BYTES", "shape": [4]} for n in foo]
    for body in ({"parameters": {"content_type": "pd"}, "inputs": inputs}, PandasCodec.encode_request(foo).to_dict()):
        response = InferenceResponse.from_dict(await infer(body))
        assert_frame_equal(PandasCodec.decode_response(response), foo)


# --- text, base64, dates -----------------------------------------------------------------------------------


async def test_text() -> None:
    foo = ["bar", "bar2"]
    plain = {"name": "foo", "data": foo, "datatype": "BYTES", "shape": [2]}
    one = InferenceRequest(inputs=[StringCodec.encode_input("foo", foo, use_bytes=False)])
    for body in (
        {"parameters": {"content_type": "str"}, "inputs": [plain]},
        StringRequestCodec.encode_request(foo, use_bytes=False).to_dict(),
        one.to_dict(),
    ):
        response = await infer(body)
        assert json.loads(response["parameters"]["seen"]) in ("list", {"foo": "list"})
        assert StringCodec.decode_output(InferenceResponse.from_dict(response).outputs[0]) == foo


async def test_base64() -> None:
    foo = b"Python is fun"
    plain = {"name": "foo", "parameters": {"content_type": "base64"}, "datatype": "BYTES", "shape": [1]}
    by_codec = InferenceRequest(inputs=[Base64Codec.encode_input("foo", foo, use_bytes=False)])
    for body in ({"inputs": [{**plain, "data": ["UHl0aG9uIGlzIGZ1bg=="]}]}, by_codec.to_dict()):
        response = await infer(body)
        assert response["outputs"][0]["data"] == ["UHl0aG9uIGlzIGZ1bg=="]
        assert Base64Codec.decode_output(InferenceResponse.from_dict(response).outputs[0]) == [foo]


async def test_datetime() -> None:
    foo = datetime.datetime(2022, 1, 11, 11, 0, 0)
    plain = {"name": "foo", "parameters": {"content_type": "datetime"}, "datatype": "BYTES", "shape": [1]}
    by_codec = InferenceRequest(inputs=[DatetimeCodec.encode_input("foo", foo, use_bytes=False)])
    for body in ({"inputs": [{**plain, "data": ["2022-01-11T11:00:00"]}]}, by_codec.to_dict()):
        response = await infer(body)
        assert response["outputs"][0]["data"] == ["2022-01-11T11:00:00"]
        assert DatetimeCodec.decode_output(InferenceResponse.from_dict(response).outputs[0]) == [foo]


# --- the model's metadata ------------------------------------------------------------------------------------

_SETTINGS = {
    "name": "foo",
    "implementation": "dragoman",
    "parameters": {"content_type": "pd"},
    "inputs": [
        {"name": "First Name", "datatype": "BYTES", "parameters": {"content_type": "str"}, "shape": [-1]},
        {"name": "Age", "datatype": "INT32", "shape": [-1]},
    ],
}
_MODEL = """
import dragoman
from dragoman.codecs.decode import Defaults, decode_request, encode_answer

class Foo(dragoman.Model):
    def load(self):
        self.defaults = Defaults.of(self.spec)

    def infer(self, call):
        value = decode_request(call, self.defaults)
        answer = encode_answer(value)
        return dragoman.Inference(answer.outputs, {**answer.parameters, "seen": type(value).__name__})
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    settings = {k: v for k, v in _SETTINGS.items() if k != "implementation"}
    (tmp_path / "foo").mkdir()
    (tmp_path / "foo" / "model-settings.json").write_text(json.dumps(settings))
    (tmp_path / "foo" / "model.py").write_text(_MODEL)
    return tmp_path


async def test_content_types_in_model_settings(folder: Path) -> None:
    bare = [{k: v for k, v in one.items() if k != "parameters"} for one in PEOPLE["inputs"]]  # type: ignore[attr-defined]
    response = await infer({"inputs": bare}, folder)
    assert response["parameters"] == {"content_type": "pd", "seen": "DataFrame"}
    back = PandasCodec.decode_response(InferenceResponse.from_dict(response))
    assert_frame_equal(back, DATAFRAME.astype({"Age": "int32"}))


async def test_the_request_takes_precedence_over_the_settings(folder: Path) -> None:
    inputs: Any = PEOPLE["inputs"]
    response = await infer({"parameters": {"content_type": "str"}, "inputs": inputs}, folder)
    assert response["parameters"]["seen"] == "list"
    encoded = [{**inputs[0], "parameters": {"content_type": "base64"}, "data": ["aGk=", "aG8="]}, inputs[1]]
    response = await infer({"inputs": encoded}, folder)
    assert response["outputs"][0]["parameters"]["content_type"] == "base64"
    frame = PandasCodec.decode_response(InferenceResponse.from_dict(response))
    assert frame["First Name"].tolist() == [b"hi", b"ho"]


def test_without_content_type_values_are_arrays() -> None:
    tensor = Tensor.of(np.arange(2))
    assert decode_inputs({"x": tensor})["x"] is tensor.data
