"""The number of workers of a model that follows its load: more while calls wait, fewer when workers are idle."""

import asyncio
import math
import time
from collections.abc import Callable

from dragoman.core.spec import LaunchOptions
from dragoman.workers.pool import CONCURRENT
from dragoman.workers.replica import Replica
from dragoman.workers.supervisor import Supervisor

_CHECK_S = 0.1
# The calls that wait should take the workers this long: as long as a further worker takes to start, within bounds.
_MIN_BACKLOG_S = 0.5
_MAX_BACKLOG_S = 10.0


class Autoscaler:
    """Starts and ends the workers of one pool.

    The calls of a pool are worth as many workers as finish them in the time that a further worker takes to start, or
    in `cost` seconds if that is longer. Until the time per call is known, that of the calls that run or wait counts.
    A worker without a call for `idle_s` seconds is ended; a start is cancelled if no call has waited for as long.

    count_calls: returns the numbers of calls that wait and that workers have. end: ends a worker that is not supervised
    any more. concurrent: whether workers compute several calls at the same time.
    """

    def __init__(
        self,
        supervisor: Supervisor[Replica],
        options: LaunchOptions,
        *,
        count_calls: Callable[[], tuple[int, int]],
        end: Callable[[Replica], None],
    ) -> None:
        self.fewest = min(options.min_replicas or 0, options.replicas)
        self._max_workers = options.replicas
        self.concurrent = False
        self._supervisor = supervisor
        self._idle_s = options.idle_s
        self._cost_s = options.cost
        self._count_calls = count_calls
        self._end = end
        self._mean_s = 0.0
        self._start_s = 0.0
        self._first_wait_s = 0.0  # when a call began to wait, 0 if none does
        self._last_wait_s = 0.0  # when a call waited last
        self._is_needed = asyncio.Event()

    @property
    def can_grow(self) -> bool:
        return len(self._supervisor.running) < self._max_workers

    def grow(self) -> None:
        """Start workers if the waiting calls justify it. Called when a call begins to wait."""
        self._is_needed.set()
        self._last_wait_s = time.monotonic()
        self._first_wait_s = self._first_wait_s or self._last_wait_s
        supervisor = self._supervisor
        missing = min(self._worth(), self._max_workers) - len(supervisor.running) - supervisor.starting
        if missing > 0:
            supervisor.add(missing)

    def record_start(self, replica: Replica) -> None:
        """Record a worker that has started."""
        self._start_s = replica.start_s
        self._is_needed.set()

    def _worth(self) -> int:
        """Return the number of workers that the present calls justify, at least one."""
        waiting, held = self._count_calls()
        calls = waiting + held
        if self.concurrent:
            return math.ceil(calls / CONCURRENT)
        backlog_s = max(self._cost_s, min(max(self._start_s, _MIN_BACKLOG_S), _MAX_BACKLOG_S))
        return min(max(1, math.ceil(calls * self._call_s() / backlog_s)), calls)

    def _call_s(self) -> float:
        running = self._supervisor.running
        known = [replica.mean_s for replica in running if replica.mean_s]
        if known:
            self._mean_s = sum(known) / len(known)
        longest_s = max((replica.elapsed_s for replica in running if replica.held), default=0.0)
        return max(self._mean_s or (0.0 if running else time.monotonic() - self._first_wait_s), longest_s)

    async def run(self) -> None:
        """Adapt the number of workers until this is cancelled."""
        while True:
            await asyncio.sleep(min(_CHECK_S, self._idle_s / 4) if self._idle_s else 0.01)
            waiting, _ = self._count_calls()
            if waiting:
                self.grow()
            else:
                self._first_wait_s = 0.0
                self._shrink()
            present = len(self._supervisor.running) + self._supervisor.starting
            if not waiting and present <= self.fewest:
                self._is_needed.clear()
                await self._is_needed.wait()

    def _shrink(self) -> None:
        supervisor = self._supervisor
        excess = len(supervisor.running) + supervisor.starting - self.fewest
        if excess > 0 and supervisor.starting and time.monotonic() - self._last_wait_s > self._idle_s:
            supervisor.cancel_starts(min(excess, supervisor.starting))
        for replica in supervisor.running[::-1]:
            if len(supervisor.running) > self.fewest and not replica.held and replica.elapsed_s > self._idle_s:
                supervisor.remove(replica)
                self._end(replica)
