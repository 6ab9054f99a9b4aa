"""HTTP requests over ASGI 3: any ASGI server or framework as a transport of the application."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextvars import copy_context
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

from dragoman.access.addresses import without_mapping
from dragoman.core.errors import DragomanError
from dragoman.core.foreign_code import ClientDisconnected
from dragoman.core.sizes import INLINE
from dragoman.protocols.wire import Buffer, Headers, HttpError, HttpRequest, HttpResponse
from dragoman.system.request_context import (
    HEADER,
    Context,
    client_request_id,
    new_context,
    request_id,
    running_in_thread,
    variables_of,
)
from dragoman.transports.application import Application, RequestSummary
from dragoman.transports.bodies import GrowingBody, SpooledBody, growing_body, too_large
from dragoman.transports.counters import TransportCounters
from dragoman.transports.limits import Limits
from dragoman.transports.loop_delay import LOOP_LATE
from dragoman.transports.routing import Match

log = logging.getLogger("dragoman.http")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# Larger response bodies are sent in chunks, so that a client that reads slowly is seen to read.
_CHUNK_BYTES = 1 << 18


class ResponseAborted(Exception):
    """A response that has begun cannot be completed; raised so that the ASGI server closes the connection."""


class AsgiRequest:
    """One request; it is the `ResponseWriter` of its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits, counters: TransportCounters) -> None:
        self.is_disconnected = self.started = False
        self.headers = _merge_headers(scope["headers"])
        self.context = new_context(client_request_id(self.headers))
        self._is_head = scope["method"] == "HEAD"
        # A connection header is not allowed in HTTP/2 and later.
        self._has_connection_headers = scope.get("http_version", "1.1").startswith("1")
        self._receive = receive
        self._send = send
        self._limits = limits
        self.body: GrowingBody | SpooledBody | None = None  # once its endpoint is known
        self._is_aborted = False
        self.statuses: defaultdict[int, int] = counters.unmatched

    # --- request body --------------------------------------------------------------------------------------------

    async def read(self, body: GrowingBody | SpooledBody, max_bytes: int) -> None:
        """Receive the whole body.

        Raises HttpError if it is too large or too slow, CancelledError if the client has disconnected.
        """
        length, limits = self.headers.get("content-length", ""), self._limits
        if length.isdecimal() and int(length) > max_bytes:
            raise too_large(max_bytes)
        started_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(limits.body_timeout_s) as timer:
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        self.is_disconnected = True
                        raise ClientDisconnected
                    body.append(message.get("body", b""))
                    if not message.get("more_body", False):
                        return
                    timer.reschedule(started_s + limits.body_timeout_s + body.size / (1 << 16))
        except TimeoutError as error:
            text = f"the body came too slowly: {body.size} bytes in {limits.body_timeout_s} s"
            raise HttpError(408, text, (("connection", "close"),)) from error

    async def wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # --- response ------------------------------------------------------------------------------------------------

    async def send(self, response: HttpResponse) -> None:
        size = sum(map(len, response.body))
        length = () if response.status in (204, 304) else (("content-length", str(size)),)
        start = self._start_message(response.status, (*response.headers, *length))
        if size <= _CHUNK_BYTES:
            await self._send_in_time(start, self._last_message(b"".join(response.body)))
            return
        await self._send_in_time(start)
        for part in response.body:
            view = memoryview(part).cast("B")
            for at in range(0, len(view), _CHUNK_BYTES):
                if (sending := self.write(view[at : at + _CHUNK_BYTES])) is not None:
                    await sending
        await self.end(b"")

    async def start(self, status: int, headers: Headers) -> None:
        await self._send_in_time(self._start_message(status, headers))

    def _start_message(self, status: int, headers: Headers) -> dict[str, Any]:
        self.started = True
        self.statuses[status] += 1
        encoded = [
            (name.lower().encode("latin-1", "replace"), value.encode("latin-1", "replace"))
            for name, value in (*headers, (HEADER, request_id(self.context)))
            if self._has_connection_headers or name.lower() != "connection"
        ]
        return {"type": "http.response.start", "status": status, "headers": encoded}

    def _last_message(self, part: Buffer) -> dict[str, Any]:
        return {"type": "http.response.body", "body": b"" if self._is_head else bytes(part), "more_body": False}

    def write(self, part: Buffer) -> Awaitable[None] | None:
        if self._is_head:
            return None
        return self._send_in_time({"type": "http.response.body", "body": bytes(part), "more_body": True})

    async def end(self, part: Buffer) -> None:
        await self._send_in_time(self._last_message(part))

    async def _send_in_time(self, *messages: dict[str, Any]) -> None:
        if self.is_disconnected:
            raise ClientDisconnected
        try:
            async with asyncio.timeout(self._limits.write_timeout_s):
                for message in messages:
                    await self._send(message)
        except TimeoutError:
            log.warning("a client did not read its response for %g s", self._limits.write_timeout_s)
            self.abort()
            raise ClientDisconnected from None
        except OSError:  # ASGI 2.4: the client has disconnected
            self.is_disconnected = True
            raise ClientDisconnected from None

    def abort(self) -> None:
        self._is_aborted = not self.is_disconnected
        self.is_disconnected = True

    def check_complete(self) -> None:
        """Raise ResponseAborted if a response was begun and given up."""
        if self._is_aborted:
            raise ResponseAborted("the response could not be completed")


async def respond(application: Application, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one HTTP request. Raises ResponseAborted if a response was begun and could not be completed."""
    writer = AsgiRequest(scope, receive, send, application.limits, application.counters)
    try:
        await _respond(application, scope, writer)
    except asyncio.CancelledError:
        if not writer.is_disconnected:
            raise
    finally:
        if writer.body is not None:
            application.bodies.release(writer.body.size)
    writer.check_complete()


async def _respond(application: Application, scope: Scope, writer: AsgiRequest) -> None:
    match: Match | None = None
    client = partial(_client_host, scope)
    try:
        path = relative_path(scope)
        match = application.match(scope["method"], path, writer.headers)
        writer.statuses = match.statuses
        if match.is_sheddable and application.executor.loop_delay.rejects():
            raise LOOP_LATE
        application = application.authorize(match, scope["method"], writer.headers, client).application
        spool = match.spool
        max_bytes = application.limits.max_body_bytes if spool is None else spool.max_bytes
        body = writer.body = growing_body(max_bytes, application.bodies, spool)
        if match.endpoint is not None:
            await writer.read(body, max_bytes)
        at_once = body.size <= INLINE and application.is_plain(match, writer.headers)
        query = scope.get("query_string", b"").decode("latin-1")
        request = HttpRequest(
            scope["method"],
            unquote(path),
            match.params,
            writer.headers,
            body.take(),
            query,
            writer.context,
            application.caller,
            client(),
            scope.get("http_version", "1.1"),
        )
        response: Any = None
        if at_once:
            response = await _begin(partial(application.begin, match, request, writer), writer.context)
        if type(response) is HttpResponse:
            await writer.send(response)
        else:
            # In a task of its own, because the engine cancels the tasks of calls when it closes.
            await _until_disconnect(response or application.answer(match, request, writer), writer)
    except (DragomanError, HttpError) as error:
        protocol, path = match.protocol if match else None, unquote(relative_path(scope))
        version = scope.get("http_version", "1.1")
        summary = RequestSummary(scope["method"], path, writer.headers, protocol, writer.context, client(), version)
        await writer.send(application.reject(error, summary))


async def _begin(begin: Callable[[], Any], context: Context) -> Any:
    """Return the result of `Application.begin`, called outside of the task of this request, which is the ASGI server's.

    The engine cancels the task in which a call was begun, and a call that is begun in none gets one of its own.
    """
    loop = asyncio.get_running_loop()
    begun: asyncio.Future[Any] = loop.create_future()
    running = running_in_thread()

    def call() -> None:
        if begun.cancelled():
            return
        running.context = context
        try:
            response = begin()
        except BaseException as error:
            begun.set_exception(error)
        else:
            begun.set_result(response)
        finally:
            running.context = ()

    loop.call_soon(call, context=copy_context())
    try:
        return await begun
    except asyncio.CancelledError:
        if not begun.cancelled() and asyncio.iscoroutine(response := begun.result()):
            response.close()
        raise


async def _until_disconnect(answering: Coroutine[Any, Any, None], writer: AsgiRequest) -> None:
    """Run `answering` to its end and cancel it if the client disconnects or this task is cancelled."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(answering, context=variables_of(writer.context))
    disconnect = loop.create_task(writer.wait_for_disconnect())
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        writer.is_disconnected = writer.is_disconnected or not task.done()
    finally:
        disconnect.cancel()
        task.cancel()  # does nothing if it is done
        # An exception of `receive` is the server's, which then closes the connection itself.
        await asyncio.gather(task, disconnect, return_exceptions=True)


def _client_host(scope: Scope) -> str:
    client = scope.get("client")
    return without_mapping(client[0]) if client else ""


def relative_path(scope: Scope) -> str:
    """Return the path of a request below the mount point (`root_path`), still percent-encoded."""
    raw = scope.get("raw_path")
    path: str = raw.decode("latin-1").partition("?")[0] if raw else quote(scope["path"])
    root = scope.get("root_path", "").strip("/")
    if root:
        count = root.count("/") + 2
        parts = path.split("/", count)
        if unquote("/".join(parts[1:count])) == root:
            return "/" + "/".join(parts[count:])
    return path


def _merge_headers(fields: Any) -> dict[str, str]:
    """RFC 9110, 5.3: fields with one name are one list."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in fields:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
