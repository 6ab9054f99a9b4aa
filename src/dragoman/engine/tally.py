"""How many calls a model version has answered, how they ended and how long they took."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from dragoman.core.errors import DragomanError
from dragoman.core.metrics import Family, Sample

# Upper bounds of the buckets of durations, in seconds.
BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
OK = "ok"


class Tally:
    """The counts of one deployment; a few additions a call."""

    __slots__ = ("_buckets", "_ended", "_sums")

    def __init__(self) -> None:
        self._ended: Counter[tuple[str, str]] = Counter()
        self._buckets: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def ended(self, call: Any, began_s: float, fault: BaseException | None = None) -> None:
        """One call has ended; `began_s` is a reading of the monotonic clock."""
        took_s = time.monotonic() - began_s
        name = type(call).__name__
        self._ended[name, OK if fault is None else outcome(fault)] += 1
        buckets = self._buckets.get(name)
        if buckets is None:
            buckets = self._buckets[name] = [0] * (len(BOUNDS_S) + 1)
            self._sums[name] = 0.0
        buckets[bisect_left(BOUNDS_S, took_s)] += 1
        self._sums[name] += took_s

    def counts(self, labels: Mapping[str, str]) -> Iterable[Sample]:
        for (call, end), count in sorted(self._ended.items()):
            yield Sample("dragoman_calls_total", {**labels, "call": call, "outcome": end}, count)

    def durations(self, labels: Mapping[str, str]) -> Iterable[Sample]:
        name = "dragoman_call_duration_seconds"
        for call, buckets in sorted(self._buckets.items()):
            own, count = {**labels, "call": call}, 0
            for bound, inside in zip((*map(str, BOUNDS_S), "+Inf"), buckets, strict=True):
                count += inside
                yield Sample(f"{name}_bucket", {**own, "le": bound}, count)
            yield Sample(f"{name}_sum", own, self._sums[call])
            yield Sample(f"{name}_count", own, count)


def outcome(fault: BaseException) -> str:
    """What a call that failed is counted as: the name of the error, or that the caller left."""
    return type(fault).__name__ if isinstance(fault, DragomanError) else "Cancelled"


def families(
    told: Iterable[tuple[Mapping[str, str], Tally, int, bool]],
) -> Iterable[Family]:
    """The engine's own measurements, of deployments by labels, tally, calls in flight and readiness."""
    rows = list(told)
    counts = [s for labels, tally, _, _ in rows for s in tally.counts(labels)]
    yield Family("dragoman_calls_total", "counter", "Calls of models by how they ended.", tuple(counts))
    times = [s for labels, tally, _, _ in rows for s in tally.durations(labels)]
    yield Family(
        "dragoman_call_duration_seconds", "histogram", "Seconds from a call's arrival to its end.", tuple(times)
    )
    flying = [Sample("dragoman_calls_in_flight", labels, float(count)) for labels, _, count, _ in rows]
    yield Family("dragoman_calls_in_flight", "gauge", "Calls that wait or are computed.", tuple(flying))
    ready = [Sample("dragoman_model_ready", labels, float(is_ready)) for labels, _, _, is_ready in rows]
    yield Family("dragoman_model_ready", "gauge", "1 where a model version can answer.", tuple(ready))
