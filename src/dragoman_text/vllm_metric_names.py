"""Metrics of text models under the names of vLLM, for its dashboards, KEDA and the endpoint picker of llm-d."""

from collections import Counter
from collections.abc import Iterable, Mapping

from dragoman.core.metrics import Family, Kind, Sample

# Name in vLLM -> ours. A counter is the sum of a histogram of ours.
_HISTOGRAMS: Mapping[str, str] = {
    "vllm:e2e_request_latency_seconds": "dragoman_text_duration_seconds",
    "vllm:time_to_first_token_seconds": "dragoman_text_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "dragoman_text_inter_token_seconds",
    "vllm:time_per_output_token_seconds": "dragoman_text_inter_token_seconds",  # its earlier name
    "vllm:request_queue_time_seconds": "dragoman_text_queue_seconds",
    "vllm:request_inference_time_seconds": "dragoman_text_inference_seconds",
    "vllm:request_time_per_output_token_seconds": "dragoman_text_token_seconds",
    "vllm:request_prompt_tokens": "dragoman_text_prompt_tokens",
    "vllm:request_generation_tokens": "dragoman_text_generated_tokens",
}
_SAME_KIND: Mapping[str, str] = {
    "vllm:num_requests_running": "dragoman_text_batch_size",
    "vllm:num_requests_waiting": "dragoman_text_queue_size",
    "vllm:kv_cache_usage_perc": "dragoman_text_cache_usage",
    "vllm:num_preemptions_total": "dragoman_text_preemptions_total",
    "vllm:spec_decode_num_draft_tokens_total": "dragoman_text_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total": "dragoman_text_accepted_draft_tokens_total",
}
# Reasons of ours -> vLLM's.
_REASONS: Mapping[str, str] = {"eos_token": "stop", "stop_sequence": "stop", "length": "length"}
_SUMS: Mapping[str, str] = {
    "vllm:prompt_tokens_total": "dragoman_text_prompt_tokens",
    "vllm:generation_tokens_total": "dragoman_text_generated_tokens",
}


def families(ours: Iterable[Family]) -> Iterable[Family]:
    """Yield vLLM's families, as far as they follow from ours."""
    known = {family.name: family for family in ours}
    for name, own in {**_HISTOGRAMS, **_SAME_KIND}.items():
        if own in known:
            family = known[own]
            samples = [(name + s.name.removeprefix(own), s.labels, s.value) for s in family.flat]
            yield _family(name, family.kind, family.help, samples)
    for name, own in _SUMS.items():
        if own in known:
            samples = [(name, s.labels, s.value) for s in known[own].flat if s.name == f"{own}_sum"]
            yield _family(name, "counter", f"Sum of {own}.", samples)
    finished = known.get("dragoman_text_finished_total")
    if finished is not None:
        yield _request_success(finished)
    blocks = known.get("dragoman_text_cache_blocks")
    if blocks is not None:
        name, line = "vllm:cache_config_info", "Size of the key-value cache; the value is 1."
        infos = [{**_labels(s.labels), **_sizes(s)} for s in blocks.flat]
        yield Family(name, "gauge", line, tuple(Sample(name, labels, 1) for labels in infos))


def _family(name: str, kind: Kind, line: str, samples: Iterable[tuple[str, Mapping[str, str], float]]) -> Family:
    return Family(name, kind, line, tuple(Sample(sample, _labels(labels), value) for sample, labels, value in samples))


def _request_success(finished: Family) -> Family:
    counts: Counter[tuple[str, str]] = Counter()
    for sample in finished.flat:
        counts[sample.labels["model"], _REASONS[sample.labels["reason"]]] += int(sample.value)
    name = "vllm:request_success_total"
    samples = tuple(
        Sample(name, {"model_name": model, "engine": "0", "finished_reason": reason}, count)
        for (model, reason), count in counts.items()
    )
    return Family(name, "counter", "Completions of requests that succeeded.", samples)


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return vLLM's labels of a model."""
    bounds = {"le": labels["le"]} if "le" in labels else {}
    return {"model_name": labels["model"], "engine": labels.get("replica", "0"), **bounds}


def _sizes(blocks: Sample) -> dict[str, str]:
    return {"block_size": blocks.labels["block_size"], "num_gpu_blocks": str(int(blocks.value))}
