"""Measurements of a load: rate, percentiles, tokens, errors by kind."""

import math
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from dragoman.load_test.connections import Exchange

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
    between_tokens_ms: Mapping[str, float] = field(default_factory=dict)
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
    """Collects exchanges that were due between `start_s` and `end_s` of the performance counter."""

    def __init__(self, start_s: float, seconds: float) -> None:
        self.start_s, self.end_s = start_s, start_s + seconds
        self.errors: Counter[str] = Counter()
        self._due = array("d")
        self._latencies = array("d")
        self._service = array("d")
        self._first_tokens = array("d")
        self._gaps = array("d")
        self._bytes = self._tokens = self._unfinished = 0
        self._last_s = start_s
        self._cpu: tuple[float, float] | None = None

    def add(self, exchange: Exchange, due_s: float, tokens: Sequence[float]) -> None:
        """Record an exchange, unless it was due in the warm-up or after the end."""
        if not self.start_s <= due_s < self.end_s:
            return
        if self._cpu is None:
            self._cpu = time.perf_counter(), time.process_time()
        self._last_s = max(self._last_s, exchange.end_s)
        self._unfinished += exchange.end_s > self.end_s
        if exchange.error:
            self.errors[exchange.error] += 1
            return
        self._due.append(due_s)
        self._latencies.append(exchange.end_s - due_s)
        self._service.append(exchange.end_s - exchange.sent_s)
        self._bytes += exchange.received_bytes
        if tokens:
            self._tokens += len(tokens)
            self._first_tokens.append(tokens[0] - due_s)
            self._gaps.extend(b - a for a, b in pairwise(tokens))

    @property
    def completed(self) -> int:
        return len(self._latencies)

    def recent(self) -> Mapping[str, float]:
        """Return percentiles of the last thousand latencies, in milliseconds."""
        return percentiles(self._latencies[-1000:])

    def measurement(self, protocol: str, load: Any) -> Measurement:
        """Return the results. The rate counts to the end of the last response."""
        seconds = max(self._last_s, self.end_s) - self.start_s
        return Measurement(
            protocol=protocol,
            label=load.label,
            load=asdict(load),
            sent=self.completed + sum(self.errors.values()),
            completed=self.completed,
            errors=dict(self.errors),
            seconds=seconds,
            rate=self.completed / seconds,
            received_bytes=self._bytes,
            latency_ms=percentiles(self._latencies),
            service_ms=percentiles(self._service),
            first_token_ms=percentiles(self._first_tokens),
            between_tokens_ms=percentiles(self._gaps),
            tokens_per_s=self._tokens / seconds,
            client_cpu=self._client_cpu(),
            unfinished=self._unfinished,
            slices=self._slices(),
        )

    def _client_cpu(self) -> float:
        """Return the CPU seconds of this process per second since the first recorded exchange."""
        if self._cpu is None:
            return 0.0
        wall_s, cpu_s = time.perf_counter() - self._cpu[0], time.process_time() - self._cpu[1]
        return cpu_s / wall_s if wall_s > 0 else 0.0

    def _slices(self) -> list[Mapping[str, float]]:
        length_s = (self.end_s - self.start_s) / SLICES
        parts: list[array[float]] = [array("d") for _ in range(SLICES)]
        for due_s, latency_s in zip(self._due, self._latencies, strict=True):
            parts[min(SLICES - 1, int((due_s - self.start_s) / length_s))].append(latency_s)
        return [{"rate": len(part) / length_s, **percentiles(part)} for part in parts]


def percentiles(values_s: Sequence[float]) -> dict[str, float]:
    """Return percentiles by the nearest rank, mean and maximum of seconds, in milliseconds; empty without values."""
    if not values_s:
        return {}
    ordered = sorted(values_s)
    ranks = {f"p{p:g}": ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)] for p in PERCENTILES}
    found = {**ranks, "max": ordered[-1], "mean": math.fsum(ordered) / len(ordered)}
    return {name: 1000 * value for name, value in found.items()}
