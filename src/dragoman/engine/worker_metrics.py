"""Metrics of the workers of models: how many there are in which state, and CPU time and memory of their processes."""

from collections.abc import Iterable, Mapping
from typing import Final

from dragoman.core.metrics import Family, Labels, Sample
from dragoman.core.worker_usage import ProcessUsage, usage_families
from dragoman.workers.pool import Pool

_WORKERS: Final = "dragoman_workers"


def state_family(pools: Iterable[Pool], labels: Labels) -> Family:
    """Return the number of workers by state."""
    counts = [(state, count) for pool in pools for state, count in pool.states().items()]
    samples = tuple(Sample(_WORKERS, {**labels, "state": state}, count) for state, count in counts)
    return Family(_WORKERS, "gauge", "Workers of a model by state.", samples)


def process_families(
    workers: Iterable[tuple[Labels, Mapping[int, int]]], groups: Mapping[int, ProcessUsage]
) -> Iterable[Family]:
    """Return CPU time and memory of the processes of replicas, which lead process groups; with the labels of models."""
    return usage_families(
        ({**labels, "replica": str(replica)}, groups[process])
        for labels, processes in workers
        for replica, process in processes.items()
        if process in groups
    )
