"""`dragoman.asgi`: models as an ASGI application, for other servers, frameworks and in-process tests."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, Unpack

from dragoman.assembly import Assembly, load_protocols
from dragoman.core.errors import InvalidInput
from dragoman.core.services import Sender
from dragoman.core.spec import ModelSpec
from dragoman.engine.engine import Engine
from dragoman.engine_setup import make_engine, settings_for, spec_of_object
from dragoman.server_transports import check_settings
from dragoman.services import Services
from dragoman.settings import SETTINGS, Settings
from dragoman.settings_arguments import SettingsArguments
from dragoman.system.trace_settings import TraceSettings
from dragoman.transports.application import Application
from dragoman.transports.asgi import Receive, Scope, Send, relative_path, respond

log = logging.getLogger("dragoman.server")


class AsgiApplication:
    """An ASGI 3 application that serves models over every HTTP protocol; created by `dragoman.asgi`.

    It loads its models at the lifespan event `startup` and closes them at `shutdown`. Without lifespan events
    (mounted applications, httpx.ASGITransport), the first request loads the models, and they are closed when
    the event loop ends, or by `async with app:` around the requests.
    """

    def __init__(self, paths: Sequence[str], objects: Sequence[ModelSpec], settings: Settings) -> None:
        check_settings(settings)
        self.settings = settings
        self._paths, self._objects = paths, objects
        self._traces = TraceSettings()
        self._protocols = load_protocols(settings, self._traces)[0]
        self._next: Engine | None = make_engine(paths, objects, settings)  # reports errors at once
        self._running: _Running | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await self._lifespan(receive, send)
            case "websocket":  # no endpoint accepts one; closing it now is a 403
                await receive()
                await send({"type": "websocket.close", "code": 1000, "reason": ""})
            case kind:
                raise NotImplementedError(f"ASGI scope type {kind!r}: expected http, lifespan or websocket")

    async def __aenter__(self) -> Self:
        await self._start().wait_until_loaded()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    @property
    def sender(self) -> Sender:
        """What sends requests to this application itself, inside `async with`."""
        assert self._running is not None, "the application runs"
        return self._running.services.sender

    def _start(self) -> "_Running":
        """Return what runs in this event loop; loading has begun. Raises RuntimeError if another loop runs it."""
        loop = asyncio.get_running_loop()
        running = self._running
        if running is not None and running.loop is not loop and not running.loop.is_closed():
            raise RuntimeError(
                "this dragoman.asgi application runs in another event loop: use one loop, e.g. `with TestClient(app):`"
            )
        if running is None or running.loop is not loop or running.task.done():
            engine, self._next = self._next or make_engine(self._paths, self._objects, self.settings), None
            assembly = Assembly(self.settings, self._traces, is_asgi=True)
            engine.metric_sources.append(assembly.metrics)
            application = assembly.application(engine, self._protocols)
            services = Services(engine, self.settings)
            running = self._running = _Running(engine, application, assembly, services, self.settings.drain_s)
        return running

    async def _stop(self) -> None:
        running, self._running = self._running, None
        if running is not None and running.loop is asyncio.get_running_loop():
            await running.stop()

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        running = self._start()
        if not (running.is_loading and _is_health_check(running.application, scope)):
            await running.wait_until_loaded()
        await respond(running.application, scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._start().wait_until_loaded()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._stop()
        await send({"type": "lifespan.shutdown.complete"})


class _Running:
    """An engine in the event loop that runs it. Its task closes the engine, also if the loop ends and cancels it."""

    def __init__(
        self, engine: Engine, application: Application, assembly: Assembly, services: Services, drain_s: float
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.application = application
        self._engine = engine
        self._assembly = assembly
        self.services = services
        self._drain_s = drain_s
        self._stopping = asyncio.Event()
        if engine.audit is not None:
            engine.audit.attach()
        self._loading = self.loop.create_task(self._load())
        self.task = self.loop.create_task(self._run())

    async def _load(self) -> None:
        await self.services.start(self._assembly)
        await self._engine.start()

    @property
    def is_loading(self) -> bool:
        return not self._loading.done()

    async def wait_until_loaded(self) -> None:
        """Wait until every model is loaded or has failed to load. Raises the errors of `Engine.start`."""
        await asyncio.shield(self._loading)

    async def stop(self) -> None:
        self._stopping.set()
        await self.task

    async def _run(self) -> None:
        self._assembly.refresher.start()
        try:
            try:
                await self._loading
            except Exception:
                log.exception("the models could not be loaded")
                return
            await self._stopping.wait()
            await self.services.close()
            try:
                async with asyncio.timeout(self._drain_s):
                    await self._engine.drain()
            except TimeoutError:
                log.warning("calls were still running after %g s and are cancelled", self._drain_s)
        finally:
            await self.services.close()
            await self._engine.close()
            await self._assembly.close()
            if self._engine.audit is not None:
                self._engine.audit.close()


def _is_health_check(application: Application, scope: Scope) -> bool:
    try:
        return application.match(scope["method"], relative_path(scope), {}).health
    except Exception:  # an unknown path or method
        return False


def asgi(*models: Any, **settings: Unpack[SettingsArguments]) -> AsgiApplication:
    """Return an ASGI application that serves models; see `Server` for the arguments.

    Settings of sockets and of the server process (`http_port`, `tls_cert`, `processes`, ...) belong to the ASGI
    server. Raises InvalidInput if one is given, or if a path or another setting is wrong.
    """
    for name in settings:
        if name in SETTINGS and SETTINGS[name].serve_only:
            raise InvalidInput(f"setting '{name}': not available in dragoman.asgi; configure the ASGI server instead")
    paths = [str(m) for m in models if isinstance(m, str | Path)]
    merged = settings_for(paths, settings)
    return AsgiApplication(paths, [spec_of_object(m, merged) for m in models if not isinstance(m, str | Path)], merged)
