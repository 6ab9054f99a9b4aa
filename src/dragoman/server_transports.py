"""What clients see of a server: the protocols that it speaks, on its addresses, around any engine."""

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
from dragoman.system import open_files
from dragoman.transports.async_results import StoredResultCall as StoredResultCall
from dragoman.transports.bodies import Bodies
from dragoman.transports.cors import Cors
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.limits import Limits

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Ports:
    """Where to listen: for HTTP, and for gRPC alone. With `shared`, other processes of ours listen there as well."""

    http: tuple[Address, ...]
    grpc: tuple[Address, ...]
    shared: bool = False


class ServerTransports:
    """The transports of one process, which ask `engine` whatever their clients ask them."""

    def __init__(self, engine: CallHandler, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._http: Any = None
        self._grpc: Any = None
        self.http_ports: list[int] = []
        self.grpc_port = -1
        self.http_protocols: list[str] = []
        self.grpc_protocols: list[str] = []

    async def start(self, where: Ports | None = None) -> None:
        """Listen there, by default where the settings say.

        Raises OSError where a port is taken, InvalidInput where a setting is wrong.
        """
        settings, (http, grpc) = self._settings, tables(self._settings)
        where = where or ports_of(settings, http, grpc)
        tls = tls_context(settings)
        self.http_protocols = [t.name for t in http]
        self.grpc_protocols = [t.service for t in grpc]
        executor = MessageExecutor(Bodies(settings.max_bodies_bytes))
        if where.http:
            from dragoman.transports.http_server import HttpServer

            also = grpc if settings.grpc_port >= 0 else ()
            bounds = replace(limits(settings), keeps_answers=not where.shared)
            self._http = HttpServer(self._engine, http, limits=bounds, tls=tls, grpc=also, executor=executor)
            self.http_ports = await self._http.start(where.http, shared=where.shared)
        for host, port in where.grpc:
            from dragoman.transports.grpc.server import GrpcServer

            # The listener sets ALPN of its context, so HTTP and gRPC have one each.
            self._grpc = GrpcServer(
                self._engine, grpc, limits=limits(settings), tls=tls_context(settings), executor=executor
            )
            self.grpc_port = await self._grpc.start(host, port, shared=where.shared)

    def application(self, http: Sequence[Any], bounds: Limits) -> Any:
        """What answers requests of HTTP that others have received."""
        from dragoman.transports.application import Application

        return Application(self._engine, http, bounds)

    def begin_drain(self) -> None:
        """Close idle connections, and every other one after its next answer; new ones are still accepted."""
        for server in (self._http, self._grpc):
            if server is not None:
                server.begin_drain()

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new and let requests under way finish, for at most `grace_s` seconds."""
        await asyncio.gather(*(t.stop(grace_s) for t in (self._http, self._grpc) if t is not None))


def tables(settings: Settings) -> tuple[list[Any], list[Any]]:
    """The tables of the protocols to speak: those over HTTP, and those over gRPC."""
    names = [*listed(settings.protocols), *["umbridge_shmem"] * settings.umbridge_shared_memory]
    found = [plugins.find("protocols", name)(policy(settings)) for name in names]
    return [t for t in found if hasattr(t, "routes")], [t for t in found if hasattr(t, "methods")]


def ports_of(settings: Settings, http: Sequence[Any], grpc: Sequence[Any]) -> Ports:
    """Where the settings say to listen, as far as there is a protocol to speak there."""
    alone = ((settings.host, settings.grpc_port),) if grpc and settings.grpc_port >= 0 else ()
    return Ports(tuple(addresses(settings)) if http else (), alone)


def check(settings: Settings) -> None:
    """Whether one could listen as the settings say. Raises InvalidInput, as `start` does, where they make no sense."""
    http, grpc = tables(settings)
    ports_of(settings, http, grpc)
    limits(settings)
    tls_context(settings)


def addresses(settings: Settings) -> list[Address]:
    """Every address of HTTP."""
    found = [(settings.host, settings.http_port)]
    if settings.umbridge_port >= 0:
        found.append((settings.host, settings.umbridge_port))
    for text in listed(settings.http_also):
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise InvalidInput(f"setting 'http_also': expected host:port, got {text!r}")
        found.append((host.strip("[]"), int(port)))
    return found


def policy(settings: Settings) -> Policy:
    """Return the settings that protocols need."""
    return Policy(**values(ProtocolOptions, settings), forward_headers=_forwarded(settings.forward_headers))


def _forwarded(text: str) -> tuple[str, ...]:
    """The patterns of the headers that models see."""
    patterns = listed(text.lower())
    for secret in CREDENTIALS & {*patterns}:
        raise InvalidInput(f"setting 'forward_headers': models never see '{secret}'; name only other headers")
    return patterns


def limits(settings: Settings) -> Limits:
    """Return the settings that transports need."""
    given = values(TransportOptions, settings)
    root = settings.root_path.strip("/")
    given |= {"root_path": f"/{root}" if root else "", "max_open_files": open_files.limit()}
    return Limits(**given, cors=_cors(settings))


def _cors(settings: Settings) -> Cors:
    lists = {n: listed(getattr(settings, f"cors_{n}")) for n in ("origins", "methods", "headers", "expose")}
    try:
        return Cors(
            **lists,
            origin_regex=settings.cors_origin_regex,
            credentials=settings.cors_credentials,
            max_age_s=settings.cors_max_age_s,
        )
    except re.error as fault:
        raise InvalidInput(f"setting 'cors_origin_regex': no regular expression: {fault}") from fault


def listed(text: str) -> tuple[str, ...]:
    """The words of a setting that lists some."""
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The server's side of TLS; None where it is off. Raises InvalidInput where the files are of no use."""
    if not settings.tls_cert:
        if settings.tls_key:
            raise InvalidInput("setting 'tls_key' needs 'tls_cert' beside it; without it nothing would be encrypted")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key or None)
    except OSError as fault:
        key = settings.tls_key or settings.tls_cert
        raise InvalidInput(f"cannot use certificate '{settings.tls_cert}' with key '{key}': {fault}") from fault
    return context
