"""Custom metrics of `triton_python_backend_utils`, exported at /metrics if `prometheus_client` is installed."""

from collections.abc import Mapping, Sequence
from typing import Any

_FAMILIES: dict[str, "MetricFamily"] = {}


class Metric:
    """A value of a family with certain labels."""

    def __init__(self, kind: int, exported: Any) -> None:
        self._kind, self._exported, self._value = kind, exported, 0.0

    def increment(self, value: float) -> None:
        if self._kind == MetricFamily.HISTOGRAM:
            raise _unsupported_method("increment", "histograms")
        if self._kind == MetricFamily.COUNTER and value < 0:
            raise ValueError(f"counters only increase: expected 0 or more, got {value}")
        self._value += value
        if self._exported is not None:
            self._exported.inc(value)

    def set(self, value: float) -> None:
        if self._kind != MetricFamily.GAUGE:
            raise _unsupported_method("set", "counters and histograms")
        self._value = value
        if self._exported is not None:
            self._exported.set(value)

    def observe(self, value: float) -> None:
        if self._kind != MetricFamily.HISTOGRAM:
            raise _unsupported_method("observe", "counters and gauges")
        if self._exported is not None:
            self._exported.observe(value)

    def value(self) -> float:
        if self._kind == MetricFamily.HISTOGRAM:
            raise _unsupported_method("value", "histograms")
        return self._value


class MetricFamily:
    """A metric by its name; metrics of equal labels are the same object."""

    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __new__(cls, name: str, description: str, kind: int) -> "MetricFamily":
        family = _FAMILIES.get(name)
        if family is None:
            family = _FAMILIES[name] = super().__new__(cls)
            family._name, family._description, family._kind = name, description, kind
            family._metrics, family._collector = {}, None
        if family._kind != kind:
            raise ValueError(f"metric '{name}' exists with another kind")
        return family

    _name: str
    _description: str
    _kind: int
    _metrics: dict[tuple[tuple[str, str], ...], Metric]
    _collector: Any

    def Metric(  # noqa: N802 - the name that models use
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        if buckets is not None and self._kind != self.HISTOGRAM:
            raise ValueError("buckets: only histograms have them")
        if buckets is None and self._kind == self.HISTOGRAM:
            raise ValueError("buckets: expected the upper bounds of the histogram")
        key = tuple(sorted((labels or {}).items()))
        if key not in self._metrics:
            self._metrics[key] = Metric(self._kind, self._export(dict(key), buckets))
        return self._metrics[key]

    def _export(self, labels: Mapping[str, str], buckets: Sequence[float] | None) -> Any:
        try:
            import prometheus_client
        except ImportError:
            return None
        if self._collector is None:
            kinds: Sequence[Any] = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
            options = {"buckets": buckets} if buckets is not None else {}
            self._collector = kinds[self._kind](self._name, self._description, tuple(labels), **options)
        return self._collector.labels(**labels) if labels else self._collector


def _unsupported_method(method: str, kinds: str) -> ValueError:
    return ValueError(f"{method} is not supported for {kinds}")
