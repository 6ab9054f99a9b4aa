"""HTTP over sockets that block: connections that are kept for the next call, of this thread or another."""

import os
import select
import socket
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress

from dragoman.client import faults
from dragoman.client.address import Address
from dragoman.client.exchange import Deadline, HttpAnswer, HttpQuestion
from dragoman.client.http1 import AnswerReader, written
from dragoman.payload.policy import Buffer

_MAX_IDLE = 32


class HttpTransport:
    """Sends questions to one server; may be used by several threads at once."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._tls = address.tls_context()
        self._idle: deque[socket.socket] = deque()

    def ask(self, question: HttpQuestion, deadline: Deadline) -> HttpAnswer:
        """The answer, whatever its status. Raises ServerUnreachable, DeadlineExceeded and ServerError."""
        with self._connection(deadline) as (connection, reader):
            self._send(connection, question, deadline)
            while not reader.done:
                self._receive(connection, reader, deadline)
        return reader.answer()

    def stream(self, question: HttpQuestion, deadline: Deadline) -> Generator[Buffer, None, None]:
        """The body as it comes; a status other than 200 is raised."""
        with self._connection(deadline, streams=True) as (connection, reader):
            self._send(connection, question, deadline)
            while not reader.begun or (reader.status != 200 and not reader.done):
                self._receive(connection, reader, deadline)
            if reader.status != 200:
                answer = reader.answer()
                raise faults.of_status(answer.status, answer.headers, answer.body)
            while not reader.done:
                yield reader.taken()
                self._receive(connection, reader, deadline)
            yield reader.taken()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def _connection(self, deadline: Deadline, *, streams: bool = False) -> Iterator[tuple[socket.socket, AnswerReader]]:
        """A connection and the reader of its next answer; kept afterwards if that was read to its end."""
        reader = AnswerReader(streams=streams)
        connection = self._kept() or self._connected(deadline)
        try:
            yield connection, reader
        except OSError as fault:
            raise told(fault, deadline, self._address) from fault
        finally:
            if reader.done and reader.keep_alive and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
            else:
                connection.close()

    def _kept(self) -> socket.socket | None:
        while self._idle:
            with suppress(IndexError):  # another thread was quicker
                connection = self._idle.pop()
                if not stale(connection.fileno()):
                    return connection
                connection.close()
        return None

    def _connected(self, deadline: Deadline) -> socket.socket:
        host, port = self._address.host, self._address.port
        try:
            connection = socket.create_connection((host, port), timeout=deadline.left_s())
        except OSError as fault:
            raise told(fault, deadline, self._address) from fault
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                return self._tls.wrap_socket(connection, server_hostname=host)
        except OSError as fault:
            connection.close()
            raise told(fault, deadline, self._address) from fault
        return connection

    def _send(self, connection: socket.socket, question: HttpQuestion, deadline: Deadline) -> None:
        # A server that refuses a body may close before all of it is sent: its answer then waits to be read.
        with suppress(BrokenPipeError, ConnectionResetError):
            for part in written(question, self._address.authority):
                connection.settimeout(deadline.left_s())
                connection.sendall(part)

    def _receive(self, connection: socket.socket, reader: AnswerReader, deadline: Deadline) -> None:
        connection.settimeout(deadline.left_s())
        count = connection.recv_into(reader.room())
        if count:
            reader.wrote(count)
        elif not reader.end():
            raise ConnectionResetError("the connection was closed before the whole answer was there")


def told(fault: OSError, deadline: Deadline, address: Address) -> Exception:
    """What a fault of the system means to the caller."""
    if isinstance(fault, TimeoutError) and fault.errno is None:  # ours; the system's own has a number
        return deadline.over()
    why = getattr(fault, "verify_message", "") or fault.strerror or fault
    if isinstance(fault, ConnectionError) and fault.errno:  # asyncio has words of its own
        why = os.strerror(fault.errno)
    return faults.unreachable(address.place, why, refused=isinstance(fault, ConnectionRefusedError))


def stale(descriptor: int) -> bool:
    """Whether the other end has closed an idle connection, or said something for which nobody asked."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
