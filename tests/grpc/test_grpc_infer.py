"""ModelInfer as a pure function: valid and invalid requests."""

from collections.abc import Callable
from typing import Any

import pytest
from grpc_fakes import infer_message, parse_request, parsed_call

from dragoman.core.datatypes import INT32
from dragoman.core.errors import InvalidInput
from dragoman.formats import grpc_messages as m
from dragoman.protocols.open_inference import grpc as oip_grpc
from dragoman.protocols.wire import GrpcMethod, GrpcRequest, Policy

Change = Callable[[Any], object]


def check_rejected(message: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        parse_request("ModelInfer", message.SerializeToString())
    return caught.value.message


@pytest.mark.parametrize("raw", [True, False])
def test_every_field_of_a_request_is_parsed(raw: bool) -> None:
    message = infer_message(raw=raw, id="7", model_version="2")
    message.parameters["p"].double_param = 0.5
    message.inputs[0].parameters["q"].uint64_param = 1 << 63
    message.outputs.add(name="y")
    exchange = parse_request("ModelInfer", message.SerializeToString())
    request, call = exchange.request, parsed_call(exchange)
    assert (request.model, request.version, request.id, request.deadline_s) == ("echo", "2", "7", None)
    assert call.outputs == ("y",)
    assert call.parameters == {"p": 0.5}
    tensor = call.inputs["x"]
    assert tensor.datatype is INT32
    assert tensor.data.tolist() == [1, 2]
    assert tensor.parameters == {"q": 1 << 63}
    assert not tensor.data.flags.writeable


# --- what is refused (T64 to T72) ------------------------------------------------------------------------


def _mixed(message: Any) -> None:
    message.inputs[0].contents.int_contents.extend([1, 2])


def _too_many_raw(message: Any) -> None:
    message.raw_input_contents.append(b"")


def _too_few_raw(message: Any) -> None:
    message.inputs.add(name="b", datatype="INT32", shape=[0])


def _short(message: Any) -> None:
    message.raw_input_contents[0] = b"\0" * 7


def _overflow(message: Any) -> None:
    message.inputs[0].shape[:] = [1 << 40, 1 << 40]


def _negative(message: Any) -> None:
    message.inputs[0].shape[:] = [-1]


def _too_deep(message: Any) -> None:
    message.inputs[0].shape[:] = [1] * 31 + [2, 1]


def _unaddressable(message: Any) -> None:
    message.inputs[0].shape[:] = [0, 1 << 62, 4]
    message.raw_input_contents[0] = b""


def _duplicate_input(message: Any) -> None:
    message.inputs.append(message.inputs[0])
    message.raw_input_contents.append(message.raw_input_contents[0])


def _unset_tensor_parameter(message: Any) -> None:
    message.inputs[0].parameters["p"].SetInParent()


def _truncated(message: Any) -> None:
    message.inputs[0].datatype = "BYTES"
    message.raw_input_contents[0] = b"\x09\0\0\0a"


def _bool(message: Any) -> None:
    message.inputs[0].datatype = "BOOL"
    message.raw_input_contents[0] = b"\1\2"


def _datatype(name: str) -> Change:
    return lambda message: setattr(message.inputs[0], "datatype", name)


RAW: list[tuple[Change, str]] = [
    (_mixed, "input 'x': expected no 'contents' beside 'raw_input_contents'"),  # T64
    (_too_many_raw, "expected 1 'raw_input_contents', one for each input, got 2"),  # T65
    (_too_few_raw, "expected 2 'raw_input_contents', one for each input, got 1"),
    (_short, "input 'x': shape [2] of INT32 needs 8 bytes, got 7"),
    (_overflow, "input 'x': shape [1099511627776, 1099511627776] has more elements"),  # T67b
    (_negative, "input 'x': expected a shape of integers"),
    (_too_deep, "input 'x': expected at most 32 axes, got 33"),
    (_unaddressable, "input 'x': shape [0, 4611686018427387904, 4] is too large"),
    (_duplicate_input, "input 'x' already exists in request"),  # T70c
    (_unset_tensor_parameter, "input 'x': parameter 'p': expected a value, got none"),  # T72
    (_datatype("int32"), "input 'x': unknown datatype 'int32'"),
    (_truncated, "input 'x': BYTES element 0 needs 9 bytes, 1 are left"),  # T42
    (_bool, "input 'x': expected BOOL bytes of 0 or 1, got 2"),  # T43
]


@pytest.mark.parametrize(("change", "expected"), RAW)
def test_invalid_raw_tensors_are_rejected(change: Change, expected: str) -> None:
    message = infer_message()
    change(message)
    assert check_rejected(message).startswith(expected)


TYPED: list[tuple[str, list[int], dict[str, list[Any]], str]] = [
    # T66: the wrong field, or two of them
    ("FP32", [2], {"int_contents": [1, 2]}, "expected contents of FP32 in 'fp32_contents', got 'int_contents'"),
    ("INT64", [2], {"int_contents": [1, 2]}, "expected contents of INT64 in 'int64_contents', got 'int_contents'"),
    (
        "INT32",
        [2],
        {"int_contents": [1, 2], "fp32_contents": [1]},
        "expected contents of INT32 in 'int_contents', got 'int_contents', 'fp32_contents'",
    ),
    # T67: no field for these
    ("FP16", [2], {"fp32_contents": [1, 2]}, "FP16 has no typed contents; send it in 'raw_input_contents'"),
    ("BF16", [2], {"fp32_contents": [1, 2]}, "BF16 has no typed contents; send it in 'raw_input_contents'"),
    # T67c: beyond the range
    ("INT8", [2], {"int_contents": [1, 200]}, "200 does not fit into INT8"),
    ("INT16", [1], {"int_contents": [-32769]}, "-32769 does not fit into INT16"),
    ("UINT8", [1], {"uint_contents": [300]}, "300 does not fit into UINT8"),
    ("UINT16", [1], {"uint_contents": [65536]}, "65536 does not fit into UINT16"),
    # T68: no data
    ("INT32", [2], {}, "shape [2] needs 2 elements, got no data"),
    ("FP16", [2], {}, "shape [2] needs 2 elements, got no data"),
    ("BYTES", [], {}, "shape [] needs 1 elements, got no data"),
    # the count
    ("INT32", [3], {"int_contents": [1, 2]}, "shape [3] needs 3 elements, got 2"),
    ("BYTES", [0], {"bytes_contents": [b"a"]}, "shape [0] needs 0 elements, got 1"),
    ("INT32", [1 << 40, 1 << 40], {"int_contents": [1]}, "shape [1099511627776, 1099511627776] has more elements"),
]


@pytest.mark.parametrize(("datatype", "shape", "contents", "expected"), TYPED)
def test_invalid_typed_tensors_are_rejected(
    datatype: str, shape: list[int], contents: dict[str, list[Any]], expected: str
) -> None:
    message = m.ModelInferRequest(model_name="echo")
    message.inputs.add(name="x", datatype=datatype, shape=shape, contents=m.InferTensorContents(**contents))
    assert check_rejected(message).startswith(f"input 'x': {expected}")


@pytest.mark.parametrize("datatype", ["INT8", "FP16", "BF16", "BYTES", "BOOL"])
@pytest.mark.parametrize("present", [True, False])
def test_a_tensor_without_elements_needs_no_data(datatype: str, present: bool) -> None:
    message = m.ModelInferRequest(model_name="echo")
    tensor = message.inputs.add(name="x", datatype=datatype, shape=[0, 3])
    if present:
        tensor.contents.SetInParent()
    data = parsed_call(parse_request("ModelInfer", message.SerializeToString())).inputs["x"].data
    assert data.shape == (0, 3)


def test_other_invalid_fields_are_rejected() -> None:
    def duplicate(message: Any) -> None:
        message.outputs.add(name="y")
        message.outputs.add(name="y")

    def unset(message: Any) -> None:
        message.parameters["p"].SetInParent()

    def unset_output(message: Any) -> None:
        message.outputs.add(name="y").parameters["p"].SetInParent()

    def classes(message: Any) -> None:
        message.outputs.add(name="y").parameters["classification"].string_param = "3"

    def final(message: Any) -> None:
        message.parameters["triton_enable_empty_final_response"].int64_param = 1

    def reserved(message: Any) -> None:
        message.parameters["triton_other"].bool_param = True

    for change, expected in (
        (duplicate, "output 'y' already exists in request"),
        (unset, "parameter 'p': expected a value, got none"),
        (unset_output, "output 'y': parameter 'p': expected a value"),
        (classes, "output 'y': parameter 'classification'"),
        (final, "parameter 'triton_enable_empty_final_response': expected a bool"),
        (reserved, "parameter keys starting with 'triton_' are reserved for Triton usage"),
    ):
        message = infer_message()
        change(message)
        assert check_rejected(message).startswith(expected)
    assert check_rejected(infer_message("")) == "expected the name of a model, got none"


def test_headers_are_no_parameter_of_clients() -> None:
    message = infer_message()
    message.parameters["headers"].string_param = "x"
    assert check_rejected(message).startswith("parameter 'headers' is reserved")


def test_the_number_of_tensors_is_limited() -> None:
    row = next(r for r in oip_grpc.protocol(Policy(max_tensors=1)).methods if r.name == "ModelInfer")
    assert isinstance(row, GrpcMethod)
    message = m.ModelInferRequest(model_name="echo")
    for name in "ab":
        message.inputs.add(name=name, datatype="INT32", shape=[0])
    with pytest.raises(InvalidInput, match="'inputs': expected at most 1, got 2"):
        row.endpoint(GrpcRequest(message.SerializeToString()))
