"""Metrics of custom models: histograms of prometheus_client, exported at /metrics.

If that package is not installed, values are accepted and not exported.
"""

from contextvars import ContextVar
from typing import Any

LABELS = ("model_name", "model_version")
# Name and version of the running model: models in threads of one process share this module.
_MODEL: ContextVar[tuple[str, str]] = ContextVar("model", default=("", ""))
_REGISTERED: dict[str, "Metric"] = {}


class Metric:
    """A metric that a model registered. Values are observed with the labels of the running model."""

    def __init__(self, name: str, description: str) -> None:
        self.name = name
        self.description = description
        self._histogram = _histogram(name, description)

    def observe(self, amount: float) -> None:
        if self._histogram is not None:
            self._histogram.labels(*_MODEL.get()).observe(amount)

    def labels(self, *_: Any, **__: Any) -> "Metric":
        """Return the metric: its labels are always name and version of the model."""
        return self


def register(name: str, description: str) -> Metric:
    """Return the metric with this name; create it on the first call."""
    if name not in _REGISTERED:
        _REGISTERED[name] = Metric(name, description)
    return _REGISTERED[name]


def log(**metrics: float) -> None:
    for name, value in metrics.items():
        register(name, name).observe(value)


def set_running_model(name: str, version: str) -> None:
    """Set the model whose code runs in this task or thread."""
    _MODEL.set((name, version))


def _histogram(name: str, description: str) -> Any:
    try:
        from prometheus_client import Histogram
    except ImportError:
        return None
    return Histogram(name, description, LABELS)


__all__ = ["Metric", "log", "register"]
