"""Times of the request that the running code works for, which the engine adds to if they are observed."""

import time
from contextvars import ContextVar
from typing import Any, Final

from dragoman.system.request_context import running_in_thread

# Further calls of other models are not recorded.
_MAX_NESTED: Final = 100


class CallTimes:
    """Times of one call of a model, on the monotonic clock, which `time.monotonic` returns.

    started_s, ended_s: of the call.
    queue_s: seconds in the queue of a batcher, until `dispatched_s`.
    batch: reason, calls and rows of its batch.
    computed_s, compute_s: when the model had computed, and for how long.
    nested: calls of other models by this one. 0 and None: unknown.
    """

    __slots__ = (
        "batch", "compute_s", "computed_s", "dispatched_s", "ended_s", "model", "nested", "queue_s", "started_s",
        "version",
    )  # fmt: skip

    def __init__(self) -> None:
        self.model = self.version = ""
        self.started_s = self.ended_s = self.queue_s = self.dispatched_s = self.computed_s = self.compute_s = 0.0
        self.batch: tuple[str, int, int] | None = None
        self.nested: tuple[CallTimes, ...] = ()

    def set_computed(self, started_s: float) -> None:
        """Record that the model has computed from `started_s` until now."""
        self.computed_s = time.monotonic()
        self.compute_s = self.computed_s - started_s

    def copy_compute(self, other: "CallTimes") -> None:
        """Take over when the model computed, from the times of the batch."""
        self.computed_s, self.compute_s = other.computed_s, other.compute_s

    def begin_nested(self, model: str, version: str) -> "CallTimes":
        """Return the times of a call of another model, which starts now."""
        nested = CallTimes()
        nested.model, nested.version, nested.started_s = model, version, time.monotonic()
        if len(self.nested) < _MAX_NESTED:
            self.nested = (*self.nested, nested)
        return nested

    # --- between processes: moments as seconds before now, because the clocks may differ ----------------------------

    def to_ages(self) -> tuple[Any, ...]:
        """Return what was recorded, for `add_ages` in another process."""
        nested = [(n.model, n.version, _age(n.started_s), _age(n.ended_s), n.to_ages()) for n in self.nested]
        return self.queue_s, self.compute_s, self.batch, _age(self.dispatched_s), _age(self.computed_s), nested

    def add_ages(self, ages: tuple[Any, ...]) -> None:
        """Take over what another process has recorded."""
        self.queue_s, self.compute_s, self.batch, dispatched, computed, nested = ages
        self.dispatched_s, self.computed_s = _moment_s(dispatched), _moment_s(computed)
        for model, version, started, ended, inner in nested:
            call = self.begin_nested(model, version)
            call.started_s, call.ended_s = _moment_s(started), _moment_s(ended)
            call.add_ages(inner)


def _age(moment_s: float) -> float | None:
    return time.monotonic() - moment_s if moment_s else None


def _moment_s(age: float | None) -> float:
    return 0.0 if age is None else time.monotonic() - age


# Set only where a request is observed.
observed: Final[ContextVar[CallTimes | None]] = ContextVar("dragoman_observed", default=None)


def set_observed(times: CallTimes | None) -> None:
    """Set the times of the work that runs in this context; cheap if nothing is observed."""
    if times is not None or observed.get() is not None:
        observed.set(times)


def get_times() -> CallTimes | None:
    """Return the times of the request that the running code works for, None if it is not observed."""
    begun = running_in_thread().begun
    if begun is None:
        return observed.get()
    times: CallTimes = begun[0] or begun[1](begun)
    return times
