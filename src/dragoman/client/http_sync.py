"""Connections over blocking sockets, and coroutines whose awaited calls block the thread."""

import socket
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterable
from contextlib import suppress
from typing import TypeVar

from dragoman.client.http import Connection, HttpTransport, ResponseParser, is_stale
from dragoman.client.messages import Address, Deadline
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
    tls = address.tls_context()

    async def connect(address: Address, deadline: Deadline) -> Connection:
        return _Connection(address, tls, deadline)

    return HttpTransport(address, connect)


class _Connection:
    def __init__(self, address: Address, tls: ssl.SSLContext | None, deadline: Deadline) -> None:
        self._socket = socket.create_connection((address.host, address.port), timeout=deadline.left_s())
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=address.host)
        except OSError:
            self._socket.close()
            raise

    def begin(self, *, streams: bool) -> None:
        self.parser = ResponseParser(streams=streams)

    async def send(self, parts: Iterable[Buffer], deadline: Deadline) -> None:
        # A server that rejects a body may close before all of it is sent; its response can still be read.
        with suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                self._socket.settimeout(deadline.left_s())
                self._socket.sendall(part)

    async def more(self, deadline: Deadline) -> None:
        self._socket.settimeout(deadline.left_s())
        count = self._socket.recv_into(self.parser.buffer())
        if count:
            self.parser.bytes_received(count)
        elif not self.parser.end():
            raise ConnectionResetError("the connection was closed before the response was complete")

    def take(self) -> Buffer:
        return self.parser.take()

    def idle(self) -> None: ...

    def is_usable(self) -> bool:
        return not is_stale(self._socket.fileno())

    def abort(self) -> None:
        self._socket.close()

    def interrupt(self) -> None:
        with suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    async def wait_closed(self) -> None: ...
