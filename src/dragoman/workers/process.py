"""A pool of worker processes: one queue of calls for all replicas of a model, each restarted when it dies."""

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
from dragoman.workers.frames import Buffer, Kind
from dragoman.workers.heartbeat import BEATS
from dragoman.workers.importable import importable
from dragoman.workers.place import Place
from dragoman.workers.pool import CONCURRENT, WINDOW, A, Loaded
from dragoman.workers.replica import Job, Replica
from dragoman.workers.settled import settle
from dragoman.workers.streams import Stream

log = logging.getLogger("dragoman.worker")

# A stream's reader tells the model of its progress this many pieces at a time.
_CREDIT = WINDOW // 2


class ProcessPool:
    """Each replica of the model has a process of its own; a crash costs the calls that it was computing alone."""

    replicated = True

    def __init__(self, spec: ModelSpec, changed: Callable[[], None]) -> None:
        self._spec = spec
        self._changed = changed
        self._numbers = itertools.count(1)
        self._queue: deque[Job] = deque()
        self._replicas: list[Replica] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._places: list[Place[Replica]] = []
        self._hopeless = False
        self._concurrent = False
        self._open = False

    @property
    def ready(self) -> bool:
        return any(not replica.heartbeat.is_hung and not replica.unavailable for replica in self._replicas)

    @property
    def unavailable(self) -> str:
        reasons = [replica.unavailable for replica in self._replicas]
        return "" if "" in reasons or not reasons else reasons[0]

    @property
    def capacity(self) -> int:
        return max(1, len(self._replicas)) * (CONCURRENT if self._concurrent else 1)

    async def start(self) -> Loaded:
        self._spec = await asyncio.to_thread(importable, self._spec)
        replicas = [self._made() for _ in range(max(1, self._spec.replicas))]
        starting = [asyncio.create_task(replica.start()) for replica in replicas]
        try:
            loaded = await asyncio.gather(*starting)
        except BaseException:
            await _abandon(replicas, starting)
            raise
        self._concurrent = loaded[0].concurrent
        self._open = True
        self._replicas = replicas
        self._spec = replace(self._spec, placement="process")  # settled, also where the model's file changes
        self._places = [Place(self._made, self._lose, self._gain, self._fail) for _ in replicas]
        keeping = zip(self._places, replicas, strict=True)
        self._keepers = [asyncio.create_task(place.keep(replica)) for place, replica in keeping]
        if self._spec.heartbeat_s:
            self._keepers.append(asyncio.create_task(self._watch_heartbeats(self._spec.heartbeat_s / BEATS)))
        self._changed()
        return loaded[0]

    def _made(self) -> Replica:
        return Replica(self._spec, self._served)

    def measurements(self) -> Sequence[Family]:
        return ()

    async def call(self, request: Request[A]) -> A:
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        job = Job(next(self._numbers), Kind.CALL, request, partial(settle, future))
        self._enter(job)
        try:
            return await future
        except asyncio.CancelledError:
            self._drop(job)
            raise

    async def stream(self, request: Request[A]) -> AsyncGenerator[A, None]:
        def credit(count: int) -> None:
            if job.replica is not None:
                job.replica.credit(job, count)

        stream = Stream(credit, lambda: self._drop(job), _CREDIT)
        job = Job(next(self._numbers), Kind.STREAM, request, stream.deliver)
        self._enter(job)
        async with aclosing(stream.pieces()) as pieces:
            async for piece in pieces:
                yield piece

    async def close(self) -> None:
        self._open = False
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers.clear()
        replicas, self._replicas = self._replicas, []
        for job in [*self._queue, *(job for replica in replicas for job in replica.held.values())]:
            job.deliver(None, self._stopped(), True)
        self._queue.clear()
        await asyncio.gather(*(replica.stop() for replica in replicas))
        if replicas:
            self._changed()

    # --- calls come and go -----------------------------------------------------------------------------------

    def _enter(self, job: Job) -> None:
        if not self._open:
            raise self._stopped()
        if self._hopeless:
            raise self._not_ready()
        self._queue.append(job)
        self._pump()

    def _drop(self, job: Job) -> None:
        """Nobody waits for it any more."""
        if job.replica is not None:
            job.replica.cancel(job)
        elif job in self._queue:
            self._queue.remove(job)

    def _pump(self) -> None:
        """Give the calls that wait to the workers that have room."""
        while self._queue:
            # Where all hang, calls wait in the processes: a deadline then ends one that hangs for good.
            able = [r for r in self._replicas if not r.heartbeat.is_hung] or self._replicas
            replica = min((r for r in able if r.room), key=lambda r: len(r.held), default=None)
            if replica is None:
                return
            job = self._queue.popleft()
            pieces = self._sendable(job, replica)
            if pieces is not None:
                replica.send(job, pieces)

    def _sendable(self, job: Job, replica: Replica) -> list[Buffer] | None:
        deadline_s = job.request.deadline_s if job.request is not None else None
        if deadline_s is not None and deadline_s <= time.monotonic():
            job.deliver(None, DeadlineExceeded("Request timeout expired"), True)
            return None
        try:
            return replica.encoded(job)
        except Exception as fault:
            told = f"model '{self._spec.name}' failed: its input cannot be sent to a process: {fault}"
            job.deliver(None, ModelFailed(told), True)
            return None

    def _served(self, _replica: Replica) -> None:
        self._pump()

    # --- processes hang --------------------------------------------------------------------------------------

    async def _watch_heartbeats(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            ready = self.ready
            for replica in self._replicas:
                if replica.beat():
                    self._heartbeat_changed(replica)
            if self.ready != ready:
                self._changed()

    def _heartbeat_changed(self, replica: Replica) -> None:
        what = "model '%s': worker process %d "
        if not replica.heartbeat.is_hung:
            log.info(what + "answers again", self._spec.name, replica.pid)
        else:
            why = replica.heartbeat.reason
            log.error(what + "hangs: %s; no call is sent to it while others answer", self._spec.name, replica.pid, why)
            if self.ready and not self._concurrent:
                for job in [*replica.held.values()][:0:-1]:  # all but the first, which it may have begun
                    if job.wanted:
                        replica.take_back(job)
                        job.number, job.replica = next(self._numbers), None
                        self._queue.appendleft(job)
        self._pump()

    # --- processes come and go -------------------------------------------------------------------------------

    def _gain(self, replica: Replica) -> None:
        self._hopeless = False
        self._replicas.append(replica)
        if len(self._replicas) == 1:
            self._changed()
        self._pump()

    def _lose(self, replica: Replica) -> None:
        if replica.overdue:
            told = "model '%s': killed the worker process that still computed a call %g s after its caller had left"
            log.warning(told, self._spec.name, self._spec.cancel_grace_s)
        else:
            log.error("model '%s': a worker process died (%s); restarting it", self._spec.name, replica.end)
        self._replicas.remove(replica)
        held = list(replica.held.values())
        computed = held if self._concurrent else held[:1]
        for job in computed:
            job.deliver(None, replica.lost(), True)
        # The others had not begun: nothing that they would do has happened, so they may run elsewhere.
        for job in reversed(held[len(computed) :]):
            if job.wanted:
                job.replica = None
                self._queue.appendleft(job)
        replica.held.clear()
        self._fail()
        if not self._replicas:
            self._changed()
        self._pump()

    def _fail(self) -> None:
        self._hopeless = not self._replicas and all(place.hopeless for place in self._places)
        if self._hopeless:
            waiting, self._queue = self._queue, deque()
            for job in waiting:
                job.deliver(None, self._not_ready(), True)

    def _not_ready(self) -> NotReady:
        return NotReady(f"model '{self._spec.name}' is not ready: its worker process cannot be kept alive")

    def _stopped(self) -> NotReady:
        return NotReady(f"model '{self._spec.name}' is stopped")


async def _abandon(replicas: list[Replica], starting: list[asyncio.Task[Loaded]]) -> None:
    for task in starting:
        task.cancel()
    loaded = await asyncio.gather(*starting, return_exceptions=True)
    await asyncio.gather(*(r.stop() for r, result in zip(replicas, loaded, strict=True) if isinstance(result, Loaded)))
