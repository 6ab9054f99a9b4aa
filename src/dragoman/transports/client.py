"""The caller of one request over ASGI: its body comes in and its answer goes out, with a patience that has bounds."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from dragoman.protocols.wire import Buffer, Headers, HttpFault, HttpResponse
from dragoman.transports.bodies import Bodies
from dragoman.transports.guard import Departure
from dragoman.transports.limits import Limits

log = logging.getLogger("dragoman.http")

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

# Answers up to this size are put together in one write.
_SMALL = 1 << 16
# Larger ones go in pieces, so that a client which reads slowly shows that it does read.
_PIECE = 1 << 18
# How long a client whose body was refused may go on sending before it is cut off.
_LINGER_S = 2.0


class Client:
    """One request's caller. Its methods raise CancelledError when it leaves, or does not read for too long."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, departure: Departure, limits: Limits, bodies: Bodies
    ) -> None:
        self.headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"]}
        self.started = False
        self._receive = receive
        self._send = send
        self._departure = departure
        self._limits = limits
        self._bodies = bodies
        self._held = 0
        self._unread = False
        self.closes = False  # the connection ends with this answer

    # --- in --------------------------------------------------------------------------------------------------

    async def body(self) -> bytes:
        """The whole body as it came. Raises HttpFault where it is too large or too slow."""
        limit = self._limits.max_body_bytes
        length = int(self.headers.get("content-length", 0))
        if not length and "transfer-encoding" not in self.headers:
            return b""
        self._unread = True
        if length > limit:
            raise _too_large(limit)
        return await self._received()

    def _hold(self, size: int) -> None:
        self._bodies.take(size)
        self._held += size

    def give_back(self) -> None:
        """The body is no longer needed."""
        self._bodies.give_back(self._held)
        self._held = 0

    async def _received(self) -> bytes:
        limits = self._limits
        parts: list[bytes] = []
        total = 0
        cycle = self._departure.cycle
        if cycle is not None and not cycle.more_body and len(cycle.body) <= limits.max_body_bytes:
            self._unread = False  # it is all here already, and needs no timer; what waits to be read is bounded
            body: bytes = (await self._receive())["body"]
            return body
        start = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(limits.body_timeout_s) as timer:
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise asyncio.CancelledError
                    self._unread = message["more_body"]
                    parts.append(message["body"])
                    total += len(parts[-1])
                    if total > limits.max_body_bytes:
                        raise _too_large(limits.max_body_bytes)
                    self._hold(len(parts[-1]))
                    if not self._unread:
                        return parts[0] if len(parts) == 1 else b"".join(parts)
                    timer.reschedule(start + limits.body_timeout_s + total / (1 << 16))
        except TimeoutError as fault:
            text = f"the body came too slowly: {total} bytes in {limits.body_timeout_s} s"
            raise HttpFault(408, text, (("connection", "close"),)) from fault

    # --- out -------------------------------------------------------------------------------------------------

    @property
    def left(self) -> bool:
        return self._departure.left

    async def send(self, response: HttpResponse) -> None:
        parts: Sequence[Buffer] = response.body
        size = sum(map(len, parts))
        length = () if response.status == 204 else (("content-length", str(size)),)
        await self.start(response.status, (*response.headers, *length))
        if self._unread:
            await self._linger(b"".join(parts))
        elif size <= _SMALL:
            await self.end(parts[0] if len(parts) == 1 else b"".join(parts))
        else:
            for whole in parts:
                view = memoryview(whole)
                for at in range(0, len(view), _PIECE):
                    await self.write(view[at : at + _PIECE])
            await self.end(b"")

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        if self.closes and ("connection", "close") not in headers:
            headers = (*headers, ("connection", "close"))
        told = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers]
        await self._patiently({"type": "http.response.start", "status": status, "headers": told})

    async def write(self, part: Buffer) -> None:
        await self._patiently({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self, part: Buffer) -> None:
        await self._patiently({"type": "http.response.body", "body": part, "more_body": False})

    async def _patiently(self, message: dict[str, Any]) -> None:
        cycle = self._departure.cycle
        if cycle is not None and not cycle.flow.write_paused:
            await self._send(message)  # there is room, so it does not wait
            return
        try:
            async with asyncio.timeout(self._limits.write_timeout_s):
                await self._send(message)
        except TimeoutError:
            log.warning("a client did not read its answer for %s s", self._limits.write_timeout_s)
            self.hang_up()
            raise asyncio.CancelledError from None

    async def _linger(self, answer: bytes) -> None:
        """Answer, and read on for a while: to hang up on a client that still sends would lose it the answer."""
        await self.write(answer)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await self._receive()).get("more_body"):
                    pass
        await self.end(b"")

    def hang_up(self) -> None:
        self._departure.hang_up()


def _too_large(limit: int) -> HttpFault:
    return HttpFault(413, f"the body is larger than the limit of {limit} bytes", (("connection", "close"),))
