"""The process of a worker: one model, and the calls for it that come through a socket."""

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
from dragoman.workers.frames import Buffer, Frame, FrameKind, encode
from dragoman.workers.group import signal_at_end_of_parent
from dragoman.workers.output_copies import copy_outputs
from dragoman.workers.pool import WINDOW, WrongPlacement


def main(fd: int, parent: int, memory: Sequence[int] = ()) -> None:
    """Load the model that the parent sends, and compute its calls until it closes the socket.

    memory: the files of shared memory, the one that the parent writes and the one that it reads.
    """
    set_up_child(parent, (fd, *memory))
    with socket.socket(fileno=fd) as sock:
        first = receive(sock)
        if first is not None:
            asyncio.run(_serve(sock, first, memory))


def set_up_child(parent: int, descriptors: Sequence[int]) -> None:
    """Prepare this process, a child of `parent` that has inherited these file descriptors."""
    _exit_with(parent)
    del sys.argv[1:]  # they are ours, and a model may parse the arguments of its process
    _ignore_signals()
    faulthandler.enable()
    with contextlib.suppress(AttributeError):  # something else may replace stdout
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    logs.set_up_from_environment()
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)


async def _serve(sock: socket.socket, first: Frame, memory: Sequence[int]) -> None:
    try:
        executor = await Executor.load(first.value(), "process", in_thread=False)
        loaded = _loaded(executor)
    except WrongPlacement as wrong:
        sock.sendall(b"".join(encode(FrameKind.ELSEWHERE, 0, wrong.placement)))
        return
    except Exception as error:
        sock.sendall(b"".join(encode(FrameKind.ERROR, 0, _picklable(error, "failed to load"))))
        return
    sock.sendall(loaded)
    await Worker(executor, sock, (memory[1], memory[0]) if memory else None, executor.loaded.concurrent).serve()
    await executor.close()


def _loaded(executor: Executor) -> bytes:
    try:
        return b"".join(encode(FrameKind.LOADED, 0, executor.loaded))
    except Exception as error:
        reason = f"its description cannot be sent from the worker process: {public_text(error)}"
        raise ModelFailed(f"failed to load '{executor.name}', {reason}") from error


class _ReceivedCall:
    """A call that waits or runs in this process. credits: bounds how far a stream runs ahead of its reader."""

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


class CallExecutor(Protocol):
    """Computes calls: the `Executor` of a model, for example. Every method raises the error that the client gets."""

    name: str

    def unavailable(self) -> str:
        """Return why calls cannot be answered now; "" while they can."""

    def one(self, request: Request[Any]) -> Any:
        """Return the response of a model that computes one call at a time."""

    async def one_async(self, request: Request[Any]) -> Any:
        """Return the response."""

    def pieces_async(self, request: Request[Any]) -> AsyncGenerator[Any, None]:
        """Yield the chunks of the response."""


class Worker:
    """Computes the calls that come through a socket.

    concurrent: compute them concurrently, as those of an `async` model; otherwise in order, one at a time.
    on_frame: called with frames that belong to no call.
    begin: starts a call without a task; without it, each call has a task from the start.
    """

    def __init__(
        self,
        executor: CallExecutor,
        sock: socket.socket,
        memory: tuple[int, int] | None = None,
        concurrent: bool = True,
        on_frame: Callable[[Frame], None] | None = None,
        begin: Callable[[Request[Any]], Any] | None = None,
    ) -> None:
        self._executor = executor
        self._concurrent = concurrent
        self._on_frame = on_frame
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[int, _ReceivedCall] = {}
        self._waiting: deque[_ReceivedCall] = deque()
        self._busy = False
        self._closed = asyncio.Event()
        self._channel = Channel(sock, self._received, self._lost, self._start_waiting, memory)
        shared.close(memory or ())

    def send(self, kind: FrameKind, value: object = None) -> None:
        """Send a frame that belongs to no call."""
        self._channel.send(encode(kind, 0, value))

    async def serve(self) -> None:
        """Compute calls until the other end of the socket is closed, then cancel those that still run."""
        await self._closed.wait()
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _received(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.CALL | FrameKind.STREAM:
                self._jobs[frame.job] = job = _ReceivedCall(frame)
                self._waiting.append(job)
            case FrameKind.CREDIT if frame.job in self._jobs:
                for _ in range(frame.value()):
                    self._jobs[frame.job].credits.release()
            case FrameKind.CANCEL if frame.job in self._jobs:
                job = self._jobs[frame.job]
                job.cancelled = True
                if job.task is not None:
                    job.task.cancel()
            case FrameKind.PING:
                self._channel.send(encode(FrameKind.PONG, 0, self._executor.unavailable()))
            case _ if self._on_frame is not None:
                self._on_frame(frame)

    def close(self) -> None:
        """Close the socket; `serve` returns."""
        self._channel.close()
        self._lost()

    def _lost(self) -> None:
        self._waiting.clear()
        self._closed.set()

    def _start_waiting(self) -> None:
        if self._concurrent:
            while self._waiting:
                job = self._waiting.popleft()
                if self._begin is None or job.frame.kind != FrameKind.CALL or job.cancelled:
                    job.task = self._loop.create_task(self._run(job))
                else:
                    self._begin_call(job, self._begin)
        elif self._waiting and not self._busy:
            self._compute(self._waiting.popleft())

    def _begin_call(self, job: _ReceivedCall, begin: Callable[[Request[Any]], Any]) -> None:
        """Send the response to a call that does not have to wait; others go on in a task."""
        try:
            response = begin(job.request())
            if type(response) is Pending:
                job.task = self._loop.create_task(self._run(job, response))
                return
            last = self._encode(FrameKind.ANSWER, job, response)
        except Exception as error:
            last = self._error(job, error)
        del self._jobs[job.frame.job]
        self._channel.send(last)

    def _next(self) -> None:
        self._busy = False
        self._channel.read()  # waiting calls may have been cancelled
        self._start_waiting()

    def _compute(self, job: _ReceivedCall) -> None:
        """Compute a call of a model that computes one at a time; a stream runs in a task."""
        self._busy = True
        if job.frame.kind == FrameKind.STREAM:
            job.task = self._loop.create_task(self._run(job))
            job.task.add_done_callback(lambda _task: self._next())
            return
        try:
            last = encode(FrameKind.END, job.frame.job)
            if not job.cancelled:
                last = self._encode(FrameKind.ANSWER, job, self._executor.one(job.request()))
        except BaseException as error:
            last = self._error(job, error)
        del self._jobs[job.frame.job]
        # Send it before the next call can crash this process, or the model can write into the same array.
        self._channel.send(last, now=True)
        self._channel.flush_all()
        if self._waiting:
            self._loop.call_soon(self._next)
        else:
            self._busy = False

    async def _run(self, job: _ReceivedCall, begun: Pending[Any] | None = None) -> None:
        last = encode(FrameKind.END, job.frame.job)
        try:
            if not job.cancelled:
                request = job.request()
                if job.frame.kind == FrameKind.CALL:
                    response = await (begun or self._executor.one_async(request))
                    last = self._encode(FrameKind.ANSWER, job, copy_outputs(response, request.call))
                else:
                    await self._stream(job, request)
        except BaseException as error:
            if not job.cancelled:  # the end of a cancelled call is reported by END
                last = self._error(job, error)
        del self._jobs[job.frame.job]
        self._channel.send(last)

    async def _stream(self, job: _ReceivedCall, request: Request[Any]) -> None:
        async with aclosing(self._executor.pieces_async(request)) as chunks:
            async for chunk in chunks:
                if self._concurrent:  # other calls may write into it while it waits to be sent
                    chunk = copy_outputs(chunk, request.call)
                self._channel.send(self._encode(FrameKind.PIECE, job, chunk))
                await self._channel.drain()  # before the model can write into the same array
                await job.credits.acquire()

    def _encode(self, kind: FrameKind, job: _ReceivedCall, response: Any) -> list[Buffer]:
        try:
            return self._channel.encode(kind, job.frame.job, response)
        except Exception as error:
            reason = f"its response cannot be sent from the worker process: {public_text(error)}"
            raise ModelFailed(f"model '{self._executor.name}' failed: {reason}") from error

    def _error(self, job: _ReceivedCall, error: BaseException) -> list[Buffer]:
        return encode(FrameKind.ERROR, job.frame.job, _picklable(error, f"model '{self._executor.name}' failed"))


def _picklable(error: BaseException, failure: str) -> DragomanError:
    """Return the error as one of ours, because the server may not be able to import the model's own classes."""
    if isinstance(error, DragomanError):
        known = next(c for c in type(error).__mro__ if c.__module__ == errors.__name__)
        made: DragomanError = known(error.message)
        return made
    return ModelFailed(f"{failure}: {public_text(error)}")


def _ignore_signals() -> None:
    """Ignore signals that a service manager sends to all processes: the parent drains first, then ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_restore_signals)


def _restore_signals() -> None:
    """Programs that the model forks get the default handlers."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _exit_with(parent: int) -> None:
    """On Linux, let the kernel kill this process when its parent exits; elsewhere EOF of the socket ends it."""
    if sys.platform == "linux":
        signal_at_end_of_parent(signal.SIGKILL)
        if os.getppid() != parent:  # it has exited already
            os._exit(0)
