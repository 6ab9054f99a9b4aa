"""A TCP connection between the server and a worker that has joined it: TLS, heartbeats, and how its loss is found."""

import array
import fcntl
import logging
import os
import select
import socket
import ssl
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from dragoman.workers.frames import Buffer, FrameKind, encode

log = logging.getLogger("dragoman.worker")

HEARTBEAT = bytes(encode(FrameKind.HEARTBEAT)[0])
_HEARTBEATS_PER_TIMEOUT = 10
_MAX_BUFFERS = 512  # that a channel passes at a time
_TLS_CHUNK = 256 * 1024  # bytes that are encrypted at a time
# Of the receive buffer: data that waits beyond it may have closed the window. Heartbeats alone do not come to it.
_FULL_SHARE = 0.25
# How long a worker whose server is gone may take to close its model.
_CLOSING_S = 2.0
# linux/tcp.h: milliseconds since data arrived are at this offset in `struct tcp_info`.
_TCP_INFO_SIZE = 104
_LAST_DATA_RECEIVED = struct.Struct("=I")
_LAST_DATA_RECEIVED_OFFSET = 52


def heartbeat_interval_s(timeout_s: float) -> float:
    """Return the interval of heartbeats for connections that are lost after `timeout_s` without one."""
    return timeout_s / _HEARTBEATS_PER_TIMEOUT


class Link:
    """A connected socket with the methods that a `Channel` uses, and heartbeats that any thread may send.

    received_s: when data was received last, as `time.monotonic()`.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self._lock = threading.Lock()  # SSL objects must not be used by several threads at the same time
        self._unsent = b""  # of a heartbeat that was sent in part
        self._announcement = b""  # a frame to be sent instead of the next heartbeat
        self._encrypting = b""  # TLS sends either all of this or none, and must get the same bytes again
        self._is_between_frames = True
        self.received_s = time.monotonic()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # an unreachable host: data not acknowledged within the timeout
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * timeout_s))

    def setblocking(self, blocking: bool) -> None:
        self._sock.setblocking(blocking)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        """Close the connection, also for copies of the socket."""
        with self._lock:
            self.shutdown()
            self._sock.close()

    def recv_into(self, buffer: memoryview) -> int:
        """Receive bytes; fewer than fit only if no more are there. Raises BlockingIOError if there are none."""
        with self._lock:
            count = self._sock.recv_into(buffer) if self._tls is None else self._decrypt_into(buffer)
        self.received_s = time.monotonic()
        return count

    def _decrypt_into(self, buffer: memoryview) -> int:
        """Receive records until the buffer is full or none is left: the socket does not show those already read."""
        count = 0
        with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while count < len(buffer):
                more = self._sock.recv_into(buffer[count:])
                if not more:
                    return count
                count += more
        if not count and len(buffer):
            raise BlockingIOError
        return count

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Send as much of some whole frames as the system accepts. Raises BlockingIOError if that is nothing."""
        with self._lock:
            if not self._send_rest():
                raise BlockingIOError
            sent = self._sock.sendmsg(buffers) if self._tls is None else self._encrypt(buffers)
            self._is_between_frames = len(buffers) < _MAX_BUFFERS and sent == sum(map(len, buffers))
            return sent

    def _encrypt(self, buffers: Sequence[Buffer]) -> int:
        if not self._encrypting:
            self._encrypting = b"".join(buffers)[:_TLS_CHUNK] if len(buffers) > 1 else bytes(buffers[0][:_TLS_CHUNK])
        self._is_between_frames = False
        try:
            sent = self._sock.send(self._encrypting)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        self._encrypting = self._encrypting[sent:]
        return sent

    def announce(self, frame: bytes) -> None:
        """Send a frame, now or with the next heartbeat; in any thread. Raises OSError if the connection is lost."""
        self._announcement = frame
        self.send_heartbeat()

    def send_heartbeat(self) -> None:
        """Send a heartbeat, unless a frame has been sent in part. Raises OSError if the connection is lost."""
        with self._lock:
            if self._is_between_frames and not self._encrypting and not self._unsent:
                self._unsent, self._announcement = self._announcement or HEARTBEAT, b""
            self._send_rest()

    def _send_rest(self) -> bool:
        """Send the rest of a heartbeat; return whether nothing is left."""
        while self._unsent:
            try:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
        return True

    def shutdown(self) -> None:
        """End the connection; the socket stays open, and shows its end."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def wait_closed(self, timeout_s: float) -> bool:
        """Return whether the connection has ended, within `timeout_s`, without receiving what may have arrived."""
        descriptor = self._sock.fileno()
        if descriptor < 0:
            return True
        poll = select.poll()
        poll.register(descriptor, getattr(select, "POLLRDHUP", select.POLLHUP))
        return bool(poll.poll(1000 * timeout_s))

    def silent_s(self) -> float:
        """Return how long nothing has arrived. Raises OSError.

        It is 0 while so much waits for a busy event loop that the server may be unable to send more.
        """
        if sys.platform != "linux":
            return 0.0
        waiting = array.array("i", [0])
        fcntl.ioctl(self._sock.fileno(), termios.FIONREAD, waiting)
        room = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        if waiting[0] > room * _FULL_SHARE:
            return 0.0
        info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
        silent_ms: int = _LAST_DATA_RECEIVED.unpack_from(info, _LAST_DATA_RECEIVED_OFFSET)[0]
        return silent_ms / 1000


class ServerMonitor:
    """Sends the heartbeats of a worker, and ends this process soon after its server has gone or is silent.

    It has a thread, because the event loop may be busy with the model for long. closing_s: how long the event loop may
    be busy after that. is_needed: returns whether another server still needs this process.
    reason: how the server was lost; "" if it has closed the connection.
    """

    def __init__(
        self, link: Link, timeout_s: float, closing_s: float = 0.0, is_needed: Callable[[], bool] = lambda: False
    ) -> None:
        self._link = link
        self._is_needed = is_needed
        self._timeout_s = timeout_s
        self._is_kept = closing_s > 0
        self._closing_s = max(_CLOSING_S, closing_s)
        self._stopped = threading.Event()
        self.reason = ""

    def start(self) -> None:
        """Run in a thread until `stop` or the loss of the server."""
        threading.Thread(target=self._run, name="dragoman-heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self.reason and not self._link.wait_closed(heartbeat_interval_s(self._timeout_s)):
            try:
                self._link.send_heartbeat()
                if self._link.silent_s() > self._timeout_s:
                    self.reason = f"the server has sent nothing for {self._timeout_s:g} s"
            except OSError as error:
                self.reason = f"the connection to the server is lost: {error}"
        if self.reason and not self._stopped.is_set():
            log.error("%s%s", self.reason, "" if self._is_kept else "; this worker ends")
            self._link.shutdown()  # the event loop sees the end of the connection then
        while not self._stopped.wait(self._closing_s):
            if self._is_needed():
                continue
            log.error("this worker ends: it still computes a call of a server that is gone")
            os._exit(1 if self.reason else 0)
