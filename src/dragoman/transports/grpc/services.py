"""Standard services of gRPC: health checks and server reflection.

protobuf is imported when the first of their calls needs it: each start would wait.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from dragoman.engine.call_handler import CallHandler
from dragoman.formats.grpc_messages import decode_error
from dragoman.protocols.wire import Buffer, GrpcProtocol, GrpcRequest
from dragoman.transports.grpc.handlers import GrpcError, Handler, Peer, StreamHandler, UnaryHandler, read_messages

# The two versions differ in their package names only.
_REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
_HEALTH_SERVICE = "grpc.health.v1.Health"
_NOT_FOUND, _INVALID_ARGUMENT = 5, 3
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3  # HealthCheckResponse.ServingStatus


@cache
def _load_descriptor(name: str) -> Any:
    """Return the descriptor of `<name>.proto` in this package, compiled by scripts/protos."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    compiled = files("dragoman.transports.grpc").joinpath(f"{name}.binpb").read_bytes()
    (file,) = FileDescriptorSet.FromString(compiled).file
    return file


@cache
def _message_classes(name: str) -> dict[str, Any]:
    """Return the message classes of `<name>.proto` by name, in a pool of their own.

    Other packages in this process may have registered the same names in protobuf's default pool, which allows each
    name once.
    """
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    pool: Any = DescriptorPool()
    file = _load_descriptor(name)
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}")) for name in names}


class Reflection:
    """Reflection on protocols, on the health service, and on itself."""

    def __init__(self, protocols: Sequence[GrpcProtocol], stopping: asyncio.Future[None]) -> None:
        self._services = sorted(
            [*(service for p in protocols for service in p.services), _HEALTH_SERVICE, *_REFLECTION_SERVICES]
        )
        self._descriptors = [p.descriptors for p in protocols]
        self._stopping = stopping
        self._methods: dict[str, Callable[[Any, Any], Any]] = {
            "list_services": self._list_services,
            "file_by_filename": self._add_files,
            "file_containing_symbol": self._find_symbol,
            "file_containing_extension": self._find_extension,
            "all_extension_numbers_of_type": self._list_extension_numbers,
        }

    @cached_property
    def _files(self) -> dict[str, Any]:
        from google.protobuf.descriptor_pb2 import FileDescriptorSet

        described = [file for each in self._descriptors for file in FileDescriptorSet.FromString(each).file]
        described += [_load_descriptor("health"), _load_descriptor("reflection"), _v1alpha()]
        return {file.name: file for file in described}

    @cached_property
    def _pool(self) -> Any:
        """Apart from protobuf's default pool, which may hold the same names; most servers never need it."""
        from google.protobuf.descriptor_pool import DescriptorPool

        pool: Any = DescriptorPool()
        for file in self._files.values():
            pool.Add(file)
        return pool

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers of both versions by path."""
        return {f"/{service}/ServerReflectionInfo": StreamHandler(self.talk) for service in _REFLECTION_SERVICES}

    async def talk(self, peer: Peer) -> None:
        async with aclosing(read_messages(peer, self._stopping)) as messages:
            async for message in messages:
                if (sending := peer.write(self.respond(message))) is not None:
                    await sending

    def respond(self, message: Buffer) -> bytes:
        """Return the response to one ServerReflectionRequest. Raises GrpcError if the message is not one."""
        classes = _message_classes("reflection")
        try:
            request: Any = classes["ServerReflectionRequest"].FromString(bytes(message))
        except decode_error() as error:
            raise GrpcError("INVALID_ARGUMENT", f"the message is not a ServerReflectionRequest: {error}") from error
        response: Any = classes["ServerReflectionResponse"](valid_host=request.host, original_request=request)
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
        try:
            file = self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            file = self._pool.FindMethodByName(symbol).containing_service.file
        self._add_files(file.name, response)

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


def _v1alpha() -> Any:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    file = FileDescriptorProto()
    file.CopyFrom(_load_descriptor("reflection"))
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


class Health:
    """Health of the server, named "", and of each of its services."""

    def __init__(self, engine: CallHandler, services: Sequence[str], stopping: asyncio.Future[None]) -> None:
        self._engine = engine
        self._services = frozenset(("", *services))
        self._stopping = stopping

    def handlers(self) -> dict[str, Handler]:
        return {
            f"/{_HEALTH_SERVICE}/Check": UnaryHandler(self.check, health=True),
            f"/{_HEALTH_SERVICE}/List": UnaryHandler(self.list, health=True),
            f"/{_HEALTH_SERVICE}/Watch": StreamHandler(self.watch, health=True),
        }

    async def check(self, request: GrpcRequest) -> bytes:
        service = _parse_health_request(request.body)
        status = self._status(service)
        if status == _SERVICE_UNKNOWN:
            raise GrpcError("NOT_FOUND", f"there is no service '{service}'")
        return _serialize_status(status)

    async def list(self, _request: GrpcRequest) -> bytes:
        """Return the status of the server and of each service."""
        response: Any = _message_classes("health")["HealthListResponse"]()
        for service in self._services:
            response.statuses[service].status = self._status(service)
        return bytes(response.SerializeToString())

    async def watch(self, peer: Peer) -> None:
        """Send the status now and whenever it changes, until the server stops."""
        message = await peer.read()
        if message is None:
            raise GrpcError("INTERNAL", "expected one message, got none")
        service, last = _parse_health_request(message), None
        while True:
            status = self._status(service)
            if status != last:
                if (sending := peer.write(_serialize_status(status))) is not None:
                    await sending
                last = status
            elif self._stopping.done():
                return
            else:
                await self._next_change(service, status)

    async def _next_change(self, service: str, status: int) -> None:
        changing = asyncio.ensure_future(self._engine.wait_for_change())
        try:
            await asyncio.sleep(0)  # let it subscribe, so that no change after the next line is missed
            if self._status(service) == status:
                await asyncio.wait({changing, self._stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changing.cancel()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return _SERVICE_UNKNOWN
        return _SERVING if self._engine.ready() and not self._stopping.done() else _NOT_SERVING


def _parse_health_request(message: Buffer) -> str:
    """Return the service that a HealthCheckRequest names. Raises GrpcError."""
    try:
        return str(_message_classes("health")["HealthCheckRequest"].FromString(bytes(message)).service)
    except decode_error() as error:
        raise GrpcError(
            "INVALID_ARGUMENT", f"the message is not a grpc.health.v1.HealthCheckRequest: {error}"
        ) from error


def _serialize_status(status: int) -> bytes:
    response: Any = _message_classes("health")["HealthCheckResponse"](status=status)
    return bytes(response.SerializeToString())
