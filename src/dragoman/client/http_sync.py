"""Connections over blocking sockets, and coroutines whose awaited calls block the thread."""

import socket
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from dragoman.client.http import Connect, Connection, HttpTransport, Parser, ResponseParser, is_stale
from dragoman.client.messages import Address, Deadline
from dragoman.core.errors import ServerError
from dragoman.formats.policy import Buffer

T = TypeVar("T")


def run_blocking(coroutine: Awaitable[T]) -> T:
    try:
        next(coroutine.__await__())
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a blocking client must not wait on an event loop")


def iterate_blocking(responses: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    try:
        while True:
            yield run_blocking(anext(responses))
    except StopAsyncIteration:
        return
    finally:
        run_blocking(responses.aclose())


async def sleep(delay: float) -> None:
    time.sleep(delay)  # noqa: ASYNC251 - no event loop runs here


def connect_transport(address: Address) -> HttpTransport:
    """Return a thread-safe transport."""
    return HttpTransport(address, connector(address, ResponseParser))


def connector(address: Address, parser: Callable[[], Parser]) -> Connect:
    """Return a function that connects to a server; `parser` returns that of a connection."""
    tls = address.tls_context()

    async def connect(address: Address, deadline: Deadline) -> Connection:
        return _Connection(address, tls, deadline, parser())

    return connect


class _Connection:
    def __init__(self, address: Address, tls: ssl.SSLContext | None, deadline: Deadline, parser: Parser) -> None:
        self.parser: Any = parser
        self._socket = socket.create_connection((address.host, address.port), timeout=deadline.left_s())
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=address.host)
        except OSError:
            self._socket.close()
            raise

    def begin(self, *, streams: bool) -> None:
        self.parser = self.parser.next(streams=streams)

    async def send(self, parts: Iterable[Buffer], deadline: Deadline) -> None:
        # A server that rejects a body may close before all of it is sent; its response can still be read.
        with suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                self._socket.settimeout(deadline.left_s())
                self._socket.sendall(part)

    async def more(self, deadline: Deadline) -> None:
        self._socket.settimeout(deadline.left_s())
        self._read()

    def _read(self) -> None:
        count = self._socket.recv_into(self.parser.buffer())
        if count:
            self.parser.bytes_received(count)
        elif not self.parser.end():
            raise ConnectionResetError("the connection was closed before the response was complete")

    def take(self) -> Buffer:
        data: Buffer = self.parser.take()
        return data

    def idle(self) -> None: ...

    async def is_usable(self) -> bool:
        if not self.parser.is_duplex:
            return not is_stale(self._socket.fileno())
        try:
            self._socket.settimeout(0)
            while is_stale(self._socket.fileno()) and self.parser.keep_alive:
                self._read()
        except (ssl.SSLWantReadError, BlockingIOError):  # a part of a TLS record
            pass
        except (OSError, ServerError):
            return False
        try:
            for part in self.parser.body():
                self._socket.sendall(part)
        except OSError:  # also if only a part of a frame could be sent
            return False
        return bool(self.parser.keep_alive)

    def abort(self) -> None:
        self._socket.close()

    def interrupt(self) -> None:
        with suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    async def wait_closed(self) -> None: ...
