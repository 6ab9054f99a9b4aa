"""Figures of a server between two reads of its metrics and its status."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dragoman.cli.connection import ServerConnection
from dragoman.core.documents import parse_json
from dragoman.core.errors import ModelNotFound, NotReady
from dragoman_check.top.metrics import NO_LABELS, Labels, Scrape, increase, quantile

# The console's paths first: they are not counted as requests. The others are those of a server without its pages.
_METRICS = ("/console/metrics", "/metrics")
_STATUS = ("/console/v2/repository/status", "/v2/repository/status")
_CALLS, _DURATION, _QUEUE = "dragoman_calls_total", "dragoman_call_duration_seconds", "dragoman_queue_seconds"
_TOKENS = "dragoman_text_generated_tokens"
_OK = {"outcome": "ok"}


@dataclass(frozen=True)
class Reading:
    """What a server says at one time. took_s: how long it took to answer, which grows with the delay of its loop."""

    scrape: Scrape
    status: Mapping[str, Any]
    took_s: float


class Source:
    """Reads a server. Raises NotReady if it cannot be reached, or is not a Dragoman server."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._paths: dict[tuple[str, ...], str] = {}

    def read(self) -> Reading:
        begin_s = time.monotonic()
        status = self._get(_STATUS)
        took_s = time.monotonic() - begin_s
        text = self._get(_METRICS).decode(errors="replace")
        try:
            content = parse_json(status)
            models = [model for model in content["models"] if model["name"] and model["workers"] is not None]
            return Reading(Scrape(text, time.monotonic()), {**content, "models": models}, took_s)
        except (ValueError, LookupError, TypeError) as error:
            raise NotReady(f"{self._connection.url} does not respond as a Dragoman server") from error

    def _get(self, paths: tuple[str, ...]) -> bytes:
        """Return the response of the first path that the server has."""
        for path in [self._paths[paths]] if paths in self._paths else paths:
            try:
                with self._connection.open(path) as response:
                    body = response.read()
            except ModelNotFound as error:
                missing = error
                continue
            self._paths[paths] = path
            return body
        raise NotReady(f"{missing.message}; with an admin port, expected its URL") from missing


def snapshot(url: str, before: Reading, after: Reading) -> dict[str, Any]:
    """Return the figures as JSON values: rates per second, latencies in milliseconds, None where nothing is known."""
    old, new = before.scrape, after.scrape
    seconds = max(new.at_s - old.at_s, 1e-3)

    def rate(name: str, labels: Labels = NO_LABELS, without: Labels = NO_LABELS) -> float:
        return round(increase(old, new, name, labels, without) / seconds, 3)

    models = [
        {
            "name": model["name"],
            "version": model["version"],
            "state": model["state"].lower(),
            "reason": model["reason"],
            "calls_per_s": rate(_CALLS, _key(model)),
            "errors_per_s": rate(_CALLS, _key(model), _OK),
            "p50_ms": _milliseconds(quantile(0.5, old, new, _DURATION, _key(model))),
            "p99_ms": _milliseconds(quantile(0.99, old, new, _DURATION, _key(model))),
            "queue_p50_ms": _milliseconds(quantile(0.5, old, new, _QUEUE, _key(model))),
            "queued": _queued(new, _key(model)),
            "in_flight": int(model["calls"]),
            "tokens_per_s": rate(f"{_TOKENS}_sum", _key(model)) if new.has(f"{_TOKENS}_sum", _key(model)) else None,
        }
        for model in after.status["models"]
    ]
    return {
        "url": url,
        "ready": bool(after.status.get("ready")),
        "seconds": round(seconds, 3),
        "version": next((each.get("version", "") for each in new.labels("dragoman_build_info")), ""),
        "cpu_percent": round(100 * rate("process_cpu_seconds_total"), 1),
        "memory_bytes": int(new.sum("process_resident_memory_bytes")),
        "answer_ms": round(1000 * after.took_s, 2),
        "calls_per_s": rate(_CALLS),
        "errors_per_s": rate(_CALLS, without=_OK),
        "tokens_per_s": rate(f"{_TOKENS}_sum") if new.has(f"{_TOKENS}_sum") else None,
        "models": models,
        "workers": [*_workers(after.status["models"])],
    }


def _key(model: Mapping[str, Any]) -> dict[str, str]:
    return {"model": model["name"], "version": model["version"]}


def _queued(scrape: Scrape, labels: Labels) -> int | None:
    names = [name for name in ("dragoman_queued_calls", "dragoman_text_queue_size") if scrape.has(name, labels)]
    return int(sum(scrape.sum(name, labels) for name in names)) if names else None


def _workers(models: list[Any]) -> Iterator[dict[str, Any]]:
    for model in models:
        for worker in model["workers"]:
            yield {
                "model": model["name"],
                "version": model["version"],
                "host": worker["host"],
                "process": worker["process"],
                "state": worker["state"],
                "reason": worker["reason"],
                "in_flight": worker["calls"],
                "mean_ms": _milliseconds(worker["mean_s"] or None),
            }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
