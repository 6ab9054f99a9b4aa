"""HTTP/1.1 for any protocol's table: a bare ASGI application on uvicorn."""

import asyncio
import logging
import socket
import ssl
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn

from dragoman.core.calls import Response
from dragoman.core.errors import DragomanError
from dragoman.engine.engine import Engine
from dragoman.protocols.wire import Buffer, HttpFault, HttpProtocol, HttpRequest, HttpResponse, HttpStream
from dragoman.transports.encoding import accepted, decoded, encoded
from dragoman.transports.guard import EXTENSION, Departure, guarded
from dragoman.transports.limits import Limits
from dragoman.transports.routing import Router

log = logging.getLogger("dragoman.http")

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

# Answers up to this size are put together in one write.
_SMALL = 1 << 16


class HttpApplication:
    """An ASGI application that routes requests to protocols and their calls to the engine."""

    def __init__(self, engine: Engine, protocols: Sequence[HttpProtocol], limits: Limits) -> None:
        self._engine = engine
        self._router = Router(protocols)
        self._default = protocols[0]
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        departure: Departure = scope["extensions"][EXTENSION]
        task = asyncio.current_task()
        assert task is not None
        departure.notify = task.cancel
        try:
            await self._answer(scope, receive, send)
        except asyncio.CancelledError:
            if not departure.left:
                raise
        finally:
            departure.notify = None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        protocol = self._default
        try:
            match = self._router.match(scope["method"], scope["raw_path"].decode("latin-1"))
            protocol = match.protocol
            if match.endpoint is None:
                response = HttpResponse(204, (), (("allow", match.allow),))
            else:
                headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"]}
                body = await self._body(headers, receive)
                request = HttpRequest(scope["method"], scope["path"], match.params, headers, body)
                exchange = match.endpoint(request)
                if isinstance(exchange, HttpStream):
                    await self._stream(exchange, send)
                    return
                response = exchange.reply(await self._engine.call(exchange.request))
        except (DragomanError, HttpFault) as fault:
            response = protocol.error(fault)
        except Exception:
            response = protocol.error(_internal())
        await self._send(response, scope, send)

    async def _body(self, headers: dict[str, str], receive: Receive) -> bytes:
        limit = self._limits.max_body_bytes
        length = int(headers.get("content-length", 0))
        if length > limit:
            raise _too_large(limit)
        if not length and "transfer-encoding" not in headers:
            return b""
        body = await self._received(receive)
        encodings = headers.get("content-encoding")
        return await decoded(body, encodings, limit) if encodings else body

    async def _received(self, receive: Receive) -> bytes:
        limits, parts, total = self._limits, [], 0
        start = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(limits.body_timeout_s) as timer:
                while True:
                    message = await receive()
                    parts.append(_part(message, limits.max_body_bytes - total, limits.max_body_bytes))
                    total += len(parts[-1])
                    if not message.get("more_body"):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
                    timer.reschedule(start + limits.body_timeout_s + total / (1 << 16))
        except TimeoutError as fault:
            text = f"the body came too slowly: {total} bytes in {limits.body_timeout_s} s"
            raise HttpFault(408, text, (("connection", "close"),)) from fault

    # --- out -------------------------------------------------------------------------------------------------

    async def _send(self, response: HttpResponse, scope: Scope, send: Send) -> None:
        parts: list[Buffer] = list(response.body)
        size = sum(len(p) for p in parts)
        headers = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in response.headers]
        if size >= self._limits.compress_min_bytes and self._limits.compress_responses:
            headers.append((b"vary", b"accept-encoding"))
            encoding = accepted(_header(scope, b"accept-encoding"))
            if encoding is not None:
                parts = [await encoded(parts, encoding)]
                size = len(parts[0])
                headers.append((b"content-encoding", encoding.encode()))
        if response.status != 204:
            headers.append((b"content-length", b"%d" % size))
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        if size <= _SMALL:
            await send({"type": "http.response.body", "body": parts[0] if len(parts) == 1 else b"".join(parts)})
            return
        for part in parts:
            await self._write(send, part)
        await send({"type": "http.response.body", "body": b""})

    async def _stream(self, stream: HttpStream[Any], send: Send) -> None:
        pieces = self._engine.stream(stream.request)
        try:
            # A fault before the first piece still gets its own status.
            first = await anext(pieces, None)
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(n.encode(), v.encode()) for n, v in stream.headers],
                }
            )
            async for text in _texts(stream, first, pieces):
                await self._write(send, text)
            await send({"type": "http.response.body", "body": stream.end})
        finally:
            await pieces.aclose()

    async def _write(self, send: Send, part: Buffer) -> None:
        try:
            async with asyncio.timeout(self._limits.write_timeout_s):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except TimeoutError:
            log.warning("a client did not read its answer for %s s", self._limits.write_timeout_s)
            raise asyncio.CancelledError from None


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
            timeout_keep_alive=int(limits.keep_alive_timeout_s),
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
    return socket.create_server((host, port), family=family, backlog=2048)


def _part(message: dict[str, Any], room: int, limit: int) -> bytes:
    if message["type"] == "http.disconnect":
        raise asyncio.CancelledError
    part: bytes = message.get("body", b"")
    if len(part) > room:
        raise _too_large(limit)
    return part


def _too_large(limit: int) -> HttpFault:
    return HttpFault(413, f"the body is larger than the limit of {limit} bytes", (("connection", "close"),))


def _header(scope: Scope, name: bytes) -> str:
    return next((v.decode("latin-1") for n, v in scope["headers"] if n == name), "")


def _internal() -> HttpFault:
    number = uuid.uuid4().hex[:12]
    log.exception("unexpected fault, request id %s", number)
    return HttpFault(500, f"internal error; the log has more under request id {number}")


async def _texts(
    stream: HttpStream[Any], first: Response[Any] | None, pieces: AsyncGenerator[Response[Any], None]
) -> AsyncGenerator[bytes, None]:
    """Each piece as it is written; a fault becomes the stream's own error and its end."""
    try:
        if first is not None:
            yield stream.piece(first)
        async for piece in pieces:
            yield stream.piece(piece)
    except DragomanError as fault:
        yield stream.error(fault)
    except Exception:
        yield stream.error(DragomanError(_internal().message))
