"""Server-side handle of a replica: it has a worker process loaded with the model, and the jobs of that process.

`start` launches the process, sends it the spec and waits until it has loaded the model. From then on a job is a frame
to the process, and its answers are frames back (`_handle_frame`); `held` are the jobs that were sent and not
answered, in order, of which a process without `async` code computes the first. The time of each call feeds an
estimate, by which the pool chooses a replica.

    state     the process                                  its jobs                             becomes
    STARTING  was launched, and was sent the spec          none                                 LOADED, LEAVING, FAILED
    LOADED    has loaded the model                         sent while it `has_capacity`         LEAVING, FAILED, KILLED
    LEAVING   has announced that it will end (DRAIN)       those that it has are finished       LEFT, FAILED, KILLED
    FAILED    has reported that its model can never        as LEAVING, for at most some seconds
              answer again (DRAIN with WorkerLost)
    LEFT      is killed: it had announced its end, and     none
              has no job any more
    KILLED    is killed: it did not end a cancelled job    the others are put back into the queue of the pool

In any state it may exit (`exited`, `exit_reason`): the pool deals with its jobs, and the supervisor starts another
one. An exit in LEFT and KILLED says nothing about its health (`was_killed`).

Independent of the state are the findings of heartbeats. An `unavailable` process takes jobs, and the model is not
ready. A hung one (`heartbeat.is_hung`) is sent none by the pool, unless all hang.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

from dragoman.core.errors import DragomanError, ModelFailed, NotReady, OutOfMemory, WorkerLost
from dragoman.core.foreign_code import is_interruption, public_error
from dragoman.core.metrics import Family, with_labels
from dragoman.core.spec import FileContent, ModelSpec, Placement
from dragoman.core.worker_status import WorkerStatus
from dragoman.system.call_times import NO_STAMPS
from dragoman.system.load_steps import LoadStep, current_observer, report_step
from dragoman.workers.channel import Channel
from dragoman.workers.file_contents import file_contents, send_files
from dragoman.workers.frames import Buffer, Frame, FrameKind, encode
from dragoman.workers.jobs import Job, JobSender
from dragoman.workers.launcher import Launcher, WorkerProcess
from dragoman.workers.pool import CONCURRENT, Loaded, WrongPlacement, load_error, load_limit_s, load_timeout_message
from dragoman.workers.shared_blocks import close_files
from dragoman.workers.supervisor import Heartbeat
from dragoman.workers.worker_messages import Measurements

log = logging.getLogger("dragoman.worker")

# How long a process may take to exit after its socket is closed: an idle one closes its model first.
_IDLE_GRACE_S = 2.0
_BUSY_GRACE_S = 0.5
# How long the calls of a process may take to fail after its model has reported that it can never answer again.
_FAILED_GRACE_S = 5.0
# Calls shorter than this may have one more call waiting behind them in the socket.
_SHORT_S = 0.01
# Several may wait for the only process of a model, if they are shorter than this: it then computes one after the other
# without a pause, which takes 0.8 of the CPU time.
_VERY_SHORT_S = 0.001
_MOST_HELD = 8
# Weights of a call in the running estimate of the time per call: a shorter one counts more, since first calls are slow.
_WEIGHT_LONGER = 0.1
_WEIGHT_SHORTER = 0.3


class ReplicaState(Enum):
    """What a worker process is known to do; see the table of this module."""

    STARTING = "starting"
    LOADED = "loaded"
    LEAVING = "leaving"
    FAILED = "failed"
    LEFT = "left"
    KILLED = "killed"


STARTING, LOADED, LEAVING, FAILED, LEFT, KILLED = ReplicaState


class Replica(JobSender):
    """A worker process with one copy of the model. `on_done` is called whenever it has finished a job.

    A process that computes one call at a time and does not end a cancelled one within `cancel_grace_s` is killed.

    unavailable: why the model cannot answer, as of the last heartbeat; "" while it can.
    mean_s: running estimate of the time per call, 0 while it is unknown.
    start_s: how long it took to start.
    measurements: the metrics of its model, with the label `replica`, as of the last second.
    """

    def __init__(self, spec: ModelSpec, launcher: Launcher, on_done: Callable[[], None], number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.measurements: tuple[Family, ...] = ()
        self._spec = spec
        self._launcher = launcher
        self._on_done = on_done
        self._is_only = spec.replicas == 1
        self.state = STARTING
        self._leaves_because = ""  # why it is LEAVING or FAILED
        self._has_own_clock = False
        self._has_short_calls = False
        self._since_s = 0.0  # when it was started, became busy, or ended its last call
        self.mean_s = 0.0
        self.start_s = 0.0
        self._concurrent = False
        self.exited = asyncio.Event()
        self.has_responded = False
        self.exit_reason = ""
        self.unavailable = ""

    async def start(self) -> Loaded:
        """Start the process and load the model. Raises ModelFailed or WrongPlacement, then nothing is left running."""
        begin_s = time.monotonic()
        self._observer = current_observer()
        # A model that was given no placement is read there, and may then prefer to run elsewhere.
        report_step("starting a process" if self._spec.placement else "starting a process to read the model")
        spec_frame = self._encode_spec()
        self._contents: tuple[FileContent, ...] = ()
        self._sending: asyncio.Task[None] | None = None
        self._loaded: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        process = self._process = await self._launch()
        self.exited = process.exited
        self._has_own_clock = process.has_own_clock
        self.channel = Channel(process.socket, self._handle_frame, process.closed.set, memory=process.memory)
        close_files(process.memory or ())
        self.heartbeat = Heartbeat(process.is_stopped, partial(self.channel.send, encode(FrameKind.PING)))
        self._waiting = asyncio.create_task(process.wait(self._grace_s, self._clean_up))
        try:
            if process.has_own_clock:
                self._contents = await asyncio.to_thread(file_contents, self._spec)
                spec_frame = self._encode_spec(self._contents)
            self.channel.send(spec_frame)
            async with asyncio.timeout(load_limit_s(self._spec)):
                loaded = await self._loaded
        except TimeoutError as error:
            await self.stop()
            raise load_error(self._spec.name, load_timeout_message(self._spec), error) from error
        except BaseException:
            await self.stop()
            raise
        self._concurrent = loaded.concurrent
        if self.state is STARTING:  # it may have announced its end since
            self.state = LOADED
        self._since_s = time.monotonic()
        self.start_s = self._since_s - begin_s
        return loaded

    async def _launch(self) -> WorkerProcess:
        try:
            return await self._launcher.launch()
        except BaseException as error:  # a launcher may be a plug-in
            if is_interruption(error):
                raise
            if not isinstance(error, DragomanError):
                log.exception("model '%s': the launcher failed", self._spec.name)
            raise public_error(error, f"failed to load '{self._spec.name}', the launcher failed") from error

    @property
    def was_killed(self) -> bool:
        return self.state is LEFT or self.state is KILLED

    @property
    def is_remote(self) -> bool:
        """Whether it may live on when its connection ends."""
        return self._has_own_clock

    @property
    def description(self) -> str:
        """Names the process in log lines."""
        return self._process.description

    @property
    def pid(self) -> int:
        """Its process on this machine; 0 if it has joined, perhaps from another one."""
        return self._process.pid

    @property
    def status(self) -> WorkerStatus:
        calls, hung = len(self.held), self.heartbeat.is_hung
        state = "hung" if hung else "unavailable" if self.unavailable else "busy" if calls else "idle"
        reason = self.heartbeat.reason if hung else self.unavailable
        return WorkerStatus(self._process.host, self.description, state, reason, calls, self.mean_s)

    @property
    def has_capacity(self) -> bool:
        """Whether it can take one more job.

        One may wait in the socket behind the one that runs, so that the process is never idle between two, unless
        another replica may be free sooner. Of very short ones several may, if there is no other replica.
        """
        if self.state is not LOADED or self._process.closed.is_set() or self.exited.is_set():
            return False
        if self._concurrent:
            return len(self.held) < CONCURRENT
        count = len(self.held)
        if count > 1:
            is_quick = self._is_only and self._has_short_calls and 0 < self.mean_s < _VERY_SHORT_S
            return is_quick and count < _MOST_HELD
        return not count or self._is_only or self._has_short_calls

    @property
    def elapsed_s(self) -> float:
        """How long it computes its present call, or has been idle."""
        return time.monotonic() - self._since_s

    def check_heartbeat(self) -> bool:
        return self.heartbeat.check(busy=bool(self.held))

    def take_back(self, job: Job) -> None:
        """Cancel a job that was sent and has not begun, so that another process may compute it."""
        self.channel.send(encode(FrameKind.CANCEL, job.number))
        self.held[job.number] = job.placeholder()

    def send(self, job: Job, frame: list[Buffer]) -> None:
        if not self.held:
            self._since_s = time.monotonic()
            self._has_short_calls = self._has_short_calls and job.kind == FrameKind.CALL
        job.worker = self
        super().send(job, frame)

    def cancel(self, job: Job) -> None:
        """Cancel a job; kill the process if it still computes it after `cancel_grace_s`."""
        was_cancelled = job.is_cancelled
        self.estimate_start(job)
        super().cancel(job)
        if job.number in self.held and not was_cancelled and self._spec.cancel_grace_s and not self._concurrent:
            self._check_later(job)

    def estimate_start(self, job: Job) -> None:
        """Record when a job began that is given up before the process has reported that; a waiting one never did."""
        is_begun = self._concurrent or job.number == next(iter(self.held), 0)
        if is_begun and job.request is not None and not job.request.times.started_s:
            job.request.times.started_s = max(job.sent_s, 0.0 if self._concurrent else self._since_s)

    def _check_later(self, job: Job) -> None:
        asyncio.get_running_loop().call_later(self._spec.cancel_grace_s, self._kill_if_busy_with, job)

    def _kill_if_busy_with(self, job: Job) -> None:
        if job.number not in self.held or self.exited.is_set():
            return
        if next(iter(self.held)) != job.number:  # it waits behind another job, and will be skipped
            self._check_later(job)
            return
        if self.state is not FAILED:
            self.state = KILLED
        self._process.kill()

    async def stop(self) -> None:
        """End the process: close its socket, then kill it."""
        if self._process.needs_farewell:
            self.channel.send(encode(FrameKind.FAREWELL), now=True)
        self.channel.close()
        self._process.closed.set()
        await asyncio.wait({self._waiting})

    def _encode_spec(self, contents: tuple[FileContent, ...] = ()) -> list[Buffer]:
        try:
            return encode(FrameKind.SPEC, 0, replace(self._spec, worker_port=None, contents=contents))
        except Exception as error:
            reason = f"its settings cannot be sent to a process: {error}"
            raise ModelFailed(f"failed to load '{self._spec.name}', {reason}") from error

    def encode(self, job: Job) -> list[Buffer]:
        if self._has_own_clock and job.request is not None and job.request.deadline_s is not None:
            fields = list(job.fields())
            fields[5] -= time.monotonic()
            return self.channel.encode(job.kind, job.number, tuple(fields))
        return super().encode(job)

    def take_stamps(self, job: Job, frame: Frame) -> None:
        if self._has_own_clock and frame.stamps != NO_STAMPS:
            self.clock.measure(job.sent_s, frame.stamps, time.monotonic())
        super().take_stamps(job, frame)

    def value_of(self, frame: Frame) -> Any:
        return frame.message()

    def undecodable(self, error: Exception) -> DragomanError:
        return ModelFailed(f"model '{self._spec.name}' failed: its response cannot be decoded: {error}")

    def _handle_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.HEARTBEAT:  # the link has recorded that something arrived
            return
        if frame.kind == FrameKind.PONG:
            self.heartbeat.record_response()
            self.unavailable = self._leaves_because or str(self.decode(frame)[0] or "")
        elif frame.kind == FrameKind.DRAIN:
            self._leave(self.decode(frame)[0])
        elif frame.kind == FrameKind.STEP:
            step, _ = self.decode(frame)
            if isinstance(step, LoadStep) and self._observer is not None:
                self._observer(step)
        elif frame.kind == FrameKind.METRICS:
            found, _ = self.decode(frame)
            families = found.families if isinstance(found, Measurements) else ()  # none if they cannot be decoded
            self.measurements = tuple(with_labels(families, {"replica": str(self.number)}))
        elif frame.kind == FrameKind.FILES:
            self._send_files(self.decode(frame)[0])
        elif frame.job not in self.held:
            self._settle_loaded(*self.decode(frame))
        elif self.deliver(frame):
            self._estimate_duration()
            self.has_responded = True
            self._end_if_left()
            self._on_done()

    def _send_files(self, wanted: object) -> None:
        """Send files of the model, once, if the operator has chosen that."""
        launch = self._spec.launch
        if launch is not None and launch.sends_files and self._sending is None and not self._loaded.done():
            self._sending = asyncio.create_task(send_files(self.channel, self._contents, wanted))

    def _leave(self, reason: Any) -> None:
        """Send no further jobs to the process, which will end soon; end it after those that it has."""
        if self.state not in (STARTING, LOADED, LEAVING):
            return
        text = str(reason)[:200]
        if isinstance(reason, WorkerLost):
            self.state, self._leaves_because = FAILED, f"its worker has failed: {text}"
            asyncio.get_running_loop().call_later(_FAILED_GRACE_S, self._process.kill)
        else:
            self.state, self._leaves_because = LEAVING, f"its worker leaves: {text}"
            log.info("model '%s': %s leaves: %s", self._spec.name, self.description, text)
        self.unavailable = self._leaves_because
        self._end_if_left()
        self._on_done()

    def _end_if_left(self) -> None:
        if self.held or self.state not in (LEAVING, FAILED):
            return
        if self.state is LEAVING:
            self.state = LEFT
        self._process.kill()

    def _settle_loaded(self, loaded: Loaded | Placement, error: DragomanError | None) -> None:
        if self._loaded.done():
            return
        if error is not None:
            self._loaded.set_exception(error)
        elif isinstance(loaded, Loaded):
            self._loaded.set_result(loaded)
        else:
            self._loaded.set_exception(WrongPlacement(loaded))

    def _estimate_duration(self) -> None:
        """Update the time per call, and whether calls are short, when one has ended. The first one is a warm-up."""
        now_s = time.monotonic()
        duration_s = now_s - self._since_s
        is_short = duration_s < _SHORT_S
        self._has_short_calls = is_short and (
            not self.held or all(j.kind == FrameKind.CALL for j in self.held.values())
        )
        self._since_s = now_s
        if self.mean_s:
            weight = _WEIGHT_SHORTER if duration_s < self.mean_s else _WEIGHT_LONGER
            self.mean_s += weight * (duration_s - self.mean_s)
        elif self.has_responded:
            self.mean_s = duration_s

    def _grace_s(self) -> float:
        """Return how long the process may take to exit after its socket was closed."""
        return _IDLE_GRACE_S if self.state is LOADED and not self.held else _BUSY_GRACE_S

    def _clean_up(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        self.channel.close()
        self.exit_reason = self._leaves_because if self.state is FAILED else self._process.exit_reason
        if not self._loaded.done():
            self._loaded.set_exception(self._exited_while_loading())
            self._loaded.exception()  # mark as retrieved: `start` may have been cancelled

    def _exited_while_loading(self) -> DragomanError:
        if self._leaves_because:
            return NotReady(f"failed to load '{self._spec.name}', {self._leaves_because}")
        message = f"failed to load '{self._spec.name}', {self._ended} while it loaded"
        if self._process.was_killed_by_system:  # if we killed it, `start` was cancelled
            return OutOfMemory(f"{message}, probably out of memory")
        return ModelFailed(message)

    def lost_error(self) -> WorkerLost:
        """Return the error of the jobs that the process was computing when it exited."""
        return WorkerLost(f"model '{self._spec.name}': {self._ended} while it computed this call")

    @property
    def _ended(self) -> str:
        """How the process ended, for clients, who do not learn its machine; a remote one may live on."""
        return f"the worker {'was lost' if self.is_remote else 'process died'} ({self.exit_reason})"
