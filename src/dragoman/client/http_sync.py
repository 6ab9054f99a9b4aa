"""Connections over sockets that block."""

import socket
import ssl
from collections.abc import Iterable
from contextlib import suppress

from dragoman.client.address import Address
from dragoman.client.exchange import Deadline
from dragoman.client.http import Connection, HttpTransport, stale
from dragoman.client.http1 import AnswerReader
from dragoman.formats.policy import Buffer


def transport(address: Address) -> HttpTransport:
    """May be used by several threads at once."""
    tls = address.tls_context()

    async def connected(address: Address, deadline: Deadline) -> Connection:
        return _Connection(address, tls, deadline)

    return HttpTransport(address, connected)


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
        self.reader = AnswerReader(streams=streams)

    async def send(self, parts: Iterable[Buffer], deadline: Deadline) -> None:
        # A server that refuses a body may close before all of it is sent: its answer then waits to be read.
        with suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                self._socket.settimeout(deadline.left_s())
                self._socket.sendall(part)

    async def more(self, deadline: Deadline) -> None:
        self._socket.settimeout(deadline.left_s())
        count = self._socket.recv_into(self.reader.room())
        if count:
            self.reader.wrote(count)
        elif not self.reader.end():
            raise ConnectionResetError("the connection was closed before the whole answer was there")

    def taken(self) -> Buffer:
        return self.reader.taken()

    def idle(self) -> None: ...

    def usable(self) -> bool:
        return not stale(self._socket.fileno())

    def abort(self) -> None:
        self._socket.close()

    async def closed(self) -> None: ...
