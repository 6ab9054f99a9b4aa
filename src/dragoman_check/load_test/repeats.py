"""Repeated runs of a load: the median of each value, and its least and largest value."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

# Values of which ranges are known: the rate and latencies.
RANGED = ("rate", "p50", "p90", "p99")


def combine(measurements: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one measurement, in JSON, of each protocol and load: medians of its runs.

    `runs` is their number, and `ranges` the least and largest values by name: of the runs, or of the parts of the only
    one. A name without a value is left out. Raises KeyError, TypeError or AttributeError for other JSON.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in measurements:
        groups.setdefault((each["protocol"], each["label"]), []).append(each)
    return [_combine(runs) for runs in groups.values()]


def _combine(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    parts = runs[0]["slices"] if len(runs) == 1 else [{"rate": run["rate"], **run["latency_ms"]} for run in runs]
    values = {name: [part[name] for part in parts if name in part] for name in RANGED}
    names = [name for name in runs[0]["latency_ms"] if all(name in run["latency_ms"] for run in runs)]
    return {
        **runs[0],
        "runs": len(runs),
        "rate": median(run["rate"] for run in runs),
        "latency_ms": {name: median(run["latency_ms"][name] for run in runs) for name in names},
        "limited_by_client": any(run.get("limited_by_client") for run in runs),
        "ranges": {name: (min(found), max(found)) for name, found in values.items() if found},
    }
