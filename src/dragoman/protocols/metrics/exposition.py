"""Formats of metrics: the Prometheus text format, and OpenMetrics by the official client library."""

import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dragoman.core.metrics import Family

_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def encode(families: Sequence[Family], accept: str) -> tuple[bytes, str]:
    """Return the metrics and their content type.

    The format is OpenMetrics if `accept` names it and prometheus_client is installed. OpenMetrics
    does not allow colons in names, as in those of vLLM: such metrics are always sent as text.
    """
    wants_openmetrics = "application/openmetrics-text" in accept and not any(":" in f.name for f in families)
    if wants_openmetrics and importlib.util.find_spec("prometheus_client") is not None:
        from prometheus_client.openmetrics import exposition

        registry: Any = _Collector(families)
        return exposition.generate_latest(registry), exposition.CONTENT_TYPE_LATEST
    return "".join(_lines(families)).encode(), _TEXT


class _Collector:
    """Registry of prometheus_client that collects our metric families."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        from prometheus_client.metrics_core import Metric

        for family in self._families:
            kind: str = "unknown" if family.kind == "untyped" else family.kind
            # OpenMetrics requires the suffix of counters, which TGI's and Triton's names do not have.
            if kind == "counter" and not family.name.endswith("_total"):
                kind = "unknown"
            name = family.name.removesuffix("_total") if kind == "counter" else family.name
            metric = Metric(name, family.help, kind)
            for sample in family.samples:
                metric.add_sample(sample.name, dict(sample.labels), sample.value)
            yield metric


def _lines(families: Iterable[Family]) -> Iterable[str]:
    for family in families:
        help_text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        yield f"# HELP {family.name} {help_text}\n# TYPE {family.name} {family.kind}\n"
        for sample in family.samples:
            yield f"{sample.name}{_labels(sample.labels)} {_number(sample.value)}\n"


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else str(int(value)) if value == int(value) else repr(value)
