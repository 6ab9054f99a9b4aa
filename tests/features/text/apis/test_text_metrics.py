"""Metrics of text generation, under Dragoman's names and TGI's."""

from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from text_server import TextServer, serve

Samples = dict[str, float]


async def fetch_samples(server: TextServer) -> Samples:
    """Return samples by name and labels, without the labels `model` and `version`."""
    text = (await server.request("GET", "/metrics")).body.decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    result: Samples = {}
    for sample in (sample for family in families for sample in family.samples):
        if not {"model", "version"} <= {*sample.labels}:  # of the server or of all versions
            continue
        assert sample.labels.pop("model") == "ReverseModel"
        assert sample.labels.pop("version") == ""
        labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
        # TGI's counters have no `_total`; the parser, which is for newer ones, adds it.
        name = sample.name.removesuffix("_total") if sample.name.startswith("tgi_") else sample.name
        key = f"{name}{{{labels}}}" if labels else name
        assert key not in result
        result[key] = sample.value
    return result


@pytest.fixture
async def server() -> AsyncIterator[TextServer]:
    async with serve(metrics_as="tgi", max_queue=1) as server:
        yield server


async def test_calls_and_tokens_are_counted_plain_and_streamed(server: TextServer) -> None:
    for path in ("/generate", "/generate_stream"):
        await server.post(path, {"inputs": "a b c"})
    await server.post("/v1/completions", {"prompt": ["a b", "c"], "max_tokens": 1})
    result = await fetch_samples(server)
    for name in ("dragoman_text_prompt_tokens", "tgi_request_input_length"):
        assert (result[f"{name}_count"], result[f"{name}_sum"]) == (4, 3 + 3 + 2 + 1)
        assert result[f"{name}_bucket{{le=2.0}}"] == 2
        assert result[f"{name}_bucket{{le=+Inf}}"] == 4
    for name in ("dragoman_text_generated_tokens", "tgi_request_generated_tokens"):
        assert (result[f"{name}_count"], result[f"{name}_sum"]) == (4, 4 + 4 + 1 + 1)
    for name in ("dragoman_text_duration_seconds", "tgi_request_duration"):
        assert result[f"{name}_count"] == 3
        assert 0 < result[f"{name}_sum"] < 60
    assert result["tgi_request_count"] == result["tgi_request_success"] == 3
    assert b'\ntgi_request_count{model="ReverseModel",version=""} 3\n' in (await server.request("GET", "/metrics")).body


async def test_unknown_durations_are_not_exported(server: TextServer) -> None:
    await server.post("/generate", {"inputs": "a"})
    result = await fetch_samples(server)
    names = (
        "text_queue",
        "request_queue",
        "inference",
        "validation_duration",
        "mean_time_per_token",
        "max_new_tokens",
        "tgi_batch",
    )
    for name in names:
        assert not [key for key in result if name in key], name


async def test_failures_are_counted_by_reason(server: TextServer) -> None:
    await server.post("/generate", {"inputs": "a !fault"})
    await server.post("/generate", {"inputs": " ".join("a" * 70)})
    _, writer = await server.send("POST", "/generate_stream", {"inputs": "b !wait"})
    while not server.model().active:
        await server.request("GET", "/health")
    await server.post("/generate", {"inputs": "a"})
    writer.close()
    while server.model().active:
        await server.request("GET", "/health")
    await server.post("/tokenize", {"inputs": "a"})  # not a generation
    await server.post("/generate", {"inputs": "a"})
    result = await fetch_samples(server)
    reasons = {key: value for key, value in result.items() if key.startswith("tgi_request_failure")}
    kinds = ("dropped", "generation", "overloaded", "validation")
    assert reasons == {f"tgi_request_failure{{err={kind}}}": kind in kinds for kind in (*kinds, "incomplete")}
    assert (result["tgi_request_count"], result["tgi_request_success"]) == (5, 1)
    assert result["tgi_request_duration_count"] == 1  # TGI's histograms count successful requests only


async def test_tgi_names_are_exported_only_with_metrics_as() -> None:
    async with serve() as server:
        await server.post("/generate", {"inputs": "a"})
        result = await fetch_samples(server)
        assert result["dragoman_text_prompt_tokens_count"] == 1
        assert not [key for key in result if key.startswith("tgi_")]
