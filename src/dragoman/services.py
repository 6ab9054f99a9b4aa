"""Services of a server: what features of the hook `dragoman.services` get, and the requests that they send."""

import asyncio
import logging
import os
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from dragoman import hooks
from dragoman.access.control import AccessControl
from dragoman.access.grants import ANONYMOUS, Grant
from dragoman.access.key_calls import calls_of
from dragoman.assembly import Assembly, files_folder, load_protocols
from dragoman.core.callers import Caller
from dragoman.core.calls import Request, Response
from dragoman.core.chunks import ChunkStream, Take
from dragoman.core.errors import Forbidden, InvalidInput
from dragoman.core.jobs import TABLE_VERSION, Jobs
from dragoman.core.services import MakeService, Service, ServiceContext, WireResponse
from dragoman.engine.engine import Engine
from dragoman.protocols.wire import JSON_TYPE, HttpError, HttpRequest
from dragoman.settings import Settings
from dragoman.system.files import TemporaryFolder, lock_folder
from dragoman.system.request_context import new_context
from dragoman.transports.application import Application, RequestSummary
from dragoman.transports.response_writer import CollectingWriter

A = TypeVar("A")
log = logging.getLogger("dragoman.server")

_JWT_OWNER = "jwt:"


class Services:
    """The services of an engine, in a server of one process: they share files and limits, which are in its memory."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self.sender = InternalSender(engine)
        self._services: dict[str, Service] = {}
        self._jobs: Jobs | None = None
        self._temporary: TemporaryFolder | None = None
        self._lock = -1

    async def start(self, assembly: Assembly | None) -> None:
        """Begin to work, with the limits and the access control of the server's requests; with None, do nothing.

        Raises InvalidInput if the folder of files cannot be used.
        """
        if assembly is None:
            return
        engine, store, sender = self._engine, self._engine.store, self.sender
        protocols = load_protocols(self._settings)[0]
        if not protocols:  # of HTTP, over which services are used
            return
        sender.open(Application(sender.engine, protocols, assembly.limits, assembly.executor, assembly.access))
        makers: dict[str, MakeService] = dict(hooks.all_of("services"))
        if not makers:
            return
        folder = self._open_folder()
        self._jobs = Jobs(store.table("service_jobs", TABLE_VERSION), folder / "jobs")
        for name, make in makers.items():
            service = self._services[name] = make(ServiceContext(self._settings, store, self._jobs, folder, sender))
            engine.metric_sources.append(service.families)
            await service.start()
        engine.services = self._services
        self._jobs.start()

    def _open_folder(self) -> Path:
        folder = files_folder(self._settings)
        if folder is None or not self._engine.store.is_writable:
            if folder is not None:
                log.error("files and batches end with the server, because the state cannot be saved")
            self._temporary = TemporaryFolder("files")
            return self._temporary.path
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            why = error.strerror or error
            raise InvalidInput(f"setting 'files_folder': '{folder}' cannot be used: {why}") from error
        self._lock = lock_folder(folder)
        if self._lock < 0:
            raise InvalidInput(f"setting 'files_folder': '{folder}' is in use by another server, or cannot be locked")
        return folder

    async def close(self) -> None:
        """Stop at once; a second call does nothing."""
        if self._jobs is not None:
            await self._jobs.close()
            for service in self._services.values():
                await service.close()
            self._jobs = None
        if self._temporary is not None:
            temporary, self._temporary = self._temporary, None
            await asyncio.to_thread(temporary.cleanup)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class InternalSender:
    """A `Sender`: requests go through an `Application` of their own, with the lowest priority of their key."""

    def __init__(self, engine: Engine) -> None:
        self._deployments = engine.deployments
        self.engine = _CountingEngine(engine)
        self._application: Application | None = None

    def open(self, application: Application) -> None:
        self._application = application

    def is_busy(self) -> bool:
        return sum(deployment.in_flight for deployment in self._deployments()) > self.engine.in_flight

    def route(self, path: str) -> str:
        assert self._application is not None, "services have been started"
        try:
            match = self._application.match("POST", path.partition("?")[0], {})
        except HttpError:
            return ""
        return "" if match.endpoint is None or match.path else match.role

    async def send(
        self, path: str, body: bytes, caller: Caller, models: frozenset[str] | None, request_id: str
    ) -> WireResponse:
        application = self._application
        assert application is not None, "services have been started"
        grant = self._grant(application.access, caller, models)
        own = application.for_caller(grant, caller.address)
        raw_path, _, query = path.partition("?")
        try:
            match = own.match("POST", raw_path, {})
        except HttpError as error:
            rejection = own.reject(error, RequestSummary("POST", raw_path))
            return WireResponse(rejection.status, dict(rejection.headers), b"".join(rejection.body))
        if match.role != "infer" or match.role not in grant.roles:
            raise Forbidden(f"key '{grant.name}': expected the role infer and a path for it, got {raw_path[:200]}")
        headers = dict((JSON_TYPE, ("x-request-id", request_id)))
        request = HttpRequest(
            "POST", unquote(raw_path), match.params, headers, body, query, new_context(request_id), own.caller
        )
        response = CollectingWriter()
        await own.answer(match, request, response)
        return WireResponse(response.status, dict(response.headers), bytes(response.body))

    @staticmethod
    def _grant(access: AccessControl | None, caller: Caller, models: frozenset[str] | None) -> Grant:
        """Return what a caller may do now: its key may have changed since, a JSON Web Token is not kept."""
        grant = ANONYMOUS if access is None else access.grant_of(caller.owner)
        if grant is None and caller.owner.startswith(_JWT_OWNER):
            grant = Grant(caller.name, frozenset(("infer",)), models, owner=caller.owner)
        if grant is None:
            raise Forbidden(f"key '{caller.name}' does not exist any more, or has expired")
        return grant.in_background()


class _CountingEngine:
    """Counts the model calls that it begins and that have not ended."""

    is_remote = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.in_flight = 0
        self.meter = engine.meter
        self.ready, self.wait_for_change = engine.ready, engine.wait_for_change

    def begin(self, request: Request[A]) -> Response[A] | Awaitable[Response[A]]:
        response, count = self._engine.begin(request), calls_of(request.call)
        return response if isinstance(response, Response) or not count else self._finish(response, count)

    async def _finish(self, response: Awaitable[Response[A]], count: int) -> Response[A]:
        self.in_flight += count
        try:
            return await response
        finally:
            self.in_flight -= count

    async def call(self, request: Request[A]) -> Response[A]:
        response = self.begin(request)
        return response if isinstance(response, Response) else await response

    def stream(self, request: Request[A]) -> ChunkStream[Response[A]]:
        return ChunkStream(partial(self._stream, request))

    async def _stream(self, request: Request[A], take: Take[Response[A]]) -> None:
        self.in_flight += 1
        try:
            await self._engine.stream(request).send_to(take)
        finally:
            self.in_flight -= 1
