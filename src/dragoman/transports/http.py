"""HTTP/1.1 for any protocol's table: a bare ASGI application on uvicorn."""

import asyncio
import logging
import socket
import ssl
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import uvicorn

from dragoman.core.calls import Response
from dragoman.core.errors import DragomanError, NotReady
from dragoman.engine.engine import Engine
from dragoman.protocols.wire import HttpFault, HttpProtocol, HttpRequest, HttpResponse, HttpStream
from dragoman.transports.aside import Aside
from dragoman.transports.bodies import Bodies
from dragoman.transports.client import Client, Receive, Scope, Send
from dragoman.transports.guard import EXTENSION, Departure, guarded
from dragoman.transports.limits import Limits
from dragoman.transports.routing import Router

log = logging.getLogger("dragoman.http")


class HttpApplication:
    """An ASGI application that routes requests to protocols and their calls to the engine."""

    def __init__(self, engine: Engine, protocols: Sequence[HttpProtocol], limits: Limits) -> None:
        self._engine = engine
        self._router = Router(protocols)
        self._default = protocols[0]
        self._limits = limits
        self._bodies = Bodies(limits.max_bodies_bytes)
        self._aside = Aside()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        departure: Departure = scope["extensions"][EXTENSION]
        task = asyncio.current_task()
        assert task is not None
        departure.notify = task.cancel
        client = Client(scope, receive, send, departure, self._limits, self._bodies)
        try:
            await self._serve(scope, client)
        except asyncio.CancelledError:
            if not departure.left:  # the server stops
                await self._give_up(client, self._default, NotReady("the server is shutting down"))
        except Exception:
            await self._give_up(client, self._default, _internal())
        finally:
            departure.notify = None
            client.give_back()

    async def _serve(self, scope: Scope, client: Client) -> None:
        protocol = self._default
        try:
            match = self._router.match(scope["method"], scope["raw_path"].decode("latin-1"))
            protocol = match.protocol
            if match.endpoint is None:
                response = HttpResponse(204, (), (("allow", match.allow),))
            else:
                body = await client.body()
                request = HttpRequest(scope["method"], scope["path"], match.params, client.headers, body)
                exchange = await self._aside.read(match.endpoint, request, len(body))
                if isinstance(exchange, HttpStream):
                    await self._stream(exchange, client)
                    return
                response = await self._aside.write(exchange.reply, await self._engine.call(exchange.request))
        except (DragomanError, HttpFault) as fault:
            await self._give_up(client, protocol, fault)
        except Exception:
            await self._give_up(client, protocol, _internal())
        else:
            await client.send(response)

    async def _stream(self, stream: HttpStream[Any], client: Client) -> None:
        async with (
            aclosing(self._engine.stream(stream.request)) as pieces,
            aclosing(self._texts(stream, pieces)) as texts,
        ):
            # A fault before the first piece is written still gets its own status.
            first = await anext(pieces, None)
            text = await self._aside.write(stream.piece, first) if first is not None else b""
            await client.start(200, stream.headers)
            await client.write(text)
            async for text in texts:
                await client.write(text)
            await client.write(stream.end, last=True)

    async def _texts(
        self, stream: HttpStream[Any], pieces: AsyncGenerator[Response[Any], None]
    ) -> AsyncGenerator[bytes, None]:
        """Each further piece as it is written; a fault becomes the stream's own error and its end."""
        try:
            async for piece in pieces:
                yield await self._aside.write(stream.piece, piece)
        except DragomanError as fault:
            yield stream.error(fault)
        except Exception:
            yield stream.error(DragomanError(_internal().message))

    async def _give_up(self, client: Client, protocol: HttpProtocol, fault: DragomanError | HttpFault) -> None:
        """Answer with a fault, or hang up where an answer is under way already."""
        if client.started:
            client.hang_up()
        else:
            await client.send(protocol.error(fault))


class HttpServer:
    """uvicorn with our application, on one or more addresses. Runs in a task of its own."""

    def __init__(
        self,
        engine: Engine,
        protocols: Sequence[HttpProtocol],
        *,
        limits: Limits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        config = uvicorn.Config(
            HttpApplication(engine, protocols, limits),
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

    async def start(self, addresses: Sequence[tuple[str, int]]) -> list[int]:
        """Listen; gives the bound ports. Raises OSError where an address cannot be bound."""
        sockets = []
        try:
            for host, port in addresses:
                sockets.append(_bound(host, port))
        except OSError:
            for bound in sockets:
                bound.close()
            raise
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets))
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.001)
        return [s.getsockname()[1] for s in sockets]

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


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.create_server((host, port), family=family, backlog=2048)
    # The connections inherit it; asyncio forgets it, and a body would then wait 40 ms for word that its head came.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def _internal() -> HttpFault:
    number = uuid.uuid4().hex[:12]
    log.exception("unexpected fault, request id %s", number)
    return HttpFault(500, f"internal error; the log has more under request id {number}")
