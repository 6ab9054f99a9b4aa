"""Metrics of custom models: histograms of prometheus_client, told at the server's /metrics.

Where that library is not installed the values are taken and told nowhere.
"""

from contextvars import ContextVar
from typing import Any

LABELS = ("model_name", "model_version")
# Whose code is running: models in threads of one process share this module.
_MODEL: ContextVar[tuple[str, str]] = ContextVar("model", default=("", ""))
_REGISTERED: dict[str, "Metric"] = {}


class Metric:
    """A metric that a model registered; values are observed for whichever model is running."""

    def __init__(self, name: str, description: str) -> None:
        self.name = name
        self.description = description
        self._histogram = _histogram(name, description)

    def observe(self, amount: float) -> None:
        if self._histogram is not None:
            self._histogram.labels(*_MODEL.get()).observe(amount)

    def labels(self, *_: Any, **__: Any) -> "Metric":
        """The metric itself: the model's name and version are its labels."""
        return self


def register(name: str, description: str) -> Metric:
    """The metric of a name, made when it is first asked for."""
    if name not in _REGISTERED:
        _REGISTERED[name] = Metric(name, description)
    return _REGISTERED[name]


def log(**metrics: float) -> None:
    """Observe a value for each metric."""
    for name, value in metrics.items():
        register(name, name).observe(value)


def running(name: str, version: str) -> None:
    """Say whose code runs from here on, in this task or thread."""
    _MODEL.set((name, version))


def _histogram(name: str, description: str) -> Any:
    try:
        from prometheus_client import Histogram
    except ImportError:
        return None
    return Histogram(name, description, LABELS)


__all__ = ["Metric", "log", "register"]
