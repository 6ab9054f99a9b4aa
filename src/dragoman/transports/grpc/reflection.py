"""Server reflection (grpc.reflection v1 and v1alpha): the server's services and their messages, for tools."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError

from dragoman.protocols.wire import Buffer, GrpcProtocol
from dragoman.transports.grpc.descriptors import load_descriptor, message_classes
from dragoman.transports.grpc.handlers import GrpcError, Handler, Peer, StreamHandler, read_messages

# The two versions differ in their package names only.
SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

_DESCRIPTOR = load_descriptor("reflection")
_CLASSES = message_classes(_DESCRIPTOR)
_NOT_FOUND, _INVALID_ARGUMENT = 5, 3


class Reflection:
    """Responds from `files`, the descriptors of everything that the server's services need."""

    def __init__(
        self, services: Sequence[str], files: Sequence[FileDescriptorProto], stopping: asyncio.Future[None]
    ) -> None:
        self._services = sorted(services)
        self._files = {file.name: file for file in files}
        self._stopping = stopping
        self._methods: dict[str, Callable[[Any, Any], Any]] = {
            "list_services": self._list_services,
            "file_by_filename": self._add_files,
            "file_containing_symbol": self._find_symbol,
            "file_containing_extension": self._find_extension,
            "all_extension_numbers_of_type": self._list_extension_numbers,
        }

    @cached_property
    def _pool(self) -> Any:
        """Apart from protobuf's default pool, which may hold the same names; most servers never need it."""
        pool: Any = DescriptorPool()
        for file in self._files.values():
            pool.Add(file)
        return pool

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers of both versions by path."""
        return {f"/{service}/ServerReflectionInfo": StreamHandler(self.talk) for service in SERVICES}

    async def talk(self, peer: Peer) -> None:
        async with aclosing(read_messages(peer, self._stopping)) as messages:
            async for message in messages:
                await peer.write(self.respond(message))

    def respond(self, message: Buffer) -> bytes:
        """Return the response to one ServerReflectionRequest. Raises GrpcError if the message is not one."""
        try:
            request: Any = _CLASSES["ServerReflectionRequest"].FromString(bytes(message))
        except DecodeError as error:
            raise GrpcError("INVALID_ARGUMENT", f"the message is not a ServerReflectionRequest: {error}") from error
        response: Any = _CLASSES["ServerReflectionResponse"](valid_host=request.host, original_request=request)
        kind = request.WhichOneof("message_request")
        if kind is None:
            _set_error(response, _INVALID_ARGUMENT, "expected a question, got none")
        else:
            try:
                self._methods[kind](getattr(request, kind), response)
            except KeyError:
                _set_error(response, _NOT_FOUND, f"{kind}: not found")
        return bytes(response.SerializeToString())

    def _list_services(self, _: str, response: Any) -> None:
        for name in self._services:
            response.list_services_response.service.add(name=name)

    def _find_symbol(self, symbol: str, response: Any) -> None:
        self._add_files(self._pool.FindFileContainingSymbol(symbol).name, response)

    def _find_extension(self, extension: Any, response: Any) -> None:
        containing = self._pool.FindMessageTypeByName(extension.containing_type)
        found = self._pool.FindExtensionByNumber(containing, extension.extension_number)
        self._add_files(found.file.name, response)

    def _list_extension_numbers(self, name: str, response: Any) -> None:
        containing = self._pool.FindMessageTypeByName(name)
        numbers = sorted(e.number for e in self._pool.FindAllExtensions(containing))
        response.all_extension_numbers_response.base_type_name = name
        response.all_extension_numbers_response.extension_number.extend(numbers)

    def _add_files(self, name: str, response: Any) -> None:
        """Add a file and its dependencies, each once."""
        names = [name]
        for file in names:
            names += [d for d in self._files[file].dependency if d not in names]
        serialized = response.file_descriptor_response.file_descriptor_proto
        serialized.extend(self._files[file].SerializeToString() for file in names)


def _set_error(response: Any, code: int, message: str) -> None:
    response.error_response.error_code = code
    response.error_response.error_message = message


def make_reflection(
    protocols: Sequence[GrpcProtocol],
    others: Sequence[tuple[str, FileDescriptorProto]],
    stopping: asyncio.Future[None],
) -> Reflection:
    """Return reflection on protocols, on `others` (services with their descriptors), and on itself."""
    files = [file for p in protocols for file in FileDescriptorSet.FromString(p.descriptors).file]
    files += [*(file for _, file in others), _DESCRIPTOR, _v1alpha()]
    services = [*(p.service for p in protocols), *(service for service, _ in others), *SERVICES]
    return Reflection(services, files, stopping)


def _v1alpha() -> FileDescriptorProto:
    file = FileDescriptorProto()
    file.CopyFrom(_DESCRIPTOR)
    file.name, file.package = "reflection_v1alpha.proto", "grpc.reflection.v1alpha"
    for message in file.message_type:
        for field in message.field:
            if field.type_name:  # setting "" would count as a value
                field.type_name = field.type_name.replace(".v1.", ".v1alpha.")
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(".v1.", ".v1alpha.")
            method.output_type = method.output_type.replace(".v1.", ".v1alpha.")
    return file
