"""The engine for a front end: a client of the process that holds it."""

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
from dragoman.workers.frames import Frame, FrameKind, encode
from dragoman.workers.job import Deliver, Job, settle
from dragoman.workers.pool import WINDOW
from dragoman.workers.streams import Stream

A = TypeVar("A")

# The reader of a stream gives credit for this many chunks at a time.
_CREDIT = WINDOW // 2


class EngineClient:
    """The interface of the engine, in another process.

    begin_drain: called when the server begins to drain. stopping: set to the seconds that requests in flight may take
    when the front end is to stop; 0 if the engine's process has exited.
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

    def send(self, kind: FrameKind, value: object = None) -> None:
        """Send a frame that belongs to no call, at once."""
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
        job = self._sent(FrameKind.CALL, request, partial(settle, future))
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(job)
            raise

    async def stream(self, request: Request[A]) -> AsyncGenerator[Response[A], None]:
        def credit(count: int) -> None:
            self._channel.send(encode(FrameKind.CREDIT, job.number, count))

        # The engine and the transport limit how long its reader may take.
        stream = Stream(credit, lambda: self._cancel(job), _CREDIT, patient=True)
        job = self._sent(FrameKind.STREAM, request, stream.deliver)
        async with aclosing(stream.chunks()) as chunks:
            async for chunk in chunks:
                yield chunk

    # ----------------------------------------------------------------------------------------------------------

    def _sent(self, kind: FrameKind, request: Request[Any], deliver: Deliver) -> Job:
        """Send a call; return its job."""
        if self._channel.closed:
            raise _lost()
        job = Job(next(self._numbers), kind, request, deliver)
        frame = self._channel.encode(kind, job.number, job.fields())
        idle = not self._held
        self._held[job.number] = job
        self._channel.send(frame, now=idle)
        return job

    def _cancel(self, job: Job) -> None:
        """Cancel a call; it stays in `_held` until the engine reports its end."""
        if job.number in self._held and not job.is_cancelled:
            job.cancel()
            self._channel.send(encode(FrameKind.CANCEL, job.number))

    def _received(self, frame: Frame) -> None:
        job = self._held.get(frame.job)
        value, error = _decode(frame)
        if job is None:
            self._control(frame.kind, value)
        elif frame.kind == FrameKind.PIECE and error is None:
            job.deliver(value, None, False)
        elif frame.kind == FrameKind.PIECE:
            job.deliver(None, error, True)
            self._cancel(job)
        else:
            del self._held[frame.job]
            job.deliver(value, error, True)

    def _control(self, kind: int, value: Any) -> None:
        """Handle a frame that belongs to no call."""
        if kind == FrameKind.READY:
            self._ready = value
            self._change.set()
            self._change = asyncio.Event()
        elif kind == FrameKind.DRAIN:
            self.begin_drain()
        elif kind == FrameKind.STOP and not self.stopping.done():
            self.stopping.set_result(value)

    def _lost(self) -> None:
        held, self._held = self._held, {}
        for job in held.values():
            job.deliver(None, _lost(), True)
        if not self.stopping.done():
            self.stopping.set_result(0.0)


def _decode(frame: Frame) -> tuple[Any, DragomanError | None]:
    """Return the value of a frame, or its error."""
    try:
        value = frame.value()
    except Exception as error:
        return None, ServerError(f"a response of the engine cannot be decoded: {error}")
    return (None, value) if frame.kind == FrameKind.ERROR else (value, None)


def _lost() -> WorkerLost:
    return WorkerLost("the process of the engine has exited")
