"""Requests and responses as objects, dicts, JSON and binary data: every field, and the limits of parameters."""

from typing import Any

import numpy as np
import orjson
import pytest

from dragoman import InferenceRequest
from dragoman.core.calls import Inference, Response
from dragoman.core.datatypes import BYTES, FP32, INT32, UINT16
from dragoman.core.errors import InvalidInput, NotSupported
from dragoman.core.tensor import Tensor
from dragoman.formats.body import parse_request, parse_response
from dragoman.formats.grpc_messages import (
    ModelInferRequest,
    ModelInferResponse,
    format_raw_response,
    tensor_from_contents,
)
from dragoman.formats.json_data import json_from_tensor
from dragoman.formats.json_document import parse_json
from dragoman.formats.json_text import format_nested, json_chunks
from dragoman.formats.message import InferenceResponse, RequestInput, RequestOutput, ResponseOutput
from dragoman.formats.policy import Policy
from dragoman.formats.small_messages import serialize_binary_response, serialize_small_response

NUMBERS = Tensor(np.array([[1.5, np.nan]], np.float32), FP32, {"content_type": "np"})
BINARY = Tensor(np.array([b"a", b"\xff"], object), BYTES)
TEXT = Tensor(np.array([b"a", "é".encode()], object), BYTES)
NUMBERS_DICT = {
    "name": "x",
    "datatype": "FP32",
    "shape": [1, 2],
    "data": [1.5, None],
    "parameters": {"content_type": "np"},
}
TEXT_DICT = {"name": "t", "datatype": "BYTES", "shape": [2], "data": ["a", "é"]}
REQUEST = InferenceRequest(
    inputs=[RequestInput("x", NUMBERS), RequestInput("t", TEXT)],
    outputs=[RequestOutput("y"), RequestOutput("z", {"binary_data": True})],
    parameters={"a": 1},
    id="7",
)
REQUEST_DICT = {
    "id": "7",
    "parameters": {"a": 1},
    "inputs": [NUMBERS_DICT, TEXT_DICT],
    "outputs": [{"name": "y"}, {"name": "z", "parameters": {"binary_data": True}}],
}
RESPONSE = InferenceResponse(
    outputs=[ResponseOutput("x", NUMBERS), ResponseOutput("t", TEXT)],
    model_name="m",
    model_version="2",
    parameters={"b": "c"},
    id="8",
)
RESPONSE_DICT = {
    "id": "8",
    "model_name": "m",
    "model_version": "2",
    "parameters": {"b": "c"},
    "outputs": [NUMBERS_DICT, TEXT_DICT],
}


def test_requests_convert_to_dict_and_json() -> None:
    assert REQUEST.to_dict() == REQUEST_DICT
    assert orjson.loads(REQUEST.to_json()) == REQUEST_DICT
    for copy in (InferenceRequest.from_dict(REQUEST_DICT), InferenceRequest.from_json(REQUEST.to_json())):
        assert copy.to_dict() == REQUEST_DICT
        assert (copy.id, copy.parameters, copy.inputs[0].datatype) == ("7", {"a": 1}, "FP32")
        assert list(copy.tensors) == ["x", "t"]
    assert InferenceRequest(inputs=[]).to_dict() == {"inputs": []}
    assert InferenceRequest.from_dict({"inputs": []}).id == ""


@pytest.mark.parametrize("binary_output", [True, False])
def test_requests_as_binary_data(binary_output: bool) -> None:
    (header, *blobs), length = REQUEST.to_binary(binary_output=binary_output)
    assert length == len(header)
    expected: dict[str, Any] = {"a": 1, "binary_data_output": True} if binary_output else {"a": 1}
    inputs = [
        {
            "name": "x",
            "datatype": "FP32",
            "shape": [1, 2],
            "parameters": {"content_type": "np", "binary_data_size": 8},
        },
        {"name": "t", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 11}},
    ]
    assert orjson.loads(header) == {**REQUEST_DICT, "parameters": expected, "inputs": inputs}
    assert b"".join(blobs) == NUMBERS.data.tobytes() + b"\1\0\0\0a\2\0\0\0\xc3\xa9"
    copy = InferenceRequest.from_json(b"".join((header, *blobs)), str(length))
    assert copy.to_dict() == {**REQUEST_DICT, "parameters": expected}
    assert RequestInput("w", BINARY).to_dict()["data"] == ["a", b"\xff"]


def test_responses_convert_to_dict_and_json() -> None:
    assert RESPONSE.to_dict() == RESPONSE_DICT
    assert orjson.loads(RESPONSE.to_json()) == RESPONSE_DICT
    for copy in (InferenceResponse.from_dict(RESPONSE_DICT), InferenceResponse.from_json(RESPONSE.to_json())):
        assert copy.to_dict() == RESPONSE_DICT
    bare = InferenceResponse.of([("x", NUMBERS)])
    assert bare.to_dict() == {"model_name": "", "outputs": [NUMBERS_DICT]}
    assert InferenceResponse.from_json(bare.to_json()).to_dict() == bare.to_dict()


@pytest.mark.parametrize("kind", [InferenceRequest, InferenceResponse])
def test_plain_values_are_no_objects(kind: Any) -> None:
    """`InferenceRequest(**values)`, which works with MLServer's types, says what reads them here."""
    field = "inputs" if kind is InferenceRequest else "outputs"
    with pytest.raises(TypeError, match=f"'{field}': expected \\w+, got dict; {kind.__name__}.from_dict reads plain"):
        kind(**{field: [NUMBERS_DICT]})
    assert kind.from_dict({field: [NUMBERS_DICT], "model_name": "m"}).tensors["x"].shape == (1, 2)


def test_tensors_of_other_types_are_rejected() -> None:
    with pytest.raises(TypeError, match="RequestOutput, got dict"):
        InferenceRequest(inputs=[], outputs=[{"name": "y"}])  # type: ignore[list-item]
    for kind in (RequestInput, ResponseOutput):
        with pytest.raises(TypeError, match="'tensor': expected Tensor, got ndarray"):
            kind("x", np.zeros(2))  # type: ignore[arg-type]


def test_a_tensor_from_a_dict() -> None:
    tensor = RequestInput.from_dict(NUMBERS_DICT)
    assert (tensor.name, tensor.shape, tensor.parameters) == ("x", [1, 2], {"content_type": "np"})
    assert np.isnan(tensor.data[0, 1])
    assert RequestInput.from_dict(TEXT_DICT).data.tolist() == [b"a", "é".encode()]
    with pytest.raises(InvalidInput, match="tensor 'x': 256 does not fit into UINT8"):
        RequestInput.from_dict({"name": "x", "datatype": "UINT8", "shape": [1], "data": [256]})


@pytest.mark.parametrize("owner", ["request", "input", "output"])
@pytest.mark.parametrize("value", [-(1 << 63), (1 << 64) - 1, -(1 << 63) - 1, 1 << 64])
def test_integer_parameters_have_64_bits(owner: str, value: int) -> None:
    parameters = f'"parameters":{{"p":{value},"q":null}}'
    fields = {each: f",{parameters}" if each == owner else "" for each in ("request", "input", "output")}
    tensor = f'{{"name":"x","shape":[1],"datatype":"INT32","data":[3]{fields["input"]}}}'
    text = f'{{"inputs":[{tensor}],"outputs":[{{"name":"y"{fields["output"]}}}]{fields["request"]}}}'
    if -(1 << 63) <= value < 1 << 64:
        copy = InferenceRequest.from_json(text.encode())
        owners: Any = {"request": copy, "input": copy.inputs[0], "output": copy.outputs[0]}
        assert owners[owner].parameters == {"p": value}
    else:
        with pytest.raises(InvalidInput, match=f"parameter 'p': expected an integer of 64 bits.* {value.bit_length()}"):
            InferenceRequest.from_json(text.encode())


def test_typed_contents_of_each_field() -> None:
    for datatype, field, values in (
        (BYTES, "bytes_contents", [b"a", b"\xff"]),
        (INT32, "int_contents", [-1, 2]),
        (UINT16, "uint_contents", [0, 65535]),
        (FP32, "fp32_contents", [1.5, -2]),
    ):
        message = ModelInferRequest()
        contents = message.inputs.add().contents
        getattr(contents, field).extend(values)
        tensor = tensor_from_contents("input 'x'", datatype, [2], contents, Policy(), {"p": 1})
        assert (tensor.data.tolist(), tensor.datatype, tensor.parameters) == (values, datatype, {"p": 1})
        with pytest.raises(InvalidInput, match=r"input 'x': shape \[3\] needs 3 elements, got 2"):
            tensor_from_contents("input 'x'", datatype, [3], contents, Policy())
        other = FP32 if datatype is not FP32 else INT32
        with pytest.raises(InvalidInput, match=f"input 'x': expected contents of {other} in '.*', got '{field}'"):
            tensor_from_contents("input 'x'", other, [2], contents, Policy())
    contents = ModelInferRequest().inputs.add().contents
    with pytest.raises(InvalidInput, match=r"input 'x': shape \[2\] needs 2 elements, got no data"):
        tensor_from_contents("input 'x'", FP32, [2], contents, Policy())
    contents.uint_contents.append(65536)
    with pytest.raises(InvalidInput, match="input 'x': 65536 does not fit into UINT16"):
        tensor_from_contents("input 'x'", UINT16, [1], contents, Policy())


def non_finite(size: int, *special: float) -> Tensor:
    values = np.arange(size, dtype=np.float32)
    values[1 : 1 + len(special)] = special
    return Tensor(values, FP32)


@pytest.mark.parametrize("size", [3, 100, 1000, 20_000])
def test_non_finite_outputs_as_json(size: int) -> None:
    def text(tensor: Tensor, nonfinite: Any) -> bytes:
        return b"".join(json_chunks({"data": json_from_tensor("output 'y'", tensor, Policy(nonfinite=nonfinite))}))

    finite, nan, inf = non_finite(size), non_finite(size, np.nan), non_finite(size, np.nan, -np.inf)
    for nonfinite in ("error", "null", "literal"):
        assert orjson.loads(text(finite, nonfinite)) == {"data": finite.data.tolist()}
    assert text(nan, "null").startswith(b'{"data":[0.0,null,2.0')
    assert text(inf, "literal").startswith(b'{"data":[0.0,NaN,-Infinity')
    with pytest.raises(NotSupported, match=r"^output 'y' holds nan at element 1, which JSON cannot carry"):
        text(nan, "error")
    with pytest.raises(NotSupported, match=r"^output 'y' holds -inf at element 2, which JSON cannot carry"):
        text(inf, "null")


def test_literals_in_a_long_array() -> None:
    data = ",".join(["1.5"] * 100_000 + ["NaN", "-Infinity"])
    text = f'{{"inputs":[{{"name":"x","shape":[100002],"datatype":"FP32","data":[{data}]}}]}}'.encode()
    array = parse_request(text, None, Policy(nonfinite="literal", max_json_values=1000)).inputs["x"].data
    assert np.array_equal(array[-3:], [1.5, np.nan, -np.inf], equal_nan=True)
    with pytest.raises(InvalidInput, match=r"^the request is not an inference request: JSON is malformed"):
        parse_request(text, None, Policy(nonfinite="null", max_json_values=1000))


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.float64, np.float16])
def test_long_tensors_of_messages(dtype: Any) -> None:
    tensor = Tensor.of(np.arange(40_000).astype(dtype) % 1024)
    request = InferenceRequest(inputs=[RequestInput("x", tensor)])
    response = InferenceResponse(outputs=[ResponseOutput("x", tensor)], model_name="m")
    for text, key in ((request.to_json(), "inputs"), (response.to_json(), "outputs")):
        assert [each["data"] for each in orjson.loads(text)[key]] == [tensor.data.tolist()]
    assert InferenceRequest.from_json(request.to_json()).inputs[0].data.tobytes() == tensor.data.tobytes()
    assert InferenceResponse.from_json(response.to_json()).outputs[0].data.tobytes() == tensor.data.tobytes()


def test_optional_fields_of_a_response() -> None:
    response = InferenceResponse.from_json(b'{"outputs":[]}')
    assert (response.model_name, response.model_version, response.id, dict(response.parameters)) == ("", "", "", {})


@pytest.mark.parametrize("shape", [[3], [3, 1]])
def test_integers_written_as_floats_in_a_dict(shape: list[int]) -> None:
    def convert(datatype: str, *values: float) -> Any:
        data = [[value] for value in values] if len(shape) > 1 else list(values)
        tensor = {"name": "x", "shape": shape, "datatype": datatype, "data": data}
        return RequestInput.from_dict(tensor).data.reshape(-1).tolist()

    assert convert("INT8", 1.0, -128.0, 127) == [1, -128, 127]
    assert convert("UINT8", 1, 0.0, 255.0) == [1, 0, 255]
    for datatype, value in (("INT8", 128.0), ("INT8", -129.0), ("UINT8", -1.0), ("UINT8", 256.0)):
        with pytest.raises(InvalidInput, match=f"^tensor 'x': {value:.0f} does not fit into {datatype}"):
            convert(datatype, 1.0, value, 2)
    with pytest.raises(InvalidInput, match=r"^tensor 'x': data.*[Ee]xpected `?'?int"):
        convert("INT32", 1.0, 2.5, 3)


def test_raw_grpc_responses_name_their_outputs() -> None:
    outputs = {"first": Tensor.of(np.arange(3)), "second": Tensor.of(np.ones((2, 1), np.float32))}
    for _ in range(2):  # computed, and from the cache
        serialized: Any = format_raw_response(Response(Inference(outputs), "named", "3"), "id")
        response = ModelInferResponse.FromString(serialized)
        assert (response.model_name, response.model_version, response.id) == ("named", "3", "id")
        metadata = [(each.name, each.datatype, list(each.shape)) for each in response.outputs]
        assert metadata == [("first", "INT64", [3]), ("second", "FP32", [2, 1])]
        assert list(response.raw_output_contents) == [each.data.tobytes() for each in outputs.values()]


def test_rest_responses_of_every_id() -> None:
    outputs = {"y": Tensor.of(np.ones(2, np.float32))}
    for id_ in (None, "", "a"):
        expected = {"model_name": "m"} | ({} if id_ is None else {"id": id_})
        (text, *blobs), size = serialize_binary_response(Inference(outputs), "m", "", id_, lambda name: True) or (
            (b"",),
            0,
        )
        whole = b"".join((text, *blobs))
        output = {"name": "y", "datatype": "FP32", "shape": [2]}
        raw = {**output, "parameters": {"binary_data_size": 8}}
        assert orjson.loads(whole[:size]) == {**expected, "outputs": [raw]}
        assert whole[size:] == outputs["y"].data.tobytes()
        serialized = serialize_small_response(Inference(outputs), "m", "", id_)
        assert orjson.loads(serialized or b"") == {**expected, "outputs": [{**output, "data": [1.0, 1.0]}]}


@pytest.mark.parametrize("count", [3, 3000])
def test_literals_in_a_whole_message(count: int) -> None:
    data = ",".join(["1.5"] * (count - 2) + ["NaN", "-Infinity"])
    for fields in ('"x"', '"\\u0078"'):
        tensor = f'{{"name":{fields},"shape":[{count}],"datatype":"FP64","data":[{data}]}}'.encode()
        literal = Policy(nonfinite="literal")
        request = parse_request(b'{"inputs":[' + tensor + b"]}", None, literal).inputs["x"]
        response = parse_response(b'{"outputs":[' + tensor + b"]}", None, literal).outputs["x"]
        for each in (request, response):
            assert np.array_equal(each.data, [1.5] * (count - 2) + [np.nan, -np.inf], equal_nan=True)
        with pytest.raises(InvalidInput, match=r"NaN|number|malformed|invalid"):
            parse_request(b'{"inputs":[' + tensor + b"]}", None, Policy(nonfinite="null"))
    with pytest.raises(InvalidInput, match=r"^the request is not an inference request: "):
        parse_request(b'{"inputs":[NaN', None, literal)
    with pytest.raises(InvalidInput, match=r"^the request is not an inference request: "):
        parse_request(b'{"id":"\\ud800","inputs":[NaN]}', None, literal)
    with pytest.raises(InvalidInput, match=r"^the response is not an inference response: "):
        parse_response(b'{"outputs":5}', None, literal)


@pytest.mark.parametrize("shape", [[40_000], [200, 200], [2, 20_000], [0]])
def test_parameters_of_tensors_of_any_length(shape: list[int]) -> None:
    for datatype, dtype in (("FP32", np.float32), ("INT64", np.int64), ("BOOL", np.bool_), ("BYTES", None)):
        values = np.arange(int(np.prod(shape))).reshape(shape)
        data: Any = values.astype(str) if dtype is None else values.astype(dtype)
        tensor = {"name": "x", "shape": shape, "datatype": datatype, "parameters": {"p": 1}, "data": data.tolist()}
        for variant in (tensor, tensor | {"data": data.reshape(-1).tolist()}):
            parsed = parse_request(orjson.dumps({"inputs": [variant]}), None, Policy(max_json_values=100)).inputs["x"]
            assert (parsed.datatype.name, list(parsed.shape), parsed.parameters) == (datatype, shape, {"p": 1})
            assert parsed.data.tolist() == (np.char.encode(data) if dtype is None else data).tolist()


def test_binary_data_size_is_removed_from_the_parameters() -> None:
    tensor = '{"name":"x","shape":[2],"datatype":"FP32","parameters":{"binary_data_size":8,"p":1}}'
    parsed = parse_request(f'{{"inputs":[{tensor}]}}'.encode(), memoryview(bytes(8)), Policy()).inputs["x"]
    assert (parsed.data.tolist(), parsed.parameters) == ([0.0, 0.0], {"p": 1})


def test_several_long_inputs_are_not_counted_as_json_values() -> None:
    values = {name: list(range(offset, 2000 + offset)) for offset, name in enumerate("abc")}
    inputs = [{"name": n, "shape": [2000], "datatype": "INT64", "data": v} for n, v in values.items()]
    tensors = parse_request(orjson.dumps({"inputs": inputs}), None, Policy(max_json_values=100)).inputs
    assert {name: tensor.data.tolist() for name, tensor in tensors.items()} == values


def test_a_scalar_as_nested_text() -> None:
    for value, text in ((np.float32(1.5), b"1.5"), (np.int64(3), b"3"), (np.bool_(True), b"true")):
        assert b"".join(json_chunks(format_nested(np.array(value)))) == text


def test_errors_of_json_documents() -> None:
    for text in (b"", b"{", b"[NaN]", b"\xff"):
        with pytest.raises(InvalidInput, match=r"^the request body is not valid JSON: "):
            parse_json(text, Policy())


def test_forwarded_headers_match_a_pattern_and_never_include_credentials() -> None:
    headers = {"x-user": "a", "x-trace-id": "b", "accept": "c", "cookie": "d", "authorization": "e"}
    assert Policy(forward_headers=("x-trace-*", "*e")).forwarded_headers(headers) == {"x-trace-id": "b"}
    assert Policy().forwarded_headers(headers) == {}
    credentials = dict.fromkeys(["authorization", "proxy-authorization", "cookie", "x-api-key"], "secret")
    assert Policy(forward_headers=("*",)).forwarded_headers(headers | credentials) == dict(list(headers.items())[:3])


def test_id_and_outputs_of_a_short_request() -> None:
    text = b'{"id":"i","inputs":[{"name":"x","shape":[2],"datatype":"INT32","data":[3,4]}],"outputs":[{"name":"y"}]}'
    body = parse_request(text, None, Policy())
    assert (body.id, body.parameters, [each.name for each in body.outputs]) == ("i", {}, ["y"])
    assert body.inputs["x"].data.tolist() == [3, 4]


@pytest.mark.parametrize("data", ["[9007199254740993, 2.0]", "[[9007199254740993], [2.0]]"])
def test_integers_beside_integral_floats_are_exact(data: str) -> None:
    shape = "[2,1]" if "[[" in data else "[2]"
    for datatype in ("INT64", "UINT64"):
        text = f'{{"inputs":[{{"name":"x","shape":{shape},"datatype":"{datatype}","data":{data}}}]}}'
        assert parse_request(text.encode(), None, Policy()).inputs["x"].data.reshape(-1).tolist() == [2**53 + 1, 2]
        with pytest.raises(InvalidInput, match="input 'x'"):  # the float may stand for several integers
            parse_request(text.replace("2.0", "9007199254740994.0").encode(), None, Policy())
