"""Metrics of requests and of text models under the names of OpenTelemetry's conventions, as histograms and counters.

The thread of the event loop counts each request once; the thread of the sender reads.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.resources import Resource

from dragoman.core.metrics import Family, Histogram
from dragoman.transports.observation import RequestRecord
from dragoman_telemetry.attributes import (
    PROVIDER,
    is_server_error,
    is_server_status,
    known_method,
    operation_of,
)
from dragoman_telemetry.sending import SCOPE, Batch, Sender, positive_number

_REQUEST_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_GEN_AI_S: Final = tuple(0.01 * 2**power for power in range(14))
_FIRST_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_EACH_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS: Final = tuple(float(4**power) for power in range(14))
# Name -> bounds of the buckets, unit and description.
_HISTOGRAMS: Final[Mapping[str, tuple[Sequence[float], str, str]]] = {
    "http.server.request.duration": (_REQUEST_S, "s", "Duration of HTTP server requests."),
    "rpc.server.call.duration": (_REQUEST_S, "s", "Duration of incoming remote procedure calls."),
    "gen_ai.server.request.duration": (_GEN_AI_S, "s", "Time to the last byte or output token."),
    "gen_ai.server.time_to_first_token": (_FIRST_S, "s", "Time to the first token of successful responses."),
    "gen_ai.server.time_per_output_token": (_EACH_S, "s", "Time per output token after the first one."),
    "gen_ai.client.token.usage": (_TOKENS, "{token}", "Number of input and output tokens used."),
}
_COUNTERS: Final = {
    "gen_ai.client.inference.usage.input_tokens": "Number of input tokens used, with those from a cache.",
    "gen_ai.client.inference.usage.output_tokens": "Number of output tokens used.",
}
Key = tuple[str | int, ...]


class RequestMetrics:
    """A request log that counts durations and tokens, and exports them every OTEL_METRIC_EXPORT_INTERVAL milliseconds.

    They are cumulative, or those since the last export if OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE is delta or
    lowmemory.
    """

    def __init__(self, exporter: Any, resource: Resource, scheme: str) -> None:
        preference = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "").strip().lower()
        self._is_delta = preference in ("delta", "lowmemory")
        self._resource, self._scheme = resource, scheme
        self._http: dict[Key, Histogram] = {}
        self._rpc: dict[Key, Histogram] = {}
        self._texts: dict[tuple[str, Key], Histogram] = {}
        self._tokens: dict[tuple[str, Key], int] = {}
        self._started_ns = time.time_ns()
        self._last: dict[Any, tuple[Sequence[int], float]] = {}  # of what was exported, for delta
        interval_s = positive_number("OTEL_METRIC_EXPORT_INTERVAL", 60_000) / 1000
        self._sender = Sender("metrics", exporter, self._take, interval_s, "Exports of metrics")
        self.close = self._sender.close

    def record(self, record: RequestRecord) -> None:
        key: Key
        if record.is_grpc:
            key, histograms = (record.path, record.protocol, record.status), self._rpc
        else:
            key, histograms = (record.method, record.route, record.status), self._http
        histogram = histograms.get(key)
        if histogram is None:
            key, histogram = self._known(key, histograms, record)
        histogram.observe(record.ended_s - record.started_s)
        if record.call.tokens is not None:
            self._count_text(record)

    def families(self) -> Iterable[Family]:
        return self._sender.families()

    def _known(self, key: Key, histograms: dict[Key, Histogram], record: RequestRecord) -> tuple[Key, Histogram]:
        """Return the histogram of a request without names that the client has made up, of which there may be many."""
        if record.is_grpc:
            key = (record.path, record.protocol, record.status) if record.protocol != "none" else ("", *key[1:])
        else:
            key = (known_method(record), record.route, record.status)
        return key, histograms.setdefault(key, Histogram(_REQUEST_S))

    def _count_text(self, record: RequestRecord) -> None:
        tokens, call = record.call.tokens, record.call
        assert tokens is not None
        error = str(record.status) if is_server_error(record) else ""
        key = (operation_of(tokens), record.model, error)
        duration_s = record.ended_s - record.started_s
        self._observe("gen_ai.server.request.duration", key, duration_s)
        self._count("gen_ai.client.inference.usage.input_tokens", key[:2], tokens.input)
        self._observe("gen_ai.client.token.usage", (*key[:2], "", "input"), tokens.input)
        if tokens.operation == "embedding":
            return
        self._count("gen_ai.client.inference.usage.output_tokens", key[:2], tokens.output)
        self._observe("gen_ai.client.token.usage", (*key[:2], "", "output"), tokens.output)
        first_s = tokens.first_token_s
        if error or first_s is None or not tokens.output:
            return
        self._observe("gen_ai.server.time_to_first_token", key[:2], first_s)
        if tokens.longest > 1:
            each_s = (call.ended_s - call.arrived_s - first_s) / (tokens.longest - 1)
            self._observe("gen_ai.server.time_per_output_token", key[:2], max(0.0, each_s))

    def _observe(self, name: str, key: Key, value: float) -> None:
        histogram = self._texts.get((name, key))
        if histogram is None:
            histogram = self._texts[name, key] = Histogram(_HISTOGRAMS[name][0])
        histogram.observe(value)

    def _count(self, name: str, key: Key, value: int) -> None:
        self._tokens[name, key] = self._tokens.get((name, key), 0) + value

    # --- in the thread of the sender -----------------------------------------------------------------------------

    def _take(self) -> Iterator[Batch]:
        now_ns = time.time_ns()
        moments_ns = self._started_ns, now_ns
        points: dict[str, list[Any]] = {}
        for name, found in (("http.server.request.duration", self._http), ("rpc.server.call.duration", self._rpc)):
            for key, histogram in [*found.items()]:
                attributes = self._http_attributes(key) if found is self._http else _rpc_attributes(key)
                points.setdefault(name, []).append(self._point(name, (name, key), histogram, attributes, moments_ns))
        for (name, key), histogram in [*self._texts.items()]:
            point = self._point(name, (name, key), histogram, _gen_ai_attributes(key), moments_ns)
            points.setdefault(name, []).append(point)
        for (name, key), count in [*self._tokens.items()]:
            attributes = {**_gen_ai_attributes(key), "gen_ai.token.modality": "text"}
            value = self._since_last((name, key), (count,), 0.0)[0][0]
            points.setdefault(name, []).append(NumberDataPoint(attributes, *moments_ns, value))
        if self._is_delta:
            self._started_ns = now_ns
        if points:
            metrics = [self._metric(name, found) for name, found in points.items()]
            scope = ScopeMetrics(SCOPE, metrics, "")
            yield MetricsData([ResourceMetrics(self._resource, [scope], self._resource.schema_url)]), 1

    def _metric(self, name: str, points: Sequence[Any]) -> Metric:
        temporality = AggregationTemporality.DELTA if self._is_delta else AggregationTemporality.CUMULATIVE
        if name in _COUNTERS:
            return Metric(name, _COUNTERS[name], "{token}", Sum(points, temporality, is_monotonic=True))
        _, unit, description = _HISTOGRAMS[name]
        return Metric(name, description, unit, HistogramData(points, temporality))

    def _point(
        self, name: str, key: Any, histogram: Histogram, attributes: Mapping[str, Any], moments_ns: tuple[int, int]
    ) -> HistogramDataPoint:
        counts, total = self._since_last(key, tuple(histogram.buckets), histogram.sum)
        bounds = _HISTOGRAMS[name][0]
        # The smallest and the largest value are not known; the protocol leaves them out if there are none.
        return HistogramDataPoint(attributes, *moments_ns, sum(counts), total, counts, bounds, None, None)  # type: ignore[arg-type]

    def _since_last(self, key: Any, counts: Sequence[int], total: float) -> tuple[Sequence[int], float]:
        """Return counts and sum, of delta those since the last export."""
        if not self._is_delta:
            return counts, total
        before, before_total = self._last.get(key, ((0,) * len(counts), 0.0))
        self._last[key] = counts, total
        return tuple(now - old for now, old in zip(counts, before, strict=True)), total - before_total

    def _http_attributes(self, key: Key) -> dict[str, Any]:
        method, route, status = key
        found = {"http.request.method": method, "http.route": route, "url.scheme": self._scheme}
        found |= {
            "http.response.status_code": status,
            "error.type": str(status) if is_server_status(status, is_grpc=False) else "",
        }
        return {name: value for name, value in found.items() if value not in ("", 0)}


def _rpc_attributes(key: Key) -> dict[str, Any]:
    path, _, status = key
    found = {"rpc.system.name": "grpc", "rpc.method": str(path).lstrip("/") or "_OTHER"}
    found |= {
        "rpc.response.status_code": str(status),
        "error.type": str(status) if is_server_status(status, is_grpc=True) else "",
    }
    return {name: value for name, value in found.items() if value}


def _gen_ai_attributes(key: Key) -> dict[str, Any]:
    operation, model, error, kind = (*key, "", "")[:4]
    found = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.token.type": kind,
        "error.type": error,
    }
    return {name: value for name, value in found.items() if value}
