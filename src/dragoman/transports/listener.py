"""Accepts connections and detects their protocol, so that one port serves HTTP/1.1, HTTP/2 and gRPC.

A wire is a function from the listener to a `ListenerConnection`, a protocol for transports of asyncio or uvloop: an
`asyncio.BufferedProtocol` or a plain `asyncio.Protocol`. With HTTP/1.1 alone it gets connections at once. With HTTP/2
too, ALPN decides over TLS; without TLS the first 24 bytes do, a preface that no request of HTTP/1.1 begins with (RFC
9113, 3.4). The connection is then made as if it were new: `connection_made(transport)`, and `begin(data)` with the
bytes that have been read.

A connection calls `listener.remove(self)` when it is closed and `listener.admits(self, transport)` when it is made, to
learn whether it may serve more than health checks. It uses `listener.loop`, `listener.wheel` for its timeouts and
`listener.leaving`: while that is true, a new HTTP/1.1 connection closes after its first response.
"""

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from dragoman.access.certificates import CertificateId, certificate_id
from dragoman.system.sockets import listening_socket
from dragoman.transports.clients import Reserve, Warnings
from dragoman.transports.connection_age import ConnectionAges
from dragoman.transports.counters import TransportCounters
from dragoman.transports.limits import Limits
from dragoman.transports.timer_wheel import TimerWheel

log = logging.getLogger("dragoman.http")

# Listening sockets of the service manager, by the address of the settings that each stands for.
Inherited = Mapping[tuple[str, int], socket.socket]
NONE_INHERITED: Inherited = MappingProxyType({})

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_BACKLOG = 2048
# Connections accepted in an iteration of the event loop.
_READ_TURNS = 3  # of the event loop, in which it reads what new connections have sent
_ACCEPTED_AT_ONCE = 64
# Bytes read at a time to detect the protocol.
_DETECTION_BYTES = 4096
# Time for connections to end once their work has been cancelled.
_CANCEL_S = 0.5


class ListenerConnection(Protocol):
    """One connection of a protocol."""

    def connection_made(self, transport: Any) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed; it calls `listener.remove`."""

    def begin(self, data: bytes) -> None:
        """Handle bytes that were read to detect the protocol."""

    def announce_close(self) -> None:
        """Close after the next response, which announces it, where the protocol can announce it without a loss."""

    def retire(self) -> None:
        """Close at a moment at which no request can be lost: after the next response that announces it."""

    def drain(self) -> None:
        """Accept no more requests, and close after the current response; at once if there is none."""

    def cancel(self) -> None:
        """Cancel the current request, respond with an error, and close."""

    def abort(self) -> None:
        """Close at once."""


Wire = Callable[["Listener"], ListenerConnection]


def end_output(transport: Any) -> bool:
    """Tell the client that no more bytes follow, while it may still send some; return False over TLS, which cannot."""
    if not transport.can_write_eof():
        return False
    with suppress(RuntimeError, OSError):  # the client has reset the connection
        transport.write_eof()
    return True


class Listener:
    """Listens on some addresses and keeps all connections from there."""

    def __init__(
        self,
        http1: Wire,
        http2: Wire | None = None,
        *,
        limits: Limits,
        tls: ssl.SSLContext | None = None,
        counters: TransportCounters | None = None,
    ) -> None:
        self._counters = counters or TransportCounters()
        self._counters.open_connections.append(lambda: len(self._open))
        self.loop = asyncio.get_running_loop()
        self.limits = limits
        shortest_s = min(limits.header_timeout_s, limits.body_timeout_s, limits.write_timeout_s)
        shortest_s = min(shortest_s, limits.keep_alive_timeout_s, limits.max_connection_age_s or math.inf)
        self.wheel = TimerWheel(self.loop, shortest_s)
        self._ages = ConnectionAges(limits, self.wheel)
        self._http1 = http1
        self._http2 = http2
        self._tls = tls
        if tls is not None:
            tls.set_alpn_protocols(["h2", "http/1.1"] if http2 is not None else ["http/1.1"])
        self._servers: list[asyncio.Server] = []
        self._bound: list[tuple[socket.socket, Mapping[str, Any]]] = []
        self._handed_over: set[socket.socket] = set()  # by a service manager, which keeps them open
        self._open: set[ListenerConnection] = set()
        self._has_certificates = tls is not None and tls.verify_mode != ssl.CERT_NONE
        self._certificates: dict[ListenerConnection, CertificateId] = {}  # of clients
        self._accepting: set[socket.socket] = set()  # whose next connections are accepted in the next iteration
        self._connecting: set[asyncio.Task[None]] = set()
        self.leaving = self.draining = False
        self.warnings = Warnings(log, self.loop)
        self._reserve = Reserve(limits, self.warnings)
        self._empty = asyncio.Event()

    async def start(
        self, addresses: Sequence[tuple[str, int]], *, shared: bool = False, inherited: Inherited = NONE_INHERITED
    ) -> list[int]:
        """Listen and return the bound ports. Raises OSError if an address cannot be bound."""
        sockets = bind_sockets(addresses, shared=shared, inherited=inherited)
        self._handed_over = {*inherited.values()} & {*sockets}
        options: dict[str, Any] = {}
        if self._tls is not None:
            options = {"ssl": self._tls, "ssl_handshake_timeout": self.limits.header_timeout_s}
            options["ssl_shutdown_timeout"] = self.limits.header_timeout_s
        for bound in sockets:
            bound.setblocking(False)
            factory = partial(self._accept_first, bound, options)
            waits = bound in self._handed_over
            server = await self.loop.create_server(
                factory, sock=bound, backlog=_BACKLOG, start_serving=not waits, **options
            )
            self._servers.append(server)
            self._bound.append((bound, options))
        return [s.getsockname()[1] for s in sockets]

    async def begin_accepting(self) -> None:
        """Accept connections of inherited sockets, which have waited until the models are loaded."""
        for server, (bound, _) in zip(self._servers, self._bound, strict=True):
            if bound in self._handed_over:
                await server.start_serving()

    def begin_leave(self) -> None:
        """Announce with each response that its connection closes, also on new ones, and close no other.

        Proxies keep connections for long. A request that one sends on a connection while the server closes it is lost,
        and a POST is not sent again (RFC 9110, 9.2.2): so they are replaced while the server still answers.
        """
        self.leaving = True
        for connection in [*self._open]:
            connection.announce_close()

    def begin_drain(self) -> None:
        """Close idle connections, and every other one after its next response; new ones are still accepted."""
        self.leaving = self.draining = True
        self._leave_to_successor()
        self._drain_after(_READ_TURNS, [*self._open])

    def _leave_to_successor(self) -> None:
        """Accept no more connections of sockets that the service manager keeps open: they wait for the next process."""
        for server, (bound, _) in [*zip(self._servers, self._bound, strict=True)]:
            if bound in self._handed_over:
                server.close()
                self._servers.remove(server)
        self._bound = [each for each in self._bound if each[0] not in self._handed_over]

    def _drain_after(self, turns: int, connections: list[ListenerConnection]) -> None:
        """Drain connections once what their clients have sent is read: else it would be lost, and they be reset."""
        if turns:
            self.loop.call_soon(self._drain_after, turns - 1, connections)
            return
        for connection in connections:
            if connection in self._open:
                connection.drain()

    async def stop(self, grace_s: float) -> None:
        """Accept no new connection and let requests in flight finish, for at most `grace_s` seconds."""
        await self._accept_waiting()
        for server in self._servers:
            server.close()
        for end, wait_s in (("drain", max(grace_s, 0.001)), ("cancel", _CANCEL_S), ("abort", _CANCEL_S)):
            for connection in [*self._open]:
                getattr(connection, end)()
            try:
                async with asyncio.timeout(wait_s):
                    while self._open:
                        self._empty.clear()
                        await self._empty.wait()
            except TimeoutError:
                continue
            break
        self.wheel.close()
        self.warnings.close()

    def abort_revoked(self, revoked: frozenset[CertificateId]) -> None:
        """Close the connections of clients whose certificates have been revoked."""
        for connection, certificate in [*self._certificates.items()]:
            if certificate in revoked:
                log.warning("connection closed, the client's certificate is revoked")
                connection.abort()

    def remove(self, connection: ListenerConnection) -> None:
        self._open.discard(connection)
        self._certificates.pop(connection, None)
        self._ages.remove(connection)
        self._reserve.forget(connection)
        if not self._open:
            self._empty.set()

    def open(self, wire: Wire) -> ListenerConnection:
        connection = wire(self)
        self.add(connection)
        return connection

    def _accept_first(self, bound: socket.socket, options: Mapping[str, Any]) -> Any:
        """Return the protocol of a connection that the event loop accepted, and accept those that wait behind it.

        uvloop accepts one in an iteration, so that many clients that come at once with large requests would keep those
        behind them waiting for as many iterations.
        """
        if bound not in self._accepting:
            self._accept_later(bound, options)
        return self._accept()

    def _accept_later(self, bound: socket.socket, options: Mapping[str, Any]) -> None:
        self._accepting.add(bound)
        self.loop.call_soon(self._accept_rest, bound, options)

    def _accept_rest(self, bound: socket.socket, options: Mapping[str, Any]) -> None:
        self._accepting.discard(bound)
        with suppress(OSError):  # none waits, or the process may have no more files
            for _ in range(_ACCEPTED_AT_ONCE):
                descriptor = self._accept_one(bound, options)
                if self._reserve.is_out_of_files(descriptor):
                    break  # without a free descriptor, uvloop resets every connection that waits
            else:
                self._accept_later(bound, options)

    def _accept_one(self, bound: socket.socket, options: Mapping[str, Any]) -> int:
        """Accept a connection that waits; return its file descriptor. Raises OSError."""
        accepted, _ = bound.accept()
        accepted.setblocking(False)
        task = self.loop.create_task(self._connect(accepted, options))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return accepted.fileno()

    async def _accept_waiting(self) -> None:
        """Accept the connections that were made before now, and read what they have sent.

        The system resets those that wait when a listening socket is closed, although their clients believe to be
        connected. Only those made in the instant between the last accept and the close are still reset.
        """
        for bound, options in self._bound:
            with suppress(OSError):  # none waits, or the process may have no more files
                for _ in range(_BACKLOG):
                    self._accept_one(bound, options)
        if self._connecting:
            await asyncio.wait({*self._connecting}, timeout=_CANCEL_S)
        for _ in range(_READ_TURNS):
            await asyncio.sleep(0)

    async def _connect(self, accepted: socket.socket, options: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the client has left, or failed to agree on TLS
            await self.loop.connect_accepted_socket(self._accept, accepted, **options)

    def _accept(self) -> Any:
        self._counters.accepted += 1
        if self._http2 is None and self._tls is None:
            return self.open(self._http1)
        return _ProtocolDetector(self, self._http1, self._http2)

    def add(self, connection: ListenerConnection) -> None:
        self._open.add(connection)
        self._ages.add(connection, self.loop.time())

    def admits(self, connection: ListenerConnection, transport: Any) -> bool:
        """Return whether a connection that has just been made may send any request.

        If not, the server has too many: the connection is for one health check and may be aborted for another one.
        """
        encrypted = transport.get_extra_info("ssl_object") if self._has_certificates else None
        if encrypted is not None and (certificate := encrypted.getpeercert(binary_form=True)):
            self._certificates[connection] = certificate_id(certificate)
        is_admitted = self._reserve.admits(connection, transport, len(self._open))
        if type(connection) is not _ProtocolDetector:  # whose successor is counted
            self._counters.rejected["connections"] += not is_admitted
        return is_admitted


class _ProtocolDetector(asyncio.BufferedProtocol):
    """A connection whose protocol is not known yet. Over TLS the handshake may fail before it is made."""

    slot = 0
    # A transport uses the buffer at once after it has asked for it, so that connections can share one.
    _space = memoryview(bytearray(_DETECTION_BYTES))

    def __init__(self, listener: Listener, http1: Wire, http2: Wire | None) -> None:
        self._listener = listener
        self._http1 = http1
        self._http2 = http2
        self._transport: Any = None
        self._due_s = 0.0
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._http2 is None:
            self._switch_to(self._http1)
            return
        encrypted = transport.get_extra_info("ssl_object")
        if encrypted is not None and encrypted.selected_alpn_protocol() == "h2":
            self._switch_to(self._http2)
            return
        self._listener.add(self)
        self._listener.admits(self, transport)
        self._due_s = self._listener.loop.time() + self._listener.limits.header_timeout_s
        self._listener.wheel.watch(self, self._due_s)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._space

    def buffer_updated(self, nbytes: int) -> None:
        self._received += self._space[:nbytes]
        if not PREFACE.startswith(self._received[: len(PREFACE)]):
            self._switch_to(self._http1)
        elif len(self._received) >= len(PREFACE):
            assert self._http2 is not None
            self._switch_to(self._http2)

    def _switch_to(self, wire: Wire) -> None:
        self.connection_lost(None)
        transport, came = self._transport, self._received
        connection = self._listener.open(wire)
        transport.set_protocol(connection)
        # uvloop checks only here whether the protocol is a BufferedProtocol.
        transport.pause_reading()
        transport.resume_reading()
        connection.connection_made(transport)
        if came:
            connection.begin(came)

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.wheel.forget(self)
        self._listener.remove(self)

    def check_timeouts(self, now_s: float) -> float:
        if now_s >= self._due_s:
            self._transport.close()
        return self._due_s

    def begin(self, data: bytes) -> None:
        raise AssertionError("a detector has no predecessor")

    def announce_close(self) -> None:
        """Nothing: the connection of the protocol will ask the listener."""

    def retire(self) -> None:
        """Nothing: the time for the first bytes is shorter."""

    def drain(self) -> None:
        self._transport.close()

    def cancel(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


def bind_sockets(
    addresses: Sequence[tuple[str, int]], *, shared: bool = False, inherited: Inherited = NONE_INHERITED
) -> list[socket.socket]:
    """Return sockets that listen on all addresses, inherited ones first. Raises OSError if one cannot be bound."""
    sockets: list[socket.socket] = []
    try:
        for host, port in addresses:
            bound = inherited.get((host, port)) or listening_socket(host, port, backlog=_BACKLOG, shared=shared)
            # Connections inherit it. asyncio does not set it, and bodies would wait 40 ms for the acknowledgement of
            # the headers.
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sockets.append(bound)
    except OSError:
        for bound in sockets:
            bound.close()
        raise
    return sockets
