"""Metrics of text models under the names of TGI, for its dashboards and autoscalers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from msgspec import structs

from dragoman.core.metrics import Family, Sample

Labels = Mapping[str, str]
_CALLS = "dragoman_calls_total"
_STEPS = "dragoman_text_steps_total"
# TGI's names of errors, by the outcome of a call; all others are "generation".
_ERRORS = {
    "InvalidInput": "validation",
    "TooLong": "validation",
    "NotSupported": "validation",
    "Overloaded": "overloaded",
    "Cancelled": "dropped",
    "WorkerLost": "incomplete",
    "InvalidOutput": "incomplete",
}


@dataclass(frozen=True, slots=True)
class _Counter:
    """A counter derived from a family: `relabel` returns the new labels of a sample, None to leave it out.

    Samples with equal new labels are added.
    """

    help: str
    family: str
    relabel: Callable[[Labels], Labels | None]


def _call(labels: Labels) -> Labels | None:
    """Labels of text generation calls with any outcome."""
    return _without(labels, "call", "outcome") if labels["call"] == "Generate" else None


def _success(labels: Labels) -> Labels | None:
    return _call(labels) if labels["outcome"] == "ok" else None


def _failure(labels: Labels) -> Labels | None:
    outcome, call = labels["outcome"], _call(labels)
    return None if call is None or outcome == "ok" else {**call, "err": _ERRORS.get(outcome, "generation")}


def _step(labels: Labels) -> Labels:
    return _without(labels, "outcome")


def _successful_step(labels: Labels) -> Labels | None:
    return _step(labels) if labels["outcome"] == "ok" else None


_COUNTERS: Mapping[str, _Counter] = {
    "tgi_request_count": _Counter("Finished requests.", _CALLS, _call),
    "tgi_request_success": _Counter("Requests that succeeded.", _CALLS, _success),
    "tgi_request_failure": _Counter("Requests that failed, by error.", _CALLS, _failure),
    "tgi_batch_inference_count": _Counter("Steps of the text engine, prefill or decode.", _STEPS, _step),
    "tgi_batch_inference_success": _Counter("Steps of the text engine that succeeded.", _STEPS, _successful_step),
}
_SAME: Mapping[str, str] = {
    "tgi_request_duration": "dragoman_text_duration_seconds",
    "tgi_request_validation_duration": "dragoman_text_validation_seconds",
    "tgi_request_queue_duration": "dragoman_text_queue_seconds",
    "tgi_request_inference_duration": "dragoman_text_inference_seconds",
    "tgi_request_mean_time_per_token_duration": "dragoman_text_token_seconds",
    "tgi_request_input_length": "dragoman_text_prompt_tokens",
    "tgi_request_generated_tokens": "dragoman_text_generated_tokens",
    "tgi_request_max_new_tokens": "dragoman_text_max_new_tokens",
    "tgi_batch_inference_duration": "dragoman_text_step_seconds",
    "tgi_batch_forward_duration": "dragoman_text_forward_seconds",
    "tgi_batch_current_size": "dragoman_text_batch_size",
    "tgi_batch_current_max_tokens": "dragoman_text_batch_max_tokens",
    "tgi_queue_size": "dragoman_text_queue_size",
}


def families(ours: Iterable[Family]) -> Iterable[Family]:
    """Yield TGI's families, as far as they follow from ours."""
    known = {family.name: family for family in ours}
    for name, counter in _COUNTERS.items():
        if counter.family in known:
            yield _sum_samples(name, counter, known[counter.family])
    for name, own in _SAME.items():
        if own in known:
            yield _rename(name, known[own])


def _sum_samples(name: str, counter: _Counter, family: Family) -> Family:
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.flat:
        labels = counter.relabel(sample.labels)
        if labels is not None:
            key = tuple(labels.items())
            sums[key] = sums.get(key, 0.0) + sample.value
    return Family(name, "counter", counter.help, tuple(Sample(name, dict(key), value) for key, value in sums.items()))


def _rename(name: str, family: Family) -> Family:
    samples = tuple(structs.replace(s, name=name + s.name.removeprefix(family.name)) for s in family.samples)
    distributions = tuple(structs.replace(each, name=name) for each in family.distributions)
    return structs.replace(family, name=name, samples=samples, distributions=distributions)


def _without(labels: Labels, *names: str) -> Labels:
    return {name: value for name, value in labels.items() if name not in names}
