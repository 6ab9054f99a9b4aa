"""Typed contents of large gRPC messages are parsed and serialized as by protobuf."""

import tracemalloc
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.core.calls import Inference, Response
from dragoman.core.datatypes import FP32, datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.tensor import NONE, Tensor
from dragoman.formats import grpc_messages
from dragoman.formats.grpc_messages import InferTensorContents, ModelInferRequest, ModelInferResponse, length_delimited
from dragoman.formats.policy import Policy
from dragoman.protocols.open_inference import grpc_inference as oip_inference
from dragoman.protocols.wire import GrpcRequest
from dragoman.transports.grpc.handlers import chunks_of

POLICY = Policy()
KINDS: dict[str, tuple[str, st.SearchStrategy[Any]]] = {
    "BOOL": ("bool_contents", st.booleans()),
    "INT8": ("int_contents", st.integers(-200, 200)),
    "INT32": ("int_contents", st.integers(-(1 << 31), (1 << 31) - 1)),
    "INT64": ("int64_contents", st.integers(-(1 << 63), (1 << 63) - 1)),
    "UINT16": ("uint_contents", st.integers(0, 70_000)),
    "UINT64": ("uint64_contents", st.integers(0, (1 << 64) - 1)),
    "FP32": ("fp32_contents", st.floats(width=32, allow_nan=False)),
    "FP64": ("fp64_contents", st.floats(allow_nan=False)),
    "BYTES": ("bytes_contents", st.binary(max_size=3)),
}


def parse(body: bytes, policy: Policy = POLICY) -> Any:
    try:
        request, _ = oip_inference.parse_infer_request(GrpcRequest(body), policy)
    except InvalidInput as error:
        return error.message
    call: Any = request.call
    return {name: (t.datatype.name, t.shape, t.data.dtype, t.data.tolist()) for name, t in call.inputs.items()}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3), st.data(), st.sampled_from([10, 13, 1 << 18]))
def test_large_contents_are_parsed_as_small_ones(kinds: list[str], data: st.DataObject, chunk: int) -> None:
    message = ModelInferRequest(model_name="m", id="7")
    for index, kind in enumerate(kinds):
        field, elements = KINDS[kind]
        values = data.draw(st.lists(elements, max_size=6))
        extra = data.draw(st.sampled_from([0, 0, 0, 1]))
        tensor = message.inputs.add(name=f"x{index}", datatype=kind, shape=[len(values) + extra])
        getattr(tensor.contents, field).extend(values)
    body = message.SerializeToString()
    expected = parse(body)
    with (
        mock.patch.object(oip_inference, "SHARED", 0),
        mock.patch.object(oip_inference, "THREAD", 0),
        mock.patch.object(grpc_messages, "SHARED", 1),
        mock.patch.object(grpc_messages, "_DECODED_BYTES", chunk),
    ):
        actual = parse(body)
    if isinstance(expected, str):
        assert isinstance(actual, str)
    else:
        assert actual == expected


def test_too_many_elements_are_rejected_before_parsing() -> None:
    message = ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="BYTES", shape=[1000]).contents.bytes_contents.extend([b""] * 1000)
    body = message.SerializeToString()
    with (
        mock.patch.object(oip_inference, "SHARED", 0),
        mock.patch.object(oip_inference, "THREAD", 0),
        mock.patch.object(oip_inference, "parse_message", side_effect=AssertionError("it was parsed")),
    ):
        assert "too many elements in typed contents: expected at most 500" in parse(
            body, Policy(max_bytes_elements=500)
        )
        with pytest.raises(AssertionError, match="it was parsed"):
            parse(body, Policy(max_bytes_elements=1000))
        many = body + b"".join(b"".join(length_delimited(5, b"")) for _ in range(600))
        assert "too many fields: expected at most 500" in parse(many, Policy(max_json_values=500))


def test_elements_are_counted_without_an_object_per_element() -> None:
    message = ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="BYTES", shape=[20_000]).contents.bytes_contents.extend([b""] * 20_000)
    body = message.SerializeToString()
    tracemalloc.start()
    try:
        assert grpc_messages.split_typed_contents(body, POLICY) == (body, {})
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * len(body)


@pytest.mark.parametrize("wire", [b"\x80", b"\x01\x80\x80", b"\xff" * 11 + b"\x01"])
def test_malformed_varints_are_rejected(wire: bytes) -> None:
    with pytest.raises(InvalidInput):
        grpc_messages.PackedContents("int64_contents", memoryview(wire)).array()


def test_repeated_contents_are_merged() -> None:
    message = ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[3])
    tensor.contents.fp32_contents.extend([1.0, 2.0])
    again = InferTensorContents(fp32_contents=[3.0]).SerializeToString()
    for contents in (again, b""):
        tensor.shape[0] = 2 + len(contents) // 6
        field = b"".join((tensor.SerializeToString(), *length_delimited(5, contents)))
        body = b"".join((b"\x0a\x01m", *length_delimited(5, field)))
        with (
            mock.patch.object(oip_inference, "SHARED", 0),
            mock.patch.object(oip_inference, "THREAD", 0),
            mock.patch.object(grpc_messages, "SHARED", 1),
        ):
            assert parse(body)["x"][3] == [1.0, 2.0, 3.0][: tensor.shape[0]]


# --- responses -------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3), st.data(), st.sampled_from([1, 3, 1 << 16]))
def test_many_elements_are_serialized_as_by_protobuf(kinds: list[str], data: st.DataObject, chunk: int) -> None:
    tensors = {}
    for index, kind in enumerate(kinds):
        dtype = datatype(kind).dtype
        low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (0, 0)
        elements = st.integers(int(low), int(high)) if dtype.kind in "iu" else KINDS[kind][1]
        values = data.draw(st.lists(elements, max_size=6))
        array = np.array(values, dtype)[::-1] if values else np.empty(0, dtype)
        tensors[f"y{index}"] = Tensor(array, datatype(kind), {"p": 1} if index else NONE)
    response = Response(Inference(tensors), "m", "1")
    options = oip_inference.GrpcOutputOptions("7", "m", "1", raw=False, classes={}, final=False)
    expected = oip_inference.format_infer_response(response, options)
    with (
        mock.patch.object(grpc_messages, "_MANY_ELEMENTS", 0),
        mock.patch.object(grpc_messages, "_ENCODED_ELEMENTS", chunk),
    ):
        assert oip_inference.format_infer_response(response, options) == expected
    assert ModelInferResponse.FromString(expected).outputs[0].HasField("contents")


def test_many_elements_are_serialized_without_an_object_per_element() -> None:
    tensor = Tensor(np.arange(1 << 18, dtype="<f4"), FP32)
    response = Response(Inference({"y": tensor}), "m", "1")
    options = oip_inference.GrpcOutputOptions("", "m", "1", raw=False, classes={}, final=False)
    tracemalloc.start()
    try:
        buffers = oip_inference.format_infer_buffers(response, options)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < tensor.data.nbytes // 4
    assert list(ModelInferResponse.FromString(b"".join(chunks_of(buffers))).outputs[0].contents.fp32_contents) == [
        *range(1 << 18)
    ]
