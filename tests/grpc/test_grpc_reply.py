"""The response of ModelInfer as a pure function: raw or typed, in order, with top classes."""

from typing import Any

import numpy as np
import pytest
from grpc_fakes import infer_message, parse_request

from dragoman.core.calls import Inference, ModelDescription, Response
from dragoman.core.datatypes import BF16, BYTES, FP16, FP32, INT32
from dragoman.core.errors import InvalidInput
from dragoman.core.signature import OPEN
from dragoman.core.tensor import Tensor, object_array
from dragoman.formats import grpc_messages as m
from dragoman.protocols.open_inference.grpc import protocol
from dragoman.protocols.wire import GrpcRequest, Policy
from dragoman.transports.grpc.handlers import chunks_of


def format_reply(message: Any, response: Inference, contents: str = "as-request") -> Any:
    exchange = parse_request("ModelInfer", message.SerializeToString(), {"dragoman-output-contents": contents})
    return m.ModelInferResponse.FromString(
        b"".join(chunks_of(exchange.format_response(Response(response, "echo", "3"))))
    )


def single_output(tensor: Tensor) -> Inference:
    return Inference({"y": tensor})


def test_a_raw_request_gets_a_raw_response() -> None:
    response = Inference({"y": Tensor(np.array([[1, 2]], "<i4"), INT32, {"q": "é"})}, {"p": True})
    reply = format_reply(infer_message(id="7"), response)
    assert (reply.model_name, reply.model_version, reply.id) == ("echo", "3", "7")
    assert reply.parameters["p"].bool_param
    (output,) = reply.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("y", "INT32", [1, 2])
    assert output.parameters["q"].string_param == "é"
    assert not output.HasField("contents")
    assert list(reply.raw_output_contents) == [b"\1\0\0\0\2\0\0\0"]


def test_a_typed_request_gets_a_typed_response() -> None:
    reply = format_reply(infer_message(raw=False), single_output(Tensor(np.array([1, 2], "<i4"), INT32)))
    assert list(reply.outputs[0].contents.int_contents) == [1, 2]
    assert not reply.raw_output_contents
    assert not reply.id


@pytest.mark.parametrize("is_raw", [True, False])
def test_metadata_and_setting_choose_the_contents(is_raw: bool) -> None:
    response = single_output(Tensor(np.array([1, 2], "<i4"), INT32))
    message = infer_message(raw=is_raw)
    for contents in ("raw", "typed"):
        assert bool(format_reply(message, response, contents).raw_output_contents) is (contents == "raw")
    endpoints = {choice: method_of(choice) for choice in ("raw", "typed", "as-request")}
    found = {}
    for choice, endpoint in endpoints.items():
        exchange: Any = endpoint(GrpcRequest(message.SerializeToString()))
        chunks = b"".join(chunks_of(exchange.format_response(Response(response, "echo", "3"))))
        found[choice] = bool(m.ModelInferResponse.FromString(chunks).raw_output_contents)
    assert found == {"raw": True, "typed": False, "as-request": is_raw}
    with pytest.raises(InvalidInput, match="expected raw, typed or as-request, got 'both'"):
        format_reply(message, response, "both")


def method_of(choice: Any) -> Any:
    table = protocol(Policy(grpc_output_contents=choice))
    return next(row.endpoint for row in table.methods if row.name == "ModelInfer")


@pytest.mark.parametrize("place", ["input", "request"])
def test_a_typed_request_with_a_content_type_gets_a_typed_response(place: str) -> None:
    message = infer_message(raw=False)
    (message if place == "request" else message.inputs[0]).parameters["content_type"].string_param = "np"
    reply = format_reply(message, single_output(Tensor(np.array([1, 2], "<i4"), INT32)), "raw")
    assert list(reply.outputs[0].contents.int_contents) == [1, 2]


def test_a_request_without_inputs_gets_a_raw_response() -> None:
    reply = format_reply(m.ModelInferRequest(model_name="echo"), single_output(Tensor(np.array([1], "<i4"), INT32)))
    assert list(reply.raw_output_contents) == [b"\1\0\0\0"]


@pytest.mark.parametrize("half", [FP16, BF16])
def test_an_output_without_a_typed_field_makes_the_response_raw(half: Any) -> None:
    response = Inference(
        {"y": Tensor(np.array([1], "<i4"), INT32), "h": Tensor(np.zeros(1, half.dtype), half)},
    )
    reply = format_reply(infer_message(raw=False), response)
    assert list(reply.raw_output_contents) == [b"\1\0\0\0", b"\0\0"]
    assert not any(o.HasField("contents") for o in reply.outputs)


def test_strided_and_empty_arrays_are_serialized_in_c_order() -> None:
    array = np.arange(6, dtype="<i4").reshape(2, 3).T
    reply = format_reply(infer_message(), Inference({"y": Tensor(array, INT32), "e": Tensor(array[:0], INT32)}))
    assert list(reply.raw_output_contents) == [array.tobytes("C"), b""]
    assert [list(o.shape) for o in reply.outputs] == [[3, 2], [0, 2]]
    assert list(
        format_reply(infer_message(raw=False), single_output(Tensor(array, INT32))).outputs[0].contents.int_contents
    ) == [
        0,
        3,
        1,
        4,
        2,
        5,
    ]


def test_a_large_raw_response_has_a_length_of_several_bytes() -> None:
    array = np.arange(100_000, dtype="<i4")
    assert format_reply(infer_message(), single_output(Tensor(array, INT32))).raw_output_contents[0] == array.tobytes()


def test_top_classes_are_text() -> None:  # T76
    message = infer_message(raw=False)
    message.outputs.add(name="y").parameters["classification"].int64_param = 2
    as_request = {"dragoman-output-contents": "as-request"}
    exchange = parse_request("ModelInfer", message.SerializeToString(), as_request)
    inferred = Response(single_output(Tensor(np.array([[0.25, 4, 1]], "<f4"), FP32)), "echo", "3")
    described = Response(ModelDescription("echo", (), "python", OPEN))
    chunks = b"".join(chunks_of(exchange.format_response(Response((inferred, described)))))
    (output,) = m.ModelInferResponse.FromString(chunks).outputs
    assert (output.datatype, list(output.shape)) == ("BYTES", [1, 2])
    assert list(output.contents.bytes_contents) == [b"4.000000:1", b"1.000000:2"]


def test_bytes_are_serialized_with_their_lengths() -> None:
    tensor = Tensor(object_array([b"ab", b""], (2,)), BYTES)
    assert list(format_reply(infer_message(), single_output(tensor)).raw_output_contents) == [b"\2\0\0\0ab\0\0\0\0"]
