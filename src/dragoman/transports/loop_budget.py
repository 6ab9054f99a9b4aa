"""Limits the time that large requests take of each iteration of the event loop, so that small ones wait briefly."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

log = logging.getLogger("dragoman.http")

# Requests and responses above this size count as large, in bytes.
LARGE_MESSAGE = 1 << 14
# Time for large messages in an iteration of the event loop. At least one is handled in each iteration that has any.
_BUDGET_S = 0.01
# After this much time the loop gets an iteration without large messages: a new connection needs several of them.
_REST_AFTER_S = 0.002
# Bytes read in an iteration before connections pause, and about the time that reading and copying a byte takes.
_MAX_READ_BYTES = 1 << 21
_READ_S_PER_BYTE = 2e-9


class LoopBudget:
    """Runs functions on the event loop in order: at once while this iteration has time left, else in a later one."""

    def __init__(self, budget_s: float = _BUDGET_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._budget_s = budget_s
        self._clock = clock
        self._spent_s = 0.0
        self._queue: deque[Callable[[], object]] = deque()
        self._is_scheduled = False
        self._is_running = False
        self._rests = 0  # iterations still to come without large messages
        self._read_bytes = 0

    def run(self, work: Callable[[], object]) -> bool:
        """Run `work` now or later; return whether it was run now. Its exceptions are logged."""
        now = not self._is_exhausted()
        if now:
            self._run(work)
        else:
            self._queue.append(work)
        return now

    async def call(self, function: Callable[[A], B], argument: A) -> B:
        """Return `function(argument)`, computed now or in a later iteration."""
        if self._is_running:  # `run` measures it
            return function(argument)
        if not self._is_exhausted():
            return self._measure(lambda: function(argument))
        result: asyncio.Future[B] = asyncio.get_running_loop().create_future()
        context = copy_context()

        def work() -> None:
            if not result.cancelled():
                try:
                    result.set_result(context.run(function, argument))
                except Exception as error:
                    result.set_exception(error)

        self._queue.append(work)
        return await result

    def run_later(self, work: Callable[[], object], cost_s: float) -> None:
        """Run `work` in a later iteration; `cost_s` is the time that its consequences will take."""

        def run() -> None:
            work()
            self._spend(cost_s)

        self._queue.append(run)
        self._spend(0.0)

    def count_read(self, size: int) -> bool:
        """Count bytes read from a connection; return whether no more should be read in this iteration."""
        self._read_bytes += size
        self._spend(0.0)
        return self._read_bytes > _MAX_READ_BYTES

    def _is_exhausted(self) -> bool:
        return self._is_scheduled and (bool(self._queue) or self._rests > 0 or self._spent_s >= self._budget_s)

    def _run(self, work: Callable[[], object]) -> None:
        try:
            self._measure(work)
        except Exception:
            log.exception("a request failed")

    def _measure(self, work: Callable[[], B]) -> B:
        was_running, self._is_running = self._is_running, True
        started_s = self._clock()
        try:
            return work()
        finally:
            self._is_running = was_running
            if not was_running:
                self._spend(self._clock() - started_s)

    def _spend(self, time_s: float) -> None:
        self._spent_s += time_s
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_iteration)

    def _next_iteration(self) -> None:
        self._rests += int(self._spent_s / _REST_AFTER_S)
        self._spent_s, self._read_bytes = 0.0, 0
        if self._rests:
            self._rests -= 1
            asyncio.get_running_loop().call_soon(self._next_iteration)
            return
        self._is_scheduled = False
        while self._queue and self._spent_s < self._budget_s:
            self._run(self._queue.popleft())


class ReadLimiter:
    """Pauses reading from a connection if much has been read from all of them in one iteration of the event loop.

    libuv reads up to 32 times from a connection before it lets others have their turn. `update` is called when reading
    may continue.
    """

    __slots__ = ("_budget", "_update", "is_paused")

    def __init__(self, budget: LoopBudget, update: Callable[[], None]) -> None:
        self.is_paused = False
        self._budget = budget
        self._update = update

    def count(self, size: int) -> None:
        """Count bytes that were read, and pause if they are too many."""
        if self._budget.count_read(size) and not self.is_paused:
            self.is_paused = True
            self._update()
            self._budget.run_later(self._resume, size * _READ_S_PER_BYTE)

    def _resume(self) -> None:
        self.is_paused = False
        self._update()
