"""Measurements of a load: rate, percentiles, tokens, errors by kind."""

import math
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from dragoman_check.load_test.connections import TimedExchange

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
# Parts of a run, whose differences are its spread.
SLICES = 5
# Share of a core from which the client limits the measurement.
_CLIENT_LIMIT = 0.9


@dataclass(frozen=True, slots=True)
class Measurement:
    """Results of one load. Times are in milliseconds, by the names of percentiles ("p50", "max", "mean").

    latency_ms: from when a request was due (open loop) or sent (closed loop) to the end of its response.
    service_ms: from when it was sent.
    first_token_ms: to the first event with text of a stream.
    between_chunks_ms, chunks_per_s: of events with text; between_tokens_ms if each of them was one token.
    tokens_per_s: 0 if the server does not report the number of tokens.
    sent, completed: requests that were due in the measured time of `seconds`, and those of them that succeeded.
    rate: responses per second of that time.
    unfinished: requests that had no response yet when the last one was due.
    slices: rate and percentiles of equal parts of the time.
    """

    protocol: str
    label: str
    load: Mapping[str, Any]
    sent: int
    completed: int
    errors: Mapping[str, int]
    seconds: float
    rate: float
    received_bytes: int
    latency_ms: Mapping[str, float]
    service_ms: Mapping[str, float]
    first_token_ms: Mapping[str, float] = field(default_factory=dict)
    between_chunks_ms: Mapping[str, float] = field(default_factory=dict)
    between_tokens_ms: Mapping[str, float] = field(default_factory=dict)
    chunks_per_s: float = 0.0
    tokens_per_s: float = 0.0
    client_cpu: float = 0.0
    unfinished: int = 0
    slices: Sequence[Mapping[str, float]] = ()

    @property
    def is_limited_by_client(self) -> bool:
        return self.client_cpu >= _CLIENT_LIMIT

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Recorder:
    """Collects latencies of requests due between `start_s` and `end_s` of the performance counter, and rates."""

    def __init__(self, start_s: float, seconds: float, warmup_s: float = 0.0) -> None:
        self.start_s, self.end_s = start_s, start_s + seconds
        self._begin_s = start_s - warmup_s
        self.errors: Counter[str] = Counter()
        self._due = array("d")
        self._latencies = array("d")
        self._service = array("d")
        self._first_tokens = array("d")
        self._gaps = array("d")
        self._bytes = self._unfinished = 0
        self._cpu: list[tuple[float, float]] = []
        # Of all responses, those of the warm-up included.
        self._ends = array("d")
        self._chunks = array("q")
        self._tokens = array("q")

    def sample_cpu(self) -> None:
        """Record the CPU time of this process; called at the start and the end of the measured time."""
        self._cpu.append((time.perf_counter(), time.process_time()))

    def add(self, exchange: TimedExchange, due_s: float, times: Sequence[float]) -> None:
        """Record an exchange and the times of its events with text. Its latencies count if it was due in time."""
        if not exchange.error:
            self._ends.append(exchange.end_s)
            self._chunks.append(len(times))
            self._tokens.append(exchange.tokens)
        if not self.start_s <= due_s < self.end_s:
            return
        self._unfinished += exchange.end_s > self.end_s
        if exchange.error:
            self.errors[exchange.error] += 1
            return
        self._due.append(due_s)
        self._latencies.append(exchange.end_s - due_s)
        self._service.append(exchange.end_s - exchange.sent_s)
        self._bytes += exchange.received_bytes
        if times:
            self._first_tokens.append(times[0] - due_s)
            self._gaps.extend(b - a for a, b in pairwise(times))

    @property
    def completed(self) -> int:
        return len(self._latencies)

    def recent(self) -> Mapping[str, float]:
        """Return percentiles of the last thousand latencies, in milliseconds."""
        return percentiles(self._latencies[-1000:])

    def measurement(self, protocol: str, load: Any) -> Measurement:
        """Return the results."""
        client_cpu = self._client_cpu()  # before the work of this method
        rate, chunks_per_s, tokens_per_s = self._rates()
        gaps = percentiles(self._gaps)
        return Measurement(
            protocol=protocol,
            label=load.label,
            load=asdict(load),
            sent=self.completed + sum(self.errors.values()),
            completed=self.completed,
            errors=dict(self.errors),
            seconds=self.end_s - self.start_s,
            rate=rate,
            received_bytes=self._bytes,
            latency_ms=percentiles(self._latencies),
            service_ms=percentiles(self._service),
            first_token_ms=percentiles(self._first_tokens),
            between_chunks_ms=gaps,
            between_tokens_ms=gaps if self._chunks == self._tokens else {},
            chunks_per_s=chunks_per_s,
            tokens_per_s=tokens_per_s if all(self._tokens) else 0.0,
            client_cpu=client_cpu,
            unfinished=self._unfinished,
            slices=self._slices(),
        )

    def _client_cpu(self) -> float:
        """Return the CPU seconds of this process per second of the measured time."""
        self.sample_cpu()  # if the second sample is not taken yet
        start, end = self._cpu[0], self._cpu[min(1, len(self._cpu) - 1)]
        return (end[1] - start[1]) / (end[0] - start[0]) if end[0] > start[0] else 0.0

    def _rates(self) -> tuple[float, float, float]:
        """Return responses, chunks and tokens per second.

        They count from the last response of the warm-up to the last one of the measured time: whole cycles of slow
        models. If the server then paused for longer than before, or had no response, the pause counts too.
        """
        rows = sorted(zip(self._ends, self._chunks, self._tokens, strict=True))
        ends = [row[0] for row in rows]
        first, last = bisect_right(ends, self.start_s), bisect_right(ends, self.end_s)
        if first == len(rows):
            return 0.0, 0.0, 0.0
        last = last if last > first else len(rows)
        times = [ends[first - 1] if first else self._begin_s, *ends[first:last]]
        pause_s = max(b - a for a, b in pairwise(times))
        end_s = self.end_s if self.end_s - times[-1] > pause_s else times[-1]
        count, chunks, tokens = last - first, sum(r[1] for r in rows[first:last]), sum(r[2] for r in rows[first:last])
        seconds = end_s - times[0]
        return count / seconds, chunks / seconds, tokens / seconds

    def _slices(self) -> list[Mapping[str, float]]:
        length_s = (self.end_s - self.start_s) / SLICES
        parts: list[array[float]] = [array("d") for _ in range(SLICES)]
        for due_s, latency_s in zip(self._due, self._latencies, strict=True):
            parts[min(SLICES - 1, int((due_s - self.start_s) / length_s))].append(latency_s)
        ends = Counter(int((end_s - self.start_s) // length_s) for end_s in self._ends)
        return [{"rate": ends[i] / length_s, **percentiles(part)} for i, part in enumerate(parts)]


def percentiles(values_s: Sequence[float]) -> dict[str, float]:
    """Return percentiles by the nearest rank, mean and maximum of seconds, in milliseconds; empty without values."""
    if not values_s:
        return {}
    ordered = sorted(values_s)
    ranks = {f"p{p:g}": ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)] for p in PERCENTILES}
    summary = {**ranks, "max": ordered[-1], "mean": math.fsum(ordered) / len(ordered)}
    return {name: 1000 * value for name, value in summary.items()}
