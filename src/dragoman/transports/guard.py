"""uvicorn's HTTP/1.1 protocol with what it leaves open: limits on heads, slow clients, and word of who left."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dragoman.transports.host import is_host
from dragoman.transports.limits import Limits


class Departure:
    """Lets the code that answers a request know that its client has left; in the scope's `extensions`."""

    __slots__ = ("cycle", "left", "notify")

    def __init__(self) -> None:
        self.left = False
        self.notify: Callable[[], Any] | None = None
        self.cycle: Any = None  # uvicorn's, of this request and its answer

    def __call__(self) -> None:
        self.left = True
        if self.cycle is not None:
            self.cycle.disconnected = True
        if self.notify is not None:
            self.notify()

    def hang_up(self) -> None:
        """Cut the connection at once, without waiting for a client to read what is still on its way."""
        self.notify = None  # the one who hangs up knows
        if self.cycle is not None:
            self.cycle.transport.abort()
        self()


EXTENSION = "dragoman.departure"
_LINGER_S = 2.0
_OFFER = (b"connection", b"upgrade", b"http2-settings")


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    limits: ClassVar[Limits]
    _reading_head = True
    _heard = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _head_too_large = False
    _refusal: tuple[int, str] | None = None
    _departures: list[Departure]

    # --- the connection --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._departures = []
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        for departure in self._departures:
            departure()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # to close would wait for a client that does not even read its last answer
        else:
            super().timeout_keep_alive_handler()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._heard = True
        if self._reading_head:
            self._head_bytes += len(data)
            self._await_head()
        self._parse(data)
        if self._reading_head and self._head_bytes > self.limits.max_header_bytes:
            self._refuse_head()

    # --- the parser ------------------------------------------------------------------------------------------

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = self._declined() + data[offer.args[0] :]
            except httptools.HttpParserError:
                self.send_400_response("the request is not valid HTTP/1.1")
                return

    def _declined(self) -> bytes:
        """The head as it would be without its offer to speak HTTP/2 or WebSocket, after which the parser stops.

        Java's own client makes that offer by default, and goes on in HTTP/1.1 where it is passed over.
        """
        lines = [b"%s %s HTTP/1.1" % (self.parser.get_method(), self.url)]
        lines += [b"%s: %s" % (n, v) for n, v in self.headers if n not in _OFFER]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()  # where it came in one piece with the end of another

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(n) + len(v) + 4 for n, v in self.headers)
        if size > self.limits.max_header_bytes:
            self._head_too_large = True
            raise ValueError("head too large")  # the parser stops and calls send_400_response
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("not a proxy")
        if not all(is_host(value.decode("latin-1")) for name, value in self.headers if name == b"host"):
            raise ValueError("not a host")
        if self.parser.should_upgrade():
            return  # comes again once the offer is declined
        self._stop_timer()
        self._reading_head = False
        self._head_bytes = 0
        departure = Departure()
        self.scope["extensions"] = {EXTENSION: departure}  # type: ignore[dict-item]
        super().on_headers_complete()
        departure.cycle = self.cycle
        self._departures.append(departure)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._reading_head = True

    def on_response_complete(self) -> None:
        del self._departures[:1]
        super().on_response_complete()
        if self._refusal is not None and not self._departures:
            self._refuse_now(*self._refusal)

    # --- refusals ----------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        if self._head_too_large:
            self._refuse_head()
        else:
            self._refuse(400, msg)

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self._heard:
            self.transport.close()
        elif self.flow.read_paused:  # we are the slow ones
            self._await_head()
        else:
            self._refuse(408, f"the request head did not come within {self.limits.header_timeout_s} s")

    def _refuse_head(self) -> None:
        self._refuse(431, f"the request head is larger than the limit of {self.limits.max_header_bytes} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Answer once what came before is answered; at once where it is the body of the one request under way."""
        self._stop_timer()
        if self.transport.is_closing() or self._refusal is not None:
            return
        self._refusal = status, message
        under_way = self._departures
        if not under_way:
            self._refuse_now(status, message)
        elif len(under_way) == 1 and not self._reading_head:
            if self.cycle.response_started:
                under_way[0].hang_up()
            else:
                self._refuse_now(status, message)
                under_way[0]()

    def _refuse_now(self, status: int, message: str) -> None:
        """Answer in the shape of every error and hang up."""
        if self.transport.is_closing():
            return
        body = orjson.dumps({"error": message})
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(line + head + body)
        if self.transport.can_write_eof():
            # To close at once would lose a client that still sends the answer.
            self.flow.resume_reading()
            self.transport.write_eof()
            self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()


def guarded(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol class for these limits."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": limits})
