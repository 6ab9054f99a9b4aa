"""HTTP/1.1 to one server: connections that are kept for the next call, and what is said over one."""

import os
import select
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from dragoman.client import faults
from dragoman.client.address import Address
from dragoman.client.exchange import Deadline, HttpAnswer, HttpQuestion
from dragoman.client.http1 import AnswerReader, written
from dragoman.formats.policy import Buffer

_MAX_IDLE = 32


class Connection(Protocol):
    """A connection, and the reader of the answer under way on it."""

    reader: AnswerReader

    def begin(self, *, streams: bool) -> None:
        """Get ready for the next answer."""

    async def send(self, parts: Iterable[Buffer], deadline: Deadline) -> None: ...

    async def more(self, deadline: Deadline) -> None:
        """Wait until more of the answer, or its end, is there."""

    def taken(self) -> Buffer:
        """What came of the body since the last time."""

    def idle(self) -> None:
        """Its answer was read to the end; it is kept."""

    def usable(self) -> bool:
        """Whether it may take the next question: it lives, and said nothing since its answer."""

    def abort(self) -> None: ...

    async def closed(self) -> None:
        """Wait until it is closed."""


class HttpTransport:
    """Sends questions to one server over what `connect` makes: several threads, or one event loop, may share it."""

    def __init__(self, address: Address, connect: Callable[[Address, Deadline], Awaitable[Connection]]) -> None:
        self._address = address
        self._connect = connect
        self._idle: list[Connection] = []

    async def ask(self, question: HttpQuestion, deadline: Deadline) -> HttpAnswer:
        """The answer, whatever its status. Raises ServerUnreachable, DeadlineExceeded and ServerError."""
        async with self._asked(question, deadline, streams=False) as connection:
            while not connection.reader.done:
                await connection.more(deadline)
            return connection.reader.answer()

    async def stream(self, question: HttpQuestion, deadline: Deadline) -> AsyncGenerator[Buffer, None]:
        """The body as it comes; a status other than 200 is raised."""
        async with self._asked(question, deadline, streams=True) as connection:
            reader = connection.reader
            while not reader.begun or (reader.status != 200 and not reader.done):
                await connection.more(deadline)
            if reader.status != 200:
                answer = reader.answer()
                raise faults.of_status(answer.status, answer.headers, answer.body)
            while not reader.done:
                yield connection.taken()
                await connection.more(deadline)
            yield connection.taken()

    async def close(self) -> None:
        while self._idle:
            with suppress(IndexError):  # another thread was quicker
                connection = self._idle.pop()
                connection.abort()
                await connection.closed()

    @asynccontextmanager
    async def _asked(self, question: HttpQuestion, deadline: Deadline, *, streams: bool) -> AsyncIterator[Connection]:
        """A connection to which the question was sent; kept afterwards if its answer was read to its end."""
        try:
            connection = self._kept() or await self._connect(self._address, deadline)
            connection.begin(streams=streams)
            try:
                await connection.send(written(question, self._address.authority), deadline)
                yield connection
            finally:
                if connection.reader.done and connection.reader.keep_alive and len(self._idle) < _MAX_IDLE:
                    connection.idle()
                    self._idle.append(connection)
                else:
                    connection.abort()
        except OSError as fault:
            raise told(fault, deadline, self._address) from fault

    def _kept(self) -> Connection | None:
        while self._idle:
            with suppress(IndexError):
                connection = self._idle.pop()
                if connection.usable():
                    return connection
                connection.abort()
        return None


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
