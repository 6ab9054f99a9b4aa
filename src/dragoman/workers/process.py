"""A pool of worker processes: one queue of calls for all replicas of a model, each restarted when it exits."""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from dragoman.core.calls import Request
from dragoman.core.errors import DeadlineExceeded, ModelFailed, NotReady
from dragoman.core.metrics import Family
from dragoman.core.spec import ModelSpec
from dragoman.workers.frames import Buffer, FrameKind
from dragoman.workers.importable import importable
from dragoman.workers.job import Job, settle
from dragoman.workers.pool import CONCURRENT, WINDOW, A, Loaded
from dragoman.workers.replica import Replica
from dragoman.workers.streams import Stream
from dragoman.workers.supervisor import Supervisors

log = logging.getLogger("dragoman.worker")

# The reader of a stream gives credit for this many chunks at a time.
_CREDIT = WINDOW // 2


class ProcessPool:
    """Each replica of the model has a process of its own. If one exits, only the calls that it computed fail."""

    replicated = True

    def __init__(self, spec: ModelSpec, changed: Callable[[], None]) -> None:
        self._spec = spec
        self._changed = changed
        self._numbers = itertools.count(1)
        self._queue: deque[Job] = deque()
        self._was_ready = False
        self._concurrent = False
        self._open = False
        self._supervisors = Supervisors(
            max(1, spec.replicas),
            lambda _number: Replica(self._spec, self._finished),
            on_exit=self._exited,
            on_restart=self._restarted,
            on_restart_failed=self._reject_if_given_up,
            on_heartbeats=self._heartbeats,
            heartbeat_s=spec.heartbeat_s,
        )

    @property
    def ready(self) -> bool:
        return any(not replica.heartbeat.is_hung and not replica.unavailable for replica in self._supervisors.running)

    @property
    def unavailable(self) -> str:
        reasons = [replica.unavailable for replica in self._supervisors.running]
        return "" if "" in reasons or not reasons else reasons[0]

    @property
    def capacity(self) -> int:
        return max(1, len(self._supervisors.running)) * (CONCURRENT if self._concurrent else 1)

    async def start(self) -> Loaded:
        self._spec = await asyncio.to_thread(importable, self._spec)
        loaded: list[Loaded] = await self._supervisors.start()
        self._concurrent = loaded[0].concurrent
        self._open = True
        self._spec = replace(self._spec, placement="process")  # decided, also if the model's file changes
        self._report_readiness()
        return loaded[0]

    def measurements(self) -> Sequence[Family]:
        return ()

    async def call(self, request: Request[A]) -> A:
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        job = Job(next(self._numbers), FrameKind.CALL, request, partial(settle, future))
        self._add(job)
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(job)
            raise

    async def stream(self, request: Request[A]) -> AsyncGenerator[A, None]:
        def credit(count: int) -> None:
            if job.worker is not None:
                job.worker.credit(job, count)

        stream = Stream(credit, lambda: self._cancel(job), _CREDIT)
        job = Job(next(self._numbers), FrameKind.STREAM, request, stream.deliver)
        self._add(job)
        async with aclosing(stream.chunks()) as chunks:
            async for chunk in chunks:
                yield chunk

    async def close(self) -> None:
        self._open = False
        replicas = await self._supervisors.close()
        for job in [*self._queue, *(job for replica in replicas for job in replica.held.values())]:
            job.deliver(None, self._unloading(), True)
        self._queue.clear()
        await asyncio.gather(*(replica.stop() for replica in replicas))
        self._report_readiness()

    def _report_readiness(self) -> None:
        """Call `changed` if `ready` has changed."""
        if self.ready != self._was_ready:
            self._was_ready = self.ready
            self._changed()

    # --- calls -----------------------------------------------------------------------------------------------

    def _add(self, job: Job) -> None:
        if not self._open:
            raise self._unloading()
        if self._supervisors.has_given_up:
            raise self._not_ready()
        self._queue.append(job)
        self._dispatch()

    def _cancel(self, job: Job) -> None:
        if job.worker is not None:
            job.worker.cancel(job)
        elif job in self._queue:
            self._queue.remove(job)

    def _dispatch(self) -> None:
        """Send queued calls to the workers that have capacity."""
        running = self._supervisors.running
        while self._queue:
            # If all hang, calls wait in the processes, where their deadline kills one that hangs for good.
            responsive = [r for r in running if not r.heartbeat.is_hung] or running
            replica = min((r for r in responsive if r.has_capacity), key=lambda r: len(r.held), default=None)
            if replica is None:
                return
            job = self._queue.popleft()
            frame = self._encode(job, replica)
            if frame is not None:
                replica.send(job, frame)

    def _encode(self, job: Job, replica: Replica) -> list[Buffer] | None:
        """Return the frame of a call; None if its deadline has passed or it cannot be encoded, which is delivered."""
        deadline_s = job.request.deadline_s if job.request is not None else None
        if deadline_s is not None and deadline_s <= time.monotonic():
            job.deliver(None, DeadlineExceeded("Request timeout expired"), True)
            return None
        try:
            return replica.encoded(job)
        except Exception as error:
            message = f"model '{self._spec.name}' failed: its input cannot be sent to a process: {error}"
            job.deliver(None, ModelFailed(message), True)
            return None

    def _finished(self, _replica: Replica) -> None:
        self._dispatch()

    def _requeue(self, jobs: Sequence[Job]) -> None:
        """Put calls that have not begun back at the head of the queue."""
        for job in reversed(jobs):
            if not job.is_cancelled:
                job.worker = None
                self._queue.appendleft(job)

    # --- processes -------------------------------------------------------------------------------------------

    def _heartbeats(self, changed: Sequence[Replica]) -> None:
        for replica in changed:
            if not replica.heartbeat.is_hung:
                log.info("model '%s': worker process %d responds again", self._spec.name, replica.pid)
                continue
            log.error(
                "model '%s': worker process %d hangs: %s; calls go to the other workers",
                self._spec.name,
                replica.pid,
                replica.heartbeat.reason,
            )
            if self.ready and not self._concurrent:
                self._take_back(replica)
        self._dispatch()
        self._report_readiness()

    def _take_back(self, replica: Replica) -> None:
        """Requeue all calls of a worker but the first, which it may have begun."""
        waiting = [job for job in [*replica.held.values()][1:] if not job.is_cancelled]
        for job in waiting:
            replica.take_back(job)
            job.number = next(self._numbers)
        self._requeue(waiting)

    def _restarted(self, _replica: Replica) -> None:
        self._report_readiness()
        self._dispatch()

    def _exited(self, replica: Replica) -> None:
        if replica.was_killed:
            log.warning(
                "model '%s': killed a worker process that still computed a call %g s after its cancellation",
                self._spec.name,
                self._spec.cancel_grace_s,
            )
        else:
            log.error("model '%s': a worker process died (%s); restarting it", self._spec.name, replica.exit_reason)
        held = list(replica.held.values())
        begun = held if self._concurrent else held[:1]
        for job in begun:
            job.deliver(None, replica.lost(), True)
        self._requeue(held[len(begun) :])
        replica.held.clear()
        self._reject_if_given_up()
        self._report_readiness()
        self._dispatch()

    def _reject_if_given_up(self) -> None:
        if self._supervisors.has_given_up:
            queued, self._queue = self._queue, deque()
            for job in queued:
                job.deliver(None, self._not_ready(), True)

    def _not_ready(self) -> NotReady:
        return NotReady(f"model '{self._spec.name}' is not ready: its worker process keeps exiting")

    def _unloading(self) -> NotReady:
        return NotReady(f"model '{self._spec.name}' is unloading")
