"""Statistics of deployments, from the counters that metrics are exported from."""

import time

from msgspec.structs import replace

from dragoman.core import error_texts
from dragoman.core.calls import (
    BatchStatistics,
    DerivativeCall,
    Embed,
    Generate,
    IndexEntry,
    Infer,
    ModelStatistics,
)
from dragoman.core.errors import InvalidInput, ModelNotFound
from dragoman.core.scoring import Score
from dragoman.core.worker_status import HIDDEN_REASON
from dragoman.engine.counters import Executions
from dragoman.engine.deployment import NOT_LOADED, Deployment
from dragoman.engine.registry import ModelRegistry

_INFERENCES = (Infer, DerivativeCall, Generate, Embed, Score)
_PUBLIC_REASONS = ("", "loading", "unloaded", NOT_LOADED)


def read_statistics(registry: ModelRegistry, model: str, version: str) -> tuple[ModelStatistics, ...]:
    """Return the statistics of a model's versions, or of one; without a name those of all models that are ready.

    Raises InvalidInput for an unknown model or version.
    """
    if not model:
        return tuple(_statistics(deployment) for deployment in registry.all() if deployment.ready)
    if model not in registry.names():
        raise InvalidInput(error_texts.no_statistics(model))
    try:
        return tuple(map(_statistics, registry.select(model, version)))
    except ModelNotFound as error:
        raise InvalidInput(error_texts.no_version_statistics(model)) from error


def _statistics(deployment: Deployment) -> ModelStatistics:
    calls, batches = list(deployment.counters.totals(_INFERENCES)), deployment.batch_counters
    executions = Executions()
    for counted in (*(c.executions for c in calls), *([] if batches is None else [batches.executions])):
        executions.add(counted)
    cache = deployment.response_cache
    hits, misses = (0, 0) if cache is None else (cache.count("hits"), cache.count("misses"))
    last_s = max((c.last_s for c in calls), default=0.0)
    return ModelStatistics(
        name=deployment.spec.name,
        version=deployment.spec.version,
        last_s=last_s and time.time() - time.monotonic() + last_s,
        succeeded=sum(c.succeeded.count for c in calls),
        success_s=sum(c.succeeded.sum for c in calls),
        failed=sum(histogram.count for c in calls for histogram in c.failed.values()),
        fail_s=sum(histogram.sum for c in calls for histogram in c.failed.values()),
        queue_s=sum(c.succeeded_queue_s for c in calls),
        compute_s=sum(c.succeeded_compute_s for c in calls),
        cache_hits=hits,
        cache_misses=misses,
        inferences=sum(c.rows for c in calls),
        executions=executions.total,
        batches=tuple(BatchStatistics(rows, count, total_s) for rows, (count, total_s) in sorted(executions.items())),
    )


def index_entry(deployment: Deployment) -> IndexEntry:
    """Return the state of a model version with its workers."""
    spec, state, reason = deployment.spec, deployment.reported_state, deployment.reported_reason
    workers = tuple(worker for pool in deployment.pools for worker in pool.workers())
    return IndexEntry(spec.name, spec.version, state, reason, spec.url, deployment.in_flight, workers)


def without_reasons(entry: IndexEntry) -> IndexEntry:
    """Return the entry without texts of exceptions, paths and addresses, but with the places that have them."""
    workers = tuple(replace(worker, reason=_hide(worker.reason)) for worker in entry.workers)
    return replace(entry, reason=_hide(entry.reason), workers=workers)


def _hide(reason: str) -> str:
    return reason if reason in _PUBLIC_REASONS else HIDDEN_REASON
