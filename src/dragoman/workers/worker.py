"""A worker process: one model, and the calls for it that arrive through a socket."""

import asyncio
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from dragoman.core import errors
from dragoman.core.calls import Request
from dragoman.core.chunks import Take
from dragoman.core.errors import DragomanError, ModelFailed, WorkerLost, error_text, public_text
from dragoman.core.foreign_code import is_interruption, public_error
from dragoman.core.metrics import Family
from dragoman.core.spec import ModelSpec
from dragoman.core.usage import RateLimits
from dragoman.core.worker_usage import usage_families
from dragoman.system.call_times import CallTimes, Stamps
from dragoman.system.coroutines import Pending
from dragoman.system.load_steps import LoadStep, observe_steps
from dragoman.system.process import resource_usage
from dragoman.system.request_context import Context, set_context
from dragoman.workers.channel import Channel, receive, wait_until_writable
from dragoman.workers.child_process import set_up_child
from dragoman.workers.executor import Executor
from dragoman.workers.file_contents import check_contents
from dragoman.workers.frames import Buffer, Frame, FrameKind, Serializer, encode
from dragoman.workers.pool import WINDOW, WrongPlacement
from dragoman.workers.results import copy_outputs
from dragoman.workers.shared_blocks import close_files
from dragoman.workers.worker_messages import Measurements, serialize_message

log = logging.getLogger("dragoman.worker")

# How often the metrics of a model are sent, if they have changed.
_METRICS_INTERVAL_S = 1.0
# Calls shorter than this share a turn of the event loop.
_TURN_S = 0.001
_MAX_SAMPLES = 10_000  # of the metrics of one model
# Steps of the CPU seconds and the memory that a joined worker reports.
_CPU_DIGITS, _MEMORY_STEP = 1, 1 << 20


def main(fd: int, parent: int, memory: Sequence[int] = ()) -> None:
    """Load the model that the parent sends, and compute its calls until it closes the socket.

    memory: the shared memory files, the one that the parent writes and the one that it reads.
    """
    set_up_child(parent, (fd, *memory))
    with socket.socket(fileno=fd) as sock:
        os.register_at_fork(after_in_child=partial(release_socket, sock))
        first = receive(sock)
        if first is not None:
            asyncio.run(serve_model(sock, first, memory))


def release_socket(sock: Any) -> None:
    """Replace the socket of the worker in a process that the model forks: two processes must not share it."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, sock.fileno(), inheritable=False)
    os.close(null)


def _exit_if_forked(worker: int) -> None:
    """End this process if a model forked it and it returned from the model's code: only the worker may go on."""
    if os.getpid() != worker:
        log.error("a process that the model forked returned from the model's code and is ended pid=%d", os.getpid())
        os._exit(os.EX_SOFTWARE)


async def serve_model(
    sock: Any,
    first: Frame,
    memory: Sequence[int],
    *,
    has_own_clock: bool = False,
    prepare: Callable[[ModelSpec], ModelSpec] = lambda spec: spec,
) -> None:
    """Load the model of the first frame and compute calls until the other end closes the socket.

    has_own_clock: whether deadlines arrive as seconds left, because the server's clock is another one.
    prepare: returns the spec of this machine for that of the server.
    """
    executor = await load_model(sock, first, has_own_clock=has_own_clock, prepare=prepare)
    if executor is not None:
        await serve_calls(sock, executor, memory, has_own_clock=has_own_clock)
        await executor.close()


async def load_model(
    sock: Any, first: Frame, *, has_own_clock: bool, prepare: Callable[[ModelSpec], ModelSpec]
) -> Executor | None:
    """Load the model of the first frame and say so; None if it cannot be loaded, which is said too."""
    send = partial(send_all, sock)
    pid = os.getpid()
    steps = _StepSender(send)
    try:
        try:
            spec = prepare(first.value())
            check_contents(spec)
            with observe_steps(steps.send, spec.name):
                executor = await Executor.load(spec, "process", in_thread=False)
        finally:
            _exit_if_forked(pid)
            steps.close()
        loaded = _encode_loaded(executor)
    except WrongPlacement as wrong:
        send(_encode_message(FrameKind.WRONG_PLACEMENT, wrong.placement))
        return None
    except BaseException as error:
        if is_interruption(error):
            raise
        public = _public_error(error, "failed to load")
        if has_own_clock:  # its log is not the server's
            log.error("%s", public.message)
        send(_encode_message(FrameKind.ERROR, public))
        return None
    send(loaded)
    return executor


def announce_loaded(sock: Any, executor: Executor) -> None:
    """Say that the model is loaded, as `load_model` does, of one that is kept from an earlier connection."""
    send_all(sock, _encode_loaded(executor))


async def serve_calls(
    sock: Any,
    executor: Executor,
    memory: Sequence[int],
    *,
    has_own_clock: bool = False,
    on_frame: Callable[[Frame], None] | None = None,
    turn: "Turn | None" = None,
) -> None:
    """Compute calls until the other end closes the socket. on_frame, turn: see `Worker`.

    Calls belong to the connection: the response of one that still runs at its end is dropped.
    """
    files = (memory[1], memory[0]) if memory else None
    worker = Worker(executor, sock, files, executor.loaded.concurrent, on_frame, has_own_clock=has_own_clock, turn=turn)
    measuring: asyncio.Task[None] | None = None
    if executor.has_measurements or has_own_clock:  # the server cannot see the process if it runs elsewhere
        usage = _own_usage if has_own_clock else tuple[Family, ...]
        measuring = asyncio.create_task(_send_measurements(worker, executor, usage))
    await worker.serve()
    if measuring is not None:
        measuring.cancel()


async def _send_measurements(worker: "Worker", executor: Executor, usage: Callable[[], Iterable[Family]]) -> None:
    """Send the metrics of the model at intervals, if they have changed, until they are invalid or this is cancelled.

    usage: returns those of the process.
    """
    sent: Measurements | None = None
    while True:
        measurements = Measurements((*executor.measurements(), *usage()))
        try:
            count = sum(len(family.samples) for family in measurements.families)
            if count > _MAX_SAMPLES:
                raise ValueError(f"expected at most {_MAX_SAMPLES} samples, got {count}")
            if measurements != sent:
                worker.send(FrameKind.METRICS, measurements)
        except BaseException as error:  # methods of the model's own classes
            log.error("model '%s': its metrics are no longer exported: %s", executor.name, error_text(error))
            worker.send(FrameKind.METRICS, Measurements(()))
            return
        sent = measurements
        await asyncio.sleep(_METRICS_INTERVAL_S)


def _own_usage() -> Iterable[Family]:
    """Return CPU time and memory of this process, rounded, as they are sent when they have changed."""
    usage = resource_usage()
    memory = usage.get("process_resident_memory_bytes")
    if memory is None:  # the system does not report it
        return ()
    cpu_s = round(usage["process_cpu_seconds_total"], _CPU_DIGITS)
    return usage_families([({}, (cpu_s, memory // _MEMORY_STEP * _MEMORY_STEP))])


class _StepSender:
    """Sends steps of loading, from any thread, until it is closed: then the channel owns the socket."""

    def __init__(self, send: Callable[[list[Buffer]], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._is_open = True

    def send(self, step: LoadStep) -> None:
        with self._lock:
            if self._is_open:
                self._send(_encode_message(FrameKind.STEP, step))

    def close(self) -> None:
        with self._lock:
            self._is_open = False


def send_all(sock: Any, frame: list[Buffer]) -> None:
    """Send a frame before the channel is used, and wait until the system has accepted it."""
    rest = memoryview(b"".join(frame))
    while rest:
        try:
            rest = rest[sock.sendmsg([rest]) :]
        except BlockingIOError:
            wait_until_writable(sock)


def _encode_message(kind: FrameKind, value: object) -> list[Buffer]:
    return encode(kind, 0, value, serializer=serialize_message)


def _encode_loaded(executor: Executor) -> list[Buffer]:
    try:
        return _encode_message(FrameKind.LOADED, executor.loaded)
    except BaseException as error:  # pickle calls methods of the model's own classes
        reason = f"its description cannot be sent from the worker process: {public_text(error)}"
        raise ModelFailed(f"failed to load '{executor.name}', {reason}") from error


class _ReceivedJob:
    """A job that waits or runs in this process. credits: chunks that a stream may still send.

    received_s: when it arrived.
    has_own_clock: whether its deadline is in seconds from then, not by the clock of this machine.
    """

    __slots__ = (
        "_frame", "_has_own_clock", "_received_s", "_request", "cancelled", "context", "credits", "is_call", "number",
        "task",
    )  # fmt: skip

    def __init__(self, frame: Frame, received_s: float, *, has_own_clock: bool) -> None:
        self.number = frame.job
        self.is_call = frame.kind == FrameKind.CALL
        self.cancelled = False
        self.context: Context = ()
        self.credits = asyncio.Semaphore(WINDOW)
        self.task: asyncio.Task[None] | None = None
        self._frame = frame
        self._received_s = received_s
        self._has_own_clock = has_own_clock
        self._request: Request[Any] | None = None

    def request(self) -> Request[Any]:
        """Return the request, and let log lines carry its id from now on."""
        if self._request is None:
            self.context, *fields = self._frame.value()
            if self._has_own_clock and fields[4] is not None:
                fields[4] += self._received_s
            self._request = Request(*fields)
        set_context(self.context)
        return self._request

    @property
    def times(self) -> CallTimes:
        return CallTimes() if self._request is None else self._request.times

    @property
    def stamps(self) -> Stamps:
        """The moments of the call: received, began, computed, and now."""
        times = self.times
        return times.arrived_s or self._received_s, times.started_s, times.computed_s, time.monotonic()


class CallExecutor(Protocol):
    """Computes calls: the `Executor` of a model, for example. Every method raises the error that the client gets.

    is_lost: whether it can never answer again, as of the last `unavailable()`.
    """

    name: str
    is_lost: bool

    def unavailable(self) -> str:
        """Return why calls cannot be answered now; "" while they can."""

    def call(self, request: Request[Any]) -> Any:
        """Return the response of a model that computes one call at a time."""

    async def call_async(self, request: Request[Any]) -> Any:
        """Return the response."""

    async def stream_async(self, request: Request[Any], take: Take[Any]) -> None:
        """Pass the chunks of the response to `take`."""


class Turn:
    """Which of several workers with one model computes now, if the model computes one call at a time: in turn."""

    def __init__(self) -> None:
        self._holder: Worker | None = None
        self._waiting: deque[Worker] = deque()

    def take(self, worker: "Worker") -> bool:
        """Return whether it is the turn of a worker, whose `start_waiting` is called otherwise once it is."""
        if self._holder is None:
            self._holder = worker
        elif self._holder is not worker and worker not in self._waiting:
            self._waiting.append(worker)
        return self._holder is worker

    def release(self, worker: "Worker") -> None:
        """Let the next worker compute, if it is the turn of this one."""
        if self._holder is worker:
            self._holder = self._waiting.popleft() if self._waiting else None
            if self._holder is not None:
                asyncio.get_running_loop().call_soon(self._holder.start_waiting)


class Worker:
    """Computes the calls that arrive through a socket.

    concurrent: compute them concurrently, as those of an `async` model; otherwise in order, one at a time.
    on_frame: called with frames that belong to no call.
    begin: starts a call without a task; without it, each call has a task from the start.
    serializer: serializes responses.
    has_own_clock: whether deadlines arrive as seconds left.
    turn: if workers with other sockets share the executor.
    """

    def __init__(
        self,
        executor: CallExecutor,
        sock: Any,
        memory: tuple[int, int] | None = None,
        concurrent: bool = True,
        on_frame: Callable[[Frame], None] | None = None,
        begin: Callable[[Request[Any]], Any] | None = None,
        serializer: Serializer = serialize_message,
        *,
        has_own_clock: bool = False,
        turn: Turn | None = None,
    ) -> None:
        self._executor = executor
        self._turn = None if concurrent else turn
        self._concurrent = concurrent
        self._on_frame = on_frame
        self._begin = begin
        self._serializer = serializer
        self._has_own_clock = has_own_clock
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[int, _ReceivedJob] = {}
        self._waiting: deque[_ReceivedJob] = deque()
        self._busy = False
        self._is_lost = False
        self._closed = asyncio.Event()
        self._pid = os.getpid()
        self._channel = Channel(sock, self._handle_frame, self._handle_close, self.start_waiting, memory, serializer)
        close_files(memory or ())

    def send(self, kind: FrameKind, value: object = None) -> None:
        """Send a frame that belongs to no call."""
        self._channel.send(self._channel.encode(kind, 0, value))

    async def serve(self) -> None:
        """Compute calls until the other end of the socket is closed, then cancel those that still run."""
        await self._closed.wait()
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        self._channel.close()
        self._handle_close()

    def _handle_close(self) -> None:
        self._waiting.clear()
        self._closed.set()

    def _handle_frame(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.CALL | FrameKind.STREAM:
                job = _ReceivedJob(frame, time.monotonic(), has_own_clock=self._has_own_clock)
                self._jobs[frame.job] = job
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
                self.send(FrameKind.PONG, self._unavailable())
            case _ if self._on_frame is not None:
                self._on_frame(frame)

    def _unavailable(self) -> str:
        """Return why calls cannot be answered; if they never will, report that this process is of no further use."""
        reason = self._executor.unavailable()
        if self._executor.is_lost and not self._is_lost:
            self._is_lost = True
            self.send(FrameKind.DRAIN, WorkerLost(reason))
        return reason

    def start_waiting(self) -> None:
        """Start the jobs that have arrived: all of them, or the first one if nothing is computed.

        Calls that are computed one at a time share a turn of the loop if they are short, because a turn takes longer.
        """
        began_s = time.monotonic()
        while self._waiting and not self._busy:
            if self._turn is not None and not self._turn.take(self):
                return
            job = self._waiting.popleft()
            if not self._concurrent:
                self._busy = True
                self._compute(job)
                if not job.is_call:
                    return
                if time.monotonic() - began_s > _TURN_S and self._waiting:
                    self._loop.call_soon(self._compute_next)
                    return
                self._busy = False
                if self._waiting:
                    self._channel.read()  # they may have been cancelled
            elif self._begin is not None and job.is_call and not job.cancelled:
                self._begin_call(job, self._begin)
            else:
                self._start_task(job)
        if self._turn is not None and not self._busy:
            self._turn.release(self)

    def _start_task(self, job: _ReceivedJob, pending: Pending[Any] | None = None) -> asyncio.Task[None]:
        job.task = self._loop.create_task(self._run(job, pending))
        return job.task

    def _begin_call(self, job: _ReceivedJob, begin: Callable[[Request[Any]], Any]) -> None:
        """Send the response to a call that does not have to wait; continue others in a task."""
        try:
            response = begin(job.request())
            if type(response) is Pending:
                self._start_task(job, response)
                return
            last = self._encode(FrameKind.RESPONSE, job, response)
        except BaseException as error:
            last = self._encode_error(job, error)
        self._finish(job, last)

    def _compute(self, job: _ReceivedJob) -> None:
        """Compute a job of a model that computes one at a time: a call here, a stream in a task."""
        if not job.is_call:
            self._start_task(job).add_done_callback(lambda _task: self._compute_next())
            return
        try:
            if job.cancelled:
                last = encode(FrameKind.END, job.number)
            else:
                last = self._encode(FrameKind.RESPONSE, job, self._executor.call(job.request()))
        except BaseException as error:
            last = self._encode_error(job, error)
        # Send it before the next call can crash this process, or the model can write to the same array.
        self._finish(job, last, now=True)
        self._channel.flush_all()

    def _compute_next(self) -> None:
        self._busy = False
        if self._turn is not None:
            self._turn.release(self)
        self._channel.read()  # waiting calls may have been cancelled
        self.start_waiting()

    async def _run(self, job: _ReceivedJob, pending: Pending[Any] | None) -> None:
        last = None
        try:
            if not job.cancelled:
                request = job.request()
                if job.is_call:
                    response = await (pending or self._executor.call_async(request))
                    last = self._encode(FrameKind.RESPONSE, job, copy_outputs(response, request.call))
                else:
                    await self._stream(job, request)
        except BaseException as error:
            if not job.cancelled:  # a cancelled job ends with END
                last = self._encode_error(job, error)
        self._finish(job, last or encode(FrameKind.END, job.number, stamps=job.stamps))

    async def _stream(self, job: _ReceivedJob, request: Request[Any]) -> None:
        async def send(chunk: Any) -> None:
            if isinstance(chunk, DragomanError):
                chunk = _public_error(chunk, "")
            if self._concurrent:  # other calls may write to it while it waits to be sent
                chunk = copy_outputs(chunk, request.call)
            self._channel.send(self._encode(FrameKind.CHUNK, job, chunk))
            await self._channel.drain()  # before the model can write to the same array
            await job.credits.acquire()

        await self._executor.stream_async(request, send)

    def _finish(self, job: _ReceivedJob, last: list[Buffer], *, now: bool = False) -> None:
        _exit_if_forked(self._pid)
        del self._jobs[job.number]
        set_context(())
        times = job.times
        if times.batch is not None or times.nested or times.tokens is not None or times.computed_tokens != (0, 0):
            last = [*encode(FrameKind.TIMES, job.number, times, serializer=self._serializer), *last]
        self._channel.send(last, now=now)

    def _encode(self, kind: FrameKind, job: _ReceivedJob, value: Any) -> list[Buffer]:
        _exit_if_forked(self._pid)  # before it writes to the memory that the worker shares with the server
        try:
            return self._channel.encode(kind, job.number, value, job.stamps)
        except BaseException as error:  # pickle calls methods of the model's own classes
            reason = f"its response cannot be sent from the worker process: {public_text(error)}"
            raise ModelFailed(f"model '{self._executor.name}' failed: {reason}") from error

    def _encode_error(self, job: _ReceivedJob, error: BaseException) -> list[Buffer]:
        if isinstance(error, WorkerLost):
            self._unavailable()
        failure = f"model '{self._executor.name}' failed"
        return self._channel.encode(FrameKind.ERROR, job.number, _public_error(error, failure), job.stamps)


def _public_error(error: BaseException, failure: str) -> DragomanError:
    """Return the error as one of ours: the server may not be able to import the model's own classes."""
    public = public_error(error, failure)
    known = next(c for c in type(public).__mro__ if c.__module__ == errors.__name__)
    copy: DragomanError = known(public.message)
    copy.retry_after_s = public.retry_after_s
    if isinstance(copy, errors.RateLimited) and isinstance(public, errors.RateLimited):
        copy.limits = public.limits if isinstance(public.limits, RateLimits) else None
    return copy
