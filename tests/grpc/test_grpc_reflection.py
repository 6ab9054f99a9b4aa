"""Server reflection of both versions: as tools such as grpcurl use it."""

from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2

from dragoman.formats import grpc_messages as m

VERSIONS = ("v1", "v1alpha")


async def reflect(channel: Any, version: str, **fields: Any) -> Any:
    """Return the response to one request; the messages of both versions have the same encoding."""
    path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    call = channel.stream_stream(path)()
    await call.write(reflection_pb2.ServerReflectionRequest(**fields).SerializeToString())
    response: Any = reflection_pb2.ServerReflectionResponse.FromString(await call.read())
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    return response


def files(response: Any) -> dict[str, FileDescriptorProto]:
    found = map(FileDescriptorProto.FromString, response.file_descriptor_response.file_descriptor_proto)
    return {file.name: file for file in found}


@pytest.mark.parametrize("version", VERSIONS)
async def test_every_service_can_be_described(channel: Any, version: str) -> None:
    response = await reflect(channel, version, list_services="")
    names = [service.name for service in response.list_services_response.service]
    assert names == sorted(names)
    assert m.SERVICE in names
    for name in names:
        described = files(await reflect(channel, version, file_containing_symbol=name))
        services = {f"{file.package}.{s.name}" for file in described.values() for s in file.service}
        assert name in services
        for file in described.values():
            again = files(await reflect(channel, version, file_by_filename=file.name))
            assert again[file.name] == file
            assert set(file.dependency) <= set(again)


async def test_methods_are_symbols(channel: Any) -> None:
    described = files(await reflect(channel, "v1", file_containing_symbol=f"{m.SERVICE}.ModelInfer"))
    assert "open_inference.proto" in described


@pytest.mark.parametrize("version", VERSIONS)
async def test_descriptors_name_messages_of_their_own_version(channel: Any, version: str) -> None:
    symbol = f"grpc.reflection.{version}.ServerReflectionRequest"
    (file,) = files(await reflect(channel, version, file_containing_symbol=symbol)).values()
    assert file.package == f"grpc.reflection.{version}"
    types = {field.type_name for message in file.message_type for field in message.field if field.type_name}
    types |= {kind for service in file.service for me in service.method for kind in (me.input_type, me.output_type)}
    assert all(kind.startswith(f".grpc.reflection.{version}.") for kind in types)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"file_containing_symbol": "no.Such"}, 5),
        ({"file_containing_symbol": "inference.GRPCInferenceService.Nothing"}, 5),
        ({"file_by_filename": "no.proto"}, 5),
        ({"all_extension_numbers_of_type": "no.Such"}, 5),
        ({"file_containing_extension": {"containing_type": "inference.ModelInferRequest"}}, 5),
        ({}, 3),
    ],
)
async def test_unknown_names_are_errors_within_the_stream(channel: Any, fields: Any, code: int) -> None:
    response = await reflect(channel, "v1", host="here", **fields)
    assert response.error_response.error_code == code
    assert response.error_response.error_message
    assert response.valid_host == response.original_request.host == "here"


async def test_types_without_extensions_have_none(channel: Any) -> None:
    name = "inference.ModelInferRequest"
    response = await reflect(channel, "v1", all_extension_numbers_of_type=name)
    assert response.all_extension_numbers_response.base_type_name == name
    assert list(response.all_extension_numbers_response.extension_number) == []
