"""Metrics of deployments: calls by outcome, their durations, and metrics that the models report themselves."""

import importlib.util
import os
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, get_args

from dragoman.core.errors import DragomanError
from dragoman.core.metrics import SECONDS, Family, Histogram, Kind, Sample
from dragoman.engine.generation_counters import GenerationCounters, GenerationUsage, generation_families
from dragoman.system import process

OK = "ok"
# Kind and description of what `resource_usage` returns.
PROCESS_METRICS: Mapping[str, tuple[Kind, str]] = {
    "process_cpu_seconds_total": ("counter", "User and system CPU seconds of the process."),
    "process_resident_memory_bytes": ("gauge", "Resident memory of the process."),
    "process_virtual_memory_bytes": ("gauge", "Virtual memory of the process."),
    "process_open_fds": ("gauge", "Open file descriptors of the process."),
    "process_max_fds": ("gauge", "Limit on open file descriptors of the process."),
    "process_start_time_seconds": ("gauge", "Start of the process, as a Unix time."),
}
# Environment variable that names the folder of prometheus_client's multiprocess mode.
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class CallCounters:
    """The counters of one deployment."""

    __slots__ = ("_by_type", "generation")

    def __init__(self) -> None:
        self._by_type: defaultdict[type[Any], TypeCounters] = defaultdict(TypeCounters)
        self.generation = GenerationCounters()

    def count(
        self, call: Any, start_s: float, error: BaseException | None = None, usage: GenerationUsage | None = None
    ) -> None:
        """Count one call that has ended; `start_s` is a reading of the monotonic clock."""
        counters = self._by_type[type(call)]
        counters.last_s = now_s = time.monotonic()
        duration_s = now_s - start_s
        counters.durations.observe(duration_s)
        if error is not None:
            counters.failed[outcome(error)] += 1
            counters.failed_s += duration_s
        elif usage is not None:
            self.generation.count(usage, duration_s)

    def take(self) -> Self:
        """Return the counts so far, and reset these counters."""
        snapshot = type(self)()
        snapshot._by_type, self._by_type = self._by_type, snapshot._by_type
        snapshot.generation, self.generation = self.generation, snapshot.generation
        return snapshot

    def add(self, other: Self) -> None:
        """Add what other counters have counted of calls without generated texts."""
        for call_type, counters in other._by_type.items():
            self._by_type[call_type].add(counters)

    @property
    def last_s(self) -> float:
        """The monotonic time when the last call ended, 0 if there was none."""
        return max((counters.last_s for counters in self._by_type.values()), default=0.0)

    def counts(self, labels: Mapping[str, str]) -> Iterable[Sample]:
        for call, counters in self._by_name():
            for name, count in sorted({OK: counters.succeeded, **counters.failed}.items()):
                if count:
                    yield Sample("dragoman_calls_total", {**labels, "call": call, "outcome": name}, count)

    def durations(self, labels: Mapping[str, str]) -> Iterable[Sample]:
        name = "dragoman_call_duration_seconds"
        for call, counters in self._by_name():
            yield from counters.durations.samples(name, {**labels, "call": call})

    def totals(self, kinds: tuple[type[Any], ...]) -> Iterable["TypeCounters"]:
        """Return the counters of calls of these types."""
        return [counters for kind, counters in self._by_type.items() if issubclass(kind, kinds)]

    def _by_name(self) -> list[tuple[str, "TypeCounters"]]:
        return sorted((kind.__name__, counters) for kind, counters in self._by_type.items())


class TypeCounters:
    """The counters of one type of call. `last_s` is the monotonic time when the last call ended."""

    __slots__ = ("durations", "failed", "failed_s", "last_s")

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()
        self.failed_s = 0.0
        self.last_s = 0.0
        self.durations = Histogram(SECONDS)

    def add(self, other: Self) -> None:
        self.failed.update(other.failed)
        self.failed_s += other.failed_s
        self.last_s = max(self.last_s, other.last_s)
        self.durations.add(other.durations)

    @property
    def succeeded(self) -> int:
        return self.durations.count - self.failed.total()


def outcome(error: BaseException) -> str:
    """Return the `outcome` label of a failed call: the name of the error, or `Cancelled`."""
    return type(error).__name__ if isinstance(error, DragomanError) else "Cancelled"


def families(deployments: Iterable[tuple[Mapping[str, str], CallCounters, int, bool]]) -> Iterable[Family]:
    """Return the metrics of deployments: each with its labels, counters, calls in flight and readiness."""
    rows = list(deployments)
    counts = [s for labels, counters, _, _ in rows for s in counters.counts(labels)]
    yield Family("dragoman_calls_total", "counter", "Model calls by outcome.", tuple(counts))
    durations = [s for labels, counters, _, _ in rows for s in counters.durations(labels)]
    help_text = "Seconds from the arrival of a call to its end."
    yield Family("dragoman_call_duration_seconds", "histogram", help_text, tuple(durations))
    yield in_flight_family((labels, count) for labels, _, count, _ in rows)
    ready = [Sample("dragoman_model_ready", labels, float(is_ready)) for labels, _, _, is_ready in rows]
    yield Family("dragoman_model_ready", "gauge", "1 if a model version can answer.", tuple(ready))
    yield from generation_families([(labels, counters.generation) for labels, counters, _, _ in rows])


def in_flight_family(rows: Iterable[tuple[Mapping[str, str], int]]) -> Family:
    """Return the gauge of calls in flight of deployments, each with its labels."""
    name = "dragoman_calls_in_flight"
    samples = tuple(Sample(name, labels, float(count)) for labels, count in rows)
    return Family(name, "gauge", "Calls that are queued or running.", samples)


def model_families(reported: Iterable[tuple[Mapping[str, str], Sequence[Family]]]) -> Iterable[Family]:
    """Return the metrics that models report, with the labels of each model; those of its replicas are added up."""
    first: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for labels, reported_families in reported:
        for family in reported_families:
            first.setdefault(family.name, family)
            sums = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple({**labels, **sample.labels}.items())
                sums[key] = sums.get(key, 0.0) + sample.value
    for name, family in first.items():
        samples = tuple(Sample(sample, dict(labels), value) for (sample, labels), value in values[name].items())
        yield Family(name, family.kind, family.help, samples)


def server_families(version: str) -> Iterable[Family]:
    """Return the version of the server, and the metrics of its process under the names of Prometheus' libraries."""
    labels = {"version": version, "python_version": platform.python_version()}
    info = (Sample("dragoman_build_info", labels, 1),)
    yield Family("dragoman_build_info", "gauge", "Versions of the server and of Python; the value is 1.", info)
    usage = process.resource_usage()
    for name, (kind, help_text) in PROCESS_METRICS.items():
        if name in usage:
            yield Family(name, kind, help_text, (Sample(name, {}, usage[name]),))


def prometheus_families() -> Iterable[Family]:
    """Return the metrics that models record with prometheus_client, if it is installed and its folder is set.

    In the library's multiprocess mode each process writes its metrics to files in that folder, so that no worker
    process has to respond.
    """
    folder = os.environ.get(METRICS_FOLDER, "")
    if not folder or not os.path.isdir(folder) or importlib.util.find_spec("prometheus_client") is None:
        return
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    for metric in MultiProcessCollector(CollectorRegistry(), folder).collect():
        samples = tuple(Sample(s.name, dict(s.labels), float(s.value)) for s in metric.samples)
        kind: Kind = metric.type if metric.type in get_args(Kind) else "untyped"
        name = f"{metric.name}_total" if kind == "counter" else metric.name
        yield Family(name, kind, metric.documentation, samples)
