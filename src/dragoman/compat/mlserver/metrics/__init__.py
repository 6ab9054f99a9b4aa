"""Metrics of custom models: they are taken, and told nowhere yet."""

from typing import Any

_REGISTERED: dict[str, "Metric"] = {}


class Metric:
    """A metric that a model registered, with the last value that it logged."""

    def __init__(self, name: str, description: str) -> None:
        self.name = name
        self.description = description
        self.value: float | None = None

    def observe(self, amount: float) -> None:
        self.value = amount

    def labels(self, *_: Any, **__: Any) -> "Metric":
        return self


def register(name: str, description: str) -> Metric:
    """The metric of a name, made when it is first asked for."""
    return _REGISTERED.setdefault(name, Metric(name, description))


def log(**metrics: float) -> None:
    """Observe a value for each metric."""
    for name, value in metrics.items():
        register(name, "").observe(value)


__all__ = ["Metric", "log", "register"]
