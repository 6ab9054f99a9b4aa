"""A pool of worker processes: one queue of calls for all replicas of a model, each restarted when it exits.

A job waits in the queue of the pool until a replica has capacity (`_dispatch`): one that is idle, or that computes
short calls and so may have one more waiting in its socket. `_choose` takes the replica that is expected to answer
first, or for prompts one that has computed their beginning. The `Supervisor` starts and restarts the processes and
detects those that hang; each is a `Replica`.

    a replica  its jobs
    runs       are sent to it
    hangs      that wait are put back into the queue while the pool is ready; no more are sent to it unless all hang
    leaves     are finished; no more are sent to it
    has exited that it had begun fail, or are repeated if the model is idempotent; the others are put back

    state            calls                                                 becomes
    STARTING         are not made yet: the deployment is not ready         OPEN (`start`), CLOSED
    OPEN             wait for a replica, also while none runs and one is   WITHOUT_WORKERS: a launcher has brought no
                     being started                                         worker for `wait_s` seconds; CLOSED
    WITHOUT_WORKERS  are rejected                                          OPEN: a worker has come; CLOSED
    CLOSED           are rejected: the model is unloading

Calls are rejected in OPEN too once the supervisor has given up (`has_given_up`): it knows when it starts no more.
"""

import asyncio
import inspect
import logging
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any

from dragoman import plugins
from dragoman.core import error_texts
from dragoman.core.calls import Generate
from dragoman.core.errors import DeadlineExceeded, ModelFailed, NotReady
from dragoman.core.metrics import Family, Sample
from dragoman.core.spec import LaunchOptions, ModelSpec
from dragoman.core.worker_status import WORKER_STATES, WorkerStatus
from dragoman.workers.autoscaler import Autoscaler
from dragoman.workers.frames import Buffer, FrameKind
from dragoman.workers.jobs import Job, JobRunner
from dragoman.workers.launcher import Launcher, LocalLauncher
from dragoman.workers.local import unloading
from dragoman.workers.pool import CONCURRENT, Loaded
from dragoman.workers.prefix_routing import PrefixRouter
from dragoman.workers.replica import KILLED, LEAVING, LEFT, LOADED, Replica
from dragoman.workers.supervisor import Supervisor

log = logging.getLogger("dragoman.worker")

# How often an idempotent call is computed again: it may itself be what ends its workers.
_MAX_REPEATS = 2
# The estimated time per call of an idle worker that is slower than others shrinks by this at each heartbeat interval,
# so that it is tried again.
_IDLE_FACTOR = 0.97
# A call is not sent behind another one while a replica is idle: the first may take longer than expected.
_BEHIND_S = 1e6
# Calls longer than this may wait for a faster replica while a slow one is idle.
_LONG_S = 0.1
_STARTING_AGAIN = "a worker is starting again"


class PoolState(Enum):
    """What a pool does with calls; see the table of this module."""

    STARTING = "starting"
    OPEN = "open"
    WITHOUT_WORKERS = "without workers"
    CLOSED = "closed"


STARTING, OPEN, WITHOUT_WORKERS, CLOSED = PoolState


class ProcessPool(JobRunner):
    """Each replica of the model has a process of its own. If one exits, only the calls that it computed fail."""

    is_replicated = True

    def __init__(self, spec: ModelSpec, on_change: Callable[[], None]) -> None:
        super().__init__()
        self._spec = spec
        self._on_change = on_change
        self.on_capacity: Callable[[], None] = lambda: None
        self._queue: deque[Job] = deque()
        self._state = STARTING
        self._was_ready = False  # when `on_change` was called last
        self._restarts = 0
        self._concurrent = False
        self._prefix_router: PrefixRouter | None = None  # of text models
        self._exits = 0
        self._min_ready = 1 if spec.launch is None else min(spec.launch.min_ready, spec.replicas)
        self._launcher: Launcher = (
            LocalLauncher(spec) if spec.launch is None else plugins.find("launchers", spec.launch.launcher)(spec)
        )
        is_elastic = spec.launch is not None and spec.launch.is_elastic and self._launcher.starts_workers
        self._initial = max(1, (spec.launch.min_replicas or 0) if is_elastic and spec.launch else spec.replicas)
        self.supervisor = Supervisor(
            max(1, spec.replicas),
            lambda number: Replica(self._spec, self._launcher, self._dispatch, number),
            on_exit=self._handle_exit,
            on_restart=self._handle_restart,
            on_restart_failed=self._reject_if_given_up,
            on_heartbeats=self._handle_heartbeats,
            heartbeat_s=spec.heartbeat_s,
            max_crashes=spec.max_crashes,
            crash_window_s=spec.crash_window_s,
            initial=self._initial,
            required=None if spec.launch is None else max(1, self._min_ready),
        )
        self._autoscaler = None if spec.launch is None or not is_elastic else self._make_autoscaler(spec.launch)
        self._recheck: asyncio.TimerHandle | None = None
        self._waiting_timer: asyncio.TimerHandle | None = None  # with a launcher, since the last worker exited
        self._scaling: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def _make_autoscaler(self, launch: LaunchOptions) -> Autoscaler:
        return Autoscaler(
            self.supervisor,
            replace(launch, replicas=self._spec.replicas),
            count_calls=lambda: (len(self._queue), sum(len(replica.held) for replica in self.supervisor.running)),
            end=self._end,
        )

    def _end(self, replica: Replica) -> None:
        log.info("model '%s': %s ends, it was idle", self._spec.name, replica.description)
        self._run(replica.stop())

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def _required_workers(self) -> int:
        """Number of workers that must be able to answer; with `min_ready` 0, one of those that run."""
        return self._min_ready or min(1, len(self.supervisor.running))

    @property
    def ready(self) -> bool:
        able = (not replica.heartbeat.is_hung and not replica.unavailable for replica in self.supervisor.running)
        return self._state is OPEN and sum(able) >= self._required_workers and not self.supervisor.has_given_up

    @property
    def unavailable(self) -> str:
        reasons = [replica.unavailable for replica in self.supervisor.running]
        if not reasons and (reason := self._crash_reason()):
            return reason
        if len(reasons) < self._min_ready:
            return self.waiting or (_STARTING_AGAIN if self._state is OPEN else "")
        return "" if reasons.count("") >= self._required_workers else next(filter(None, reasons))

    @property
    def waiting(self) -> str:
        """Which workers it waits for, "" if it has all that it needs or they are processes of this machine."""
        count, starting = len(self.supervisor.running), self.supervisor.starting
        if self._spec.launch is None or self._state is CLOSED:
            return ""
        if self._state is not STARTING and (count or not starting) and count >= self._min_ready:
            return ""
        wanted = max(self._initial, count + starting)
        waiting = f"waiting for {self._launcher.waiting_for}: {count} of {wanted} are loaded"
        error = self.supervisor.start_error.removeprefix(f"failed to load '{self._spec.name}', ")
        return waiting if error in waiting else f"{waiting}; the last start failed: {error}"

    def _crash_reason(self) -> str:
        """Return why no process runs."""
        spec, reason = self._spec, self.supervisor.last_crash
        if self.supervisor.is_crash_loop:
            return (
                f"its worker process crashed {spec.max_crashes} times within {spec.crash_window_s:g} s and is "
                f"not restarted until the model is loaded again; last reason: {reason}"
            )
        if not self.supervisor.has_given_up:
            return ""
        error = self.supervisor.start_error
        return f"its worker process {f'cannot be started again: {error}' if error else f'keeps exiting: {reason}'}"

    @property
    def capacity(self) -> int:
        can_grow = self._autoscaler is not None and self._autoscaler.can_grow  # one call waits, and so makes it grow
        return max(1, len(self.supervisor.running) + can_grow) * (CONCURRENT if self._concurrent else 1)

    async def start(self) -> Loaded:
        self._spec = await asyncio.to_thread(importable, self._spec)
        if self._spec.launch is not None:
            runtime = absolute_path(self._spec.runtime) if ".py:" in self._spec.runtime else self._spec.runtime
            self._spec = replace(self._spec, uri=absolute_path(self._spec.uri), runtime=runtime)
        loaded: list[Loaded] = await self.supervisor.start()
        self._concurrent = loaded[0].concurrent
        if self._concurrent and Generate in loaded[0].calls and self._spec.replicas > 1:
            self._prefix_router = PrefixRouter()
        self._state = OPEN
        if self._autoscaler is not None:
            self._autoscaler.concurrent = self._concurrent
            self._autoscaler.record_start(self.supervisor.running[0])
            self._scaling = self._run(self._autoscaler.run())
        self._spec = replace(self._spec, placement="process")  # also after a restart with a changed model file
        self._report_readiness()
        return loaded[0]

    def measurements(self) -> Sequence[Family]:
        name = "dragoman_worker_restarts_total"
        restarts = (Sample(name, {}, self._restarts),)
        families = [Family(name, "counter", "Worker processes that were started again.", restarts)]
        return [*families, *(family for replica in self.supervisor.running for family in replica.measurements)]

    def workers(self) -> tuple[WorkerStatus, ...]:
        waiting = WorkerStatus("", "", "waiting", self.waiting or f"waiting for {self._launcher.waiting_for}")
        return (*(replica.status for replica in self.supervisor.running), *[waiting] * self._awaited_workers)

    def states(self) -> Mapping[str, int]:
        counts = Counter(replica.status.state for replica in self.supervisor.running)
        counts["waiting"] = self._awaited_workers
        return {state: counts[state] for state in WORKER_STATES}

    def process_ids(self) -> Mapping[int, int]:
        return {replica.number: replica.pid for replica in self.supervisor.running if replica.pid}

    @property
    def _awaited_workers(self) -> int:
        """Number of workers that are started, or that a launcher has to bring."""
        if self._state is CLOSED:
            return 0
        return self._initial if self._state is STARTING else self.supervisor.starting

    async def close(self) -> None:
        self._state = CLOSED
        self._end_waiting()
        if self._scaling is not None:
            self._scaling.cancel()
        replicas = await self.supervisor.close()
        for job in [*self._queue, *(job for replica in replicas for job in replica.held.values())]:
            job.deliver(None, unloading(self._spec), True)
        self._queue.clear()
        await asyncio.gather(*(replica.stop() for replica in replicas))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._report_readiness()

    def _report_readiness(self) -> None:
        if self.ready != self._was_ready:
            self._was_ready = self.ready
            self._on_change()

    # --- jobs ------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        if self._state is not OPEN or self.supervisor.has_given_up:
            raise self._not_ready() if self._state in (OPEN, WITHOUT_WORKERS) else unloading(self._spec)
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
        while self._queue:
            replica = self._choose(self._queue[0])
            if replica is None:
                if self._autoscaler is not None:
                    self._autoscaler.grow()
                return
            job = self._queue.popleft()
            frame = self._encode(job, replica)
            if frame is not None:
                replica.send(job, frame)

    def _choose(self, job: Job) -> Replica | None:
        """Return the replica that is expected to answer first, or for prompts one with their prefix; None to wait."""
        if self._prefix_router is not None and job.request is not None:
            able = [
                replica for replica in self.supervisor.running if replica.has_capacity and not replica.heartbeat.is_hung
            ]
            if able:
                return self._prefix_router.choose(able, job.request.call)
        best, least_s, all_hang = None, math.inf, True
        for replica in self.supervisor.running:
            if replica.heartbeat.is_hung:
                continue
            all_hang = False
            if replica.has_capacity:
                held = len(replica.held)
                answer_s = (held + 1) * (replica.mean_s or self._guess_s(replica))
                if held and not self._concurrent:
                    answer_s += _BEHIND_S
                if answer_s < least_s:
                    best, least_s = replica, answer_s
        if all_hang:  # jobs wait in the processes, where their deadline kills one that hangs for good
            able = [replica for replica in self.supervisor.running if replica.has_capacity]
            return min(able, key=lambda replica: len(replica.held), default=None)
        if best is not None and best.mean_s > _LONG_S and self._is_sooner_elsewhere(best.mean_s):
            return None
        return best

    def _guess_s(self, replica: Replica) -> float:
        """Return the assumed time per call of a replica without an estimate: 0 if idle, so that it gets a call."""
        return max((other.mean_s for other in self.supervisor.running), default=0.0) or 1.0 if replica.held else 0.0

    def _is_sooner_elsewhere(self, mean_s: float) -> bool:
        """Return whether the faster replicas, although busy, will have answered all jobs within `mean_s` seconds."""
        running = [replica for replica in self.supervisor.running if replica.state is LOADED]
        faster = [r for r in running if 0 < r.mean_s < mean_s and not r.has_capacity]
        faster = [replica for replica in faster if replica.elapsed_s < 2 * replica.mean_s]
        if not faster:
            return False
        jobs = len(self._queue) + sum(len(replica.held) for replica in faster)
        if jobs / sum(1 / replica.mean_s for replica in faster) >= mean_s:
            return False
        if self._recheck is None:  # in case that they take longer
            self._recheck = asyncio.get_running_loop().call_later(_LONG_S, self._dispatch_again)
        return True

    def _dispatch_again(self) -> None:
        self._recheck = None
        if self._state is OPEN:
            self._dispatch()

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
        fastest_s = min((replica.mean_s for replica in self.supervisor.running), default=0.0)
        for replica in self.supervisor.running:
            if not replica.held and replica.mean_s > fastest_s:
                replica.mean_s *= _IDLE_FACTOR
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

    def _handle_restart(self, replica: Replica) -> None:
        if self._autoscaler is not None:
            self._autoscaler.record_start(replica)
        if self._restarts < self._exits:  # others have started late
            self._restarts += 1
            log.info("model '%s': %s runs in place of one that ended", self._spec.name, replica.description)
        self._end_waiting()
        self._report_readiness()
        self._dispatch()
        self.on_capacity()

    def _handle_exit(self, replica: Replica) -> None:
        if replica.state in (LEAVING, LEFT):
            log.info("model '%s': %s has left", self._spec.name, replica.description)
        elif replica.state is KILLED:
            log.warning(
                "model '%s': killed a worker process that still computed a call %g s after its cancellation",
                self._spec.name,
                self._spec.cancel_grace_s,
            )
        else:
            event = "is lost" if replica.is_remote else "died"
            log.error("model '%s': %s %s (%s)", self._spec.name, replica.description, event, replica.exit_reason)
        self._exits += 1
        held = list(replica.held.values())
        started = held if self._concurrent else held[:1]
        again = [job for job in started if self._may_repeat(job, replica)]
        for job in started:
            if job not in again:
                replica.estimate_start(job)
                job.deliver(None, replica.lost_error(), True)
        self._requeue([*again, *held[len(started) :]])
        replica.held.clear()
        self._reject_if_given_up()
        if self._spec.launch is not None and self._min_ready and not self.supervisor.running:
            self._end_waiting()
            loop = asyncio.get_running_loop()
            self._waiting_timer = loop.call_later(self._spec.launch.wait_s, self._stop_waiting)
        self._report_readiness()
        self._dispatch()

    def _may_repeat(self, job: Job, replica: Replica) -> bool:
        """Return whether to compute a call of a lost worker again, and count that."""
        if not self._spec.idempotent or replica.was_killed or job.is_cancelled or job.kind != FrameKind.CALL:
            return False
        job.repeats += 1
        return job.repeats <= _MAX_REPEATS

    def _end_waiting(self) -> None:
        if self._state is WITHOUT_WORKERS:
            self._state = OPEN
        if self._waiting_timer is not None:
            self._waiting_timer.cancel()

    def _stop_waiting(self) -> None:
        """Reject queued calls, and new ones, since no worker has come for too long."""
        self._state = WITHOUT_WORKERS
        log.error("model '%s': calls are rejected until a worker is there: %s", self._spec.name, self.waiting)
        self._reject_queue()

    def _reject_queue(self) -> None:
        queued, self._queue = self._queue, deque()
        for job in queued:
            job.deliver(None, self._not_ready(), True)

    def _reject_if_given_up(self) -> None:
        if self.supervisor.has_given_up:
            self._reject_queue()
        if self.supervisor.is_crash_loop:
            log.error("model '%s': unavailable: %s", self._spec.name, self.unavailable)
            self._on_change()

    def _not_ready(self) -> NotReady:
        return NotReady(error_texts.not_ready(self._spec.name, "UNAVAILABLE"))


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
