"""Supervision of child processes: start them, restart those that exit, detect those that hang.

a slot is  its process                                  and becomes
free       is not wanted                                starting (`add`)
starting   is being started, or will be after a delay   running; failed; free (`cancel_starts`); itself, if the
                                                         start is delayed by others (`StartDelayed`)
failed     as starting, and the last attempt failed     running; abandoned after too many crashes; free
running    runs                                         starting or abandoned (it exits); free (`remove`)
abandoned  is not started again
"""

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from dragoman.core.errors import DragomanError, NotReady

log = logging.getLogger("dragoman.worker")

# Delay before a restart: 0.1 s, then 0.2 s, ... up to 30 s; back to 0.1 s once a process has run for 10 s.
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 30.0
_HEALTHY_S = 10.0
# If a process exits this many times in a row without a response, calls fail at once.
_MAX_FAILURES = 3
# Missed heartbeats after which a process counts as hung. They are counted, not timed: if the server itself was stopped
# or busy for a long time, only one is missed.
MAX_MISSED = 5


class StartDelayed(NotReady):
    """A process cannot be started now for a reason that passes: a scheduler that does not answer, for example. Calls
    wait, and the start is tried again.
    """


class SupervisedProcess(Protocol):
    """A process that can be supervised."""

    exited: asyncio.Event  # set when the process has exited
    has_responded: bool  # it has answered at least one call
    exit_reason: str

    @property
    def was_killed(self) -> bool:
        """Whether this process killed it, so that its exit says nothing about its health."""

    async def start(self) -> Any:
        """Start the process. Raises DragomanError, after which nothing is left running."""

    async def stop(self) -> None:
        """End the process."""

    def check_heartbeat(self) -> bool:
        """Check the process, at equal intervals; return whether it has begun or ceased to hang."""


P = TypeVar("P", bound=SupervisedProcess)


class _Slot:
    """One of the processes that a supervisor may keep running: its task while it is in use, and its failures."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.task: asyncio.Task[None] | None = None
        self.state = "free"  # or another one of the table above
        self.failures = 0  # exits in a row without a response
        self.crash_times_s: deque[float] = deque()

    @property
    def is_failing(self) -> bool:
        return self.failures >= _MAX_FAILURES or self.state in ("failed", "abandoned")


class Supervisor(Generic[P]):
    """Keep processes running: `count` of them, or fewer with `initial`, `add` and `remove`.

    create: return a new process that has not been started, given its number from 0.
    initial: number of processes to start with; by default all.
    required: number of processes that `start` waits for; by default all.
    on_exit: called with each process that has exited.
    on_restart: called with each one that has started since `start`.
    on_restart_failed: called after each failed attempt.
    on_heartbeats: called at each heartbeat interval with the processes that have begun or ceased to hang.
    max_crashes: a process that has exited or failed to start this many times within `crash_window_s` seconds is not
        restarted again; 0 for no limit. NotReady and processes that were killed do not count.
    """

    def __init__(
        self,
        count: int,
        create: Callable[[int], P],
        *,
        on_exit: Callable[[P], None],
        on_restart: Callable[[P], None],
        on_restart_failed: Callable[[], None] = lambda: None,
        on_heartbeats: Callable[[Sequence[P]], None],
        heartbeat_s: float,
        max_crashes: int = 0,
        crash_window_s: float = 0.0,
        initial: int | None = None,
        required: int | None = None,
    ) -> None:
        self.running: list[P] = []
        self._initial = count if initial is None else initial
        self._required = self._initial if required is None else min(required, self._initial)
        self._create = create
        self._on_exit = on_exit
        self._on_restart = on_restart
        self._on_restart_failed = on_restart_failed
        self._on_heartbeats = on_heartbeats
        self._heartbeat_s = heartbeat_s
        self._max_crashes = max_crashes
        self._crash_window_s = crash_window_s
        self._slots = [_Slot(number) for number in range(count)]
        self._slot_of: dict[P, _Slot] = {}
        self.last_crash = ""  # why the last process exited or could not start, unless that was NotReady
        self.start_error = ""  # why the last process could not start; "" once one has
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every process is running."""
        return len(self.running) == len(self._slots)

    @property
    def starting(self) -> int:
        """Number of processes that are being started, or will be after a delay."""
        return len(self._slots_in("starting", "failed"))

    @property
    def has_given_up(self) -> bool:
        """Whether no process runs and each one cannot be started, or exits without a response or too often."""
        if self.running:
            return False
        used = [slot for slot in self._slots if slot.state != "free"]
        return bool(used) and all(slot.is_failing for slot in used)

    @property
    def is_crash_loop(self) -> bool:
        """Whether no process runs or will be started again, because each one has exited or failed too often."""
        return bool(self._slots_in("abandoned")) and not self._slots_in("starting", "failed", "running")

    def _slots_in(self, *states: str) -> list[_Slot]:
        return [slot for slot in self._slots if slot.state in states]

    async def start(self) -> list[Any]:
        """Start the first processes; return the results of `required` ones, while the others continue to start.

        If one cannot start meanwhile, raise its error and end all.
        """
        slots = self._slots[: self._initial]
        processes = [self._create(slot.number) for slot in slots]
        starting = [asyncio.create_task(process.start()) for process in processes]
        try:
            await self._wait_for_required(starting)
        except BaseException:
            for task in starting:
                task.cancel()
            outcomes = await asyncio.gather(*starting, return_exceptions=True)
            failed = [isinstance(outcome, BaseException) for outcome in outcomes]
            await asyncio.gather(*(p.stop() for p, has_failed in zip(processes, failed, strict=True) if not has_failed))
            raise
        for slot, process, task in zip(slots, processes, starting, strict=True):
            if task.done():
                self._record_start(slot, process)
                self._run(self._supervise(slot, process), slot)
            else:
                slot.state = "starting"
                self._run(self._supervise_later(slot, process, task), slot)
        if self._heartbeat_s:
            self._run(self._check_heartbeats(self._heartbeat_s / MAX_MISSED))
        return [task.result() for task in starting if task.done()]

    def _run(self, supervising: Coroutine[Any, Any, None], slot: _Slot | None = None) -> None:
        task = asyncio.create_task(supervising)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if slot is not None:
            slot.task = task

    def add(self, count: int) -> None:
        """Start this many further processes, at most as many as there may be."""
        for slot in self._slots_in("free")[:count]:
            slot.state = "starting"
            self._run(self._supervise_new(slot), slot)

    def remove(self, process: P) -> None:
        """Stop supervising a process that runs, for the caller to end."""
        slot = self._slot_of[process]
        self._forget(process)
        self._release(slot)

    def cancel_starts(self, count: int) -> None:
        """End this many processes that have not started yet."""
        waiting = self._slots_in("starting", "failed")
        for slot in waiting[len(waiting) - count :]:
            self._release(slot)

    def _release(self, slot: _Slot) -> None:
        assert slot.task is not None
        slot.task.cancel()
        slot.task, slot.state = None, "free"

    def _record_start(self, slot: _Slot, process: P) -> None:
        slot.state = "running"
        self.start_error = ""
        self._slot_of[process] = slot
        self.running.append(process)

    def _forget(self, process: P) -> None:
        slot = self._slot_of.pop(process)
        if slot.state == "running":
            slot.state = "starting"
        self.running.remove(process)

    async def _wait_for_required(self, starting: Sequence[asyncio.Task[Any]]) -> None:
        if self._required == len(starting):
            await asyncio.gather(*starting)
            return
        while sum(task.done() for task in starting) < self._required:
            waiting = [task for task in starting if not task.done()]
            for task in (await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))[0]:
                task.result()

    async def close(self) -> list[P]:
        """Stop supervising; return the processes that still run, for the caller to end."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        running, self.running = self.running, []
        return running

    async def _supervise_later(self, slot: _Slot, process: P, starting: asyncio.Task[Any]) -> None:
        """Supervise a process that is still starting."""
        started: P | None = process
        try:
            await starting
        except DragomanError as error:
            self._handle_failed_start(slot, error, _FIRST_DELAY_S)
            started, _ = await self._restart(slot, _FIRST_DELAY_S)
        await self._supervise_started(slot, started)

    async def _supervise_new(self, slot: _Slot) -> None:
        """Start a process in a slot that had none, and supervise it."""
        started, _ = await self._restart(slot, 0.0)
        await self._supervise_started(slot, started)

    async def _supervise_started(self, slot: _Slot, process: P | None) -> None:
        if process is not None:
            self._record_start(slot, process)
            self._on_restart(process)
            await self._supervise(slot, process)

    async def _supervise(self, slot: _Slot, process: P) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            started_s = time.monotonic()
            await process.exited.wait()
            if not process.was_killed:
                slot.failures = 1 if process.has_responded else slot.failures + 1
                self._record_crash(slot, process.exit_reason)
            if process.was_killed or time.monotonic() - started_s > _HEALTHY_S:
                delay_s = _FIRST_DELAY_S
            self._forget(process)
            self._on_exit(process)
            restarted, delay_s = await self._restart(slot, delay_s)
            if restarted is None:
                return
            process = restarted
            self._record_start(slot, process)
            self._on_restart(process)

    def _record_crash(self, slot: _Slot, reason: str) -> None:
        """Record an exit or a failed start, and stop restarting the process after too many."""
        self.last_crash = reason
        times_s, now_s = slot.crash_times_s, time.monotonic()
        times_s.append(now_s)
        while times_s[0] < now_s - self._crash_window_s:
            times_s.popleft()
        if 0 < self._max_crashes <= len(times_s):
            slot.state = "abandoned"
            log.error(
                "process %d: not restarted after %d crashes within %g s",
                slot.number,
                len(times_s),
                self._crash_window_s,
            )

    async def _restart(self, slot: _Slot, delay_s: float) -> tuple[P | None, float]:
        """Start a new process, however long it takes; return it with the next delay, None if it crashes too often."""
        while slot.state != "abandoned":
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S) or _FIRST_DELAY_S
            process = self._create(slot.number)
            try:
                await process.start()
            except DragomanError as error:
                self._handle_failed_start(slot, error, delay_s)
            else:
                return process, delay_s
        return None, delay_s

    def _handle_failed_start(self, slot: _Slot, error: DragomanError, delay_s: float) -> None:
        slot.state = "starting" if isinstance(error, StartDelayed) else "failed"
        self.start_error = error.message
        if not isinstance(error, NotReady):
            self._record_crash(slot, error.message)
        retry = "not restarted again" if slot.state == "abandoned" else f"trying again in {delay_s:g} s"
        log.error("%s; %s", error.message, retry)
        self._on_restart_failed()

    async def _check_heartbeats(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self._on_heartbeats([process for process in self.running if process.check_heartbeat()])


class Heartbeat:
    """Detect whether a worker process hangs.

    A process hangs if it is stopped, or if it is idle and does not respond to pings. No ping is sent to a process that
    computes a call: it may hold the interpreter lock for minutes, during which none of its threads could respond.

    is_stopped: returns whether the process is stopped. ping: sends it a ping.
    """

    def __init__(self, is_stopped: Callable[[], bool], ping: Callable[[], None]) -> None:
        self._is_stopped = is_stopped
        self._ping = ping
        self._stopped_count = 0
        self._silent_count = 0
        self._was_pinged = False
        self.is_hung = False

    @property
    def reason(self) -> str:
        return "it is stopped" if self._stopped_count else "it does not respond"

    def record_response(self) -> None:
        self._was_pinged = False
        self._silent_count = 0
        self.is_hung = self._stopped_count >= MAX_MISSED

    def check(self, *, busy: bool) -> bool:
        """Check the process, which computes a call if it is busy; return whether `is_hung` has changed."""
        was_hung = self.is_hung
        if self._is_stopped():
            self._stopped_count += 1
        else:
            self._stopped_count = 0
            self._check_responses(busy)
        self.is_hung = self._stopped_count >= MAX_MISSED or self._silent_count >= MAX_MISSED
        return self.is_hung != was_hung

    def _check_responses(self, busy: bool) -> None:
        if busy and self._silent_count < MAX_MISSED:
            self._silent_count = 0
        elif self._was_pinged:
            self._silent_count += 1
        if not (busy or self._was_pinged):
            self._was_pinged = True
            self._ping()


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP or a debugger; False if the system does not report it."""
    if sys.platform == "linux":
        with suppress(OSError, IndexError):
            # proc(5): the state follows the name of the command, which may contain blanks and parentheses.
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"Tt"
    return False
