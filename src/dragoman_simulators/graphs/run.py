"""Run the steps of a plan, independent ones concurrently."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

from dragoman.core.errors import WorkerLost
from dragoman.system.threads import cancellation_check
from dragoman_simulators.graphs.plan import Plan, Step

RunStep = Callable[[Step, Sequence[Any]], Any]

# A step shorter than this is not worth a thread; the weight of a new time in the moving average.
_CHEAP_S = 0.0002
_WEIGHT = 0.2


class Schedule:
    """The dependencies between the steps of a plan, and which steps are cheap: as declared, or as measured."""

    def __init__(self, plan: Plan, cheap: Sequence[bool]) -> None:
        self.steps = plan.steps
        self.declared_cheap = cheap
        self.cheap = [*cheap]
        self._mean_s: list[float | None] = [None] * len(cheap)
        self.dependency_counts = [len(step.after) for step in plan.steps]
        self.dependents: list[list[int]] = [[] for _ in plan.steps]
        for i, step in enumerate(plan.steps):
            for earlier in step.after:
                self.dependents[earlier].append(i)
        self.parallel = self._is_parallel()

    def record(self, step: int, seconds: float) -> None:
        """Record how long a step took that was not declared cheap."""
        old_s = self._mean_s[step]
        mean_s = seconds if old_s is None else old_s + _WEIGHT * (seconds - old_s)
        self._mean_s[step] = mean_s
        if self.cheap[step] != (mean_s < _CHEAP_S):
            self.cheap[step] = mean_s < _CHEAP_S
            self.parallel = self._is_parallel()

    def _is_parallel(self) -> bool:
        """Return whether two steps that are not cheap can run at the same time."""
        ancestors: list[int] = []  # of each step, a set of steps as the bits of a number
        last = None
        for i, step in enumerate(self.steps):
            bits = 0
            for earlier in step.after:
                bits |= ancestors[earlier] | 1 << earlier
            ancestors.append(bits)
            if not self.cheap[i]:
                if last is not None and not bits >> last & 1:
                    return True
                last = i
        return False


def run_steps(schedule: Schedule, run_step: RunStep, pool: Executor | None) -> list[Any]:
    """Return the results of all steps. `run_step(step, results)` runs one; after an error no further step begins.

    Each step adds up its terms in the order of the plan: results do not depend on the order of threads.
    """
    if pool is not None and schedule.parallel:
        return _ParallelRun(schedule, run_step, pool).results()
    results: list[Any] = []
    is_cancelled = cancellation_check()
    for i in range(len(schedule.steps)):
        _check_cancelled(is_cancelled)
        results.append(_run_timed(schedule, i, run_step, results))
    return results


def _check_cancelled(is_cancelled: Callable[[], bool]) -> None:
    if is_cancelled():
        raise WorkerLost("request cancelled: client disconnected or deadline exceeded")


def _run_timed(schedule: Schedule, i: int, run_step: RunStep, results: Sequence[Any]) -> Any:
    if schedule.declared_cheap[i]:
        return run_step(schedule.steps[i], results)
    start_s = time.perf_counter()
    result = run_step(schedule.steps[i], results)
    schedule.record(i, time.perf_counter() - start_s)
    return result


class _ParallelRun:
    """One run of a plan. The caller's thread runs steps too; the pool gets one task per step that is left over."""

    def __init__(self, schedule: Schedule, run_step: RunStep, pool: Executor) -> None:
        self._schedule = schedule
        self._run_step = run_step
        self._pool = pool
        self._results: list[Any] = [None] * len(schedule.steps)
        self._open_dependencies = [*schedule.dependency_counts]
        self._unfinished = len(schedule.steps)
        self._ready: deque[int] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_cancelled = cancellation_check()

    def results(self) -> list[Any]:
        own: list[int] = []
        self._distribute([i for i, n in enumerate(self._open_dependencies) if n == 0], own)
        self._run(own)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._unfinished == 0 or self._error is not None)
                if self._error is not None:
                    raise self._error
                if self._unfinished == 0:
                    return self._results
            self._run_ready()

    def _run_ready(self) -> None:
        try:
            step = self._ready.popleft()
        except IndexError:  # another thread took it
            return
        self._run([step])

    def _run(self, own: list[int]) -> None:
        """Run these steps, and those of the steps that become ready which are best run in this thread."""
        while own and self._error is None:
            step = own.pop()
            try:
                _check_cancelled(self._is_cancelled)
                self._results[step] = _run_timed(self._schedule, step, self._run_step, self._results)
            except BaseException as error:  # raised by `results`
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
                return
            self._distribute(self._finish(step), own)

    def _finish(self, step: int) -> list[int]:
        """Count a finished step; return the steps that are ready now."""
        with self._changed:
            self._unfinished -= 1
            if self._unfinished == 0:
                self._changed.notify_all()
            ready = []
            for dependent in self._schedule.dependents[step]:
                self._open_dependencies[dependent] -= 1
                if self._open_dependencies[dependent] == 0:
                    ready.append(dependent)
            return ready

    def _distribute(self, ready: list[int], own: list[int]) -> None:
        """Add to `own` the cheap steps and, if it has none yet, one costly step; give the others to the pool."""
        costly = [i for i in ready if not self._schedule.cheap[i]]
        if costly and all(self._schedule.cheap[i] for i in own):
            own.insert(0, costly.pop(0))  # run last: `own` is a stack
        own += [i for i in reversed(ready) if self._schedule.cheap[i]]
        if costly:
            with self._changed:
                self._ready.extend(costly)
                self._changed.notify_all()
            with suppress(RuntimeError):  # the pool was closed: the caller's thread runs all
                for _ in costly:
                    self._pool.submit(self._run_ready)
