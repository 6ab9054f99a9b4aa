"""What models themselves measure: those of this process by telling it, any with prometheus_client.

With that each process writes its numbers to files of its own in one folder (the library's multiprocess mode); reading
them asks no worker anything.
"""

import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from dragoman.core.metrics import Family, Kind, Sample

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_Key = tuple[str, tuple[tuple[str, str], ...]]


def gathered(told: Iterable[tuple[Mapping[str, str], Sequence[Family]]]) -> Iterable[Family]:
    """What models tell, under the labels of each: what several replicas of one tell adds up."""
    kinds: dict[str, Family] = {}
    values: dict[str, dict[_Key, float]] = {}
    for labels, families in told:
        for family in families:
            kinds.setdefault(family.name, family)
            sums = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple({**labels, **sample.labels}.items())
                sums[key] = sums.get(key, 0.0) + sample.value
    for name, first in kinds.items():
        samples = tuple(Sample(of, dict(labels), value) for (of, labels), value in values[name].items())
        yield Family(name, first.kind, first.help, samples)


def families() -> Iterable[Family]:
    """What was measured with the library; nothing where nobody has set the folder up, or it is not installed."""
    folder = os.environ.get(FOLDER, "")
    if not folder or not os.path.isdir(folder) or importlib.util.find_spec("prometheus_client") is None:
        return
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    for found in MultiProcessCollector(CollectorRegistry(), folder).collect():
        samples = tuple(Sample(s.name, dict(s.labels), float(s.value)) for s in found.samples)
        kind: Kind = found.type if found.type in get_args(Kind) else "untyped"
        name = f"{found.name}_total" if kind == "counter" else found.name
        yield Family(name, kind, found.documentation, samples)
