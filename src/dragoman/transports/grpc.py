"""A gRPC server that runs any protocol table, with the standard health and reflection services."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2

from dragoman.protocols.wire import GrpcMethod, GrpcProtocol, GrpcStreamMethod
from dragoman.transports import grpc_health
from dragoman.transports.aside import Aside
from dragoman.transports.grpc_calls import Answers, Stream, Unary, received
from dragoman.transports.grpc_health import Health

# Calls and streams at a time; further ones get RESOURCE_EXHAUSTED before their message is read.
_MAX_CALLS = 1000

Tls = tuple[bytes, bytes, bytes | None]


class GrpcServer:
    """Serves protocol tables on one port.

    `tls` is the key, the certificate chain and, where clients have to show certificates, the authority that
    signs them, each as PEM.
    """

    def __init__(
        self, engine: Answers, protocols: Sequence[GrpcProtocol], *, max_message_bytes: int, tls: Tls | None = None
    ) -> None:
        self._engine = engine
        self._protocols = tuple(protocols)
        self._options = _options(max_message_bytes)
        self._tls = tls
        self._aside = Aside()
        self._server: Any = None
        self._stopping: asyncio.Future[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens and returns the port, which the system chooses where 0 is asked for.

        Raises OSError where that cannot be, e.g. because another server has the port.
        """
        stopping = asyncio.get_running_loop().create_future()
        server = grpc.aio.server(options=self._options, maximum_concurrent_rpcs=_MAX_CALLS)
        server.add_generic_rpc_handlers(self._handlers(stopping))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        bound = _bind(server, address, self._tls)
        await server.start()
        self._server, self._stopping = server, stopping
        return bound

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls and waits for those in flight, which are cancelled after `grace_s` seconds.

        Streams end after the answer that they are at; health tells NOT_SERVING.
        """
        if self._server is None or self._stopping is None:
            return
        if not self._stopping.done():
            self._stopping.set_result(None)
        await self._server.stop(grace_s)

    def _handlers(self, stopping: asyncio.Future[None]) -> tuple[Any, ...]:
        services = [p.service for p in self._protocols]
        health = Health(self._engine, services, stopping)
        return (
            *(self._table(p, stopping) for p in self._protocols),
            health.handlers(),
            _reflection((*services, grpc_health.SERVICE, reflection.SERVICE_NAME), _pool(self._protocols), stopping),
        )

    def _table(self, protocol: GrpcProtocol, stopping: asyncio.Future[None]) -> Any:
        handlers: dict[str, Any] = {}
        for method in protocol.methods:
            match method:
                case GrpcMethod():
                    unary = Unary(self._engine, protocol, method, self._aside)
                    handlers[method.name] = grpc.unary_unary_rpc_method_handler(unary.handle)
                case GrpcStreamMethod():
                    stream = Stream(self._engine, protocol, method, stopping, self._aside)
                    handlers[method.name] = grpc.stream_stream_rpc_method_handler(stream.handle)
        return grpc.method_handlers_generic_handler(protocol.service, handlers)


def _options(max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # a busy port is an error, not a second server
        # Clients may ask every ten seconds whether the connection lives, also between calls.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    )


def _bind(server: Any, address: str, tls: Tls | None) -> int:
    try:
        if tls is not None:
            return int(server.add_secure_port(address, _credentials(tls)))
        return int(server.add_insecure_port(address))
    except RuntimeError as fault:
        raise OSError(f"cannot listen for gRPC on {address}; is the port taken, or the host another one's?") from fault


def _credentials(tls: Tls) -> Any:
    key, certificate, client_ca = tls
    return grpc.ssl_server_credentials(
        [(key, certificate)], root_certificates=client_ca, require_client_auth=client_ca is not None
    )


def _pool(protocols: Sequence[GrpcProtocol]) -> DescriptorPool:
    """The descriptors that reflection shows, apart from protobuf's common pool, which may hold others so named."""
    files = {file.name: file for p in protocols for file in FileDescriptorSet.FromString(p.descriptors).file}
    for serialized in (grpc_health.DESCRIPTOR, reflection_pb2.DESCRIPTOR.serialized_pb):
        file = FileDescriptorProto.FromString(serialized)
        files[file.name] = file
    pool = DescriptorPool()
    for file in files.values():
        pool.Add(file)
    return pool


def _reflection(services: Sequence[str], pool: DescriptorPool, stopping: asyncio.Future[None]) -> Any:
    servicer = reflection.aio.ReflectionServicer(services, pool=pool)

    async def info(_: object, context: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(received(context, stopping)) as requests:
            async for answer in servicer.ServerReflectionInfo(requests, context):
                yield answer

    handler = grpc.stream_stream_rpc_method_handler(
        info,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": handler})
