"""Protocols and transports of a server, on its addresses."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dragoman import plugins
from dragoman.access.control import AccessControl
from dragoman.access.refresh import AccessRefresher
from dragoman.assembly import (
    Address,
    access_control,
    http_addresses,
    load_protocols,
    make_observation,
    protocol_policy,
    split_routes,
    transport_limits,
    with_pages,
)
from dragoman.core.errors import InvalidInput
from dragoman.core.metrics import Family
from dragoman.core.options import KafkaOptions, values
from dragoman.engine.call_handler import CallHandler
from dragoman.settings import Settings
from dragoman.system.trace_settings import TraceSettings
from dragoman.transports.async_results import StoredResultCall as StoredResultCall
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.limits import Limits
from dragoman.transports.recent_requests import RecentRequests
from dragoman.transports.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class Ports:
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
        self._http: Any = None
        self._grpc: Any = None
        self._admin: Any = None
        self._refresher = AccessRefresher(None)
        self.access: AccessControl | None = None  # until it is started
        self._tls: TlsFiles | None = None
        self._executor: Any = None
        self.recent = RecentRequests(0)
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
        tls, access = tls_files(settings), access_control(settings, ports.processes)
        self.http_protocols = [t.name for t in http]
        self.grpc_protocols = [t.service for t in grpc]
        limits = replace(transport_limits(settings), keeps_answers=not ports.is_shared)
        self._executor = MessageExecutor(BodyMemory(settings.max_bodies_bytes), settings.max_loop_delay_s)
        recent = self.recent = RecentRequests(settings.recent_requests, is_partial=ports.is_shared)
        self._executor.observation = make_observation(settings, traces, recent)
        self._tls, self.access = tls, access
        self._refresher = AccessRefresher(access)
        if tls is not None:
            self._refresher.add(tls.files, tls.reload)
        open_http, open_grpc = http, grpc
        if ports.admin:
            open_http, open_grpc = split_routes(http, grpc, administrative=False)
            self._admin = self._http_server(*split_routes(http, grpc, administrative=True), limits, recent)
            (self.admin_port,) = await self._admin.start(ports.admin, shared=ports.is_shared)
        if ports.http:
            self._http = self._http_server(open_http, open_grpc, limits, None if ports.admin else recent)
            self.http_ports = await self._http.start(ports.http, shared=ports.is_shared)
        for host, port in ports.grpc:
            from dragoman.transports.grpc.calls import GrpcServer

            # The listener sets ALPN of its context, so HTTP and gRPC have one each.
            context, executor = tls.context() if tls is not None else None, self._executor
            self._grpc = GrpcServer(
                self._engine, open_grpc, limits=limits, tls=context, executor=executor, access=access
            )
            self.grpc_port = await self._grpc.start(host, port, shared=ports.is_shared)
        self._refresher.start()

    def _http_server(
        self, http: Sequence[Any], grpc: Sequence[Any], limits: Limits, recent: RecentRequests | None
    ) -> Any:
        from dragoman.transports.http_server import HttpServer

        assert self.access is not None
        return HttpServer(
            self._engine,
            with_pages(http, self._settings, self.access, recent),
            limits=limits,
            tls=self._tls.context() if self._tls is not None else None,
            grpc=grpc if self._settings.grpc_port >= 0 else (),
            executor=self._executor,
            access=self.access,
        )

    def reload(self) -> None:
        """Read the files of keys and certificates again."""
        self._refresher.reload()

    def application(self, http: Sequence[Any], limits: Limits) -> Any:
        """Return an application for HTTP requests that other processes receive."""
        from dragoman.transports.application import Application

        return Application(self._engine, http, limits)

    def metrics(self) -> tuple[Family, ...]:
        """Return the metrics of requests and connections, and of denied requests unless every request is open."""
        denied = self.access.families() if self.access is not None else ()
        return (*(() if self._executor is None else self._executor.metrics()), *denied)

    def begin_drain(self) -> None:
        """Close idle connections, and all others after their next response; new ones are still accepted."""
        for server in (self._http, self._grpc, self._admin):
            if server is not None:
                server.begin_drain()

    async def drain(self) -> None:
        """Wait until calls have ended that other processes compute for the engine."""

    async def stop(self, grace_s: float) -> None:
        """Accept no connections and let requests in flight finish, for at most `grace_s` seconds."""
        await self._refresher.stop()
        if self.access is not None:
            self.access.refusals.flush()
        servers = (self._http, self._grpc, self._admin)
        await asyncio.gather(*(server.stop(grace_s) for server in servers if server is not None))
        if self._executor is not None and self._executor.observation is not None:
            await asyncio.to_thread(self._executor.observation.close)


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


def tls_files(settings: Settings) -> TlsFiles | None:
    """Return the files of TLS, None without TLS. Raises InvalidInput for invalid files."""
    if not settings.tls_cert:
        for name in ("tls_key", "tls_client_ca"):
            if getattr(settings, name):
                raise InvalidInput(
                    f"setting '{name}' needs 'tls_cert'; without a certificate nothing would be encrypted"
                )
        return None
    files = TlsFiles(
        cert=settings.tls_cert,
        key=settings.tls_key,
        client_ca=settings.tls_client_ca,
        min_version=settings.tls_min_version,
    )
    files.check()
    return files


def make_kafka_input(engine: CallHandler, settings: Settings) -> Any:
    """Return the `KafkaInput`, None if it is off. Raises InvalidInput."""
    if not settings.kafka_servers:
        return None
    from dragoman.transports.application import Application
    from dragoman.transports.kafka import KafkaInput

    protocol = plugins.find("protocols", "oip_rest")(protocol_policy(settings))
    application = Application(engine, [protocol], transport_limits(settings))
    return KafkaInput(engine, application, KafkaOptions(**values(KafkaOptions, settings)))


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
