"""Counters of loads of models: by outcome, and how long they took."""

import time
from collections.abc import Iterable
from typing import Final

from dragoman.core.metrics import Family, Histogram, Sample
from dragoman.engine.deployment import Deployment

_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class LoadCounters:
    """Loads at the start, through the API, of changed files and by calls.

    failed: also updates whose settings are invalid, so that no load began.
    """

    def __init__(self) -> None:
        self.ok = self.failed = 0
        self._durations = Histogram(_SECONDS)

    async def start(self, deployment: Deployment) -> None:
        """Start a deployment, and count that unless it is cancelled."""
        began_s = time.monotonic()
        try:
            await deployment.start()
        except Exception:
            self.failed += 1
            raise
        self.ok += 1
        self._durations.observe(time.monotonic() - began_s)

    def families(self) -> Iterable[Family]:
        name = "dragoman_model_loads_total"
        loads = (Sample(name, {"outcome": "ok"}, self.ok), Sample(name, {"outcome": "failed"}, self.failed))
        yield Family(name, "counter", "Loads of models by outcome.", loads)
        name = "dragoman_model_load_duration_seconds"
        durations = (self._durations.distribution(name, {}),)
        yield Family(name, "histogram", "Seconds to load a model.", distributions=durations)
