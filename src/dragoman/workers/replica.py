"""One worker process as the server sees it: its birth, the calls that it holds, and its end."""

import asyncio
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from dragoman.core.calls import Request
from dragoman.core.errors import DragomanError, ModelFailed, OutOfMemory, WorkerLost
from dragoman.core.spec import ModelSpec, Placement
from dragoman.workers import shared
from dragoman.workers.channel import Channel, pair
from dragoman.workers.frames import Buffer, Frame, Kind, encode
from dragoman.workers.heartbeat import Heartbeat, is_stopped
from dragoman.workers.pool import CONCURRENT, Elsewhere, Loaded
from dragoman.workers.shortage import failure
from dragoman.workers.spawn import exit_of, kill, spawn, told

# How long a process may take to end by itself: one that is idle closes its model first.
_IDLE_GRACE_S = 2.0
_BUSY_GRACE_S = 0.5
_KILL_GRACE_S = 0.5
# Calls so short that one more may wait behind them.
_SHORT_S = 0.01


class Job:
    """One call on its way. `deliver` takes a piece, the answer or an error, and whether that is the last."""

    __slots__ = ("deliver", "kind", "number", "replica", "request")

    def __init__(
        self,
        number: int,
        kind: Kind,
        request: Request[Any] | None,
        deliver: Callable[[Any, DragomanError | None, bool], None],
    ) -> None:
        self.number = number
        self.kind = kind
        self.request = request
        self.deliver = deliver
        self.replica: Replica | None = None

    @property
    def wanted(self) -> bool:
        """Whether somebody still waits for it."""
        return self.deliver is not _nobody

    def drop(self) -> None:
        """Nobody waits for it any more; its tensors need not last as long as the call does."""
        self.deliver = _nobody
        self.request = None

    def words(self) -> tuple[Any, ...]:
        """What the worker makes its request of."""
        asked = self.request
        assert asked is not None, "a call that is sent is wanted"
        words = (asked.call, asked.model, asked.version, asked.id, asked.deadline_s)
        return (*words, asked.metadata) if asked.metadata else words


class Replica:
    """A process that holds the model. `served` is called whenever it has done a call; `gone` is set when it ended.

    `held` are the calls that it has, in order; one that was cancelled stays until the process says it is done. A
    model that does one call at a time and does not end a cancelled one in time is killed; it is `overdue` then.
    `answered` tells whether any call was done here, `end` how the process ended, `heartbeat` whether it hangs,
    `unavailable` why its model cannot answer, as of the last heartbeat.
    """

    def __init__(self, spec: ModelSpec, served: Callable[["Replica"], None]) -> None:
        self._spec = spec
        self._served = served
        self._alone = spec.replicas == 1
        self._short = False
        self._since_s = 0.0
        self._concurrent = False
        self._ready = False
        self.held: dict[int, Job] = {}
        self.gone = asyncio.Event()
        self.answered = False
        self.overdue = False
        self.end = ""
        self.unavailable = ""
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def start(self) -> Loaded:
        """Start the process and load the model in it. Raises ModelFailed or Elsewhere; nothing is left behind then."""
        hello = self._hello()
        self._eof = asyncio.Event()
        self._loaded: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        try:
            process, self._channel = self._born()
        except OSError as fault:
            raise failure(fault)(f"failed to load '{self._spec.name}', no process: {fault}") from fault
        self._process = process
        self.heartbeat = Heartbeat(partial(is_stopped, process.pid), partial(self._channel.send, encode(Kind.PING)))
        self._watching = asyncio.create_task(self._watch(process))
        self._channel.send(hello)
        try:
            loaded = await self._loaded
        except BaseException:
            await self.stop()
            raise
        self._concurrent = loaded.concurrent
        self._ready = True
        return loaded

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def room(self) -> bool:
        """Whether it may have one more call.

        One call may wait in the socket behind the one that runs, so that the process never idles between two; but
        not where another replica could be free sooner.
        """
        if self._eof.is_set() or self.gone.is_set() or self.overdue:
            return False
        if self._concurrent:
            return len(self.held) < CONCURRENT
        return not self.held or (len(self.held) == 1 and (self._alone or self._short))

    def beat(self) -> bool:
        """Look whether the process hangs; true where that has changed."""
        hung = self.heartbeat.is_hung
        self.heartbeat.beat(busy=bool(self.held))
        return self.heartbeat.is_hung != hung

    def take_back(self, job: Job) -> None:
        """Give up a call that has been sent and not begun, so that another process may have it."""
        self._channel.send(encode(Kind.CANCEL, job.number))
        self.held[job.number] = given_up = Job(job.number, job.kind, None, _nobody)
        given_up.replica = self

    def encoded(self, job: Job) -> list[Buffer]:
        """The call for `send`. Raises what pickle raises."""
        return self._channel.encode(job.kind, job.number, job.words())

    def send(self, job: Job, pieces: list[Buffer]) -> None:
        idle = not self.held
        if idle:
            self._begin(job)
        job.replica = self
        self.held[job.number] = job
        self._channel.send(pieces, now=idle)

    def credit(self, job: Job, count: int) -> None:
        """Let a stream run `count` pieces further ahead."""
        self._channel.send(encode(Kind.CREDIT, job.number, count))

    def cancel(self, job: Job) -> None:
        if job.number in self.held and job.wanted:
            job.drop()
            self._channel.send(encode(Kind.CANCEL, job.number))
            if self._spec.cancel_grace_s and not self._concurrent:
                self._give_grace(job)

    def _give_grace(self, job: Job) -> None:
        asyncio.get_running_loop().call_later(self._spec.cancel_grace_s, self._check, job)

    def _check(self, job: Job) -> None:
        """Kill the process where it still computes a call that was cancelled some time ago."""
        if job.number not in self.held or self.gone.is_set():
            return
        if next(iter(self.held)) != job.number:  # behind a call that is wanted; it will be skipped
            self._give_grace(job)
            return
        self.overdue = True
        kill(self._process)

    async def stop(self) -> None:
        """End the process: by EOF, then by SIGKILL."""
        self._channel.close()
        self._eof.set()
        await asyncio.wait({self._watching})

    # --------------------------------------------------------------------------------------------------------

    def _born(self) -> tuple[subprocess.Popen[bytes], Channel]:
        """A new process, and the way to it."""
        ours, theirs = pair()
        memory = shared.files()
        try:
            with theirs:
                process = spawn(theirs.fileno(), self._spec.replicas, memory or (), folder=self._own_folder())
            return process, Channel(ours, self._received, self._eof.set, memory=memory)
        except OSError:
            ours.close()
            raise
        finally:
            shared.close(memory or ())

    def _own_folder(self) -> str | None:
        """The working directory of the process, where it has one of its own. Raises OSError."""
        if self._spec.working_directory == "shared":
            return None
        self._folder = tempfile.TemporaryDirectory(prefix=f"dragoman-{self._spec.name}-", ignore_cleanup_errors=True)
        return self._folder.name

    def _hello(self) -> list[Buffer]:
        try:
            return encode(Kind.SPEC, 0, self._spec)
        except Exception as fault:
            raise ModelFailed(
                f"failed to load '{self._spec.name}', its settings cannot be sent to a process: {fault}"
            ) from fault

    def _received(self, frame: Frame) -> None:
        job = self.held.get(frame.job)
        value: Any = None
        error: DragomanError | None = None
        try:
            value = frame.value()
        except Exception as fault:
            error = ModelFailed(f"model '{self._spec.name}' failed: its answer cannot be read: {fault}")
        if frame.kind == Kind.ERROR and error is None:
            value, error = None, value
        if frame.kind == Kind.PONG:
            self.heartbeat.heard()
            self.unavailable = str(value or "")
        elif job is None:
            self._has_loaded(value, error)
        elif frame.kind == Kind.PIECE:
            job.deliver(value, error, error is not None)
            if error is not None:
                self.cancel(job)
        else:
            self._done(job)
            self.answered = True
            job.deliver(value, error, True)
            self._served(self)

    def _has_loaded(self, loaded: Loaded | Placement, error: DragomanError | None) -> None:
        if self._loaded.done():
            return
        if error is not None:
            self._loaded.set_exception(error)
        elif isinstance(loaded, Loaded):
            self._loaded.set_result(loaded)
        else:
            self._loaded.set_exception(Elsewhere(loaded))

    def _begin(self, job: Job) -> None:
        self._since_s = time.monotonic()
        self._short = self._short and job.kind == Kind.CALL

    def _done(self, job: Job) -> None:
        del self.held[job.number]
        now_s = time.monotonic()
        self._short = now_s - self._since_s < _SHORT_S
        self._since_s = now_s
        for following in self.held.values():
            self._short = self._short and following.kind == Kind.CALL

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of the process, whichever way it shows, and see to it that it is one."""
        exited = asyncio.create_task(exit_of(process, self._eof))
        eof = asyncio.create_task(self._eof.wait())
        try:
            await asyncio.wait({exited, eof}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():  # what it still sent comes before EOF, unless a process that it forked holds the socket
                await asyncio.wait({eof}, timeout=_KILL_GRACE_S)
            else:
                await self._see_off(process, exited)
        finally:
            kill(process)
            process.wait()
            self._channel.close()
            self._eof.set()
            exited.cancel()
            eof.cancel()
            await asyncio.wait({exited, eof})
            if self._folder is not None:
                self._folder.cleanup()
            self.end = told(process.returncode)
            if not self._loaded.done():
                self._loaded.set_exception(self._unloadable(process.returncode))
                self._loaded.exception()  # nobody may be waiting any more
            self.gone.set()

    def _unloadable(self, code: int) -> ModelFailed:
        """What to tell of a process that ended while it loaded the model."""
        why = f"failed to load '{self._spec.name}', the worker process died ({self.end}) while it loaded"
        if code == -signal.SIGKILL:  # by the kernel: nobody waits any more where we killed it
            return OutOfMemory(f"{why}, as where memory is short")
        return ModelFailed(why)

    async def _see_off(self, process: subprocess.Popen[bytes], exited: asyncio.Task[None]) -> None:
        idle = self._ready and not self.held
        await asyncio.wait({exited}, timeout=_IDLE_GRACE_S if idle else _BUSY_GRACE_S)
        if not exited.done():
            kill(process)
            await asyncio.wait({exited})

    def lost(self) -> WorkerLost:
        return WorkerLost(
            f"model '{self._spec.name}': the worker process died ({self.end}) while it computed this call"
        )


def _nobody(_value: Any, _error: DragomanError | None, _last: bool) -> None:
    """Where the answer to a cancelled call goes."""
