"""What models themselves measure with prometheus_client, in this process and in the workers.

Each process writes its numbers to files of its own in one folder (the library's multiprocess mode); reading them asks
no worker anything.
"""

import importlib.util
import os
from collections.abc import Iterable
from typing import get_args

from dragoman.core.metrics import Family, Kind, Sample

FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def families() -> Iterable[Family]:
    """The models' own metrics; none where nobody has set the folder up, or the library is not installed."""
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
