"""A worker process as the server sees it: its start, the calls that it holds, and its exit."""

import asyncio
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from dragoman.core.errors import DragomanError, ModelFailed, OutOfMemory, WorkerLost
from dragoman.core.spec import ModelSpec, Placement
from dragoman.workers import shared
from dragoman.workers.channel import Channel
from dragoman.workers.child_process import ChildProcess
from dragoman.workers.frames import Buffer, Frame, FrameKind, encode
from dragoman.workers.heartbeat import Heartbeat, is_stopped
from dragoman.workers.job import Job, ignore
from dragoman.workers.pool import CONCURRENT, Loaded, WrongPlacement
from dragoman.workers.shortage import failure

# How long a process may take to exit after its socket is closed: an idle one closes its model first.
_IDLE_GRACE_S = 2.0
_BUSY_GRACE_S = 0.5
# Calls shorter than this may have one more call waiting behind them in the socket.
_SHORT_S = 0.01


class Replica:
    """A worker process with one copy of the model. `on_done` is called whenever it has finished a call.

    held: the calls that it has, in order. A cancelled one stays until the process reports its end. A process that
    computes one call at a time and does not end a cancelled one within `cancel_grace_s` is killed (`was_killed`).
    unavailable: why the model cannot answer, as of the last heartbeat; "" while it can.
    """

    def __init__(self, spec: ModelSpec, on_done: Callable[["Replica"], None]) -> None:
        self._spec = spec
        self._on_done = on_done
        self._is_only = spec.replicas == 1
        self._has_short_calls = False
        self._since_s = 0.0
        self._concurrent = False
        self._is_loaded = False
        self.held: dict[int, Job] = {}
        self.exited = asyncio.Event()
        self.has_responded = False
        self.was_killed = False
        self.exit_reason = ""
        self.unavailable = ""
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def start(self) -> Loaded:
        """Start the process and load the model. Raises ModelFailed or WrongPlacement, then nothing is left running."""
        hello = self._hello()
        self._loaded: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        try:
            self._child = ChildProcess("dragoman.workers.group", self._spec.replicas, self._own_folder())
        except OSError as error:
            reason = f"cannot start a process: {error}"
            raise failure(error)(f"failed to load '{self._spec.name}', {reason}") from error
        child = self._child
        self.exited = child.exited
        self._channel = Channel(child.socket, self._received, child.closed.set, memory=child.memory)
        shared.close(child.memory or ())
        self.heartbeat = Heartbeat(partial(is_stopped, child.pid), partial(self._channel.send, encode(FrameKind.PING)))
        self._waiting = asyncio.create_task(child.wait(self._grace_s, self._has_exited))
        self._channel.send(hello)
        try:
            loaded = await self._loaded
        except BaseException:
            await self.stop()
            raise
        self._concurrent = loaded.concurrent
        self._is_loaded = True
        return loaded

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def has_capacity(self) -> bool:
        """Whether it can take one more call.

        One call may wait in the socket behind the one that runs, so that the process is never idle between two, unless
        another replica may be free sooner.
        """
        if self._child.closed.is_set() or self.exited.is_set() or self.was_killed:
            return False
        if self._concurrent:
            return len(self.held) < CONCURRENT
        return not self.held or (len(self.held) == 1 and (self._is_only or self._has_short_calls))

    def beat(self) -> bool:
        """Look at the heartbeat; return whether the process has begun or ceased to hang."""
        hung = self.heartbeat.is_hung
        self.heartbeat.beat(busy=bool(self.held))
        return self.heartbeat.is_hung != hung

    def take_back(self, job: Job) -> None:
        """Cancel a call that was sent and has not begun, so that another process may have it."""
        self._channel.send(encode(FrameKind.CANCEL, job.number))
        self.held[job.number] = Job(job.number, job.kind, None, ignore)

    def encoded(self, job: Job) -> list[Buffer]:
        """Return the frame of a call, for `send`. Raises what pickle raises."""
        return self._channel.encode(job.kind, job.number, job.fields())

    def send(self, job: Job, frame: list[Buffer]) -> None:
        """Send a call to the process."""
        idle = not self.held
        if idle:
            self._begin(job)
        job.worker = self
        self.held[job.number] = job
        self._channel.send(frame, now=idle)

    def credit(self, job: Job, count: int) -> None:
        """Let a stream run `count` chunks further ahead."""
        self._channel.send(encode(FrameKind.CREDIT, job.number, count))

    def cancel(self, job: Job) -> None:
        """Cancel a call; kill the process if it still computes it after `cancel_grace_s`."""
        if job.number in self.held and not job.is_cancelled:
            job.cancel()
            self._channel.send(encode(FrameKind.CANCEL, job.number))
            if self._spec.cancel_grace_s and not self._concurrent:
                self._check_later(job)

    def _check_later(self, job: Job) -> None:
        asyncio.get_running_loop().call_later(self._spec.cancel_grace_s, self._kill_if_busy_with, job)

    def _kill_if_busy_with(self, job: Job) -> None:
        if job.number not in self.held or self.exited.is_set():
            return
        if next(iter(self.held)) != job.number:  # it waits behind another call, and will be skipped
            self._check_later(job)
            return
        self.was_killed = True
        self._child.kill()

    async def stop(self) -> None:
        """End the process: close its socket, then kill it."""
        self._channel.close()
        self._child.closed.set()
        await asyncio.wait({self._waiting})

    def _own_folder(self) -> str | None:
        """Return a new working directory for the process, or None if it shares the server's. Raises OSError."""
        if self._spec.working_directory == "shared":
            return None
        self._folder = tempfile.TemporaryDirectory(prefix=f"dragoman-{self._spec.name}-", ignore_cleanup_errors=True)
        return self._folder.name

    def _hello(self) -> list[Buffer]:
        try:
            return encode(FrameKind.SPEC, 0, self._spec)
        except Exception as error:
            raise ModelFailed(
                f"failed to load '{self._spec.name}', its settings cannot be sent to a process: {error}"
            ) from error

    def _received(self, frame: Frame) -> None:
        job = self.held.get(frame.job)
        value: Any = None
        error: DragomanError | None = None
        try:
            value = frame.value()
        except Exception as cause:
            error = ModelFailed(f"model '{self._spec.name}' failed: its response cannot be decoded: {cause}")
        if frame.kind == FrameKind.ERROR and error is None:
            value, error = None, value
        if frame.kind == FrameKind.PONG:
            self.heartbeat.heard()
            self.unavailable = str(value or "")
        elif job is None:
            self._settle_loaded(value, error)
        elif frame.kind == FrameKind.PIECE:
            job.deliver(value, error, error is not None)
            if error is not None:
                self.cancel(job)
        else:
            self._finish(job)
            self.has_responded = True
            job.deliver(value, error, True)
            self._on_done(self)

    def _settle_loaded(self, loaded: Loaded | Placement, error: DragomanError | None) -> None:
        if self._loaded.done():
            return
        if error is not None:
            self._loaded.set_exception(error)
        elif isinstance(loaded, Loaded):
            self._loaded.set_result(loaded)
        else:
            self._loaded.set_exception(WrongPlacement(loaded))

    def _begin(self, job: Job) -> None:
        self._since_s = time.monotonic()
        self._has_short_calls = self._has_short_calls and job.kind == FrameKind.CALL

    def _finish(self, job: Job) -> None:
        del self.held[job.number]
        now_s = time.monotonic()
        self._has_short_calls = now_s - self._since_s < _SHORT_S
        self._since_s = now_s
        for following in self.held.values():
            self._has_short_calls = self._has_short_calls and following.kind == FrameKind.CALL

    def _grace_s(self) -> float:
        """How long the process may take to exit after its socket was closed."""
        return _IDLE_GRACE_S if self._is_loaded and not self.held else _BUSY_GRACE_S

    def _has_exited(self) -> None:
        self._channel.close()
        if self._folder is not None:
            self._folder.cleanup()
        self.exit_reason = self._child.exit_reason
        if not self._loaded.done():
            self._loaded.set_exception(self._exited_while_loading())
            self._loaded.exception()  # mark as retrieved: `start` may have been cancelled

    def _exited_while_loading(self) -> ModelFailed:
        message = f"failed to load '{self._spec.name}', the worker process died ({self.exit_reason}) while it loaded"
        if self._child.exit_code == -signal.SIGKILL:  # by the kernel: where we killed it, `start` was cancelled
            return OutOfMemory(f"{message}, probably out of memory")
        return ModelFailed(message)

    def lost(self) -> WorkerLost:
        """Return the error of the calls that the process was computing when it exited."""
        return WorkerLost(
            f"model '{self._spec.name}': the worker process died ({self.exit_reason}) while it computed this call"
        )
