"""Takes the steps of a plan, those that are independent of each other at the same time."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

from dragoman.core.errors import WorkerLost
from dragoman.graphs.plan import Plan, Step
from dragoman.system.cancellation import cancellation_check

Do = Callable[[Step, Sequence[Any]], Any]

# A step that takes less than this is not worth a thread, in seconds; and what a new time weighs against old ones.
_QUICK_S = 0.0002
_WEIGHT = 0.2


class Order:
    """Which steps of a plan wait for which, worked out once, and which are cheap, as is known or turns out."""

    def __init__(self, plan: Plan, cheap: Sequence[bool]) -> None:
        self.steps = plan.steps
        self.known = cheap
        self.cheap = [*cheap]
        self._took_s: list[float | None] = [None] * len(cheap)
        self.waits = [len(step.after) for step in plan.steps]
        self.followers: list[list[int]] = [[] for _ in plan.steps]
        for i, step in enumerate(plan.steps):
            for earlier in step.after:
                self.followers[earlier].append(i)
        self.parallel = self._parallel()

    def took(self, step: int, seconds: float) -> None:
        """A step that was not known to be cheap took so long."""
        old_s = self._took_s[step]
        mean_s = seconds if old_s is None else old_s + _WEIGHT * (seconds - old_s)
        self._took_s[step] = mean_s
        if self.cheap[step] != (mean_s < _QUICK_S):
            self.cheap[step] = mean_s < _QUICK_S
            self.parallel = self._parallel()

    def _parallel(self) -> bool:
        """Whether two steps that are worth a thread can be taken at the same time."""
        before: list[int] = []  # a set of steps for each step, as the bits of a number
        last = None
        for i, step in enumerate(self.steps):
            seen = 0
            for earlier in step.after:
                seen |= before[earlier] | 1 << earlier
            before.append(seen)
            if not self.cheap[i]:
                if last is not None and not seen >> last & 1:
                    return True
                last = i
        return False


def take(order: Order, do: Do, pool: Executor | None) -> list[Any]:
    """The results of all steps. `do(step, results)` takes one; an error of one ends the others that have not begun.

    Sums are added up by whoever takes a step, in the plan's order: results do not depend on which thread was first.
    """
    if pool is not None and order.parallel:
        return _Taking(order, do, pool).results()
    results: list[Any] = []
    left = cancellation_check()
    for i in range(len(order.steps)):
        if left():
            raise _unwanted()
        results.append(_timed(order, i, do, results))
    return results


def _unwanted() -> WorkerLost:
    return WorkerLost("nobody waits for this call any more")


def _timed(order: Order, i: int, do: Do, results: Sequence[Any]) -> Any:
    if order.known[i]:
        return do(order.steps[i], results)
    began_s = time.perf_counter()
    found = do(order.steps[i], results)
    order.took(i, time.perf_counter() - began_s)
    return found


class _Taking:
    """One plan on its way. The caller's thread takes steps too; the others get a ticket for each step that is left."""

    def __init__(self, order: Order, do: Do, pool: Executor) -> None:
        self._order = order
        self._do = do
        self._pool = pool
        self._results: list[Any] = [None] * len(order.steps)
        self._waits = [*order.waits]
        self._open = len(order.steps)
        self._ready: deque[int] = deque()
        self._changed = threading.Condition()
        self._fault: BaseException | None = None
        self._left = cancellation_check()

    def results(self) -> list[Any]:
        mine: list[int] = []
        self._share([i for i, n in enumerate(self._waits) if n == 0], mine)
        self._go(mine)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._open == 0 or self._fault is not None)
                if self._fault is not None:
                    raise self._fault
                if self._open == 0:
                    return self._results
            self._ticket()

    def _ticket(self) -> None:
        try:
            first = self._ready.popleft()
        except IndexError:  # somebody else took it
            return
        self._go([first])

    def _go(self, mine: list[int]) -> None:
        """Take these steps, and of those that become ready thereby what is best done in this thread."""
        while mine and self._fault is None:
            step = mine.pop()
            try:
                if self._left():
                    raise _unwanted()
                self._results[step] = _timed(self._order, step, self._do, self._results)
            except BaseException as fault:  # whoever waits raises it
                with self._changed:
                    self._fault = self._fault or fault
                    self._changed.notify_all()
                return
            self._share(self._finished(step), mine)

    def _finished(self, step: int) -> list[int]:
        with self._changed:
            self._open -= 1
            if self._open == 0:
                self._changed.notify_all()
            ready = []
            for other in self._order.followers[step]:
                self._waits[other] -= 1
                if self._waits[other] == 0:
                    ready.append(other)
            return ready

    def _share(self, ready: list[int], mine: list[int]) -> None:
        """Add to `mine` the cheap ones and, where it has none, one that is costly; the rest are for everybody."""
        costly = [i for i in ready if not self._order.cheap[i]]
        if costly and all(self._order.cheap[i] for i in mine):
            mine.insert(0, costly.pop(0))  # the last is taken first
        mine += [i for i in reversed(ready) if self._order.cheap[i]]
        if costly:
            with self._changed:
                self._ready.extend(costly)
                self._changed.notify_all()
            with suppress(RuntimeError):  # the pool is closed meanwhile: whoever asked takes them all
                for _ in costly:
                    self._pool.submit(self._ticket)
