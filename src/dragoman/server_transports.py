"""Protocols and transports of a server, on its addresses."""

import asyncio
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dragoman import plugins
from dragoman.core.errors import InvalidInput
from dragoman.core.options import values
from dragoman.engine.call_handler import CallHandler
from dragoman.formats.policy import CREDENTIALS, Policy
from dragoman.settings import ProtocolOptions, Settings, TransportOptions
from dragoman.system.process import open_files_limit
from dragoman.transports.async_results import StoredResultCall as StoredResultCall
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.limits import Cors, Limits

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Ports:
    """Addresses to listen on: for HTTP, and for gRPC only. With `shared`, other front ends listen on them too."""

    http: tuple[Address, ...]
    grpc: tuple[Address, ...]
    shared: bool = False


class ServerTransports:
    """The transports of one process, which send calls to `engine`."""

    def __init__(self, engine: CallHandler, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._http: Any = None
        self._grpc: Any = None
        self.http_ports: list[int] = []
        self.grpc_port = -1
        self.http_protocols: list[str] = []
        self.grpc_protocols: list[str] = []

    async def start(self, ports: Ports | None = None) -> None:
        """Listen on `ports`, by default those of the settings.

        Raises OSError if a port is in use, InvalidInput if a setting is invalid.
        """
        settings, (http, grpc) = self._settings, load_protocols(self._settings)
        ports = ports or configured_ports(settings, http, grpc)
        tls = tls_context(settings)
        self.http_protocols = [t.name for t in http]
        self.grpc_protocols = [t.service for t in grpc]
        executor = MessageExecutor(BodyMemory(settings.max_bodies_bytes))
        if ports.http:
            from dragoman.transports.http_server import HttpServer

            grpc_too = grpc if settings.grpc_port >= 0 else ()
            http_limits = replace(transport_limits(settings), keeps_answers=not ports.shared)
            self._http = HttpServer(self._engine, http, limits=http_limits, tls=tls, grpc=grpc_too, executor=executor)
            self.http_ports = await self._http.start(ports.http, shared=ports.shared)
        for host, port in ports.grpc:
            from dragoman.transports.grpc.server import GrpcServer

            # The listener sets ALPN of its context, so HTTP and gRPC have one each.
            self._grpc = GrpcServer(
                self._engine, grpc, limits=transport_limits(settings), tls=tls_context(settings), executor=executor
            )
            self.grpc_port = await self._grpc.start(host, port, shared=ports.shared)

    def application(self, http: Sequence[Any], limits: Limits) -> Any:
        """Return an application for HTTP requests that other processes receive."""
        from dragoman.transports.application import Application

        return Application(self._engine, http, limits)

    def begin_drain(self) -> None:
        """Close idle connections, and all others after their next response; new ones are still accepted."""
        for server in (self._http, self._grpc):
            if server is not None:
                server.begin_drain()

    async def stop(self, grace_s: float) -> None:
        """Accept no connections and let requests in flight finish, for at most `grace_s` seconds."""
        await asyncio.gather(*(t.stop(grace_s) for t in (self._http, self._grpc) if t is not None))


def load_protocols(settings: Settings) -> tuple[list[Any], list[Any]]:
    """Return the protocols of the settings: those over HTTP, and those over gRPC."""
    names = [*split_list(settings.protocols), *["umbridge_shmem"] * settings.umbridge_shared_memory]
    found = [plugins.find("protocols", name)(protocol_policy(settings)) for name in names]
    return [p for p in found if hasattr(p, "routes")], [p for p in found if hasattr(p, "methods")]


def configured_ports(settings: Settings, http: Sequence[Any], grpc: Sequence[Any]) -> Ports:
    """Return the addresses of the settings, as far as a protocol is served on them."""
    grpc_only = ((settings.host, settings.grpc_port),) if grpc and settings.grpc_port >= 0 else ()
    return Ports(tuple(http_addresses(settings)) if http else (), grpc_only)


def check_settings(settings: Settings) -> None:
    """Raise InvalidInput, as `ServerTransports.start` does, if a setting is invalid."""
    configured_ports(settings, *load_protocols(settings))
    transport_limits(settings)
    tls_context(settings)


def http_addresses(settings: Settings) -> list[Address]:
    found = [(settings.host, settings.http_port)]
    if settings.umbridge_port >= 0:
        found.append((settings.host, settings.umbridge_port))
    for text in split_list(settings.http_also):
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise InvalidInput(f"setting 'http_also': expected host:port, got {text!r}")
        found.append((host.strip("[]"), int(port)))
    return found


def protocol_policy(settings: Settings) -> Policy:
    """Return the settings that protocols need."""
    headers = split_list(settings.forward_headers.lower())
    for secret in CREDENTIALS & {*headers}:
        raise InvalidInput(f"setting 'forward_headers': models never see '{secret}'; name only other headers")
    return Policy(**values(ProtocolOptions, settings), forward_headers=headers)


def transport_limits(settings: Settings) -> Limits:
    """Return the settings that transports need."""
    fields = values(TransportOptions, settings)
    root = settings.root_path.strip("/")
    fields |= {"root_path": f"/{root}" if root else "", "max_open_files": open_files_limit()}
    return Limits(**fields, cors=_cors(settings))


def _cors(settings: Settings) -> Cors:
    lists = {n: split_list(getattr(settings, f"cors_{n}")) for n in ("origins", "methods", "headers", "expose")}
    try:
        return Cors(
            **lists,
            origin_regex=settings.cors_origin_regex,
            credentials=settings.cors_credentials,
            max_age_s=settings.cors_max_age_s,
        )
    except re.error as error:
        raise InvalidInput(f"setting 'cors_origin_regex': expected a regular expression: {error}") from error


def split_list(text: str) -> tuple[str, ...]:
    """Return the items of a setting that is a comma-separated list."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context of the server, None without TLS. Raises InvalidInput for invalid files."""
    if not settings.tls_cert:
        if settings.tls_key:
            raise InvalidInput("setting 'tls_key' needs 'tls_cert'; without a certificate nothing would be encrypted")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key or None)
    except OSError as error:
        key = settings.tls_key or settings.tls_cert
        raise InvalidInput(f"cannot use certificate '{settings.tls_cert}' with key '{key}': {error}") from error
    return context
