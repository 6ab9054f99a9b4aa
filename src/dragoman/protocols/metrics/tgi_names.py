"""What text models measure, under the names that TGI's dashboards ask for."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from dragoman.core.metrics import Family, Sample

Labels = Mapping[str, str]
_CALLS = "dragoman_calls_total"
_STEPS = "dragoman_text_steps_total"
# What TGI calls the ways in which a request fails, by the names of ours; whatever else there is failed in generation.
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
class _Counted:
    """A counter made of those samples of a family for whose labels `told` gives labels, which it has in place of these;
    samples whose labels become the same add up."""

    help: str
    of: str
    told: Callable[[Labels], Labels | None]


def _call(labels: Labels) -> Labels | None:
    """Of calls for texts, however they ended."""
    return _without(labels, "call", "outcome") if labels["call"] == "Generate" else None


def _success(labels: Labels) -> Labels | None:
    return _call(labels) if labels["outcome"] == "ok" else None


def _failure(labels: Labels) -> Labels | None:
    end, found = labels["outcome"], _call(labels)
    return None if found is None or end == "ok" else {**found, "err": _ERRORS.get(end, "generation")}


def _step(labels: Labels) -> Labels:
    return _without(labels, "outcome")


def _good_step(labels: Labels) -> Labels | None:
    return _step(labels) if labels["outcome"] == "ok" else None


_COUNTED: Mapping[str, _Counted] = {
    "tgi_request_count": _Counted("Requests that have ended.", _CALLS, _call),
    "tgi_request_success": _Counted("Requests that ended well.", _CALLS, _success),
    "tgi_request_failure": _Counted("Requests that did not end well, by why.", _CALLS, _failure),
    "tgi_batch_inference_count": _Counted("Steps of the engine, by whether prompts were read in them.", _STEPS, _step),
    "tgi_batch_inference_success": _Counted("Those of the steps that did not fail.", _STEPS, _good_step),
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
    """The families that TGI has, as far as they can be told from these."""
    known = {family.name: family for family in ours}
    for name, counted in _COUNTED.items():
        if counted.of in known:
            yield _added_up(name, counted, known[counted.of])
    for name, own in _SAME.items():
        if own in known:
            yield _renamed(name, known[own])


def _added_up(name: str, counted: _Counted, family: Family) -> Family:
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = counted.told(sample.labels)
        if labels is not None:
            key = tuple(labels.items())
            sums[key] = sums.get(key, 0.0) + sample.value
    return Family(name, "counter", counted.help, tuple(Sample(name, dict(key), value) for key, value in sums.items()))


def _renamed(name: str, family: Family) -> Family:
    samples = (replace(each, name=name + each.name.removeprefix(family.name)) for each in family.samples)
    return Family(name, family.kind, family.help, tuple(samples))


def _without(labels: Labels, *names: str) -> Labels:
    return {name: value for name, value in labels.items() if name not in names}
