"""Jobs: calls on their way to a worker and back, in the process that sends them."""

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from dragoman.core.callers import ANYONE
from dragoman.core.calls import Request
from dragoman.core.chunks import NOTHING, ChunkStream, Relay, StreamEnd, Take
from dragoman.core.errors import DeadlineExceeded, DragomanError
from dragoman.system.call_times import CallTimes, ClockOffset
from dragoman.system.request_context import get_context, values
from dragoman.workers import pool
from dragoman.workers.channel import Channel
from dragoman.workers.frames import Buffer, Frame, FrameKind, encode

# Called on the event loop with a chunk, a response or an error, and whether it is the last one.
Deliver = Callable[[Any, BaseException | None, bool], None]

# The reader of a stream grants its worker this many further chunks at a time.
_CREDIT = pool.WINDOW // 2


class Job:
    """A call that waits for a worker or is computed by one.

    kind: `FrameKind.CALL` or `FrameKind.STREAM`.
    number: id of the call in frames.
    worker: the process that has it.
    credits: chunks that a stream in a thread may still send.
    context: of the request, for log lines.
    sent_s: when it was sent to the process that has it.
    repeats: how often it was sent again because its worker was lost.
    """

    __slots__ = ("context", "credits", "deliver", "kind", "number", "repeats", "request", "sent_s", "worker")

    def __init__(self, number: int, kind: FrameKind, request: Request[Any] | None, deliver: Deliver) -> None:
        self.number = number
        self.kind = kind
        self.request = request
        self.deliver = deliver
        self.worker: Any = None
        self.repeats = 0
        self.context = get_context()
        self.sent_s = 0.0
        self.credits: threading.Semaphore | None = None

    @property
    def is_cancelled(self) -> bool:
        return self.deliver is _ignore

    def cancel(self) -> None:
        """Ignore further results, and release the request: a worker may come to this job late."""
        self.deliver = _ignore
        self.request = None
        if self.credits is not None:
            self.credits.release()

    def placeholder(self) -> "Job":
        """Return a cancelled job of the same number."""
        return Job(self.number, self.kind, None, _ignore)

    def fields(self) -> tuple[Any, ...]:
        """Return the context and the fields of the request, from which the other process recreates them."""
        request = self.request
        assert request is not None, "a job that is sent is not cancelled"
        fields = (request.call, request.model, request.version, request.id, request.deadline_s, request.metadata)
        is_plain = request.models is None and request.caller is ANYONE and not request.is_trial
        rest = () if is_plain else (request.models, request.caller, request.is_trial)
        return (values(self.context), *fields, *rest)


def _ignore(_value: Any, _error: BaseException | None, _last: bool) -> None:
    """Receive the response of a cancelled job."""


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None, _last: bool) -> None:
    """Set the result or the error of a future, unless it is done or cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


class JobRunner:
    """Calls and streams as jobs. A subclass implements `submit`, `cancel` and `credit`.

    limits_readers: whether a stream fails if its reader blocks the worker for too long.
    """

    limits_readers = True

    def __init__(self) -> None:
        self.numbers = itertools.count(1)

    def submit(self, job: Job) -> None:
        """Give a job to a worker or queue it. Raises NotReady and similar errors."""
        raise NotImplementedError

    def cancel(self, job: Job) -> None:
        """Cancel a job whose caller no longer waits. Does nothing for one that has ended."""
        raise NotImplementedError

    def credit(self, job: Job, count: int) -> None:
        """Let a stream send `count` further chunks."""
        raise NotImplementedError

    async def call(self, request: Request[Any]) -> Any:
        """Return the response. Cancelling it cancels the job."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        job = Job(next(self.numbers), FrameKind.CALL, request, partial(_settle, future))
        self.submit(job)
        try:
            return await future
        except asyncio.CancelledError:
            self.cancel(job)
            raise
        finally:
            del job, future  # an error refers to this frame: a cycle would keep the request until a full collection

    def stream(self, request: Request[Any]) -> ChunkStream[Any]:
        """Return the chunks. Cancelling the task that reads them cancels the job."""
        return ChunkStream(partial(self._stream, request))

    async def _stream(self, request: Request[Any], take: Take[Any]) -> None:
        stream = _Stream(
            take, lambda count: self.credit(job, count), lambda: self.cancel(job), is_limited=self.limits_readers
        )
        job = Job(next(self.numbers), FrameKind.STREAM, request, stream.deliver)
        self.submit(job)
        await stream.run()


class _Stream:
    """The chunks of a stream that have arrived and are not read yet.

    take: takes a chunk. credit: called with the number of further chunks that the worker may send. cancel: called when
    the reader has ended the stream or, if `is_limited`, has read nothing for `pool.STALL_S` while the worker waited for
    it.
    """

    def __init__(
        self, take: Take[Any], credit: Callable[[int], None], cancel: Callable[[], None], *, is_limited: bool
    ) -> None:
        self._relay = Relay(take, self._next)
        self._credit = credit
        self._cancel = cancel
        self._is_limited = is_limited
        self._allowed = pool.WINDOW
        self._received = 0
        self._read = 0
        self._is_reading = False  # a chunk, the last one of `_next`
        self._ended = False
        # Bounded by the window: the worker waits for credit before each chunk beyond it.
        self._arrived: deque[tuple[Any, BaseException | None, bool]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def deliver(self, value: Any, error: BaseException | None, last: bool) -> None:
        """Add a chunk, an error or the end."""
        self._arrived.append((value, error, last))
        self._received += 1
        self._ended = self._ended or last or error is not None
        self._relay.wake()
        self._restart_timer()

    async def run(self) -> None:
        """Pass on the chunks as they arrive; raise the error that ends them."""
        try:
            await self._relay.run()
        finally:
            self._ended = True
            self._restart_timer()
            self._cancel()

    def _next(self) -> Any:
        """Return the next chunk; the reader has taken the last one."""
        if self._is_reading:
            self._is_reading = False
            self._read += 1
            if self._read % _CREDIT == 0:
                self._allowed += _CREDIT
                self._credit(_CREDIT)
            self._restart_timer()
        if not self._arrived:
            return NOTHING
        value, error, last = self._arrived.popleft()
        if error is not None:
            raise error
        if last:
            raise StreamEnd
        self._is_reading = True
        return value

    def _restart_timer(self) -> None:
        """Restart the time limit of the reader, which counts while the worker waits for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_limited and self._received > self._allowed and not self._ended:
            self._timer = asyncio.get_running_loop().call_later(pool.STALL_S, self._give_up)

    def _give_up(self) -> None:
        self._cancel()
        message = f"the reader of this stream is too slow: it read nothing for {pool.STALL_S:g} s"
        self._arrived.append((None, DeadlineExceeded(message), True))
        self._relay.wake()


class JobSender:
    """Sends jobs through a channel and delivers their responses.

    held: jobs that the other process has, in order. A cancelled one stays until the process reports its end.
    """

    def __init__(self) -> None:
        self.held: dict[int, Job] = {}
        self.clock = ClockOffset()  # 0: the other process has the same clock
        self.channel: Channel

    def value_of(self, frame: Frame) -> Any:
        """Return the value of a frame from the other process."""
        return frame.value()

    def undecodable(self, error: Exception) -> DragomanError:
        """Return the error of a response that cannot be decoded."""
        raise NotImplementedError

    def encode(self, job: Job) -> list[Buffer]:
        """Return the frame of a job, for `send`. Raises what pickle raises."""
        return self.channel.encode(job.kind, job.number, job.fields())

    def send(self, job: Job, frame: list[Buffer]) -> None:
        """Send a job: at once if the process is idle."""
        is_idle = not self.held
        job.sent_s = time.monotonic()
        self.held[job.number] = job
        self.channel.send(frame, now=is_idle)

    def credit(self, job: Job, count: int) -> None:
        self.channel.send(encode(FrameKind.CREDIT, job.number, count))

    def cancel(self, job: Job) -> None:
        if job.number in self.held and not job.is_cancelled:
            job.cancel()
            self.channel.send(encode(FrameKind.CANCEL, job.number))

    def take_stamps(self, job: Job, frame: Frame) -> None:
        """Record when the other process has computed a call."""
        _, started_s, computed_s, _ = frame.stamps
        if job.request is None or not started_s:
            return
        times = job.request.times
        times.started_s, times.computed_s = self.clock.convert(started_s, computed_s, job.sent_s, time.monotonic())

    def take_times(self, job: Job, frame: Frame) -> None:
        """Record the tokens that the model has counted; only an engine knows of batches and calls of other models."""
        if job.request is not None:
            recorded = self.value_of(frame)
            if isinstance(recorded, CallTimes):
                job.request.times.computed_tokens = recorded.computed_tokens

    def decode(self, frame: Frame) -> tuple[Any, DragomanError | None]:
        """Return the value of a frame, or the error that it carries or that decoding it raises."""
        try:
            value = self.value_of(frame)
        except Exception as error:
            return None, self.undecodable(error)
        return (None, value) if frame.kind == FrameKind.ERROR else (value, None)

    def deliver(self, frame: Frame) -> bool:
        """Deliver a frame to its job; return whether the job has ended."""
        job = self.held[frame.job]
        if frame.kind == FrameKind.TIMES:
            self.take_times(job, frame)
            return False
        self.take_stamps(job, frame)
        value, error = self.decode(frame)
        if frame.kind == FrameKind.CHUNK:
            job.deliver(value, error, error is not None)
            if error is not None:
                self.cancel(job)
            return False
        del self.held[frame.job]
        job.deliver(value, error, True)
        return True
