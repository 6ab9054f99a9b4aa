"""Every datatype, raw and typed, in every kind of shape: values roundtrip bit for bit."""

import math
from typing import Any

import numpy as np
import pytest
from grpc_fakes import parse_request, parsed_call
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.calls import Inference, Response
from dragoman.core.datatypes import BOOL, BYTES, DATATYPES, Datatype
from dragoman.core.tensor import Tensor, object_array
from dragoman.formats import grpc_messages as m
from dragoman.formats.raw import raw_from_tensor
from dragoman.transports.grpc.handlers import chunks_of

SHAPES = st.one_of(
    st.just(()),
    st.integers(0, 4).map(lambda n: (0, n)),
    st.lists(st.integers(1, 2), min_size=8, max_size=8).map(tuple),
    st.lists(st.integers(0, 3), max_size=4).map(tuple),
)


@st.composite
def tensors(draw: st.DrawFn, datatype: Datatype) -> Tensor:
    shape = draw(SHAPES)
    count = math.prod(shape)
    if datatype is BYTES:
        elements = draw(st.lists(st.binary(max_size=5), min_size=count, max_size=count))
        return Tensor(object_array(elements, shape), BYTES)
    size = count * datatype.size
    bits = draw(st.binary(min_size=size, max_size=size))
    if datatype is BOOL:
        bits = bytes(b & 1 for b in bits)
    return Tensor(np.frombuffer(bits, datatype.dtype).reshape(shape), datatype)


def infer_request(tensor: Tensor, raw: bool) -> Any:
    message = m.ModelInferRequest(model_name="echo")
    input_tensor = message.inputs.add(name="x", datatype=tensor.datatype.name, shape=tensor.shape)
    if raw:
        message.raw_input_contents.append(bytes(raw_from_tensor(tensor)))
    elif tensor.data.size:
        getattr(input_tensor.contents, tensor.datatype.contents_field).extend(tensor.data.reshape(-1).tolist())
    return message


def same(one: Tensor, other: Tensor, exact: bool) -> bool:
    if one.datatype is not other.datatype or one.data.dtype != other.data.dtype or one.shape != other.shape:
        return False
    if exact and one.datatype is not BYTES:
        return one.data.tobytes() == other.data.tobytes()
    return np.array_equal(one.data, other.data, equal_nan=one.datatype.kind == "float")


def round_trip(tensor: Tensor, raw: bool) -> tuple[Tensor, Any]:
    exchange = parse_request(
        "ModelInfer", infer_request(tensor, raw).SerializeToString(), {"dragoman-output-contents": "as-request"}
    )
    parsed: Tensor = parsed_call(exchange).inputs["x"]
    reply = m.ModelInferResponse.FromString(
        b"".join(chunks_of(exchange.format_response(Response(Inference({"y": parsed}), "echo", "1"))))
    )
    return parsed, reply


@pytest.mark.parametrize("datatype", DATATYPES.values(), ids=str)
@given(data=st.data())
def test_raw_tensors_roundtrip(datatype: Datatype, data: st.DataObject) -> None:
    tensor = data.draw(tensors(datatype))
    parsed, reply = round_trip(tensor, raw=True)
    assert same(parsed, tensor, exact=True)
    assert tuple(reply.outputs[0].shape) == tensor.shape
    assert reply.outputs[0].datatype == datatype.name
    assert list(reply.raw_output_contents) == [bytes(raw_from_tensor(tensor))]


@pytest.mark.parametrize("datatype", [d for d in DATATYPES.values() if d.contents_field], ids=str)
@given(data=st.data())
def test_typed_tensors_roundtrip(datatype: Datatype, data: st.DataObject) -> None:
    tensor = data.draw(tensors(datatype))
    parsed, reply = round_trip(tensor, raw=False)
    assert same(parsed, tensor, exact=False)
    (output,) = reply.outputs
    assert tuple(output.shape) == tensor.shape
    assert not reply.raw_output_contents
    returned = m.ModelInferRequest(model_name="echo")
    returned.inputs.add(name="x", datatype=output.datatype, shape=output.shape, contents=output.contents)
    reparsed = parsed_call(parse_request("ModelInfer", returned.SerializeToString())).inputs["x"]
    assert same(reparsed, tensor, exact=False)
