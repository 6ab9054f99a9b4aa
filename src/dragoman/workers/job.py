"""A call on its way to a worker and back."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from dragoman.core.calls import Request
from dragoman.workers.frames import FrameKind

# Takes a chunk, a response or an error, and whether it is the last one; called on the event loop.
Deliver = Callable[[Any, BaseException | None, bool], None]


class Job:
    """A call that waits for a worker or is computed by one.

    kind: `FrameKind.CALL` or `FrameKind.STREAM`. number: id of the call in frames. worker: the process that has it.
    credits: bounds how far a stream in a thread runs ahead of its reader.
    """

    __slots__ = ("credits", "deliver", "kind", "number", "request", "worker")

    def __init__(self, number: int, kind: FrameKind, request: Request[Any] | None, deliver: Deliver) -> None:
        self.number = number
        self.kind = kind
        self.request = request
        self.deliver = deliver
        self.worker: Any = None
        self.credits: threading.Semaphore | None = None

    @property
    def is_cancelled(self) -> bool:
        return self.deliver is ignore

    def cancel(self) -> None:
        """Ignore what is still delivered, and release the request: a worker may come to this job late."""
        self.deliver = ignore
        self.request = None
        if self.credits is not None:
            self.credits.release()

    def fields(self) -> tuple[Any, ...]:
        """Return the fields of the request, from which the other process makes it again."""
        request = self.request
        assert request is not None, "a job that is sent is not cancelled"
        fields = (request.call, request.model, request.version, request.id, request.deadline_s)
        return (*fields, request.metadata) if request.metadata else fields


def ignore(_value: Any, _error: BaseException | None, _last: bool) -> None:
    """Receive the response of a cancelled job."""


def settle(future: asyncio.Future[Any], value: Any, error: BaseException | None, last: bool = True) -> None:
    """Set the result or the error of a future, unless it is done or cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
