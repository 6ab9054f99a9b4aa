"""Counters of the batches of one deployment: sizes, time in the queue, and the reason of each dispatch."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, Self, get_args

from dragoman.core.metrics import Family, Histogram, Labels, Sample
from dragoman.engine.counters import Executions
from dragoman.system.call_times import CallTimes

# Why a batch was dispatched at its moment: a worker was idle; all were busy and one became free; the batch was full;
# `max_batch_wait_s` or the adaptive batch delay had passed.
Reason = Literal["idle_worker", "worker_free", "full", "max_wait", "batch_delay"]
_SIZES: Final = tuple(float(1 << power) for power in range(13))
_CALLS: Final = "dragoman_batch_calls"
_ROWS: Final = "dragoman_batch_rows"
_DISPATCHED: Final = "dragoman_batches_total"


class BatchCounters:
    """The counters; `queued` returns the number of calls that wait now.

    `executions` are the successful executions of the model by their rows, with the seconds that they took.
    """

    __slots__ = ("_calls", "_rows", "executions", "queued", "reasons")

    def __init__(self, queued: Callable[[], int]) -> None:
        self.reasons: defaultdict[Reason, int] = defaultdict(int)
        self.queued = queued
        self.executions = Executions()
        self._calls, self._rows = Histogram(_SIZES), Histogram(_SIZES)

    def take(self) -> Self:
        """Return the counts so far, and reset these counters."""
        snapshot = type(self)(int)  # 0 calls wait in it; a lambda cannot be pickled for another process
        for name in self.__slots__:
            if name != "queued":
                mine = getattr(self, name)
                setattr(self, name, getattr(snapshot, name))
                setattr(snapshot, name, mine)
        return snapshot

    def add(self, other: Self) -> None:
        """Add what other counters have counted."""
        self._calls.add(other._calls)
        self._rows.add(other._rows)
        for reason, count in other.reasons.items():
            self.reasons[reason] += count
        self.executions.add(other.executions)

    def count(self, calls: Sequence[CallTimes], rows: int, reason: Reason) -> None:
        """Count a batch of calls, and record it in their times."""
        self._calls.observe(len(calls))
        self._rows.observe(rows)
        self.reasons[reason] += 1
        for times in calls:
            times.batch = reason, len(calls), rows

    def families(self, labels: Labels) -> Iterable[Family]:
        """Return the metrics of a deployment with these labels."""
        for name, line, sizes in (
            (_CALLS, "Calls of a batch.", self._calls),
            (_ROWS, "Rows of a batch.", self._rows),
        ):
            distributions = (sizes.distribution(name, labels),) if sizes.count else ()
            yield Family(name, "histogram", line, distributions=distributions)
        reasons = tuple(Sample(_DISPATCHED, {**labels, "reason": r}, self.reasons[r]) for r in get_args(Reason))
        yield Family(_DISPATCHED, "counter", "Batches by the reason why they were dispatched.", reasons)
