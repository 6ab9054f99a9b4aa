"""API keys with several processes, which check them and send calls of keys with limits to the engine."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from access.access_models import BODY, Doubler, KeyFile, Tripler, bearer
from access.test_key_calls import key_calls
from dragoman import Model
from dragoman.core.calls import Generate
from dragoman.core.text import Generation, Text
from dragoman.system.cpus import cores
from rest.rest_server import Gate, RestServer, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux" or cores() < 2, reason="one process per core of Linux")


class Words(Model):
    """Return the prompt."""

    placement = "inline"

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        prompt = str(call.prompts[0])
        yield Generation((Text(0, 0, prompt, (), 2, finish="eos_token", whole=prompt),))


async def test_keys_and_their_models_hold_in_each_process(keys: KeyFile) -> None:
    bound = bearer(keys.add("bound", models=["Doubler"]))
    settings = {"processes": 2, "api_keys": str(keys.path), "admin_port": 0}
    async with serving(Doubler, Tripler, **settings) as server:
        for _ in range(8):  # connections of both processes
            assert (await server.infer("Doubler", BODY)).status == 401
            assert (await server.infer("Doubler", BODY, bound)).status == 200
            assert (await server.infer("Tripler", BODY, bound)).status == 403
        assert (await server.request("GET", "/v2/models", headers=bound)).json == {"models": ["Doubler"]}
        rows = b'{"instances": [1.5]}'
        assert (await server.request("POST", "/invocations", rows, bound)).json == {"predictions": [3.0]}
        assert (await server.request("GET", "/metrics", headers=bearer(keys.keys["user"]))).status == 404
        admin = RestServer(int(server.dragoman.admin_url.rpartition(":")[2]), server.dragoman)
        assert (await admin.request("GET", "/metrics", headers=bearer(keys.keys["user"]))).status == 200
        keys.delete("bound")
        async with asyncio.timeout(60):
            while (await server.infer("Doubler", BODY, bound)).status != 401:
                await asyncio.sleep(0.05)


async def test_limits_count_the_calls_of_all_processes(keys: KeyFile) -> None:
    slow = bearer(keys.add("slow", calls_per_s=0.01))  # a burst of one call
    few = bearer(keys.add("few", models=["Words", "Gate"], max_concurrent=1))
    single = bearer(keys.add("single", calls_per_s=0.01))
    async with serving(Doubler, Gate, Words, processes=2, api_keys=str(keys.path)) as server:
        responses = [await server.infer("Doubler", BODY, slow) for _ in range(12)]
        assert sorted(r.status for r in responses) == [200] + [429] * 11
        limited = next(r for r in responses if r.status == 429)
        assert limited.json == {"error": "key 'slow' has reached its limit of 0.01 calls per second"}
        assert 60 <= int(limited.headers["retry-after"]) <= 100
        assert (await server.request("GET", "/v2", headers=slow)).status == 200  # limits are those of calls to models

        waiting = asyncio.create_task(server.infer("Gate", BODY, few))
        async with asyncio.timeout(60):
            await server.model("Gate").begun.wait()
        stream = {"model": "Words", "prompt": "a b", "stream": True}
        for _ in range(6):
            assert (await server.request("POST", "/v1/completions", stream, few)).status == 429
        server.model("Gate").open.set()
        assert (await waiting).status == 200
        assert (await server.request("POST", "/v1/completions", stream, few)).status == 200

        statuses = [await background_status(server, single) for _ in range(6)]
        assert sorted(statuses) == [200] + [429] * 5
        assert await key_calls(server, keys.keys["user"]) == {
            ("slow", "ok"): 1, ("slow", "RateLimited"): 11, ("few", "ok"): 2, ("few", "RateLimited"): 6,
            ("single", "ok"): 1, ("single", "RateLimited"): 5,
        }  # fmt: skip


async def background_status(server: RestServer, key: Mapping[str, str]) -> int:
    """Return the status of a background call, whose response is fetched by another request."""
    headers = {**key, "x-synchronous": "false"}
    accepted = await server.request("POST", "/predictions/Words", {"inputs": "a b"}, headers)
    assert accepted.status == 200
    headers = {**key, "x-starting-token": accepted.headers["x-next-token"]}
    async with asyncio.timeout(60):
        while (found := await server.request("POST", "/predictions/Words", b"", headers)).status == 202:
            await asyncio.sleep(0.01)
    return found.status


@pytest.mark.parametrize(("per_minute", "most"), [(4, 5), (1, 3)])
async def test_failed_attempts_are_divided_among_processes(keys: KeyFile, per_minute: int, most: int) -> None:
    """The first attempt at each process is not throttled; `most` allows one more for the time that the test takes."""
    async with serving(Doubler, processes=2, api_keys=str(keys.path), auth_failures_per_minute=per_minute) as server:
        responses = [await server.infer("Doubler", BODY, bearer("wrong" * 8)) for _ in range(24)]
        user = bearer(keys.keys["user"])
        text = (await server.request("GET", "/metrics", headers=user)).body.decode()
    invalid = sum(r.status == 401 for r in responses)
    assert 1 <= invalid <= most
    assert sum(r.status == 429 for r in responses) == 24 - invalid
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    denied = {s.labels["reason"]: s.value for s in samples if s.name == "dragoman_access_denied_total"}
    assert (denied["invalid"], denied["throttled"]) == (invalid, 24 - invalid)
