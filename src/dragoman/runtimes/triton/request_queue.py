"""The queue of a model of Triton's Python backend, which takes lists of requests."""

import bisect
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.errors import DragomanError, NotReady, Overloaded
from dragoman.core.schedule import ScheduleOptions


@dataclass(eq=False)
class PendingRequest:
    """A request that waits for the model or is answered by it. deliver: takes a response and whether it is the last."""

    request: Request[Inference]
    rows: int
    deliver: Callable[[Inference | DragomanError | None, bool], None]
    cancelled: threading.Event = field(default_factory=threading.Event)
    context: Context = field(default_factory=copy_context)
    executions: int = 0  # earlier ones, of a request that is executed repeatedly
    sequence_id: int = 0  # of such a request without one of its own
    order: tuple[int, bool, int] = (1, False, 0)  # level, whether it has waited too long, number

    def fail(self, error: DragomanError) -> None:
        self.deliver(error, True)


class RequestQueue:
    """Requests in order of priority and arrival; `take` returns those that are executed together."""

    def __init__(self, max_rows: int, delay_s: float, schedule: ScheduleOptions) -> None:
        self._max_rows, self._delay_s, self._schedule = max_rows, delay_s, schedule
        self._pending: deque[PendingRequest] = deque()
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, pending: PendingRequest) -> None:
        """Add a request. Raises NotReady once the queue is closed, and Overloaded if its level is full."""
        level = self._schedule.level(call_of(pending.request).parameters.get("priority"))
        with self._changed:
            if self._closed:
                raise NotReady("the model is unloading")
            if 0 < self._schedule.policy(level).max_queue_size <= sum(each.order[0] == level for each in self._pending):
                raise Overloaded("Exceeds maximum queue size")
            pending.order = level, False, next(self._numbers)
            self._insert(pending)
            self._changed.notify_all()

    def _insert(self, pending: PendingRequest) -> None:
        self._pending.insert(bisect.bisect(self._pending, pending.order, key=lambda each: each.order), pending)

    def expire(self, pending: PendingRequest) -> None:
        """Reject or delay a request that still waits."""
        with self._changed:
            if pending not in self._pending:
                return
            self._pending.remove(pending)
            if self._schedule.policy(pending.order[0]).timeout_action == "delay":
                pending.order = pending.order[0], True, pending.order[2]
                self._insert(pending)
                return
        pending.fail(Overloaded("Request timeout expired"))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self) -> list[PendingRequest]:
        """Wait for requests; return one, or a batch of equal shapes. Empty once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closed)
            if self._delay_s and not self._closed:
                self._changed.wait_for(self._is_full, self._delay_s)
            if self._closed:
                for pending in self._pending:
                    pending.fail(NotReady("the model is unloading"))
                self._pending.clear()
                return []
            return self._next_batch()

    def _is_full(self) -> bool:
        return self._closed or sum(pending.rows for pending in self._pending) >= self._max_rows

    def _next_batch(self) -> list[PendingRequest]:
        batch: list[PendingRequest] = []
        total = 0
        while self._pending:
            pending = self._pending[0]
            if batch and (total + pending.rows > self._max_rows or _shapes(pending) != _shapes(batch[0])):
                break
            self._pending.popleft()
            if not pending.cancelled.is_set():
                batch.append(pending)
                total += pending.rows
        return batch or [*self._wait_again()]

    def _wait_again(self) -> Iterator[PendingRequest]:
        """All requests were cancelled: wait for others."""
        self._changed.wait_for(lambda: self._pending or self._closed)
        if not self._closed:
            yield from self._next_batch()


def _shapes(pending: PendingRequest) -> Any:
    return {name: (t.datatype, t.shape[1:]) for name, t in call_of(pending.request).inputs.items()}


def call_of(request: Request[Inference]) -> Infer:
    call = request.call
    assert isinstance(call, Infer)
    return call
