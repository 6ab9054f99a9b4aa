"""Server reflection: the services and their messages, told to tools that ask (grpc.reflection v1 and v1alpha)."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection_pb2

from dragoman.protocols.wire import Buffer, GrpcProtocol
from dragoman.transports.grpc_calls import Handler, Peer, Refusal, StreamHandler, received

# The two versions differ in nothing but their name.
SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
_NOT_FOUND, _INVALID_ARGUMENT = 5, 3


class Reflection:
    """Answers about `files`, which are all that the server's services need."""

    def __init__(
        self, services: Sequence[str], files: Sequence[FileDescriptorProto], stopping: asyncio.Future[None]
    ) -> None:
        self._services = sorted(services)
        self._files = {file.name: file for file in files}
        self._stopping = stopping
        self._answers: dict[str, Callable[[Any, Any], Any]] = {
            "list_services": self._list,
            "file_by_filename": self._file_by_name,
            "file_containing_symbol": self._file_of_symbol,
            "file_containing_extension": self._file_of_extension,
            "all_extension_numbers_of_type": self._extension_numbers,
        }

    @cached_property
    def _pool(self) -> Any:
        """Apart from protobuf's common pool, which may hold others so named; most servers are never asked."""
        pool: Any = DescriptorPool()
        for file in self._files.values():
            pool.Add(file)
        return pool

    def handlers(self) -> dict[str, Handler]:
        return {f"/{service}/ServerReflectionInfo": StreamHandler(self.talk) for service in SERVICES}

    async def talk(self, peer: Peer) -> None:
        async with aclosing(received(peer, self._stopping)) as questions:
            async for question in questions:
                await peer.write(self.answer(question))

    def answer(self, question: Buffer) -> bytes:
        """The answer to one ServerReflectionRequest; Refusal where it is none."""
        try:
            asked: Any = reflection_pb2.ServerReflectionRequest.FromString(bytes(question))
        except DecodeError as fault:
            raise Refusal("INVALID_ARGUMENT", f"the message is no ServerReflectionRequest: {fault}") from fault
        told: Any = reflection_pb2.ServerReflectionResponse(valid_host=asked.host, original_request=asked)
        kind = asked.WhichOneof("message_request")
        if kind is None:
            _fail(told, _INVALID_ARGUMENT, "expected a question, got none")
        else:
            try:
                self._answers[kind](getattr(asked, kind), told)
            except KeyError:
                _fail(told, _NOT_FOUND, f"{kind}: not found")
        return bytes(told.SerializeToString())

    def _list(self, _: str, told: Any) -> None:
        for name in self._services:
            told.list_services_response.service.add(name=name)

    def _file_by_name(self, name: str, told: Any) -> None:
        self._tell(name, told)

    def _file_of_symbol(self, symbol: str, told: Any) -> None:
        self._tell(self._pool.FindFileContainingSymbol(symbol).name, told)

    def _file_of_extension(self, asked: Any, told: Any) -> None:
        containing = self._pool.FindMessageTypeByName(asked.containing_type)
        self._tell(self._pool.FindExtensionByNumber(containing, asked.extension_number).file.name, told)

    def _extension_numbers(self, name: str, told: Any) -> None:
        containing = self._pool.FindMessageTypeByName(name)
        numbers = sorted(e.number for e in self._pool.FindAllExtensions(containing))
        told.all_extension_numbers_response.base_type_name = name
        told.all_extension_numbers_response.extension_number.extend(numbers)

    def _tell(self, name: str, told: Any) -> None:
        """A file, after those that it needs."""
        wanted = [name]
        for file in wanted:
            wanted += [d for d in self._files[file].dependency if d not in wanted]
        written = told.file_descriptor_response.file_descriptor_proto
        written.extend(self._files[file].SerializeToString() for file in wanted)


def _fail(told: Any, code: int, message: str) -> None:
    told.error_response.error_code = code
    told.error_response.error_message = message


def reflection(
    protocols: Sequence[GrpcProtocol], others: Sequence[tuple[str, bytes]], stopping: asyncio.Future[None]
) -> Reflection:
    """Reflection on tables, on `others` (services with the serialized FileDescriptorProto of each), and on itself."""
    files = [file for p in protocols for file in FileDescriptorSet.FromString(p.descriptors).file]
    files += [FileDescriptorProto.FromString(serialized) for _, serialized in others]
    files += _own_files()
    services = [*(p.service for p in protocols), *(service for service, _ in others), *SERVICES]
    return Reflection(services, files, stopping)


def _own_files() -> list[FileDescriptorProto]:
    alpha: bytes = reflection_pb2.DESCRIPTOR.serialized_pb
    old = FileDescriptorProto.FromString(alpha)
    new = FileDescriptorProto.FromString(alpha)
    new.name, new.package = "grpc/reflection/v1/reflection.proto", "grpc.reflection.v1"
    for message in new.message_type:
        for field in message.field:
            if field.type_name:  # to set an empty one counts as one
                field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
    for service in new.service:
        for method in service.method:
            method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
            method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
    return [old, new]
