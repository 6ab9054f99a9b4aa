"""Parts of a server that its settings name: protocols, access control, limits and records of requests."""

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from msgspec import structs

from dragoman import hooks, plugins
from dragoman._version import __version__
from dragoman.access.control import AccessControl, AccessRules
from dragoman.access.refresh import AccessRefresher
from dragoman.access.sites import ANY_HOST, SiteRules
from dragoman.access.tokens import TokenRules, TokenVerifier
from dragoman.core.errors import InvalidInput
from dragoman.core.metrics import Family
from dragoman.core.options import split_list, values
from dragoman.core.state_store import state_file
from dragoman.engine.call_handler import CallHandler
from dragoman.engine.model_files import response_dialect
from dragoman.formats.policy import CREDENTIALS, Policy
from dragoman.formats.shared_regions import SharedRegions
from dragoman.protocols.console.routes import with_console
from dragoman.protocols.custom_handlers import prefer_handlers
from dragoman.protocols.openapi import routes as openapi
from dragoman.protocols.wire import GrpcMethod, GrpcProtocol, GrpcStreamMethod, HttpProtocol, Route
from dragoman.settings import ProtocolOptions, Settings, TransportOptions
from dragoman.system.process import open_files_limit
from dragoman.system.trace_settings import TraceSettings
from dragoman.transports.application import Application
from dragoman.transports.bodies import BodyMemory
from dragoman.transports.executor import MessageExecutor
from dragoman.transports.limits import Cors, Limits
from dragoman.transports.observation import Observation, RequestLog, Telemetry
from dragoman.transports.recent_requests import RecentRequests, RequestLogs

log = logging.getLogger("dragoman.server")

Address = tuple[str, int]


class Assembly:
    """What the requests of one event loop share, whatever receives them: limits, access, memory and their record.

    processes: how many processes listen. is_asgi: another server listens, whose addresses are not known.
    Raises InvalidInput for an invalid setting.
    """

    def __init__(self, settings: Settings, traces: TraceSettings, *, processes: int = 1, is_asgi: bool = False) -> None:
        self._settings = settings
        self.limits = replace(transport_limits(settings), keeps_answers=processes == 1)
        self.access = access_control(settings, processes, is_asgi=is_asgi)
        self.recent = RecentRequests(settings.recent_requests, is_partial=processes > 1)
        self.executor = MessageExecutor(BodyMemory(self.limits.max_bodies_bytes), self.limits.max_loop_delay_s)
        self.executor.observation = make_observation(settings, traces, self.recent)
        self.executor.counters.key_calls.expect(self.access.key_names)
        self.refresher = AccessRefresher(self.access)

    def application(
        self, engine: CallHandler, http: Sequence[HttpProtocol], *, shows_requests: bool = True
    ) -> Application:
        """Return the application of an address with its pages; its console may show recent requests."""
        protocols = self.with_pages(http, self.recent if shows_requests else None)
        return Application(engine, protocols, self.limits, self.executor, self.access)

    def with_pages(self, http: Sequence[HttpProtocol], recent: RecentRequests | None = None) -> list[HttpProtocol]:
        """Return the protocols of an address, their description, and the console, which shows recent requests."""
        has_pages = self._settings.web_pages
        own = openapi.protocol(
            http,
            version=__version__,
            root_path=self.limits.root_path,
            is_guarded=self.access.is_guarded,
            has_page=has_pages,
        )
        return with_console([*http, own], recent, self.limits.root_path) if has_pages else [*http, own]

    def metrics(self) -> tuple[Family, ...]:
        """Return the metrics of requests and connections, and of denied requests unless every request is open."""
        self.executor.counters.key_calls.expect(self.access.key_names)  # of a file that was changed, too
        return (*self.executor.metrics(), *self.access.families())

    async def close(self) -> None:
        """Write what is not yet logged. Nothing may be received any more."""
        await self.refresher.stop()
        self.access.refusals.flush()
        if self.executor.observation is not None:
            await asyncio.to_thread(self.executor.observation.close)


def load_protocols(settings: Settings, traces: TraceSettings | None = None) -> tuple[list[Any], list[Any]]:
    """Return the protocols of the settings: those over HTTP, and those over gRPC; they may change `traces`.

    Those of features that are not installed, which is logged, are left out.
    """
    missing = hooks.missing_names("protocols")
    asked = [*split_list(settings.protocols), *["umbridge_shmem"] * settings.umbridge_shared_memory]
    names = [name for name in asked if name not in missing]
    policy = protocol_policy(settings, traces)
    protocols: list[Any] = [structs.replace(plugins.find("protocols", name)(policy), key=name) for name in names]
    http = [p for p in protocols if hasattr(p, "routes")]
    if policy.dialect.handlers_first:
        http = prefer_handlers(http, policy, needs_keys=settings.needs_keys)
    return http, [p for p in protocols if hasattr(p, "methods")]


def protocol_policy(settings: Settings, traces: TraceSettings | None = None) -> Policy:
    headers = split_list(settings.forward_headers.lower())
    for secret in CREDENTIALS & {*headers}:
        raise InvalidInput(f"setting 'forward_headers': models never see '{secret}'; name only other headers")
    if settings.shared_memory and settings.processes != 1:
        raise InvalidInput(f"setting 'shared_memory': expected processes 1, got {settings.processes}")
    regions = SharedRegions(settings.max_body_bytes) if settings.shared_memory else None
    own = (traces or TraceSettings()) if settings.processes == 1 else None
    dialect = response_dialect(settings.responses_as)
    folder = files_folder(settings)
    return Policy(
        **values(ProtocolOptions, settings),
        forward_headers=headers,
        regions=regions,
        traces=own,
        dialect=dialect,
        upload_folder="" if folder is None else str(folder),
    )


def files_folder(settings: Settings) -> Path | None:
    """Return the folder of files of services that outlive the server, None if they do not. Raises InvalidInput."""
    if not settings.state:
        if settings.files_folder:
            raise InvalidInput("setting 'files_folder' needs 'state', which knows the files")
        return None
    if settings.processes != 1:  # there are no services
        return None
    if settings.files_folder:
        return Path(settings.files_folder).absolute()
    state = state_file(settings.state)
    return state.with_name(f"{state.stem}-files")


def split_routes(
    http: Sequence[HttpProtocol], grpc: Sequence[GrpcProtocol], *, administrative: bool
) -> tuple[list[HttpProtocol], list[GrpcProtocol]]:
    """Return the protocols with the routes of the admin port, or with all others. Both have the health checks.

    The admin port also describes models, and has no inference.
    """

    def is_on(route: Route | GrpcMethod | GrpcStreamMethod) -> bool:
        if getattr(route, "health", False):
            return True
        is_administrative = route.role == "admin" or getattr(route, "is_administrative", False)
        return is_administrative or route.role == "read" if administrative else not is_administrative

    https = [
        structs.replace(p, routes=tuple(filter(is_on, p.routes)), fallback=None if administrative else p.fallback)
        for p in http
    ]
    return https, [structs.replace(p, methods=tuple(filter(is_on, p.methods))) for p in grpc]


def access_control(settings: Settings, processes: int = 1, *, is_asgi: bool = False) -> AccessControl:
    """Return what decides about requests. Raises InvalidInput for invalid files.

    Each of `processes` processes allows its share of failed attempts. is_asgi: another server listens, whose
    addresses are not known.
    """
    allowed_hosts = split_list(settings.allowed_hosts)
    if not allowed_hosts and (is_asgi or open_hosts(settings)):
        allowed_hosts = ANY_HOST
    sites = SiteRules(allowed_hosts=allowed_hosts, allows_origin=_cors(settings).allows)
    tokens = None
    if settings.jwt_jwks:
        claims = {
            "roles_claim": settings.jwt_roles_claim,
            "models_claim": settings.jwt_models_claim,
            "limits_claim": settings.jwt_limits_claim,
        }
        tokens = TokenVerifier(
            TokenRules(jwks=settings.jwt_jwks, issuer=settings.jwt_issuer, audience=settings.jwt_audience, **claims)
        )
    return AccessControl(
        AccessRules(
            keys_file=settings.api_keys,
            api_key=settings.api_key,
            control_token=settings.control_token,
            control_loopback=settings.control_loopback,
            control_open=settings.control_open,
            sites=sites,
            tokens=tokens,
            failures_per_minute=settings.auth_failures_per_minute / processes,
            has_certificates=bool(settings.tls_client_ca),
        )
    )


def transport_limits(settings: Settings) -> Limits:
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


def make_observation(settings: Settings, traces: TraceSettings, recent: RecentRequests) -> Any:
    """Return what observes requests: the access log, the recent requests and telemetry by these settings; None without
    them.

    Raises InvalidInput if the access log cannot be opened or the settings are invalid.
    """
    logs: list[RequestLog] = [recent] if recent.size else []
    if settings.access_log:
        from dragoman.transports.access_log import AccessLog

        style, skip = settings.access_log_format or settings.log_format, frozenset(split_list(settings.access_log_skip))
        logs.append(AccessLog(settings.access_log, style, skip))
    telemetry = _make_telemetry(settings)
    if telemetry is not None and telemetry.metrics is not None:
        logs.append(telemetry.metrics)
    if not logs and telemetry is None:
        return None
    return Observation(RequestLogs(logs) if len(logs) > 1 else next(iter(logs), None), telemetry, traces)


def _make_telemetry(settings: Settings) -> Telemetry | None:
    """Return what a feature exports by these settings and the environment, None for nothing. Raises InvalidInput."""
    for make in hooks.all_of("telemetry").values():
        telemetry: Telemetry | None = make(settings)
        if telemetry is not None:
            return telemetry
    if settings.tracing_endpoint:
        raise InvalidInput("setting 'tracing_endpoint': the feature that exports traces is not installed")
    return None


def http_addresses(settings: Settings) -> list[Address]:
    addresses = [(settings.host, settings.http_port)]
    if settings.umbridge_port >= 0:
        addresses.append((settings.host, settings.umbridge_port))
    for text in split_list(settings.http_also):
        name, _, port = text.rpartition(":")
        host = name.strip("[]")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise InvalidInput(f"setting 'http_also': expected host:port, got {text!r}")
        addresses.append((host, int(port)))
    return addresses


def open_hosts(settings: Settings) -> list[str]:
    """Return the addresses of the settings that other machines may reach."""
    admin = [settings.admin_host] if settings.admin_port >= 0 and settings.admin_host else []
    named = {host for host, _ in http_addresses(settings)} | {*admin}
    return sorted(host for host in named if not _is_loopback(host))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a host name
        return False
