"""The compiled messages: up to date, separate from those of other libraries, with the field numbers of the protocol."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import Default

from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.formats import grpc_messages as m
from dragoman.formats.model_config import WIDE_INTEGERS
from dragoman.protocols.open_inference.grpc import INFER_RESPONSE

ROOT = Path(__file__).resolve().parents[2]


def test_the_descriptors_equal_the_proto_file(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "protos", tmp_path], check=True)
    assert (tmp_path / "open_inference.binpb").read_bytes() == m.DESCRIPTORS
    assert (tmp_path / "model_repository.binpb").read_bytes() == m.REPOSITORY_DESCRIPTORS


def test_the_messages_of_the_repository_service_are_those_of_the_protocol() -> None:
    (ours,), (theirs,) = (FileDescriptorSet.FromString(d).file for d in (m.DESCRIPTORS, m.REPOSITORY_DESCRIPTORS))
    known: dict[str, Any] = {}
    for message in ours.message_type:
        known |= _fields(message)
    for message in theirs.message_type:
        for name, (number, kind, label, type_name) in _fields(message).items():
            assert (number, kind, label, type_name.replace(".model_repository", "")) == known[name], name


def test_the_numbers_of_fields_are_those_of_the_messages() -> None:
    def numbers(message: Any) -> dict[str, int]:
        return {field.name: field.number for field in message.DESCRIPTOR.fields}

    request, response = numbers(m.ModelInferRequest), numbers(m.ModelInferResponse)
    assert (request["inputs"], request["raw_input_contents"]) == (m.INPUTS, m.RAW_INPUT_CONTENTS)
    assert numbers(m.ModelInferRequest.InferInputTensor)["contents"] == m.INPUT_CONTENTS
    assert numbers(m.InferTensorContents) == m.CONTENTS
    assert tuple(response[name] for name in ("id", "outputs", "raw_output_contents")) == (
        m.ID,
        m.OUTPUTS,
        m.RAW_OUTPUT_CONTENTS,
    )
    assert numbers(m.ModelInferResponse.InferOutputTensor)["contents"] == m.OUTPUT_CONTENTS
    assert numbers(m.ModelStreamInferResponse)["infer_response"] == INFER_RESPONSE
    assert {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64} == {*WIDE_INTEGERS}


def test_messages_that_are_first_used_by_several_threads_are_of_one_pool() -> None:
    """Protobuf would refuse to put a message of one pool into a message of another."""
    code = """
import sys, threading
from dragoman.formats import grpc_messages as m
assert "google.protobuf" not in sys.modules
sys.setswitchinterval(1e-6)
found, start = [], threading.Barrier(8)
def use():
    start.wait()
    found.append(m.ModelInferRequest)
threads = [threading.Thread(target=use) for _ in range(8)]
for each in threads: each.start()
for each in threads: each.join()
assert len(found) == 8 and len({*map(id, found)}) == 1, found
try:
    m.NoMessage
except AttributeError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "module 'dragoman.formats.grpc_messages' has no attribute 'NoMessage'\n"


def test_messages_are_not_in_the_default_pool() -> None:
    with pytest.raises(KeyError):
        Default().FindFileByName("open_inference.proto")
    assert m.ModelInferRequest.DESCRIPTOR.file.pool is not Default()


def _fields(message: DescriptorProto, prefix: str = "") -> dict[str, tuple[int, int, int, str]]:
    found: dict[str, tuple[int, int, int, str]] = {}
    field: FieldDescriptorProto
    for field in message.field:
        found[f"{prefix}{message.name}.{field.name}"] = field.number, field.type, field.label, field.type_name
    for nested in message.nested_type:
        found |= _fields(nested, f"{prefix}{message.name}.")
    return found


# Fields that this client does not have yet.
NEWER = (
    "ropert",
    "is_non_linear_format_io",
    "response_stats",
    "ResponseStat",
    "max_inflight_requests",
    "ModelMetrics",
    "model_metrics",
    "ModelConfig.runtime",
    "TensorMetadata.parameters",
    "TensorMetadata.ParametersEntry",
)


def test_field_numbers_and_types_are_those_of_triton_clients() -> None:
    triton = pytest.importorskip("tritonclient.grpc")
    theirs, configuration = FileDescriptorProto(), FileDescriptorProto()
    triton.service_pb2.DESCRIPTOR.CopyToProto(theirs)
    triton.model_config_pb2.DESCRIPTOR.CopyToProto(configuration)
    expected: dict[str, Any] = {}
    for message in (*theirs.message_type, *configuration.message_type):
        expected |= _fields(message)
    (ours,) = FileDescriptorSet.FromString(m.DESCRIPTORS).file
    for message in ours.message_type:
        for name, field in _fields(message).items():
            if not any(newer in name for newer in NEWER):
                assert field == expected[name], name
    rpcs = {r.name: (r.input_type, r.output_type) for r in theirs.service[0].method}
    for rpc in ours.service[0].method:
        assert rpcs[rpc.name] == (rpc.input_type, rpc.output_type)


@pytest.mark.parametrize("value", [True, False, 0, -(1 << 63), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1.5, "", "é"])
def test_parameters_roundtrip(value: bool | int | float | str) -> None:
    message = m.ModelInferResponse()
    m.parameters_to_proto({"p": value}, message.parameters)
    back = m.parameters_from_proto(m.ModelInferResponse.FromString(message.SerializeToString()).parameters, "")
    assert back == {"p": value}
    assert type(back["p"]) is type(value)


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, None, [1]])
def test_an_unsupported_parameter_is_an_error_of_the_model(value: Any) -> None:
    with pytest.raises(InvalidOutput, match="parameter 'p'"):
        m.parameters_to_proto({"p": value}, m.ModelInferResponse().parameters)


def test_a_parameter_without_a_value_is_rejected() -> None:
    message = m.ModelInferRequest()
    message.parameters["p"].SetInParent()
    with pytest.raises(InvalidInput, match="parameter 'p': expected a value, got none"):
        m.parameters_from_proto(message.parameters, "")


@pytest.mark.parametrize("body", [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe"])
def test_a_malformed_message_is_rejected(body: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"not a valid inference\.ModelInferRequest"):
        m.parse_message(m.ModelInferRequest, body)
