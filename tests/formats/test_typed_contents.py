"""Typed contents of large gRPC messages are read as protobuf reads them."""

from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.core.errors import InvalidInput
from dragoman.formats import oip_typed
from dragoman.formats.oip_messages import ModelInferRequest, length_delimited
from dragoman.formats.policy import Policy
from dragoman.protocols.open_inference import grpc_inference as oip_inference
from dragoman.protocols.wire import GrpcRequest

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


def read(body: bytes, policy: Policy = POLICY) -> Any:
    try:
        request, _ = oip_inference.parse_infer_request(GrpcRequest(body), policy)
    except InvalidInput as fault:
        return fault.message
    call: Any = request.call
    return {name: (t.datatype.name, t.shape, t.data.dtype, t.data.tolist()) for name, t in call.inputs.items()}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3), st.data(), st.sampled_from([10, 13, 1 << 18]))
def test_large_contents_are_read_as_small_ones(kinds: list[str], data: st.DataObject, portion: int) -> None:
    message = ModelInferRequest(model_name="m", id="7")
    for at, kind in enumerate(kinds):
        field, elements = KINDS[kind]
        values = data.draw(st.lists(elements, max_size=6))
        wrong = data.draw(st.sampled_from([0, 0, 0, 1]))
        tensor = message.inputs.add(name=f"x{at}", datatype=kind, shape=[len(values) + wrong])
        getattr(tensor.contents, field).extend(values)
    body = message.SerializeToString()
    expected = read(body)
    with (
        mock.patch.object(oip_inference, "TYPED_LARGE", 0),
        mock.patch.object(oip_typed, "_CONTENTS_LARGE", 1),
        mock.patch.object(oip_typed, "_PORTION", portion),
    ):
        found = read(body)
    if isinstance(expected, str):
        assert isinstance(found, str)
    else:
        assert found == expected


def test_more_elements_than_may_be_parsed_are_rejected_first() -> None:
    message = ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="BYTES", shape=[1000]).contents.bytes_contents.extend([b""] * 1000)
    body = message.SerializeToString()
    with (
        mock.patch.object(oip_inference, "TYPED_LARGE", 0),
        mock.patch.object(oip_inference, "parsed", side_effect=AssertionError("it was parsed")),
    ):
        assert "too many unpacked elements: expected at most 500" in read(body, Policy(max_bytes_elements=500))
        with pytest.raises(AssertionError, match="it was parsed"):
            read(body, Policy(max_bytes_elements=1000))
        many = body + b"".join(b"".join(length_delimited(5, b"")) for _ in range(600))
        assert "too many fields: expected at most 500" in read(many, Policy(max_json_values=500))


@pytest.mark.parametrize("wire", [b"\x80", b"\x01\x80\x80", b"\xff" * 11 + b"\x01"])
def test_varints_that_are_broken_are_rejected(wire: bytes) -> None:
    with pytest.raises(InvalidInput):
        oip_typed.Packed("int64_contents", memoryview(wire)).array()
