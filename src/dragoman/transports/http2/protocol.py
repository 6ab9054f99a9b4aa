"""An HTTP/2 connection on its socket: reading, writing and timeouts.

`Http2Connection` handles the bytes. This class reads them, large bodies directly to where they stay (`_direct`), writes
what it returns, and checks timeouts: soon while something is expected from the client, else rarely. A connection has
no stage of its own: `Http2Connection.phase` is its state. What is here are independent facts of the socket.

    reading pauses while                                      known by
    the client sends, and does not read responses             `_full`
    received bytes are left for later iterations of the loop  `_behind`
    much was read from all connections in this iteration      `_read_limiter`

    since the last check the client    known by                         then
    has sent or read something         `_has_received`, `moved_s`       nothing
    has been silent, for long enough   neither                          it is sent a PING: `_has_pinged`
    has not responded to the PING      `_has_pinged`                    the connection is aborted
"""

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

from dragoman.access.certificates import peer_certificate
from dragoman.core.sizes import INLINE
from dragoman.formats.http2 import frames
from dragoman.transports.clients import client_address, client_host
from dragoman.transports.executor import MessageExecutor, ReadLimiter
from dragoman.transports.http2.connection import Http2Connection
from dragoman.transports.http2.limits import Http2Limits
from dragoman.transports.http2.stream import CLOSED, DRAINING, ENDING, OPEN, Buffer, Http2Service
from dragoman.transports.listener import Listener, end_output

log = logging.getLogger("dragoman.http2")

# Bytes per read, except of large bodies: requests in one read are answered before other connections have a turn.
_READ_BYTES = 1 << 16
# Bytes in the transport's buffer before bodies wait in their streams, and before reading pauses for control frames.
_HIGH_WATER = 1 << 20
_MOST_WAITING = _HIGH_WATER + (1 << 18)
# Seconds for a client to receive the error that ends its connection, and to acknowledge a PING.
_LINGER_S = 2.0
_ANSWER_S = 20.0


class Http2Protocol(asyncio.BufferedProtocol):
    """One connection. It reads into `scratch`, which is processed at once, so that all connections can share it."""

    def __init__(
        self,
        listener: Listener,
        service: Http2Service,
        http2_limits: Http2Limits,
        scratch: memoryview,
        executor: MessageExecutor,
    ) -> None:
        self.slot = 0
        self._counters = executor.counters
        self._listener = listener
        self._limits = limits = listener.limits
        self._scratch = scratch
        self._loop = listener.loop
        self._transport: Any = None
        self._direct = False
        self._paused_s = 0.0  # since when the client has read nothing; 0 while the transport has room
        self._unread = 0  # bytes that were unread then
        self._reading = True
        self._read_limiter = ReadLimiter(executor.budget, self._read_or_wait)
        self._full = False  # the client sends without reading responses
        self._behind = False  # received bytes are not handled yet
        self._has_received = False
        self._has_pinged = False
        times_s = limits.header_timeout_s, limits.body_timeout_s, limits.write_timeout_s
        self._shortest_s = min(*times_s, limits.grpc_stream_idle_timeout_s or math.inf) / 5
        self.connection = Http2Connection(
            service, http2_limits, self._write, self._close, self._loop.time, executor.bodies.count_unread
        )

    # --- the socket ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self.connection.phase == CLOSED:  # the server stopped before the connection was made
            transport.close()
            return
        self.connection.host, self.connection.address = client_host(transport), client_address(transport)
        self.connection.certificate = peer_certificate(transport)
        self.connection.reserved = not self._listener.admits(self, transport)
        self._made_s = self._received_s = self.connection.sender.now_s = self._loop.time()
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        self.connection.start()
        self._watch_closely()

    def begin(self, data: bytes) -> None:
        """Handle bytes that were read from the socket before this protocol was chosen."""
        self._counters.received += len(data)
        self._handle_input(data)

    def get_buffer(self, sizehint: int) -> memoryview:
        room = self.connection.buffer() if self.connection.body.left else None
        self._direct = room is not None
        return self._scratch if room is None else room

    def buffer_updated(self, size: int) -> None:
        self._counters.received += size
        if self._direct:
            self._handle_input(b"", size)
        else:
            self._handle_input(bytes(self._scratch[:size]))
        if size >= INLINE:
            self._read_limiter.count(size)

    def _handle_input(self, data: bytes, filled: int = 0) -> None:
        connection = self.connection
        connection.sender.now_s = now_s = self._loop.time()
        self._has_received = True
        try:
            connection.receive(data, filled)
        except Exception:
            log.exception("a connection failed")
            connection.fail(frames.INTERNAL_ERROR, "internal error")
        if connection.reader.more is not self._behind:
            self._behind = connection.reader.more
            self._read_or_wait()
        if connection.reader.more:
            self._loop.call_soon(self._go_on)
        if connection.reserved and connection.last and connection.phase == OPEN:
            self.drain()
        if connection.streams or connection.incomplete_since_s < now_s:
            self._watch_closely()

    def _go_on(self) -> None:
        if self.connection.reader.more and self.connection.phase != CLOSED:
            self._handle_input(b"")

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.wheel.forget(self)
        self.connection.on_connection_lost()
        self._listener.remove(self)

    # --- writing -------------------------------------------------------------------------------------------------

    def _write(self, buffers: list[Buffer]) -> None:
        transport = self._transport
        if len(buffers) == 1:
            self._counters.sent += len(buffers[0])
            transport.write(buffers[0])
        else:
            self._counters.sent += sum(map(len, buffers))
            transport.writelines(buffers)
        if self._paused_s and not self._full and transport.get_write_buffer_size() > _MOST_WAITING:
            self._full = True
            self._read_or_wait()

    def _read_or_wait(self) -> None:
        reading = not (self._full or self._behind or self._read_limiter.is_paused)
        if reading is not self._reading and not self._transport.is_closing():
            self._reading = reading
            (self._transport.resume_reading if reading else self._transport.pause_reading)()

    def pause_writing(self) -> None:
        self._paused_s = self._loop.time()
        self._unread = self._transport.get_write_buffer_size()
        self.connection.sender.paused = True
        self._watch_closely()

    def resume_writing(self) -> None:
        self._paused_s = 0.0
        self.connection.sender.paused = False
        self._full = False
        self._read_or_wait()
        self.connection.sender.pump()

    def _close(self) -> None:
        """Close once everything is written and the client has had time to read it."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if end_output(transport):
            self._loop.call_later(_LINGER_S, transport.abort)
        else:
            transport.close()

    def abort(self) -> None:
        """Close the connection without waiting for unsent data."""
        if self._transport is not None:
            self._transport.abort()

    # --- stopping -----------------------------------------------------------------------------------

    def announce_close(self) -> None:
        """Nothing: the GOAWAY of `drain` loses no request of a client that heeds it."""

    def retire(self) -> None:
        self.connection.retire()
        if self.connection.phase == DRAINING:
            self._loop.call_later(_LINGER_S, self.connection.refuse_streams)  # if no PING is acknowledged

    def drain(self) -> None:
        if self._transport is None:  # still in its TLS handshake
            self.connection.on_connection_lost()
            self._listener.remove(self)
            return
        has_waited = self.connection.phase == ENDING  # until the calls had ended; responses may still be on their way
        self.connection.drain()
        if self.connection.phase != ENDING or has_waited:
            self._loop.call_later(_LINGER_S, self.connection.refuse_streams)  # if no PING is acknowledged

    def cancel(self) -> None:
        for stream in list(self.connection.streams.values()):
            if stream.handler is not None:
                stream.handler.cancel()
        self.connection.refuse_streams()

    # --- timeouts ---------------------------------------------------------------------------------------------------

    def _watch_closely(self) -> None:
        """Check timeouts soon, because something is expected from the client."""
        self._listener.wheel.watch(self, self.connection.sender.now_s + self._shortest_s)

    def check_timeouts(self, now_s: float) -> float:
        """Apply the timeouts; return when to check again."""
        connection = self.connection
        if connection.phase == CLOSED:
            return 0.0
        connection.sender.now_s = now_s
        self._check(now_s)
        waits = (
            connection.streams
            or not connection.settled
            or connection.phase != OPEN
            or self._paused_s
            or self._has_pinged
        )
        if waits or connection.incomplete_since_s < now_s:
            return now_s + self._shortest_s
        return now_s + self._limits.keep_alive_timeout_s

    def _check(self, now_s: float) -> None:
        connection, limits = self.connection, self._limits
        if not connection.settled and now_s - self._made_s > limits.header_timeout_s:
            connection.fail(frames.SETTINGS_TIMEOUT, f"SETTINGS not received within {limits.header_timeout_s} s")
        elif now_s - connection.incomplete_since_s > limits.header_timeout_s:
            connection.fail(frames.ENHANCE_YOUR_CALM, f"a frame was not complete within {limits.header_timeout_s} s")
        elif self._paused_s and not self._reads(now_s) and now_s - self._paused_s > limits.write_timeout_s:
            self._listener.warnings.log("client disconnected: it read nothing for %s s", limits.write_timeout_s)
            self.abort()
        else:
            self._check_streams(now_s)
            self._check_alive(now_s)

    def _reads(self, now_s: float) -> bool:
        """Whether the client has read some of what the transport holds, since this was last called or it paused."""
        unread = self._transport.get_write_buffer_size()
        if unread >= self._unread:
            return False
        self._unread, self._paused_s = unread, now_s
        self.connection.sender.moved_s = now_s
        return True

    def _check_streams(self, now_s: float) -> None:
        connection, timeout_s = self.connection, self._limits.write_timeout_s
        for stream in list(connection.streams.values()):
            if stream.pending and now_s - connection.sender.unread_since_s(stream) > timeout_s:
                self._listener.warnings.log("stream reset: the client read nothing of it for %s s", timeout_s)
                connection.abort(stream, frames.CANCEL)
            elif not stream.remote_ended and stream.handler is not None:
                stream.handler.check_timeout(now_s)

    def _check_alive(self, now_s: float) -> None:
        """Send a PING to a client that has been silent for long; abort the connection if it does not respond."""
        if (
            self._has_received or self.connection.sender.moved_s > self._received_s
        ):  # one that reads is there, and a PING waits behind
            self._has_received, self._received_s, self._has_pinged = False, now_s, False
        elif self._has_pinged and now_s - self._received_s > self._limits.keep_alive_timeout_s + _ANSWER_S:
            self.abort()
        elif not self._has_pinged and now_s - self._received_s >= self._limits.keep_alive_timeout_s:
            self._has_pinged = True
            self.connection.ping()


def http2(service: Http2Service, limits: Http2Limits, executor: MessageExecutor) -> Callable[[Listener], Http2Protocol]:
    """Return a factory of connections for a listener."""
    scratch = memoryview(bytearray(_READ_BYTES))
    return lambda listener: Http2Protocol(listener, service, limits, scratch, executor)
