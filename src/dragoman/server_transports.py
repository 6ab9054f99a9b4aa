"""Protocols and transports of a server, on its addresses."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman import plugins
from dragoman.assembly import (
    Address,
    Assembly,
    access_control,
    http_addresses,
    load_protocols,
    make_observation,
    protocol_policy,
    split_routes,
    transport_limits,
)
from dragoman.core.errors import InvalidInput
from dragoman.core.metrics import Family
from dragoman.core.options import KafkaOptions, values
from dragoman.core.record_calls import FindRequests
from dragoman.engine.call_handler import CallHandler
from dragoman.protocols.wire import GrpcProtocol, HttpProtocol
from dragoman.settings import Settings
from dragoman.system.trace_settings import TraceSettings
from dragoman.transports.application import Application
from dragoman.transports.async_results import StoredResultCall as StoredResultCall
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.grpc.calls import GrpcServer
from dragoman.transports.http_server import HttpServer
from dragoman.transports.listener import NONE_INHERITED, Inherited
from dragoman.transports.recent_requests import RecentRequests
from dragoman.transports.tls import TlsFiles

# Settings that need `tls_client_ca`.
_OF_CLIENT_CA = ("tls_client_crl", "tls_client_optional")


class Ports(msgspec.Struct, frozen=True):
    """Addresses to listen on: for HTTP, for gRPC only, and for administration.

    `processes` is the number of processes that listen on them.
    """

    http: tuple[Address, ...]
    grpc: tuple[Address, ...]
    admin: tuple[Address, ...] = ()
    processes: int = 1

    @property
    def is_shared(self) -> bool:
        return self.processes > 1


class ServerTransports:
    """The transports of one process, which send calls to `engine`."""

    def __init__(self, engine: CallHandler, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._http: HttpServer | None = None
        self._grpc: GrpcServer | None = None
        self._admin: HttpServer | None = None
        self.assembly: Assembly | None = None  # until it is started
        self.inherited: Inherited = NONE_INHERITED  # sockets in place of addresses of the settings
        self.http_ports: list[int] = []
        self.grpc_port = self.admin_port = -1
        self.http_protocols: list[str] = []
        self.grpc_protocols: list[str] = []

    async def start(self, ports: Ports | None = None) -> None:
        """Listen on `ports`, by default those of the settings.

        Raises OSError if a port is in use, InvalidInput if a setting is invalid.
        """
        settings, traces = self._settings, TraceSettings()
        http, grpc = load_protocols(settings, traces)
        ports = ports or configured_ports(settings, http, grpc)
        tls = tls_files(settings, logs_reloads=not ports.is_shared)
        self.http_protocols = [t.name for t in http]
        self.grpc_protocols = [t.service for t in grpc]
        assembly = self.assembly = Assembly(settings, traces, processes=ports.processes)
        assembly.access.logs_reloads = not ports.is_shared
        if tls is not None:
            assembly.refresher.add(tls.files, tls.reload)

        def http_server(
            http: Sequence[HttpProtocol], grpc: Sequence[GrpcProtocol], *, shows_requests: bool
        ) -> HttpServer:
            application = assembly.application(self._engine, http, shows_requests=shows_requests)
            services = grpc if settings.grpc_port >= 0 else ()
            return HttpServer(application, services, tls=tls.context() if tls is not None else None)

        open_http, open_grpc = http, grpc
        if ports.admin:
            open_http, open_grpc = split_routes(http, grpc, administrative=False)
            self._admin = http_server(*split_routes(http, grpc, administrative=True), shows_requests=True)
            (self.admin_port,) = await self._admin.start(ports.admin, shared=ports.is_shared, inherited=self.inherited)
        if ports.http:
            self._http = http_server(open_http, open_grpc, shows_requests=not ports.admin)
            self.http_ports = await self._http.start(ports.http, shared=ports.is_shared, inherited=self.inherited)
        for host, port in ports.grpc:
            self._grpc = GrpcServer(
                self._engine,
                open_grpc,
                limits=assembly.limits,
                tls=tls.context() if tls is not None else None,  # of its own: the listener sets ALPN
                executor=assembly.executor,
                access=assembly.access,
            )
            self.grpc_port = await self._grpc.start(host, port, shared=ports.is_shared, inherited=self.inherited)
        if tls is not None:
            tls.on_revoked.extend(s.abort_revoked for s in (self._http, self._grpc, self._admin) if s is not None)
        assembly.refresher.start()

    def reload(self) -> None:
        """Read the files of keys and certificates again."""
        if self.assembly is not None:
            self.assembly.refresher.reload()

    def metrics(self) -> tuple[Family, ...]:
        """Return the metrics of requests and connections, and of denied requests unless every request is open."""
        return () if self.assembly is None else self.assembly.metrics()

    def find_requests(self, query: FindRequests) -> list[dict[str, Any]]:
        """Return recent requests of this process, newest first."""
        return [] if self.assembly is None else self.assembly.recent.find(query)

    async def begin_accepting(self) -> None:
        """Accept connections of inherited sockets."""
        for server in (self._http, self._grpc, self._admin):
            if server is not None:
                await server.begin_accepting()

    def begin_leave(self) -> None:
        """Announce with each response over HTTP/1.1 that its connection closes; gRPC has GOAWAY for that."""
        for server in (self._http, self._admin):
            if server is not None:
                server.begin_leave()

    def begin_drain(self) -> None:
        """Close idle connections, and all others after their next response; new ones are still accepted."""
        for server in (self._http, self._grpc, self._admin):
            if server is not None:
                server.begin_drain()

    async def drain(self) -> None:
        """Wait until calls have ended that other processes compute for the engine."""

    async def stop(self, grace_s: float) -> None:
        """Accept no connections and let requests in flight finish, for at most `grace_s` seconds."""
        servers = (self._http, self._grpc, self._admin)
        await asyncio.gather(*(server.stop(grace_s) for server in servers if server is not None))
        if self.assembly is not None:
            await self.assembly.close()


def configured_ports(settings: Settings, http: Sequence[Any], grpc: Sequence[Any]) -> Ports:
    """Return the addresses of the settings, as far as a protocol is served on them."""
    grpc_only = ((settings.host, settings.grpc_port),) if grpc and settings.grpc_port >= 0 else ()
    admin = ((settings.admin_host or settings.host, settings.admin_port),) if http and settings.admin_port >= 0 else ()
    return Ports(tuple(http_addresses(settings)) if http else (), grpc_only, admin)


def check_settings(settings: Settings) -> None:
    """Raise InvalidInput, as `ServerTransports.start` does, if a setting is invalid."""
    configured_ports(settings, *load_protocols(settings))
    transport_limits(settings)
    tls_files(settings)
    access_control(settings)


def tls_files(settings: Settings, *, logs_reloads: bool = True) -> TlsFiles | None:
    """Return the files of TLS, None without TLS. Raises InvalidInput for invalid files."""
    if not settings.tls_cert:
        for name in ("tls_key", "tls_client_ca", *_OF_CLIENT_CA):
            if getattr(settings, name):
                raise InvalidInput(
                    f"setting '{name}' needs 'tls_cert'; without a certificate nothing would be encrypted"
                )
        return None
    for name in _OF_CLIENT_CA:
        if getattr(settings, name) and not settings.tls_client_ca:
            raise InvalidInput(f"setting '{name}' needs 'tls_client_ca', the authorities of client certificates")
    if settings.tls_client_crl and settings.tls_min_version == "1.2":
        raise InvalidInput(
            "setting 'tls_client_crl' needs 'tls_min_version' 1.3: revoked clients could resume sessions of TLS 1.2"
        )
    if settings.tls_client_optional and not settings.needs_keys:
        raise InvalidInput(
            "setting 'tls_client_optional' needs keys, such as 'api_keys': else nothing would need a certificate"
        )
    files = TlsFiles(
        cert=settings.tls_cert,
        key=settings.tls_key,
        client_ca=settings.tls_client_ca,
        client_crl=settings.tls_client_crl,
        is_optional=settings.tls_client_optional,
        min_version=settings.tls_min_version,
        logs_reloads=logs_reloads,
    )
    files.check()
    return files


def make_kafka_input(engine: CallHandler, settings: Settings) -> Any:
    """Return the `KafkaInput`, None if it is off. Raises InvalidInput."""
    if not settings.kafka_servers:
        return None
    from dragoman.transports.kafka import KafkaInput

    protocol = replace(plugins.find("protocols", "oip_rest")(protocol_policy(settings)), key="kafka")
    limits = transport_limits(settings)

    def application() -> Application:
        executor = MessageExecutor(BodyMemory(limits.max_bodies_bytes))
        # Of its own: with several processes this one has no HTTP server whose access log it could use.
        executor.observation = make_observation(settings, TraceSettings(), RecentRequests(0))
        return Application(engine, [protocol], limits, executor)

    return KafkaInput(engine, application, KafkaOptions(**values(KafkaOptions, settings)))


def check_kafka(settings: Settings) -> None:
    """Raise InvalidInput if the settings of Kafka are invalid, as far as that is known without a broker."""
    if settings.kafka_servers:
        from dragoman.transports.kafka import open_clients

        _, consumer, _ = open_clients(KafkaOptions(**values(KafkaOptions, settings)))
        consumer.close()


def make_worker_port(settings: Settings) -> Any:
    """Return the port that workers join, None if it is off. Raises InvalidInput."""
    if settings.worker_port < 0:
        return None
    if not plugins.has("worker_ports", "join"):
        raise InvalidInput(
            f"setting 'worker_port': expected -1, because the feature for workers on other machines is not installed, "
            f"got {settings.worker_port}"
        )
    return plugins.find("worker_ports", "join")(settings)
