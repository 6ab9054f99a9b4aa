"""HTTP/1.1 on uvicorn: the application behind a bare ASGI callable."""

import asyncio
import logging
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn

from dragoman.core.errors import NotReady
from dragoman.protocols.wire import HttpFault, HttpRequest
from dragoman.transports.application import Application
from dragoman.transports.client import Client, Receive, Scope, Send
from dragoman.transports.guard import EXTENSION, Departure, guarded
from dragoman.transports.listener import bound_to


class AsgiApplication:
    """Receives each request whole and has it answered."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        departure: Departure = scope["extensions"][EXTENSION]
        task = asyncio.current_task()
        assert task is not None
        departure.notify = task.cancel
        application = self._application
        client = Client(scope, receive, send, departure, application.limits, application.bodies)
        client.closes = self.draining
        try:
            await self._serve(scope, client)
        except asyncio.CancelledError:  # before it is the application's
            if not departure.left and not client.started:
                await client.send(application.refusal(NotReady("the server is shutting down")))
        finally:
            departure.notify = None
            client.give_back()

    async def _serve(self, scope: Scope, client: Client) -> None:
        application, protocol = self._application, None
        try:
            match = application.match(scope["method"], scope["raw_path"].decode("latin-1"))
            protocol = match.protocol
            body = await client.body() if match.endpoint is not None else b""
        except HttpFault as fault:
            await client.send(application.refusal(fault, protocol))
            return
        query = scope["query_string"].decode("latin-1")
        request = HttpRequest(scope["method"], scope["path"], match.params, client.headers, body, query)
        await application.answer(match, request, client)


class UvicornServer:
    """uvicorn with an application, on one or more addresses. Runs in a task of its own."""

    def __init__(self, application: Application, *, tls: ssl.SSLContext | None = None) -> None:
        limits = application.limits
        self._application = AsgiApplication(application)
        config = uvicorn.Config(
            self._application,
            http=guarded(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, round(limits.keep_alive_timeout_s)),
        )
        config.load()
        config.ssl = tls
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        logging.getLogger("uvicorn.access").propagate = False
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self, addresses: Sequence[tuple[str, int]], *, shared: bool = False) -> list[int]:
        """Listen; gives the bound ports. Raises OSError where an address cannot be bound."""
        sockets = bound_to(addresses, shared=shared)
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets))
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.001)
        return [s.getsockname()[1] for s in sockets]

    def begin_drain(self) -> None:
        """Close idle connections, and every other one after its next answer; new ones are still accepted."""
        self._application.draining = True
        for connection in [*self._server.server_state.connections]:
            connection.shutdown()

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new and let requests under way finish, for at most `grace_s` seconds."""
        if self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, int(grace_s))
        self._server.should_exit = True
        await self._task


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the business of whoever runs the event loop."""
        yield
