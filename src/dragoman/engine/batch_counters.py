"""Counters of the batches of one deployment: sizes, time in the queue, and the reason of each dispatch."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, Self

from dragoman.core.metrics import SECONDS, Family, Histogram, Sample

# Why a batch was dispatched at its moment: a worker was idle; all were busy and one became free; the batch was full;
# `max_batch_wait_s` or the adaptive batch delay had passed.
Reason = Literal["idle_worker", "worker_free", "full", "max_wait", "batch_delay"]
_SIZES: Final = tuple(float(1 << power) for power in range(13))
_HISTOGRAMS: Final = {
    "dragoman_queue_seconds": "Seconds that a batched call waited in the queue.",
    "dragoman_batch_calls": "Calls of a batch.",
    "dragoman_batch_rows": "Rows of a batch.",
}
_DISPATCHED: Final = "dragoman_batches_total"
_QUEUED: Final = "dragoman_queued_calls"


def _no_executions() -> tuple[int, float]:
    return 0, 0.0


def _no_queue() -> int:
    return 0


class BatchCounters:
    """The counters; `queued` returns the number of calls that wait now.

    `executions` are the successful executions of the model by their rows, with the seconds that they took. They
    answered `answered` calls, which had waited for `answered_wait_s`.
    """

    __slots__ = ("_histograms", "answered", "answered_wait_s", "executions", "queued", "reasons")

    def __init__(self, queued: Callable[[], int]) -> None:
        self.reasons: defaultdict[Reason, int] = defaultdict(int)
        self.queued = queued
        self.executions: defaultdict[int, tuple[int, float]] = defaultdict(_no_executions)
        self.answered = 0
        self.answered_wait_s = 0.0
        self._histograms = [Histogram(bounds) for bounds in (SECONDS, _SIZES, _SIZES)]

    def take(self) -> Self:
        """Return the counts so far, and reset these counters."""
        snapshot = type(self)(_no_queue)
        for name in self.__slots__:
            if name != "queued":
                mine = getattr(self, name)
                setattr(self, name, getattr(snapshot, name))
                setattr(snapshot, name, mine)
        return snapshot

    def add(self, other: Self) -> None:
        """Add what other counters have counted."""
        for mine, its in zip(self._histograms, other._histograms, strict=True):
            mine.add(its)
        for reason, count in other.reasons.items():
            self.reasons[reason] += count
        for rows, (count, compute_s) in other.executions.items():
            executions, before_s = self.executions[rows]
            self.executions[rows] = executions + count, before_s + compute_s
        self.answered += other.answered
        self.answered_wait_s += other.answered_wait_s

    def count(self, waits_s: Sequence[float], rows: int, reason: Reason) -> None:
        """Count a batch; `waits_s` are the times that its calls spent in the queue."""
        queue, calls, all_rows = self._histograms
        for wait_s in waits_s:
            queue.observe(wait_s)
        calls.observe(len(waits_s))
        all_rows.observe(rows)
        self.reasons[reason] += 1

    def count_execution(self, rows: int, waits_s: Sequence[float], duration_s: float) -> None:
        """Count a successful execution; `waits_s` are the times in the queue of the calls that it answers."""
        executions, compute_s = self.executions[rows]
        self.executions[rows] = executions + 1, compute_s + duration_s
        self.answered += len(waits_s)
        self.answered_wait_s += sum(waits_s)

    def samples(self, labels: Mapping[str, str]) -> Iterable[tuple[str, Sample]]:
        """Yield the samples, each with the name of its family."""
        for name, histogram in zip(_HISTOGRAMS, self._histograms, strict=True):
            for sample in histogram.samples(name, labels):
                yield name, sample
        for reason, count in sorted(self.reasons.items()):
            yield _DISPATCHED, Sample(_DISPATCHED, {**labels, "reason": reason}, count)


def queue_family(deployments: Sequence[tuple[Mapping[str, str], BatchCounters | None]]) -> Iterable[Family]:
    """Return the gauge of queued calls of the deployments that batch, each with its labels."""
    samples = [Sample(_QUEUED, labels, c.queued()) for labels, c in deployments if c is not None]
    if samples:
        yield Family(_QUEUED, "gauge", "Calls that wait for a batch.", tuple(samples))


def batch_families(deployments: Sequence[tuple[Mapping[str, str], BatchCounters | None]]) -> Iterable[Family]:
    """Return the metrics of the deployments that batch, each with its labels."""
    rows = [row for labels, counters in deployments if counters is not None for row in counters.samples(labels)]
    if rows:
        for name, help_text in _HISTOGRAMS.items():
            yield Family(name, "histogram", help_text, tuple(sample for family, sample in rows if family == name))
        yield from queue_family(deployments)
        samples = tuple(sample for family, sample in rows if family == _DISPATCHED)
        yield Family(_DISPATCHED, "counter", "Batches by the reason why they were dispatched.", samples)
