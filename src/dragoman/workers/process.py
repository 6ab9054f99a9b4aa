"""A pool of worker processes: one queue of calls for all replicas of a model, each restarted when it exits."""

import asyncio
import inspect
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from dragoman import plugins
from dragoman.core.errors import DeadlineExceeded, ModelFailed, NotReady
from dragoman.core.metrics import Family, Sample
from dragoman.core.spec import ModelSpec
from dragoman.workers.frames import Buffer, FrameKind
from dragoman.workers.jobs import Job, JobRunner
from dragoman.workers.launcher import Launcher, LocalLauncher
from dragoman.workers.local import unloading
from dragoman.workers.pool import CONCURRENT, Loaded
from dragoman.workers.replica import Replica
from dragoman.workers.supervisor import Supervisor

log = logging.getLogger("dragoman.worker")

# How often an idempotent call is computed again: it may itself be what ends its workers.
_MAX_REPEATS = 2


class ProcessPool(JobRunner):
    """Each replica of the model has a process of its own. If one exits, only the calls that it computed fail."""

    is_replicated = True

    def __init__(self, spec: ModelSpec, on_change: Callable[[], None]) -> None:
        super().__init__()
        self._spec = spec
        self._on_change = on_change
        self._queue: deque[Job] = deque()
        self._was_ready = False
        self._restarts = 0
        self._concurrent = False
        self._open = False
        self._exits = 0
        self._min_ready = 1 if spec.launch is None else spec.launch.min_ready
        self._launcher: Launcher = (
            LocalLauncher(spec) if spec.launch is None else plugins.find("launchers", spec.launch.launcher)(spec)
        )
        self.supervisor = Supervisor(
            max(1, spec.replicas),
            lambda _number: Replica(self._spec, self._launcher, self._dispatch),
            on_exit=self._handle_exit,
            on_restart=self._handle_restart,
            on_restart_failed=self._reject_if_given_up,
            on_heartbeats=self._handle_heartbeats,
            heartbeat_s=spec.heartbeat_s,
            max_crashes=spec.max_crashes,
            crash_window_s=spec.crash_window_s,
            required=None if spec.launch is None else self._min_ready,
        )

    @property
    def ready(self) -> bool:
        able = (not replica.heartbeat.is_hung and not replica.unavailable for replica in self.supervisor.running)
        return sum(able) >= self._min_ready

    @property
    def unavailable(self) -> str:
        reasons = [replica.unavailable for replica in self.supervisor.running]
        if not reasons and (reason := self._crash_reason()):
            return reason
        if len(reasons) < self._min_ready:
            return self.waiting
        return "" if reasons.count("") >= self._min_ready else next(filter(None, reasons))

    @property
    def waiting(self) -> str:
        """Which workers it waits for, "" if it has all that it needs or they are processes of this machine."""
        count = len(self.supervisor.running)
        if self._spec.launch is None or count >= self._min_ready:
            return ""
        return f"waiting for {self._launcher.waiting_for}: {count} of {self._spec.replicas} are loaded"

    def _crash_reason(self) -> str:
        """Return why no process runs."""
        spec, reason = self._spec, self.supervisor.last_crash
        if self.supervisor.is_crash_loop:
            return (
                f"its worker process crashed {spec.max_crashes} times within {spec.crash_window_s:g} s and is "
                f"not restarted until the model is loaded again; last reason: {reason}"
            )
        return f"its worker process keeps exiting: {reason}" if self.supervisor.has_given_up else ""

    @property
    def capacity(self) -> int:
        return max(1, len(self.supervisor.running)) * (CONCURRENT if self._concurrent else 1)

    async def start(self) -> Loaded:
        self._spec = await asyncio.to_thread(importable, self._spec)
        if self._spec.launch is not None:
            self._spec = replace(self._spec, uri=absolute_path(self._spec.uri))
        loaded: list[Loaded] = await self.supervisor.start()
        self._concurrent = loaded[0].concurrent
        self._open = True
        self._spec = replace(self._spec, placement="process")  # also after a restart with a changed model file
        self._report_readiness()
        return loaded[0]

    def measurements(self) -> Sequence[Family]:
        name = "dragoman_worker_restarts_total"
        restarts = (Sample(name, {}, self._restarts),)
        families = [Family(name, "counter", "Worker processes that were started again.", restarts)]
        if self._spec.launch is not None:
            running, name = len(self.supervisor.running), "dragoman_workers"
            states = (("loaded", running), ("waiting", self._spec.replicas - running))
            samples = tuple(Sample(name, {"state": state}, count) for state, count in states)
            families.append(Family(name, "gauge", "Workers of a launcher that are loaded, or awaited.", samples))
        return families

    async def close(self) -> None:
        self._open = False
        replicas = await self.supervisor.close()
        for job in [*self._queue, *(job for replica in replicas for job in replica.held.values())]:
            job.deliver(None, unloading(self._spec), True)
        self._queue.clear()
        await asyncio.gather(*(replica.stop() for replica in replicas))
        self._report_readiness()

    def _report_readiness(self) -> None:
        """Call `changed` if `ready` has changed."""
        if self.ready != self._was_ready:
            self._was_ready = self.ready
            self._on_change()

    # --- jobs ------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        if not self._open:
            raise unloading(self._spec)
        if self.supervisor.has_given_up:
            raise self._not_ready()
        self._queue.append(job)
        self._dispatch()

    def cancel(self, job: Job) -> None:
        if job.worker is not None:
            job.worker.cancel(job)
        elif job in self._queue:
            self._queue.remove(job)

    def credit(self, job: Job, count: int) -> None:
        if job.worker is not None:
            job.worker.credit(job, count)

    def _dispatch(self) -> None:
        """Send queued jobs to the replicas that have capacity."""
        running = self.supervisor.running
        while self._queue:
            # If all hang, jobs wait in the processes, where their deadline kills one that hangs for good.
            responsive = [r for r in running if not r.heartbeat.is_hung] or running
            replica = min((r for r in responsive if r.has_capacity), key=lambda r: len(r.held), default=None)
            if replica is None:
                return
            job = self._queue.popleft()
            frame = self._encode(job, replica)
            if frame is not None:
                replica.send(job, frame)

    def _encode(self, job: Job, replica: Replica) -> list[Buffer] | None:
        """Return the frame of a job. If its deadline has passed or it cannot be encoded, deliver that; return None."""
        deadline_s = job.request.deadline_s if job.request is not None else None
        if deadline_s is not None and deadline_s <= time.monotonic():
            job.deliver(None, DeadlineExceeded("Request timeout expired"), True)
            return None
        try:
            return replica.encode(job)
        except Exception as error:
            message = f"model '{self._spec.name}' failed: its input cannot be sent to a process: {error}"
            job.deliver(None, ModelFailed(message), True)
            return None

    def _requeue(self, jobs: Sequence[Job]) -> None:
        """Put jobs that have not begun back at the head of the queue."""
        for job in reversed(jobs):
            if not job.is_cancelled:
                job.worker = None
                self._queue.appendleft(job)

    # --- processes -------------------------------------------------------------------------------------------

    def _handle_heartbeats(self, changed: Sequence[Replica]) -> None:
        for replica in changed:
            if not replica.heartbeat.is_hung:
                log.info("model '%s': %s responds again", self._spec.name, replica.description)
                continue
            log.error(
                "model '%s': %s hangs: %s; calls go to the other workers",
                self._spec.name,
                replica.description,
                replica.heartbeat.reason,
            )
            if self.ready and not self._concurrent:
                self._requeue_waiting(replica)
        self._dispatch()
        self._report_readiness()

    def _requeue_waiting(self, replica: Replica) -> None:
        """Requeue all jobs of a replica but the first, which it may have begun."""
        waiting = [job for job in [*replica.held.values()][1:] if not job.is_cancelled]
        for job in waiting:
            replica.take_back(job)
            job.number = next(self.numbers)
        self._requeue(waiting)

    def _handle_restart(self, _replica: Replica) -> None:
        self._restarts = min(self._restarts + 1, self._exits)  # others have started late
        self._report_readiness()
        self._dispatch()

    def _handle_exit(self, replica: Replica) -> None:
        if replica.was_killed:
            log.warning(
                "model '%s': killed a worker process that still computed a call %g s after its cancellation",
                self._spec.name,
                self._spec.cancel_grace_s,
            )
        else:
            log.error("model '%s': a worker process died (%s)", self._spec.name, replica.exit_reason)
        self._exits += 1
        held = list(replica.held.values())
        begun = held if self._concurrent else held[:1]
        again = [job for job in begun if self._may_repeat(job, replica)]
        for job in begun:
            if job not in again:
                job.deliver(None, replica.lost_error(), True)
        self._requeue([*again, *held[len(begun) :]])
        replica.held.clear()
        self._reject_if_given_up()
        self._report_readiness()
        self._dispatch()

    def _may_repeat(self, job: Job, replica: Replica) -> bool:
        """Return whether to compute a call of a lost worker again, and count that."""
        if not self._spec.idempotent or replica.was_killed or job.is_cancelled or job.kind != FrameKind.CALL:
            return False
        job.repeats += 1
        return job.repeats <= _MAX_REPEATS

    def _reject_if_given_up(self) -> None:
        if self.supervisor.has_given_up:
            queued, self._queue = self._queue, deque()
            for job in queued:
                job.deliver(None, self._not_ready(), True)
        if self.supervisor.is_crash_loop:
            log.error("model '%s': unavailable: %s", self._spec.name, self.unavailable)
            self._on_change()

    def _not_ready(self) -> NotReady:
        return NotReady(f"model '{self._spec.name}' is not ready: {self.unavailable}")


def importable(spec: ModelSpec) -> ModelSpec:
    """Return the spec with a path instead of a live object. Raises ModelFailed if the object has no such path."""
    if spec.target is None:
        return spec
    path = _import_path(spec.target)
    if path is None:
        raise ModelFailed(
            f"model '{spec.name}': placement 'process' needs 'module:object', 'file.py:object', or a class or function "
            f"at the top level of a module or script; got {spec.target!r}; otherwise set placement 'thread'"
        )
    return replace(spec, target=None, uri=path, runtime="python")


def absolute_path(uri: str) -> str:
    """Return a path, or `file.py:object`, for processes with another working directory; unchanged if it is neither."""
    file, colon, name = uri.rpartition(":") if ".py:" in uri else (uri, "", "")
    return f"{Path(file).absolute()}{colon}{name}" if file and Path(file).exists() else uri


def _import_path(target: Any) -> str | None:
    """Return `module:object` or `file.py:object`; None if another process would not find this very object there."""
    module = sys.modules.get(getattr(target, "__module__", ""))
    if module is None or not (inspect.isclass(target) or inspect.isfunction(target)):
        return None
    try:
        if attrgetter(target.__qualname__)(module) is not target:
            return None
    except AttributeError:  # defined in a function
        return None
    path = module.__name__
    if path == "__main__" and module.__spec__ is not None:
        path = module.__spec__.name  # `python -m`: its imports may be relative
    elif path == "__main__" or path.startswith("dragoman_file_"):  # other processes do not know these names
        path = getattr(module, "__file__", None) or ""
        if not path.endswith(".py"):
            return None
    return f"{path}:{target.__qualname__}"
