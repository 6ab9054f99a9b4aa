"""uvicorn's HTTP/1.1 protocol with what it leaves open: limits on heads, slow clients, and word of who left."""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dragoman.transports.limits import Limits


class Departure:
    """Lets the code that answers a request know that its client has left; in the scope's `extensions`."""

    __slots__ = ("left", "notify")

    def __init__(self) -> None:
        self.left = False
        self.notify: Callable[[], Any] | None = None

    def __call__(self) -> None:
        self.left = True
        if self.notify is not None:
            self.notify()


EXTENSION = "dragoman.departure"


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    limits: ClassVar[Limits]
    _reading_head = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _fault_status = 400
    _departures: list[Departure]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._departures = []
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        for departure in self._departures:
            departure()

    def data_received(self, data: bytes) -> None:
        if self._reading_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._reading_head:
            self._stop_timer()
        elif self._head_bytes > self.limits.max_header_bytes and not self.transport.is_closing():
            self._refuse(431, f"the request head is larger than the limit of {self.limits.max_header_bytes} bytes")
        elif self._head_bytes:
            self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading_head = True
        departure = Departure()
        self._departures.append(departure)
        self.scope["extensions"] = {EXTENSION: departure}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        self._reading_head = False
        self._head_bytes = 0
        size = len(self.url) + sum(len(n) + len(v) + 4 for n, v in self.headers)
        if size > self.limits.max_header_bytes:
            self._fault_status = 431
            raise ValueError("head too large")  # the parser stops and calls send_400_response
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        del self._departures[:1]
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        if self._fault_status == 431:
            msg = f"the request head is larger than the limit of {self.limits.max_header_bytes} bytes"
        self._refuse(self._fault_status, msg)

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if self._reading_head and not self.transport.is_closing():
            self._refuse(408, f"the request head did not come within {self.limits.header_timeout_s} s")

    def _refuse(self, status: int, message: str) -> None:
        """Answer in the shape of every error and hang up."""
        body = orjson.dumps({"error": message})
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


def guarded(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol class for these limits."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits})
