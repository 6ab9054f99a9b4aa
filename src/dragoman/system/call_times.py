"""Times of the request that the running code works for, which the engine adds to if they are observed."""

from contextvars import ContextVar
from typing import Final

from dragoman.system.request_context import running_in_thread


class CallTimes:
    """`queue_s`: seconds in a queue of the engine. `batch`: reason, calls and rows of its batch."""

    __slots__ = ("batch", "queue_s")

    def __init__(self) -> None:
        self.queue_s = 0.0
        self.batch: tuple[str, int, int] | None = None


# Set only where an access log is written.
observed: Final[ContextVar[CallTimes | None]] = ContextVar("dragoman_observed", default=None)


def get_times() -> CallTimes | None:
    """Return the times of the request that the running code works for, None if it is not observed."""
    times: CallTimes | None = running_in_thread().times
    return times or observed.get()
