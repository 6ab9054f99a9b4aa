"""CPU time and memory of worker processes as metrics, which the server reads or a joined worker reports."""

from collections.abc import Iterable
from typing import Final

from dragoman.core.metrics import Family, Labels, Sample

_CPU: Final = "dragoman_worker_cpu_seconds_total"
_MEMORY: Final = "dragoman_worker_resident_memory_bytes"

ProcessUsage = tuple[float, float]  # CPU seconds and bytes of resident memory


def usage_families(usages: Iterable[tuple[Labels, ProcessUsage]]) -> Iterable[Family]:
    """Return the metrics of processes with these labels."""
    found = [*usages]
    cpu = tuple(Sample(_CPU, labels, usage[0]) for labels, usage in found)
    memory = tuple(Sample(_MEMORY, labels, usage[1]) for labels, usage in found)
    yield Family(_CPU, "counter", "User and system CPU seconds of a worker process.", cpu)
    yield Family(_MEMORY, "gauge", "Resident memory of a worker process.", memory)
