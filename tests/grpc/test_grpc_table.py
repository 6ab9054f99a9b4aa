"""The other methods as pure functions: health, metadata, streams, the repository and the table of statuses."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from grpc_fakes import SIGNATURE, TABLE, infer_message, method, parse_request, parse_stream_request, parsed_call
from msgspec import structs

from dragoman.core import errors
from dragoman.core.calls import (
    Describe,
    DescribeServer,
    Index,
    IndexEntry,
    Inference,
    Live,
    Load,
    ModelDescription,
    Ready,
    Response,
    ServerDescription,
    Unload,
)
from dragoman.core.datatypes import INT32
from dragoman.core.errors import DragomanError, Forbidden, InvalidInput, NotSupported
from dragoman.core.tensor import Tensor
from dragoman.formats import grpc_messages as m
from dragoman.plugins import find
from dragoman.protocols.wire import GrpcRequest, GrpcStreamMethod, Policy

CHUNK = Response(Inference({"y": Tensor(np.array([5], "<i4"), INT32)}), "echo", "3")
FINAL_WANTED = "triton_enable_empty_final_response"


def test_the_protocol_is_found_by_name() -> None:
    table = find("protocols", "oip_grpc")(Policy())
    assert table.service == "inference.GRPCInferenceService"
    assert [row.name for row in table.methods] == [row.name for row in TABLE.methods]


# --- health and metadata ---------------------------------------------------------------------------------


@pytest.mark.parametrize("response", [True, False])
def test_health(response: bool) -> None:
    live = parse_request("ServerLive", b"")
    assert live.request.call == Live()
    assert m.ServerLiveResponse.FromString(live.format_response(Response(response))).live is response
    ready = parse_request("ServerReady", b"")
    assert (ready.request.call, ready.request.model) == (Ready(), "")
    assert m.ServerReadyResponse.FromString(ready.format_response(Response(response))).ready is response
    model = parse_request("ModelReady", m.ModelReadyRequest(name="a", version="2").SerializeToString())
    assert (model.request.call, model.request.model, model.request.version) == (Ready(may_be_unknown=True), "a", "2")
    assert m.ModelReadyResponse.FromString(model.format_response(Response(response))).ready is response


@pytest.mark.parametrize("name", ["ModelReady", "ModelMetadata"])
def test_a_model_without_a_name_is_not_the_server(name: str) -> None:
    with pytest.raises(InvalidInput, match="expected the name of a model"):
        parse_request(name, b"")


@pytest.mark.parametrize("name", [row.name for row in TABLE.methods if row.name != "ModelStreamInfer"])
def test_every_method_rejects_a_malformed_message(name: str) -> None:
    with pytest.raises(InvalidInput, match="the message is no"):
        parse_request(name, b"\xff")


def test_server_metadata() -> None:
    exchange = parse_request("ServerMetadata", b"")
    assert exchange.request.call == DescribeServer()
    response = Response(ServerDescription("dragoman", "1.2", ("parameters", "special")))
    reply = m.ServerMetadataResponse.FromString(exchange.format_response(response))
    assert (reply.name, reply.version) == ("dragoman", "1.2")
    assert list(reply.extensions) == ["parameters", "special"]


def test_model_metadata_lists_the_tensors() -> None:
    exchange = parse_request("ModelMetadata", m.ModelMetadataRequest(name="a", version="1").SerializeToString())
    assert (exchange.request.call, exchange.request.model, exchange.request.version) == (Describe(), "a", "1")
    response = Response(ModelDescription("a", ("1", "2"), "onnx_onnxv1", SIGNATURE))
    reply = m.ModelMetadataResponse.FromString(exchange.format_response(response))
    assert (reply.name, list(reply.versions), reply.platform) == ("a", ["1", "2"], "onnx_onnxv1")
    assert [(t.name, t.datatype, list(t.shape)) for t in reply.inputs] == [("x", "FP32", [-1, 2])]
    assert [(t.name, t.datatype, list(t.shape)) for t in reply.outputs] == [("y", "INT32", []), ("z", "FP32", [-1])]
    assert not reply.properties


# --- streams ---------------------------------------------------------------------------------------------


def text(request: GrpcRequest, error: DragomanError) -> bytes | None:
    row = method("ModelStreamInfer")
    assert isinstance(row, GrpcStreamMethod)
    return row.format_error(request, error)


@pytest.mark.parametrize("raw", [True, False])
def test_a_chunk_of_a_stream(raw: bool) -> None:
    as_request = {"dragoman-output-contents": "as-request"}
    stream = parse_stream_request(infer_message(raw=raw, id="7").SerializeToString(), as_request)
    assert stream.format_end() is None
    reply = m.ModelStreamInferResponse.FromString(stream.format_chunk(CHUNK))
    assert not reply.error_message
    assert (reply.infer_response.model_version, reply.infer_response.id) == ("3", "7")
    assert not reply.infer_response.parameters["triton_final_response"].bool_param
    assert bool(reply.infer_response.raw_output_contents) is raw


def test_the_final_response_is_marked_on_request() -> None:
    message = infer_message(id="7")
    message.parameters[FINAL_WANTED].bool_param = True
    stream = parse_stream_request(message.SerializeToString())
    assert not parsed_call(stream).parameters
    chunk = m.ModelStreamInferResponse.FromString(stream.format_chunk(CHUNK)).infer_response
    assert chunk.parameters["triton_final_response"].WhichOneof("parameter_choice") == "bool_param"
    assert not chunk.parameters["triton_final_response"].bool_param
    sent = stream.format_end()
    assert sent is not None
    end = m.ModelStreamInferResponse.FromString(sent).infer_response
    assert end.parameters["triton_final_response"].bool_param
    assert (end.model_name, end.id, len(end.outputs)) == ("echo", "7", 0)


def test_no_response_follows_one_that_the_model_has_marked_as_the_last() -> None:
    message = infer_message(id="7")
    message.parameters[FINAL_WANTED].bool_param = True
    stream = parse_stream_request(message.SerializeToString())
    marks = []
    for is_last in (False, True):
        chunk = structs.replace(CHUNK, answer=structs.replace(CHUNK.answer, is_last=is_last))
        response = m.ModelStreamInferResponse.FromString(stream.format_chunk(chunk)).infer_response
        marks.append(response.parameters["triton_final_response"].bool_param)
    assert marks == [False, True]
    assert stream.format_end() is None


def test_an_error_among_the_responses_is_not_the_last_one() -> None:
    stream = parse_stream_request(infer_message(id="7").SerializeToString())
    sent = stream.format_error(InvalidInput("no"))
    assert sent is not None
    error = m.ModelStreamInferResponse.FromString(sent)
    assert (error.error_message, error.infer_response.id) == ("no", "7")
    assert not error.infer_response.parameters["triton_final_response"].bool_param
    for metadata in ({"triton_grpc_error": "true"}, {"dragoman-stream-shape": "bare"}):
        stream = parse_stream_request(infer_message().SerializeToString(), metadata)
        assert stream.format_error(InvalidInput("no")) is None  # a status ends the stream


def test_the_only_response_of_a_model_is_final() -> None:
    message = infer_message(id="7")
    message.parameters[FINAL_WANTED].bool_param = True
    stream = parse_stream_request(message.SerializeToString(), streams=False)
    chunk = m.ModelStreamInferResponse.FromString(stream.format_chunk(CHUNK)).infer_response
    assert chunk.parameters["triton_final_response"].bool_param
    assert (chunk.id, len(chunk.outputs)) == ("7", 1)
    assert stream.format_end() is None


RAW, CONTENT_TYPE, EMPTY = "raw", "content type", "no inputs"


@pytest.mark.parametrize(
    ("kinds", "metadata", "unchecked", "is_bare"),
    [
        ({RAW}, {}, False, False),
        ({RAW}, {}, True, False),
        ({RAW, CONTENT_TYPE}, {}, True, False),
        ({EMPTY}, {}, True, False),
        (set(), {}, False, False),
        (set(), {}, True, True),
        ({CONTENT_TYPE}, {}, False, True),
        ({FINAL_WANTED, CONTENT_TYPE}, {}, True, False),
        ({CONTENT_TYPE}, {"triton_grpc_error": "true"}, True, False),
        ({CONTENT_TYPE}, {"dragoman-stream-shape": "triton"}, True, False),
        ({RAW}, {"dragoman-stream-shape": "bare"}, False, True),
    ],
)
def test_the_shape_of_a_stream_follows_from_the_request(
    kinds: set[str], metadata: dict[str, str], unchecked: bool, is_bare: bool
) -> None:  # T2
    message = m.ModelInferRequest(model_name="echo") if EMPTY in kinds else infer_message(raw=RAW in kinds)
    message.id = "7"
    if FINAL_WANTED in kinds:
        message.parameters[FINAL_WANTED].bool_param = False
    if CONTENT_TYPE in kinds:
        message.inputs[0].parameters["content_type"].string_param = "np"
    stream = parse_stream_request(message.SerializeToString(), metadata, unchecked=unchecked)
    chunk = stream.format_chunk(CHUNK)
    if is_bare:
        response = m.ModelInferResponse.FromString(chunk)
        assert not response.parameters
    else:
        response = m.ModelStreamInferResponse.FromString(chunk).infer_response
        assert "triton_final_response" in response.parameters
    assert (response.id, len(response.outputs)) == ("7", 1)
    assert stream.ends_with_status is is_bare


def test_marks_of_plain_responses_on_request() -> None:
    message = infer_message(id="7")
    message.parameters[FINAL_WANTED].bool_param = True
    bare = {"dragoman-stream-shape": "bare"}
    stream = parse_stream_request(message.SerializeToString(), bare)
    assert m.ModelInferResponse.FromString(stream.format_chunk(CHUNK)).id == "7"
    end = stream.format_end()
    assert end is not None
    assert m.ModelInferResponse.FromString(end).parameters["triton_final_response"].bool_param
    assert text(GrpcRequest(b"", bare), InvalidInput("no")) is None


def test_an_error_is_a_stream_message_unless_a_status_is_requested() -> None:  # T74
    body = infer_message(id="7").SerializeToString()
    in_band = text(GrpcRequest(body), InvalidInput("no"))
    assert in_band is not None
    reply = m.ModelStreamInferResponse.FromString(in_band)
    assert (reply.error_message, reply.infer_response.id) == ("no", "7")
    assert reply.infer_response.parameters["triton_final_response"].bool_param
    assert text(GrpcRequest(body, {"triton_grpc_error": "true"}), InvalidInput("no")) is None
    malformed = text(GrpcRequest(b"\xff"), InvalidInput())
    assert malformed is not None
    assert m.ModelStreamInferResponse.FromString(malformed).error_message == "InvalidInput"


# --- the model repository --------------------------------------------------------------------------------


def test_the_index() -> None:
    body = m.RepositoryIndexRequest(ready=True).SerializeToString()
    exchange = parse_request("RepositoryIndex", body, {"authorization": "bearer  secret"})
    assert exchange.request.call == Index("secret", ready=True)
    reply = exchange.format_response(
        Response((IndexEntry("a", "1", "READY", ""), IndexEntry("b", "", "UNAVAILABLE", "why")))
    )
    rows = [(e.name, e.version, e.state, e.reason) for e in m.RepositoryIndexResponse.FromString(reply).models]
    assert rows == [("a", "1", "READY", ""), ("b", "", "UNAVAILABLE", "why")]  # T73


REPOSITORY: list[tuple[str, Any, Any]] = [
    ("RepositoryModelLoad", m.RepositoryModelLoadRequest, Load),
    ("RepositoryModelUnload", m.RepositoryModelUnloadRequest, partial(Unload, may_be_unknown=True)),
]


@pytest.mark.parametrize(("name", "kind", "call"), REPOSITORY)
def test_loading_and_unloading(name: str, kind: Any, call: Any) -> None:
    message = kind(model_name="a")
    message.parameters["version"].string_param = "2"
    if call is not Load:
        message.parameters["unload_dependents"].bool_param = False
    exchange = parse_request(name, message.SerializeToString(), {"authorization": "Bearer secret"})
    assert exchange.request.call == call("secret")
    assert (exchange.request.model, exchange.request.version) == ("a", "2")
    assert exchange.format_response(Response(None)) == b""
    assert parse_request(
        name, kind(model_name="a").SerializeToString(), {"authorization": "Basic x"}
    ).request.call == call("")


@pytest.mark.parametrize(("name", "kind", "call"), REPOSITORY)
def test_invalid_load_requests_are_rejected(name: str, kind: Any, call: Any) -> None:
    for parameter in ("config", "file:1/model.onnx") if call is Load else ():
        message = kind(model_name="a")
        message.parameters[parameter].bytes_param = b"{}"
        with pytest.raises(Forbidden, match=f"failed to load 'a', parameter '{parameter}'"):
            parse_request(name, message.SerializeToString())
    with pytest.raises(NotSupported, match="there is one repository"):
        parse_request(name, kind(model_name="a", repository_name="other").SerializeToString())
    message = kind(model_name="a")
    message.parameters["verson"].string_param = "2"
    with pytest.raises(InvalidInput, match="unrecognized parameter 'verson'"):
        parse_request(name, message.SerializeToString())
    for field, value in (("int64_param", 2), ("string_param", "../2")):
        message = kind(model_name="a")
        setattr(message.parameters["version"], field, value)
        with pytest.raises(InvalidInput, match="version"):
            parse_request(name, message.SerializeToString())


# --- statuses --------------------------------------------------------------------------------------------


def test_every_error_has_a_status() -> None:
    expected = {
        "InvalidInput": "INVALID_ARGUMENT",
        "ModelNotFound": "NOT_FOUND",
        "NotSupported": "UNIMPLEMENTED",
        "NotReady": "UNAVAILABLE",
        "Overloaded": "RESOURCE_EXHAUSTED",
        "DeadlineExceeded": "DEADLINE_EXCEEDED",
        "Unauthorized": "UNAUTHENTICATED",
        "Forbidden": "PERMISSION_DENIED",
        "InvalidOutput": "INTERNAL",
        "ModelFailed": "INTERNAL",
        "WorkerLost": "UNAVAILABLE",
    }
    for name, status in expected.items():
        assert TABLE.status(getattr(errors, name)("no")) == status
    assert TABLE.status(type("Further", (InvalidInput,), {})("no")) == "INVALID_ARGUMENT"
    assert TABLE.status(DragomanError("no")) == "INTERNAL"
