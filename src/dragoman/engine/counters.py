"""Metrics of deployments: calls by outcome, their durations, and metrics that the models report themselves."""

import importlib.util
import os
import platform
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any, Final, Self, get_args

from dragoman.core.calls import Embed, Generate, Infer, Request, Tokenize
from dragoman.core.errors import CallerError, DragomanError
from dragoman.core.metrics import SECONDS, Distribution, Family, Histogram, Kind, Labels, Sample
from dragoman.core.scoring import Score
from dragoman.core.usage import Usage, UsageCounts, UsageMeter
from dragoman.engine.generation_counters import GenerationCounters, GenerationUsage
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


# Every outcome that a call of a model can have. Each is exported as 0 before its first call: the increase of a counter
# that appears with the first failures cannot be computed. Other errors count as the listed one that they are a kind of.
OUTCOMES: Final = (
    OK, "Cancelled", "DeadlineExceeded", "InvalidInput", "InvalidOutput", "ModelFailed", "NotReady", "NotSupported",
    "Overloaded", "WorkerLost",
)  # fmt: skip
TEXT_OUTCOMES: Final = (*OUTCOMES, "TooLong")
_TEXT_CALLS: Final = frozenset({Generate, Tokenize, Embed, Score})
MAX_SIZES: Final = 1000
_CALLS: Final = "dragoman_calls_total"
_ROWS: Final = "dragoman_rows_total"
_EXECUTIONS: Final = "dragoman_executions_total"
_DURATION: Final = "dragoman_call_duration_seconds"
_QUEUE: Final = "dragoman_queue_seconds"
_COMPUTE: Final = "dragoman_compute_seconds"
_ROWS_HELP: Final = "Rows of the calls that the model has computed; a call without a batch axis counts 1."
_EXECUTIONS_HELP: Final = "Successful executions of the model, of one call or a batch."
_DURATION_HELP: Final = "Seconds from the arrival of a call to its end, by outcome."
_QUEUE_HELP: Final = "Seconds from the arrival of a call until its model began to compute it."
_COMPUTE_HELP: Final = "Seconds that the model computed a call, or the batch that the call was part of."


class CallCounters:
    """The counters of one deployment, by the type of the call.

    generation: those of generated texts. counts_rows: the first axis of inputs counts rows.
    meter: counts what keys use.
    """

    __slots__ = ("_by_type", "counts_rows", "generation", "meter")

    def __init__(self, meter: UsageMeter | UsageCounts | None = None) -> None:
        self.counts_rows = False
        self.meter = meter
        self._by_type: defaultdict[type[Any], TypeCounters] = defaultdict(TypeCounters)
        self.generation = GenerationCounters()

    def expect(self, calls: Iterable[type[Any]]) -> None:
        """Export the counters of these types of calls from now on, also before the first one."""
        for call_type in calls:
            self._by_type[call_type]

    def count(
        self,
        request: Request[Any],
        start_s: float,
        error: BaseException | None = None,
        usage: GenerationUsage | None = None,
    ) -> None:
        """Count one call that ends now; it came at `start_s`, by the monotonic clock."""
        times, counters = request.times, self._by_type[type(request.call)]
        ended_s = times.ended_s = counters.last_s = monotonic()
        first_token_s = None
        if usage is not None:
            times.tokens = usage.tokens(request.call, times)
            first_token_s = times.tokens.first_token_s
        if self.meter is not None and request.caller.owner:
            self._count_usage(self.meter, request, error)
        if error is None:
            durations = counters.succeeded
            if usage is not None:
                self.generation.count(usage, ended_s - start_s, first_token_s)
        else:
            durations = counters.failed[outcome(error, outcomes_of(type(request.call)))]
            if times.arrived_s:
                times.fail()
        # Without a function for each of the three histograms a small request takes 5 % less time.
        duration_s = ended_s - start_s
        durations.buckets[bisect_left(SECONDS, duration_s)] += 1
        durations.sum += duration_s
        started_s = times.started_s
        if not started_s or not times.arrived_s:  # answered from a cache, or rejected
            return
        queue_s, compute_s, histogram = started_s - times.arrived_s, times.computed_s - started_s, counters.queue
        if queue_s > 0:
            queue_s = times.queue_s
            histogram.buckets[bisect_left(SECONDS, queue_s)] += 1
            histogram.sum += queue_s
        else:
            queue_s = 0.0
            histogram.buckets[0] += 1
        if started_s < ended_s:  # else it never began
            if times.computed_s > ended_s:
                compute_s = times.compute_s
            histogram = counters.compute
            histogram.buckets[bisect_left(SECONDS, compute_s)] += 1
            histogram.sum += compute_s
        if error is None:
            counters.succeeded_queue_s += queue_s
            counters.succeeded_compute_s += compute_s
            if not times.is_cached:
                rows = _rows(request.call) if self.counts_rows else 1
                counters.rows += rows
                if times.batch is None:
                    counters.executions.count(rows, compute_s)

    def _count_usage(
        self,
        meter: UsageMeter | UsageCounts,
        request: Request[Any],
        error: BaseException | None,
    ) -> None:
        """Count what a call of a key has used, also if it failed after its model had begun."""
        times, caller = request.times, request.caller
        began = 0.0 < times.started_s < times.ended_s
        if error is not None and not began:
            return
        prompts, completions = times.computed_tokens
        if times.tokens is not None:
            prompts, completions = max(prompts, times.tokens.input), max(completions, times.tokens.output)
        compute_s = 0.0
        if began and not times.is_cached:
            compute_s = max(0.0, (times.computed_s or times.ended_s) - times.started_s)
            if times.batch is not None and times.batch[2] > 1:
                compute_s *= min(1.0, _rows(request.call) / times.batch[2])
        model = times.served_by[0] or request.model
        meter.add(caller.owner, caller.name, model, Usage(1, prompts, completions, compute_s))

    def take(self) -> Self:
        """Return the counts so far, and reset these counters."""
        snapshot = type(self)()
        if isinstance(self.meter, UsageCounts):
            snapshot.meter, self.meter = self.meter, UsageCounts()
        snapshot._by_type, self._by_type = self._by_type, snapshot._by_type
        snapshot.generation, self.generation = self.generation, snapshot.generation
        return snapshot

    def add(self, other: Self) -> None:
        """Add what other counters have counted of calls without generated texts."""
        for call_type, counters in other._by_type.items():
            self._by_type[call_type].add(counters)
        if self.meter is not None and isinstance(other.meter, UsageCounts):
            for (owner, name, model), usage in other.meter.take().items():
                self.meter.add(owner, name, model, usage)

    @property
    def last_s(self) -> float:
        """The monotonic time when the last call ended, 0 if there was none."""
        return max((counters.last_s for counters in self._by_type.values()), default=0.0)

    def totals(self, kinds: tuple[type[Any], ...]) -> Iterable["TypeCounters"]:
        """Return the counters of calls of these types."""
        return [counters for kind, counters in self._by_type.items() if issubclass(kind, kinds)]

    def families(self, labels: Labels, of_batches: int) -> Iterable[Family]:
        """Return the metrics of the calls; `of_batches` are the executions of batches.

        Histograms that have counted nothing are left out, counters are not.
        """
        by_name = sorted((kind.__name__, kind, counters) for kind, counters in self._by_type.items())
        counts, rows, executions = list[Sample](), list[Sample](), list[Sample]()
        durations, queue, compute = list[Distribution](), list[Distribution](), list[Distribution]()
        for name, kind, counters in by_name:
            own = {**labels, "call": name}
            for each in outcomes_of(kind):
                histogram = counters.succeeded if each == OK else counters.failed.get(each)
                count = 0 if histogram is None else histogram.count
                counts.append(Sample(_CALLS, {**own, "outcome": each}, count))
                if histogram is not None and count:
                    durations.append(histogram.distribution(_DURATION, {**own, "outcome": each}))
            if kind is Infer:
                rows.append(Sample(_ROWS, own, counters.rows))
                executions.append(Sample(_EXECUTIONS, own, counters.executions.total + of_batches))
            queue += [counters.queue.distribution(_QUEUE, own)] if counters.queue.count else ()
            compute += [counters.compute.distribution(_COMPUTE, own)] if counters.compute.count else ()
        yield Family(_CALLS, "counter", "Model calls by outcome.", tuple(counts))
        yield Family(_ROWS, "counter", _ROWS_HELP, tuple(rows))
        yield Family(_EXECUTIONS, "counter", _EXECUTIONS_HELP, tuple(executions))
        yield Family(_DURATION, "histogram", _DURATION_HELP, distributions=tuple(durations))
        yield Family(_QUEUE, "histogram", _QUEUE_HELP, distributions=tuple(queue))
        yield Family(_COMPUTE, "histogram", _COMPUTE_HELP, distributions=tuple(compute))
        if Generate in self._by_type:
            yield from self.generation.families(labels)


class Executions(dict[int, tuple[int, float]]):
    """The number of successful executions of a model by their rows, with the seconds that they took.

    Clients choose the rows: beyond `MAX_SIZES` different numbers a new one counts as the next power of two.
    """

    @property
    def total(self) -> int:
        return sum(count for count, _ in self.values())

    def count(self, rows: int, duration_s: float, executions: int = 1) -> None:
        if len(self) >= MAX_SIZES and rows not in self:
            rows = 1 << (rows - 1).bit_length()
        count, before_s = self.get(rows, (0, 0.0))
        self[rows] = count + executions, before_s + duration_s

    def add(self, other: Self) -> None:
        for rows, (count, duration_s) in other.items():
            self.count(rows, duration_s, count)


def _seconds() -> Histogram:
    return Histogram(SECONDS)


class TypeCounters:
    """The counters of one type of call.

    succeeded, failed: durations of calls, of those that failed by outcome.
    queue: of calls that were accepted. compute: of those that the model began to compute.
    succeeded_queue_s, succeeded_compute_s: sums of calls with the outcome `ok`.
    rows: of those that were computed. executions: of the model, for those that were no part of a batch.
    last_s: the monotonic time when the last call ended.
    """

    __slots__ = (
        "compute", "executions", "failed", "last_s", "queue", "rows", "succeeded", "succeeded_compute_s",
        "succeeded_queue_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.failed: defaultdict[str, Histogram] = defaultdict(_seconds)
        self.succeeded, self.queue, self.compute = _seconds(), _seconds(), _seconds()
        self.succeeded_queue_s = self.succeeded_compute_s = 0.0
        self.rows, self.executions = 0, Executions()
        self.last_s = 0.0

    def add(self, other: Self) -> None:
        for name, durations in other.failed.items():
            self.failed[name].add(durations)
        self.succeeded.add(other.succeeded)
        self.queue.add(other.queue)
        self.compute.add(other.compute)
        self.succeeded_queue_s += other.succeeded_queue_s
        self.succeeded_compute_s += other.succeeded_compute_s
        self.rows += other.rows
        self.executions.add(other.executions)
        self.last_s = max(self.last_s, other.last_s)


def _rows(call: Any) -> int:
    """Return the number of rows of a call, 1 for one without tensors."""
    for tensor in call.inputs.values() if type(call) is Infer else ():
        shape: tuple[int, ...] = tensor.data.shape
        return shape[0] if shape else 1
    return 1


def outcomes_of(call_type: type[Any]) -> tuple[str, ...]:
    """Return the outcomes that calls of a type can have."""
    return TEXT_OUTCOMES if call_type in _TEXT_CALLS else OUTCOMES


def outcome(error: BaseException, names: tuple[str, ...]) -> str:
    """Return the `outcome` label of a failed call, one of `names`: that of the error, or `Cancelled`."""
    if not isinstance(error, DragomanError):
        return "Cancelled"
    known = next((each.__name__ for each in type(error).__mro__ if each.__name__ in names), "")
    return known or ("InvalidInput" if isinstance(error, CallerError) else "ModelFailed")


def server_families(version: str) -> Iterable[Family]:
    """Return the version of the server, and the metrics of its process under the names of Prometheus' libraries."""
    labels = {"version": version, "python_version": platform.python_version()}
    info = (Sample("dragoman_build_info", labels, 1),)
    yield Family("dragoman_build_info", "gauge", "Versions of the server and of Python; the value is 1.", info)
    usage = process.resource_usage()
    for name, (kind, help_text) in PROCESS_METRICS.items():
        if name in usage:
            yield Family(name, kind, help_text, (Sample(name, {}, usage[name]),))


def prometheus_families() -> tuple[Family, ...]:
    """Return the metrics that models record with prometheus_client, if it is installed and its folder is set.

    In the library's multiprocess mode each process writes its metrics to files in that folder, so that no worker
    process has to respond. Call it in a thread: it reads files, and the import takes 40 ms.
    """
    folder = os.environ.get(METRICS_FOLDER, "")
    has_files = bool(folder) and any(Path(folder).glob("*.db"))
    if not has_files or importlib.util.find_spec("prometheus_client") is None:
        return ()
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    families = []
    for metric in MultiProcessCollector(CollectorRegistry(), folder).collect():
        samples = tuple(Sample(s.name, dict(s.labels), float(s.value)) for s in metric.samples)
        kind: Kind = metric.type if metric.type in get_args(Kind) else "untyped"
        name = f"{metric.name}_total" if kind == "counter" else metric.name
        families.append(Family(name, kind, metric.documentation, samples))
    return tuple(families)
