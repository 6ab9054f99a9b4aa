"""How many calls a model version has answered, how they ended and how long they took."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from dragoman.core.errors import DragomanError
from dragoman.core.histogram import SECONDS, Histogram
from dragoman.core.metrics import Family, Sample
from dragoman.core.text import Generation
from dragoman.engine import text_tally
from dragoman.engine.text_tally import TextTally, Written

OK = "ok"


class Tally:
    """The counts of one deployment; a few additions a call."""

    __slots__ = ("_rows", "texts")

    def __init__(self) -> None:
        self._rows: dict[type[Any], _Row] = {}
        self.texts = TextTally()

    def ended(self, call: Any, began_s: float, fault: BaseException | None = None, answer: Any = None) -> float:
        """One call has ended, by a fault or with its one answer; `began_s` is a reading of the monotonic clock.

        Gives how long it took.
        """
        took_s = time.monotonic() - began_s
        row = self._rows.get(type(call))
        if row is None:
            row = self._rows[type(call)] = _Row()
        if fault is None:
            row.well += 1
        else:
            row.failed[outcome(fault)] += 1
        row.durations.observe(took_s)
        if type(answer) is Generation:
            written = Written()
            written.take(answer)
            self.texts.add(written, took_s)
        return took_s

    def counts(self, labels: Mapping[str, str]) -> Iterable[Sample]:
        for call, row in self._sorted():
            for end, count in sorted({OK: row.well, **row.failed}.items()):
                if count:
                    yield Sample("dragoman_calls_total", {**labels, "call": call, "outcome": end}, count)

    def durations(self, labels: Mapping[str, str]) -> Iterable[Sample]:
        name = "dragoman_call_duration_seconds"
        for call, row in self._sorted():
            yield from row.durations.samples(name, {**labels, "call": call})

    def _sorted(self) -> list[tuple[str, "_Row"]]:
        return sorted((kind.__name__, row) for kind, row in self._rows.items())


class _Row:
    """The calls of one type: how many went well, how the others ended, and how long they all took."""

    __slots__ = ("durations", "failed", "well")

    def __init__(self) -> None:
        self.well = 0
        self.failed: Counter[str] = Counter()
        self.durations = Histogram(SECONDS)


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
    yield from text_tally.families([(labels, tally.texts) for labels, tally, _, _ in rows])
