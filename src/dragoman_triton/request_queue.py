"""The queue of a model of Triton's Python backend, which takes lists of requests."""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import cached_property

from dragoman.core.calls import Infer, Inference, Request
from dragoman.core.datatypes import Datatype
from dragoman.core.errors import DragomanError
from dragoman.core.schedule import Order, QueuePolicy, ScheduleOptions
from dragoman.core.signature import Shape


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
    order: Order = (1, False, 0)
    arrived_s: float = 0.0  # when it was queued

    @cached_property
    def shapes(self) -> dict[str, tuple[Datatype, Shape]]:
        """The datatypes of its inputs and their shapes without the batch axis."""
        return {name: (t.datatype, t.shape[1:]) for name, t in call_of(self.request).inputs.items()}

    def fail(self, error: DragomanError) -> None:
        self.deliver(error, True)


class RequestQueue:
    """Requests in order of priority and arrival; `take` returns those that are executed together.

    by_owner: they have one owner, for a model that calls others in its name.
    """

    def __init__(self, max_rows: int, delay_s: float, schedule: ScheduleOptions, *, by_owner: bool = False) -> None:
        self._max_rows, self._delay_s, self._policy, self._by_owner = max_rows, delay_s, QueuePolicy(schedule), by_owner
        self._pending: deque[PendingRequest] = deque()
        self._changed = threading.Condition()
        self._closed: DragomanError | None = None  # the error of requests that come or wait after that

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def put(self, pending: PendingRequest) -> float:
        """Add a request; return the seconds until `expire`, 0 for no limit.

        Raises Overloaded if its level is full, InvalidInput for an invalid timeout, and after `close` its error.
        """
        with self._changed:
            if self._closed is not None:
                raise type(self._closed)(self._closed.message)
            pending.arrived_s = time.monotonic()
            wait_s = self._policy.put(self._pending, pending, call_of(pending.request).parameters, self._pending)
            self._changed.notify_all()
            return wait_s

    def expire(self, pending: PendingRequest) -> None:
        """Reject or delay a request that still waits."""
        with self._changed:
            error = self._policy.expire(self._pending, pending) if pending in self._pending else None
        if error is not None:
            pending.fail(error)

    def close(self, error: DragomanError) -> None:
        """Fail the requests that wait with an error, and reject others with it."""
        with self._changed:
            self._closed = error
            pending, self._pending = self._pending, deque()
            self._changed.notify_all()
        for each in pending:
            each.fail(error)

    def wake(self) -> None:
        """Let `take` check whether its caller has ended."""
        with self._changed:
            self._changed.notify_all()

    def take(self, has_ended: Callable[[], bool] = bool) -> list[PendingRequest]:
        """Wait for requests; return those that are executed together. Empty once the queue is closed or the caller has
        ended."""
        with self._changed:
            while self._closed is None and not has_ended():
                batch, is_complete = self._next_batch()
                wait_s: float | None = None
                if batch:
                    oldest_s = min(pending.arrived_s for pending in batch)
                    wait_s = 0.0 if is_complete else oldest_s + self._delay_s - time.monotonic()
                    if wait_s <= 0:
                        self._remove_until(batch[-1])
                        return batch
                else:
                    self._pending.clear()  # all of them were cancelled
                self._changed.wait(wait_s)
            return []

    def _next_batch(self) -> tuple[list[PendingRequest], bool]:
        """Return the first requests that may be executed together, and whether no later one can join them.

        As in Triton, a request with other inputs or shapes ends the batch before it, which need not wait any longer.
        """
        batch: list[PendingRequest] = []
        rows = 0
        for pending in self._pending:
            if pending.cancelled.is_set():
                continue
            if batch and (rows + pending.rows > self._max_rows or not self._may_join(pending, batch[0])):
                return batch, True
            batch.append(pending)
            rows += pending.rows
        return batch, rows >= self._max_rows

    def _may_join(self, pending: PendingRequest, first: PendingRequest) -> bool:
        is_of_owner = not self._by_owner or pending.request.caller.owner == first.request.caller.owner
        return is_of_owner and pending.shapes == first.shapes

    def _remove_until(self, last: PendingRequest) -> None:
        """Remove a request and those before it, which are executed with it or were cancelled."""
        while self._pending.popleft() is not last:
            pass


def call_of(request: Request[Inference]) -> Infer:
    call = request.call
    assert isinstance(call, Infer)
    return call
