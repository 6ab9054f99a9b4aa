"""The statistics extension: Triton's counts and durations of requests, over REST and gRPC."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.calls import ModelStatistics
from dragoman.formats import grpc_messages as m


class Duration(msgspec.Struct):
    """A number of events and the sum of their durations in nanoseconds."""

    count: int = 0
    ns: int = 0


class InferenceDurations(msgspec.Struct):
    """Durations of requests and of their parts. The engine measures no other parts than the queue."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class BatchDurations(msgspec.Struct):
    """Executions with one batch size."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class Statistics(msgspec.Struct):
    """The statistics of a model version. `last_inference` is a Unix time in milliseconds, or 0."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferenceDurations
    response_stats: Mapping[str, Any]
    batch_stats: Sequence[BatchDurations]
    memory_usage: Sequence[Any]


# Triton's clients expect a number, also for a model without versions.
_ONLY_VERSION = "1"


class StatisticsList(msgspec.Struct):
    model_stats: Sequence[Statistics]


def statistics_list(models: Sequence[ModelStatistics]) -> StatisticsList:
    """Return the body of a REST response."""
    return StatisticsList([_statistics(model) for model in models])


def statistics_message(models: Sequence[ModelStatistics]) -> Any:
    """Return the ModelStatisticsResponse."""
    from google.protobuf.json_format import ParseDict  # takes as long as many other modules together

    return ParseDict(msgspec.to_builtins(statistics_list(models)), m.ModelStatisticsResponse())


def _statistics(model: ModelStatistics) -> Statistics:
    count, computed = model.succeeded, max(0, model.succeeded - model.cache_hits)
    durations = InferenceDurations(
        success=_duration(count, model.success_s),
        fail=_duration(model.failed, model.fail_s),
        queue=_duration(count, model.queue_s),
        compute_input=Duration(computed),
        compute_infer=_duration(computed, model.compute_s),
        compute_output=_duration(computed, max(0.0, model.success_s - model.queue_s - model.compute_s)),
        cache_hit=Duration(model.cache_hits),
        cache_miss=Duration(model.cache_misses),
    )
    return Statistics(
        name=model.name,
        version=model.version or _ONLY_VERSION,
        last_inference=int(model.last_s * 1e3),
        inference_count=model.inferences,
        execution_count=model.executions,
        inference_stats=durations,
        response_stats={},
        batch_stats=[
            BatchDurations(b.rows, Duration(b.executions), _duration(b.executions, b.compute_s), Duration(b.executions))
            for b in model.batches
        ],
        memory_usage=[],
    )


def _duration(count: int, seconds: float) -> Duration:
    return Duration(count, int(seconds * 1e9))
