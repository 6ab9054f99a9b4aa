"""What is measured of texts, under our names and under TGI's."""

from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from .text_house import House, speaking

Samples = dict[str, float]


async def samples(house: House) -> Samples:
    """The samples by their names and labels, but for those that every one has."""
    told = (await house.ask("GET", "/metrics")).body.decode()
    families = list(text_string_to_metric_families(told))
    assert len({family.name for family in families}) == len(families)
    found: Samples = {}
    for sample in (sample for family in families for sample in family.samples):
        assert sample.labels.pop("model") == "Speaker"
        assert sample.labels.pop("version") == ""
        labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
        # TGI's counters have no `_total`; the parser, which is for newer ones, adds it.
        name = sample.name.removesuffix("_total") if sample.name.startswith("tgi_") else sample.name
        key = f"{name}{{{labels}}}" if labels else name
        assert key not in found
        found[key] = sample.value
    return found


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with speaking(metrics_as="tgi", max_queue=1) as made:
        yield made


async def test_calls_and_their_tokens_are_counted_whole_and_streamed(house: House) -> None:
    for path in ("/generate", "/generate_stream"):
        await house.post(path, {"inputs": "a b c"})
    await house.post("/v1/completions", {"prompt": ["a b", "c"], "max_tokens": 1})
    told = await samples(house)
    for name in ("dragoman_text_prompt_tokens", "tgi_request_input_length"):
        assert (told[f"{name}_count"], told[f"{name}_sum"]) == (4, 3 + 3 + 2 + 1)
        assert told[f"{name}_bucket{{le=2.0}}"] == 2
        assert told[f"{name}_bucket{{le=+Inf}}"] == 4
    for name in ("dragoman_text_generated_tokens", "tgi_request_generated_tokens"):
        assert (told[f"{name}_count"], told[f"{name}_sum"]) == (4, 4 + 4 + 1 + 1)
    for name in ("dragoman_text_duration_seconds", "tgi_request_duration"):
        assert told[f"{name}_count"] == 3
        assert 0 < told[f"{name}_sum"] < 60
    assert told["tgi_request_count"] == told["tgi_request_success"] == 3
    assert b'\ntgi_request_count{model="Speaker",version=""} 3\n' in (await house.ask("GET", "/metrics")).body


async def test_what_a_model_does_not_tell_is_not_made_up(house: House) -> None:
    await house.post("/generate", {"inputs": "a"})
    told = await samples(house)
    for name in ("queue", "inference", "validation", "mean_time_per_token", "max_new_tokens", "tgi_batch"):
        assert not [key for key in told if name in key], name


async def test_failures_are_told_by_their_reason(house: House) -> None:
    await house.post("/generate", {"inputs": "a !fault"})
    await house.post("/generate", {"inputs": " ".join("a" * 70)})
    _, writer = await house.send("POST", "/generate_stream", {"inputs": "b !wait"})
    while not house.model().active:
        await house.ask("GET", "/health")
    await house.post("/generate", {"inputs": "a"})
    writer.close()
    while house.model().active:
        await house.ask("GET", "/health")
    await house.post("/tokenize", {"inputs": "a"})  # which generates nothing
    await house.post("/generate", {"inputs": "a"})
    told = await samples(house)
    reasons = {key: value for key, value in told.items() if key.startswith("tgi_request_failure")}
    kinds = ("dropped", "generation", "overloaded", "validation")
    assert reasons == {f"tgi_request_failure{{err={kind}}}": 1.0 for kind in kinds}
    assert (told["tgi_request_count"], told["tgi_request_success"]) == (5, 1)
    assert told["tgi_request_duration_count"] == 1  # TGI's histograms have only requests that went well


async def test_nothing_is_told_twice_unless_that_is_asked_for() -> None:
    async with speaking() as house:
        await house.post("/generate", {"inputs": "a"})
        told = await samples(house)
        assert told["dragoman_text_prompt_tokens_count"] == 1
        assert not [key for key in told if key.startswith("tgi_")]
