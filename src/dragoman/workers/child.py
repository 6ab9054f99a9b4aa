"""What a worker process runs: one model, and the calls that come for it through the socket that it was born with."""

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from dragoman.core import errors
from dragoman.core.calls import Request
from dragoman.core.error_text import public_text
from dragoman.core.errors import DragomanError, ModelFailed
from dragoman.system import logs
from dragoman.system.coroutines import Pending
from dragoman.workers import shared
from dragoman.workers.channel import Channel, receive
from dragoman.workers.execute import Executor
from dragoman.workers.frames import Buffer, Frame, Kind, encode
from dragoman.workers.group import signal_at_end_of_parent
from dragoman.workers.output_copies import copy_outputs
from dragoman.workers.pool import WINDOW, Elsewhere


def main(fd: int, parent: int, memory: Sequence[int] = ()) -> None:
    """Load the model that the parent names, and answer its calls until it lets go of the socket.

    `memory` are the files that both share: what the parent writes, and what it reads.
    """
    begin(parent, (fd, *memory))
    with socket.socket(fileno=fd) as sock:
        first = receive(sock)
        if first is not None:
            asyncio.run(_serve(sock, first, memory))


def begin(parent: int, descriptors: Sequence[int]) -> None:
    """Settle in as a child of that process, which has handed down these descriptors."""
    _end_with(parent)
    del sys.argv[1:]  # they are ours; a model's own parser of arguments must not trip over them
    _leave_signals_to_the_parent()
    faulthandler.enable()
    with contextlib.suppress(AttributeError):  # where something else stands in for stdout
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    logs.set_up_from_environment()
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)


async def _serve(sock: socket.socket, first: Frame, memory: Sequence[int]) -> None:
    try:
        executor = await Executor.load(first.value(), "process", in_thread=False)
        loaded = _loaded(executor)
    except Elsewhere as found:
        sock.sendall(b"".join(encode(Kind.ELSEWHERE, 0, found.placement)))
        return
    except Exception as fault:
        sock.sendall(b"".join(encode(Kind.ERROR, 0, _crossing(fault, "failed to load"))))
        return
    sock.sendall(loaded)
    await Worker(executor, sock, (memory[1], memory[0]) if memory else None, executor.loaded.concurrent).serve()
    await executor.close()


def _loaded(executor: Executor) -> bytes:
    try:
        return b"".join(encode(Kind.LOADED, 0, executor.loaded))
    except Exception as fault:
        told = f"what it tells of itself cannot leave the worker process: {public_text(fault)}"
        raise ModelFailed(f"failed to load '{executor.name}', {told}") from fault


class _Job:
    """One call in hand. `credits` bounds how far a stream runs ahead of its reader."""

    __slots__ = ("_request", "cancelled", "credits", "frame", "task")

    def __init__(self, frame: Frame) -> None:
        self._request: Request[Any] | None = None
        self.frame = frame
        self.cancelled = False
        self.credits = asyncio.Semaphore(WINDOW)
        self.task: asyncio.Task[None] | None = None

    def request(self) -> Request[Any]:
        if self._request is None:
            self._request = Request(*self.frame.value())
        return self._request


class Answering(Protocol):
    """Who answers the calls that come: a model's `Executor`, for one. Each raises what the caller is told."""

    name: str

    def unavailable(self) -> str:
        """Why calls cannot be answered now; "" while they can."""

    def one(self, request: Request[Any]) -> Any:
        """The answer, of what does one call at a time."""

    async def one_async(self, request: Request[Any]) -> Any:
        """The answer."""

    def pieces_async(self, request: Request[Any]) -> AsyncGenerator[Any, None]:
        """The answers as they come."""


class Worker:
    """Answers calls that come through a socket: side by side where they are `concurrent`, as those of an `async` model
    are, else one after the other, in order. `told` gets the frames that are about no call. `begin` starts a
    call without a task; without it, each has a task from the start."""

    def __init__(
        self,
        executor: Answering,
        sock: socket.socket,
        memory: tuple[int, int] | None = None,
        concurrent: bool = True,
        told: Callable[[Frame], None] | None = None,
        begin: Callable[[Request[Any]], Any] | None = None,
    ) -> None:
        self._executor = executor
        self._concurrent = concurrent
        self._told = told
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[int, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._busy = False
        self._gone = asyncio.Event()
        self._channel = Channel(sock, self._received, self._lost, self._work, memory)
        shared.close(memory or ())

    def tell(self, kind: Kind, value: object = None) -> None:
        """Say something that is about no call."""
        self._channel.send(encode(kind, 0, value))

    async def serve(self) -> None:
        """Until the other end of the socket is gone; what is in hand then is cancelled."""
        await self._gone.wait()
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _received(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.CALL | Kind.STREAM:
                self._jobs[frame.job] = job = _Job(frame)
                self._waiting.append(job)
            case Kind.CREDIT if frame.job in self._jobs:
                for _ in range(frame.value()):
                    self._jobs[frame.job].credits.release()
            case Kind.CANCEL if frame.job in self._jobs:
                job = self._jobs[frame.job]
                job.cancelled = True
                if job.task is not None:
                    job.task.cancel()
            case Kind.PING:
                self._channel.send(encode(Kind.PONG, 0, self._executor.unavailable()))
            case _ if self._told is not None:
                self._told(frame)

    def close(self) -> None:
        """Let go of the socket; `serve` ends."""
        self._channel.close()
        self._lost()

    def _lost(self) -> None:
        self._waiting.clear()
        self._gone.set()

    # --- the calls that wait ---------------------------------------------------------------------------------

    def _work(self) -> None:
        if self._concurrent:
            while self._waiting:
                job = self._waiting.popleft()
                if self._begin is None or job.frame.kind != Kind.CALL or job.cancelled:
                    job.task = self._loop.create_task(self._run(job))
                else:
                    self._begin_call(job, self._begin)
        elif self._waiting and not self._busy:
            self._one(self._waiting.popleft())

    def _begin_call(self, job: _Job, begin: Callable[[Request[Any]], Any]) -> None:
        """Send the answer to a call that does not have to wait; the others go on in a task."""
        try:
            answer = begin(job.request())
            if type(answer) is Pending:
                job.task = self._loop.create_task(self._run(job, answer))
                return
            last = self._encoded(Kind.ANSWER, job, answer)
        except Exception as error:
            last = self._error(job, error)
        del self._jobs[job.frame.job]
        self._channel.send(last)

    def _next(self) -> None:
        self._busy = False
        self._channel.read()  # what waits may have been cancelled meanwhile
        self._work()

    def _one(self, job: _Job) -> None:
        """One call of a model that does one at a time; here and now unless it is a stream."""
        self._busy = True
        if job.frame.kind == Kind.STREAM:
            job.task = self._loop.create_task(self._run(job))
            job.task.add_done_callback(lambda _task: self._next())
            return
        try:
            last = encode(Kind.END, job.frame.job)
            if not job.cancelled:
                last = self._encoded(Kind.ANSWER, job, self._executor.one(job.request()))
        except BaseException as fault:
            last = self._error(job, fault)
        del self._jobs[job.frame.job]
        # It leaves before the next call can crash this process, or the model write into the same array again.
        self._channel.send(last, now=True)
        self._channel.flush_all()
        if self._waiting:
            self._loop.call_soon(self._next)
        else:
            self._busy = False

    async def _run(self, job: _Job, begun: Pending[Any] | None = None) -> None:
        last = encode(Kind.END, job.frame.job)
        try:
            if not job.cancelled:
                request = job.request()
                if job.frame.kind == Kind.CALL:
                    answer = await (begun or self._executor.one_async(request))
                    last = self._encoded(Kind.ANSWER, job, copy_outputs(answer, request.call))
                else:
                    await self._stream(job, request)
        except BaseException as fault:
            if not job.cancelled:  # else the server does not wait for it any more; END tells that it is done
                last = self._error(job, fault)
        del self._jobs[job.frame.job]
        self._channel.send(last)

    async def _stream(self, job: _Job, request: Request[Any]) -> None:
        async with aclosing(self._executor.pieces_async(request)) as pieces:
            async for piece in pieces:
                if self._concurrent:  # other calls may write into it while it waits to be sent
                    piece = copy_outputs(piece, request.call)
                self._channel.send(self._encoded(Kind.PIECE, job, piece))
                await self._channel.drain()  # before the model may write into the same array again
                await job.credits.acquire()

    def _encoded(self, kind: Kind, job: _Job, answer: Any) -> list[Buffer]:
        try:
            return self._channel.encode(kind, job.frame.job, answer)
        except Exception as fault:
            told = f"its answer cannot leave the worker process: {public_text(fault)}"
            raise ModelFailed(f"model '{self._executor.name}' failed: {told}") from fault

    def _error(self, job: _Job, fault: BaseException) -> list[Buffer]:
        return encode(Kind.ERROR, job.frame.job, _crossing(fault, f"model '{self._executor.name}' failed"))


def _crossing(fault: BaseException, doing: str) -> DragomanError:
    """The fault as the server can unpickle it: it may know neither the model's modules nor its own errors."""
    if isinstance(fault, DragomanError):
        known = next(c for c in type(fault).__mro__ if c.__module__ == errors.__name__)
        made: DragomanError = known(fault.message)
        return made
    return ModelFailed(f"{doing}: {public_text(fault)}")


def _leave_signals_to_the_parent() -> None:
    """A service manager sends signals to all processes of the service; the parent drains first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_restore_signals)


def _restore_signals() -> None:
    """What the model itself forks can be ended as ever."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that happens; elsewhere EOF must do."""
    if sys.platform == "linux":
        signal_at_end_of_parent(signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(0)
