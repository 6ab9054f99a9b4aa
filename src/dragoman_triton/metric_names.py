"""Metrics of models under the names of Triton, for its dashboards, autoscalers and the endpoint picker of llm-d."""

from collections.abc import Callable, Iterable, Mapping

from dragoman.core.metrics import Family, Kind, Sample

_MICROSECONDS = 1e6
_Key = tuple[str, str]  # model and version
# Triton's reasons of failures, by the outcome of a call; all others are "BACKEND".
_REASONS = {"Cancelled": "CANCELED", "Overloaded": "REJECTED", "InvalidInput": "OTHER", "NotReady": "OTHER"}


def families(ours: Iterable[Family]) -> Iterable[Family]:
    """Yield Triton's families, as far as they follow from ours; they count calls of type Infer.

    Counters without the suffix `_total` are untyped, as newer formats require.
    """
    known = {family.name: (*family.flat,) for family in ours}
    calls = [s for s in known.get("dragoman_calls_total", ()) if s.labels["call"] == "Infer"]
    succeeded = _sum(calls, lambda s: s.labels["outcome"] == "ok")
    rows, executions, hits, misses = (
        _sum((s for s in known.get(f"dragoman_{each}_total", ()) if s.labels["call"] == "Infer"), lambda _: True)
        for each in ("rows", "executions", "response_cache_hits", "response_cache_misses")
    )
    durations = [
        s
        for s in known.get("dragoman_call_duration_seconds", ())
        if s.labels["call"] == "Infer" and s.labels["outcome"] == "ok"
    ]
    queue, compute = (
        _sum((s for s in known.get(name, ()) if s.labels["call"] == "Infer"), _is_sum)
        for name in ("dragoman_queue_seconds", "dragoman_compute_seconds")
    )
    total = _sum(durations, _is_sum)
    yield _family("nv_inference_request_success", "Inference requests that succeeded.", succeeded)
    yield _failures([s for s in calls if s.labels["outcome"] != "ok"])
    yield _family("nv_inference_count", "Inferences; a request with n rows counts n.", rows)
    yield _family("nv_inference_exec_count", "Executions of the model.", executions)
    waiting = _sum(known.get("dragoman_queued_calls", ()), lambda _: True)
    models = dict.fromkeys(_sum(known.get("dragoman_model_ready", ()), lambda _: True), 0.0)
    yield _family("nv_inference_pending_request_count", "Requests in the queue.", models | waiting, "gauge")
    microseconds = {key: total.get(key, 0.0) * _MICROSECONDS for key in models}
    yield _family("nv_inference_request_duration_us", "Duration of requests in microseconds.", microseconds)
    if "dragoman_response_cache_bytes" in known:
        yield _family("nv_cache_num_hits_per_model", "Requests answered from the response cache.", hits)
        yield _family("nv_cache_num_misses_per_model", "Requests that the cache could not answer.", misses)
    for name, line, seconds in (
        ("nv_inference_queue_duration_us", "Time in the queue in microseconds.", queue),
        ("nv_inference_compute_infer_duration_us", "Time of computing in microseconds.", compute),
    ):
        yield _family(name, line, {key: seconds.get(key, 0.0) * _MICROSECONDS for key in models})


def _is_sum(sample: Sample) -> bool:
    return sample.name.endswith("_sum")


def _sum(samples: Iterable[Sample], is_wanted: Callable[[Sample], bool]) -> dict[_Key, float]:
    sums: dict[_Key, float] = {}
    for sample in filter(is_wanted, samples):
        key = sample.labels["model"], sample.labels["version"]
        sums[key] = sums.get(key, 0.0) + sample.value
    return sums


def _failures(calls: Iterable[Sample]) -> Family:
    name = "nv_inference_request_failure"
    sums: dict[tuple[str, str, str], float] = {}
    for call in calls:
        key = call.labels["model"], call.labels["version"], _REASONS.get(call.labels["outcome"], "BACKEND")
        sums[key] = sums.get(key, 0.0) + call.value
    samples = [
        Sample(name, {"model": model, "version": version, "reason": reason}, count)
        for (model, version, reason), count in sums.items()
    ]
    return Family(name, "untyped", "Inference requests that failed.", tuple(samples))


def _family(name: str, line: str, values: Mapping[_Key, float], kind: Kind = "untyped") -> Family:
    samples = (Sample(name, {"model": key[0], "version": key[1]}, value) for key, value in values.items())
    return Family(name, kind, line, tuple(samples))
