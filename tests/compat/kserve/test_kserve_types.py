"""The module `kserve`: its requests and responses over REST and gRPC, and the helpers of custom models."""

import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dragoman.compat import kserve
from dragoman.compat.kserve.errors import InferenceError, InvalidInput, ModelMissingError
from dragoman.compat.kserve.infer_type import InferInput, InferOutput, InferRequest, InferResponse, RequestedOutput
from dragoman.compat.kserve.model_server import parser
from dragoman.compat.kserve.numpy_codec import from_np_dtype, to_np_dtype
from dragoman.compat.kserve.storage import Storage
from dragoman.compat.kserve.utils import get_predict_input, get_predict_response, strtobool
from dragoman.formats.oip_messages import ModelInferRequest
from dragoman.runtimes.kserve.script import install

NUMBERS = np.array([[1, 2]], np.int32)
WORDS = np.array([["a", "é"]], object)


def tensor(array: Any, *, binary: bool, kind: Any = InferInput, name: str = "x") -> Any:
    made = kind(name, list(array.shape), from_np_dtype(array.dtype))
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def response(*outputs: InferOutput, **options: Any) -> InferResponse:
    return InferResponse("1", "m", list(outputs), **options)


def test_the_module_is_imported_once_under_both_names() -> None:
    install()
    import kserve as imported  # type: ignore[import-not-found, unused-ignore]
    from kserve.constants.constants import PredictorProtocol  # type: ignore[import-not-found, unused-ignore]
    from kserve.protocol.grpc.grpc_predict_v2_pb2 import (  # type: ignore[import-not-found, unused-ignore]
        ModelInferRequest as message,  # noqa: N813
    )
    from kserve.protocol.infer_type import InferRequest as request  # type: ignore[import-not-found, unused-ignore] # noqa: N813
    from kserve_storage import Storage as storage  # type: ignore[import-not-found, unused-ignore] # noqa: N813

    assert (imported.Model, request, message) == (kserve.Model, InferRequest, ModelInferRequest)
    assert (storage, PredictorProtocol("v2").name) == (Storage, "REST_V2")
    with pytest.raises(ImportError):
        from kserve.api import kserve_client  # type: ignore[import-not-found, unused-ignore] # noqa: F401


# --- requests ----------------------------------------------------------------------------------------------------


def test_a_request_as_json() -> None:
    inputs = [tensor(NUMBERS, binary=False), tensor(WORDS, binary=False, name="w")]
    request = InferRequest(
        "m", inputs, "7", parameters={"a": 1}, request_outputs=[RequestedOutput("y", {"binary_data": True})]
    )
    expected = {
        "id": "7",
        "model_name": "m",
        "inputs": [
            {"name": "x", "shape": [1, 2], "datatype": "INT32", "data": [1, 2]},
            {"name": "w", "shape": [1, 2], "datatype": "BYTES", "data": ["a", "é"]},
        ],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
        "parameters": {"a": 1},
    }
    assert request.to_rest() == (expected, None)
    assert InferRequest.from_rest("m", expected) == request
    assert InferRequest("m", inputs).to_rest()[0]["id"] != InferRequest("m", inputs).to_rest()[0]["id"]  # type: ignore[call-overload]


def test_a_request_with_raw_data_and_json() -> None:
    request = InferRequest("m", [tensor(NUMBERS, binary=True), tensor(WORDS, binary=False, name="w")], "7")
    body, length = request.to_rest()
    assert isinstance(body, bytes)
    assert body[length:] == NUMBERS.tobytes()
    assert body[:length] == (
        b'{"id":"7","model_name":"m","inputs":[{"name":"x","shape":[1,2],"datatype":"INT32","parameters":'
        b'{"binary_data_size":8}},{"name":"w","shape":[1,2],"datatype":"BYTES","data":["a","\xc3\xa9"]}]}'
    )
    found = InferRequest.from_bytes(body, length or 0, "m")
    assert [each.data for each in found.inputs] == [[1, 2], ["a", "é"]]
    assert [each.parameters for each in found.inputs] == [None, None]


@pytest.mark.parametrize("binary", [False, True])
def test_a_request_as_a_message(binary: bool) -> None:
    inputs = [tensor(NUMBERS, binary=binary), tensor(WORDS, binary=binary, name="w")]
    parameters = {"b": True, "i": 3, "f": 0.5, "s": "t"}
    request = InferRequest("m", inputs, "7", parameters=parameters, request_outputs=[RequestedOutput("y")])
    message = request.to_grpc()
    assert list(message.raw_input_contents) == ([NUMBERS.tobytes(), b"\1\0\0\0a\2\0\0\0\xc3\xa9"] if binary else [])
    assert list(message.inputs[0].contents.int_contents) == ([] if binary else [1, 2])
    assert list(message.inputs[1].contents.bytes_contents) == ([] if binary else [b"a", b"\xc3\xa9"])
    found = InferRequest.from_grpc(ModelInferRequest.FromString(message.SerializeToString()))
    assert (found.id, found.model_name, found.parameters) == ("7", "m", parameters)
    assert (found.from_grpc, found.use_binary_outputs) == (True, binary)
    assert found.request_outputs == [RequestedOutput("y")]
    assert found.inputs[0].as_numpy().tolist() == [[1, 2]]
    assert found.inputs[1].as_numpy().tolist() == [[b"a", "é".encode()]]
    assert found.inputs[1].as_string() == ["a", "é"]


def test_requests_that_cannot_be_sent() -> None:
    half = tensor(np.array([1], np.float16), binary=False)
    with pytest.raises(InvalidInput, match="Sending FP16 data via JSON is not supported"):
        InferRequest("m", [half]).to_rest()
    with pytest.raises(InvalidInput, match="'data' field is missing for 'x'"):
        InferRequest("m", [InferInput("x", [1], "INT32")]).to_rest()
    with pytest.raises(InvalidInput, match="raw data for all tensors or for none"):
        InferRequest("m", [tensor(NUMBERS, binary=True), tensor(NUMBERS, binary=False)]).to_grpc()
    with pytest.raises(InvalidInput, match="invalid parameter value"):
        InferRequest("m", [], parameters={"a": []}).to_grpc()
    with pytest.raises(InvalidInput, match="expected raw data for each of 1 tensors, got 2"):
        InferRequest("m", [tensor(NUMBERS, binary=False)], raw_inputs=[b"", b""])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "Unrecognized request format"),
        (b"[]", "Unrecognized request format"),
        (b'{"inputs": [{"name": "x", "shape": [1]}]}', "Unrecognized request format: 'datatype'"),
        (b'{"inputs": [{"name": "x", "shape": [1], "datatype": "INT8"}]}', "'data' field is missing for 'x'"),
        (
            b'{"inputs": [{"name": "x", "shape": [1], "datatype": "INT8", "parameters": {"binary_data_size": 1}}]}',
            "'x': expected 1 bytes of raw data, got 0",
        ),
    ],
)
def test_bodies_that_are_not_requests(body: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        InferRequest.from_bytes(body, len(body), "m")


# --- tensors -----------------------------------------------------------------------------------------------------


def test_big_endian_arrays_are_sent_little_endian() -> None:
    given = np.array([1, 2], ">i4")
    made = InferInput("x", [2], "INT32")
    made.set_data_from_numpy(given, binary_data=True)
    assert made.as_numpy().tolist() == [1, 2]
    assert InferRequest("m", [made]).to_rest()[0].endswith(b"\1\0\0\0\2\0\0\0")  # type: ignore[union-attr]


def test_arrays_that_do_not_fit_their_tensor() -> None:
    given = InferInput("x", [1, 2], "int32")
    assert given.datatype == "INT32"
    with pytest.raises(InferenceError, match="got unexpected datatype INT64 from numpy array, expected INT32"):
        given.set_data_from_numpy(np.array([[1, 2]]))
    with pytest.raises(InferenceError, match=r"got unexpected numpy array shape \[2\], expected \[1, 2\]"):
        given.set_data_from_numpy(np.array([1, 2], np.int32))
    with pytest.raises(InferenceError, match="must be a numpy array"):
        given.set_data_from_numpy([1, 2])
    with pytest.raises(InvalidInput, match="invalid datatype BF16 in the input"):
        InferInput("x", [1], "BF16", [1]).as_numpy()
    with pytest.raises(InvalidInput, match="invalid datatype INT32 in the input"):
        given.as_string()
    raw = InferInput("x", [2], "BYTES")
    raw.set_raw_data(b"\1\0\0\0a")
    with pytest.raises(InvalidInput, match="'x'"):
        raw.as_numpy()
    with pytest.raises(InvalidInput, match="not UTF-8"):
        tensor(np.array([b"\xff"], object), binary=False)


def test_the_data_of_a_tensor_can_be_changed() -> None:
    given = tensor(NUMBERS, binary=True)
    array = given.as_numpy()
    assert (given.data, given.parameters) == (None, {"binary_data_size": 8})
    given.data = [3, 4]
    given.shape = [2]
    assert array.tolist() == [[1, 2]]
    given.set_data_from_numpy(np.array([5, 6], np.int32), binary_data=False)
    assert (given.data, given.parameters, given.as_numpy().tolist()) == ([5, 6], {}, [5, 6])


def test_datatypes_of_numpy() -> None:
    names = [
        "BOOL",
        "INT8",
        "INT16",
        "INT32",
        "INT64",
        "UINT8",
        "UINT16",
        "UINT32",
        "UINT64",
        "FP16",
        "FP32",
        "FP64",
        "BYTES",
    ]
    assert [from_np_dtype(np.dtype(to_np_dtype(name))) for name in names] == names
    assert [to_np_dtype(name) for name in ("BF16", "INT4")] == [None, None]
    assert [from_np_dtype(np.dtype(each)) for each in ("S2", "U2", "M8[s]", "c16")] == ["BYTES", "BYTES", "BYTES", None]


# --- responses -----------------------------------------------------------------------------------------------------


def test_a_response_as_json_and_raw() -> None:
    first, second = (
        tensor(NUMBERS, binary=True, kind=InferOutput, name="a"),
        InferOutput("b", [1], "FP16", np.ones(1, "f2")),
    )
    requested = [RequestedOutput("b", {"binary_data": True}), RequestedOutput("a")]
    body, length = response(first, second, requested_outputs=requested, parameters={"n": 2}).to_rest()
    assert isinstance(body, bytes)
    assert body[length:] == b"\0\x3c"
    found = InferResponse.from_bytes(body, length or 0)
    assert [(each.name, each.as_numpy().tolist()) for each in found.outputs] == [("b", [1.0]), ("a", [[1, 2]])]
    assert (found.id, found.model_name, found.parameters) == ("1", "m", {"n": 2})
    with pytest.raises(InvalidInput, match="Unexpected inference output 'c'"):
        response(first, requested_outputs=[RequestedOutput("c")]).to_rest()


def test_a_response_as_a_message() -> None:
    numbers = InferOutput("a", [2], "INT32", [1, 2])
    message = response(numbers).to_grpc()
    assert (list(message.outputs[0].contents.int_contents), list(message.raw_output_contents)) == ([1, 2], [])
    assert InferResponse.from_grpc(message).get_output_by_name("a").as_numpy().tolist() == [1, 2]
    message = response(numbers, InferOutput("h", [1], "FP16", np.ones(1, "f2"))).to_grpc()
    assert [len(each) for each in message.raw_output_contents] == [8, 2]  # FP16 has no typed contents
    assert InferResponse.from_grpc(message).outputs[1].as_numpy().tolist() == [1.0]


# --- helpers ---------------------------------------------------------------------------------------------------------


def test_rows_of_a_payload() -> None:
    assert get_predict_input({"instances": [[1, 2]]}).tolist() == [[1, 2]]
    assert get_predict_input({"inputs": ["a"]}) == ["a"]
    assert get_predict_input({"instances": [[{"a": 1}], [{"a": 2}]]})["a"].tolist() == [1, 2]
    assert get_predict_input({"instances": []}).size == 0
    request = InferRequest("m", [tensor(np.array(["a"], object), binary=False)], parameters={"content_type": "pd"})
    assert get_predict_input(request).to_dict("list") == {"x": ["a"]}
    request.parameters = None
    assert get_predict_input(request) == ["a"]
    with pytest.raises(InvalidInput, match="unsupported payload type"):
        get_predict_input(b"")


def test_the_response_for_a_result() -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    assert get_predict_response({}, frame, "m") == {"predictions": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]}
    assert get_predict_response({}, np.array([1]), "m") == {"predictions": [1]}
    request = InferRequest("m", [], "7", parameters={"binary_data_output": True})
    found = get_predict_response(request, frame, "m")
    assert (found.id, [each.datatype for each in found.outputs]) == ("7", ["INT64", "BYTES"])
    assert found.outputs[1].as_numpy().tolist() == [b"x", b"y"]
    found = get_predict_response(InferRequest("m", []), ["x"], "m")
    assert (found.outputs[0].name, found.outputs[0].data) == ("output-0", ["x"])


def test_arguments_of_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--predictor_host", "h", "--protocol", "v2", "--enable_grpc", "false"])
    arguments, _ = parser.parse_known_args()
    assert (arguments.predictor_host, arguments.http_port, arguments.enable_grpc) == ("h", 8080, False)
    kserve.ModelServer()
    config = kserve.Model("m").predictor_config
    assert config is not None
    assert (config.predictor_base_url, config.protocol) == ("http://h", "v2")
    older = kserve.Model("m")
    older.predictor_host, older.protocol = "older", "grpc-v2"  # type: ignore[attr-defined]
    assert older.predictor_config is not None
    assert (older.predictor_config.predictor_host, older.predictor_config.protocol) == ("older", "grpc-v2")
    with pytest.raises(ValueError, match="invalid truth value 'maybe'"):
        strtobool("maybe")
    with pytest.raises(RuntimeError, match="dragoman serve FILE"):
        kserve.ModelServer().start([])


def test_files_of_models(tmp_path: Any) -> None:
    assert Storage.download(f"file://{tmp_path}") == Storage.download(str(tmp_path)) == str(tmp_path)
    for uri in ("s3://bucket/model", str(tmp_path / "missing")):
        with pytest.raises(ModelMissingError, match="expected a file or folder on this machine"):
            Storage.download(uri)
