"""The engine, as a front end asks it: through the socket to the process that holds it."""

import asyncio
import itertools
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from dragoman.core.calls import Request, Response
from dragoman.core.errors import DragomanError, ServerError, WorkerLost
from dragoman.system.coroutines import begin
from dragoman.workers import shared
from dragoman.workers.channel import Channel
from dragoman.workers.frames import Frame, Kind, encode
from dragoman.workers.pool import WINDOW
from dragoman.workers.replica import Job
from dragoman.workers.settled import settle
from dragoman.workers.streams import Stream

A = TypeVar("A")

# A stream's reader tells the engine of its progress this many pieces at a time.
_CREDIT = WINDOW // 2


class RemoteEngine:
    """Answers as the engine does.

    `begin_drain` is called when the server begins to drain. `stopping` is how many seconds requests under way may take
    when it is to stop, which it is also where the engine is gone.
    """

    def __init__(self, sock: socket.socket, memory: tuple[int, int] | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._held: dict[int, Job] = {}
        self._ready = False
        self._change = asyncio.Event()
        self.begin_drain: Callable[[], None] = lambda: None
        self.stopping: asyncio.Future[float] = self._loop.create_future()
        self._channel = Channel(sock, self._received, self._lost, memory=memory)
        shared.close(memory or ())

    def tell(self, kind: Kind, value: object = None) -> None:
        """Say something that is about no call, now."""
        self._channel.send(encode(kind, 0, value), now=True)
        self._channel.flush_all()

    def ready(self) -> bool:
        return self._ready

    async def changed(self) -> None:
        await self._change.wait()

    def begin(self, request: Request[A]) -> Response[A] | Awaitable[Response[A]]:
        return begin(self.call(request))

    async def call(self, request: Request[A]) -> Response[A]:
        future: asyncio.Future[Response[A]] = self._loop.create_future()
        job = self._asked(Kind.CALL, request, partial(settle, future))
        try:
            return await future
        except asyncio.CancelledError:
            self._drop(job)
            raise

    async def stream(self, request: Request[A]) -> AsyncGenerator[Response[A], None]:
        def credit(count: int) -> None:
            self._channel.send(encode(Kind.CREDIT, job.number, count))

        # How long its reader may take, the engine knows, and the transport.
        stream = Stream(credit, lambda: self._drop(job), _CREDIT, patient=True)
        job = self._asked(Kind.STREAM, request, stream.deliver)
        async with aclosing(stream.pieces()) as pieces:
            async for piece in pieces:
                yield piece

    # ----------------------------------------------------------------------------------------------------------

    def _asked(
        self, kind: Kind, request: Request[Any], deliver: Callable[[Any, DragomanError | None, bool], None]
    ) -> Job:
        if self._channel.closed:
            raise _gone()
        job = Job(next(self._numbers), kind, request, deliver)
        pieces = self._channel.encode(kind, job.number, job.words())
        idle = not self._held
        self._held[job.number] = job
        self._channel.send(pieces, now=idle)
        return job

    def _drop(self, job: Job) -> None:
        """Nobody waits for it any more; the engine says when it is done with it."""
        if job.number in self._held and job.wanted:
            job.drop()
            self._channel.send(encode(Kind.CANCEL, job.number))

    def _received(self, frame: Frame) -> None:
        job = self._held.get(frame.job)
        value, error = _read(frame)
        if job is None:
            self._ordered(frame.kind, value)
        elif frame.kind == Kind.PIECE and error is None:
            job.deliver(value, None, False)
        elif frame.kind == Kind.PIECE:
            job.deliver(None, error, True)
            self._drop(job)
        else:
            del self._held[frame.job]
            job.deliver(value, error, True)

    def _ordered(self, kind: int, value: Any) -> None:
        if kind == Kind.READY:
            self._ready = value
            self._change.set()
            self._change = asyncio.Event()
        elif kind == Kind.DRAIN:
            self.begin_drain()
        elif kind == Kind.STOP and not self.stopping.done():
            self.stopping.set_result(value)

    def _lost(self) -> None:
        held, self._held = self._held, {}
        for job in held.values():
            job.deliver(None, _gone(), True)
        if not self.stopping.done():
            self.stopping.set_result(0.0)


def _read(frame: Frame) -> tuple[Any, DragomanError | None]:
    """What a frame says: a value, or an error."""
    try:
        value = frame.value()
    except Exception as fault:
        return None, ServerError(f"the answer cannot be read: {fault}")
    return (None, value) if frame.kind == Kind.ERROR else (value, None)


def _gone() -> WorkerLost:
    return WorkerLost("the process of the engine is gone")
