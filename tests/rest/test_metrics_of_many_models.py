"""Exporting the metrics of many models takes little of the event loop and of the network."""

import asyncio
import time
import zlib
from collections.abc import Iterator

import pytest

from dragoman.core.metrics import Family, Sample, with_labels
from rest.rest_server import Identity, RestServer, inputs, request, serving, tensor

CALL = request("POST", "/v2/models/Identity/infer", inputs(tensor(data=[1])))
MODELS = 1000
GZIP = {"accept-encoding": "gzip"}


async def samples(server: RestServer) -> list[str]:
    """Return the lines of metrics of the model."""
    text = (await server.request("GET", "/metrics")).body.decode()
    return [line for line in text.splitlines() if 'model="Identity"' in line]


async def test_histograms_begin_with_the_first_call_and_counters_before_it() -> None:
    async with serving(Identity) as server:
        before = await samples(server)
        await server.send(CALL)
        after = await samples(server)
    assert [line for line in before if "_seconds" in line] == []
    outcomes = [line for line in before if line.startswith("dragoman_calls_total{")]
    assert len(outcomes) == 10
    assert all(line.endswith(" 0") for line in outcomes)
    histograms = [line for line in after if "_seconds" in line]
    assert len(histograms) == 3 * 24  # from arrival to end, queue and computation, of 22 buckets, a sum and a count
    assert len(after) == len(before) + len(histograms)


@pytest.mark.parametrize("calls", [0, 1])
async def test_a_thousand_models_take_less_than_a_megabyte(calls: int) -> None:
    """Prometheus asks for gzip."""
    async with serving(Identity) as server:
        for _ in range(calls):
            await server.send(CALL)
        engine = server.dragoman.engine

        def others() -> Iterator[Family]:
            (deployment,) = engine.deployments()
            for number in range(MODELS):
                yield from with_labels(deployment.families(), {"model": f"model-{number:04d}"})

        engine.metric_sources.append(others)
        response = await server.request("GET", "/metrics", headers=GZIP)
    assert response.headers["content-encoding"] == "gzip"
    text = zlib.decompress(response.body, wbits=31)
    assert text.count(b"\ndragoman_calls_total{") == 10 * (MODELS + 1)
    assert len(response.body) < 1_000_000
    assert len(text) < (8_500_000 if calls else 1_500_000)


async def test_a_scrape_does_not_keep_calls_waiting() -> None:
    family = Family("many", "gauge", "m", tuple(Sample("many", {"n": str(n)}, n) for n in range(60_000)))
    async with serving(Identity) as server:
        server.dragoman.engine.metric_sources.append(lambda: (family,))
        for _ in range(5):
            began_s = last_s = time.monotonic()
            longest_s = 0.0
            scrape = asyncio.ensure_future(server.request("GET", "/metrics", headers=GZIP))
            while not scrape.done():
                await asyncio.sleep(0)
                now_s = time.monotonic()
                longest_s, last_s = max(longest_s, now_s - last_s), now_s
            if (share := longest_s / (last_s - began_s)) < 0.9:  # on the event loop, all of it
                break
    assert share < 0.9
