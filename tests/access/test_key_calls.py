"""`dragoman_key_calls_total`: calls of models by the name of their key and by outcome, in every protocol."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from access.access_models import BODY, Doubler, KeyFile, bearer
from access.test_grpc_keys import INFER, message
from dragoman import Model
from dragoman.access.key_calls import MAX_NAMES, OUTCOMES, KeyCalls, calls_of
from dragoman.core.calls import ConcurrentCalls, Generate, Infer, Request
from dragoman.core.errors import ModelFailed
from dragoman.core.text import Generation, Text
from rest.rest_server import Gate, RestServer, serving


class Stuttering(Model):
    """Generate a word, and then whatever the prompt says: another one, an error, or nothing for a long time."""

    placement = "inline"

    def load(self) -> None:
        self.begun = asyncio.Event()

    async def generate(self, call: Generate) -> AsyncIterator[Generation]:
        yield Generation((Text(0, 0, "a ", (), 1),))
        prompt = str(call.prompts[0])
        if prompt == "fail":
            raise ModelFailed("no second word")
        if prompt == "wait":
            self.begun.set()
            await asyncio.Event().wait()
        yield Generation((Text(0, 0, "b", (), 2, finish="eos_token", whole="a b"),))


async def key_calls(server: RestServer, key: str) -> dict[tuple[str, str], float]:
    """Return the counts that are not 0."""
    text = (await server.request("GET", "/metrics", headers=bearer(key))).body.decode()
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    found = {(s.labels["key"], s.labels["outcome"]): s.value for s in samples if s.name == "dragoman_key_calls_total"}
    assert {outcome for _, outcome in found} == {*OUTCOMES}  # of each key, as 0 before the first call
    return {labels: value for labels, value in found.items() if value}


async def test_each_call_is_counted_once_with_its_outcome(keys: KeyFile) -> None:
    user, few = bearer(keys.keys["user"]), bearer(keys.add("few", calls_per_s=0.01))
    bound = bearer(keys.add("bound", models=["Doubler"]))
    async with serving(Doubler, Gate, Stuttering, grpc_port=0, api_keys=str(keys.path)) as server:
        assert await key_calls(server, keys.keys["user"]) == {}
        for _ in range(3):
            assert (await server.infer("Doubler", BODY, user)).status == 200
        assert (await server.infer("Doubler", b'{"inputs": []}', user)).status == 400
        assert (await server.infer("Unknown", BODY, user)).status == 404
        assert (await server.request("GET", "/v2/models/Doubler", headers=user)).status == 200  # no call of a model
        assert [(await server.infer("Doubler", BODY, few)).status for _ in range(3)] == [200, 429, 429]
        assert (await server.infer("Gate", BODY, bound)).status == 403
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.dragoman.grpc_port}") as channel:
            await channel.unary_unary(INFER)(message(), metadata=[*user.items()])
        body: dict[str, Any] = {"model": "Stuttering", "prompt": "go", "stream": True}
        assert (await server.request("POST", "/v1/completions", body, user)).status == 200
        assert (await server.request("POST", "/v1/completions", body | {"stream": False}, user)).status == 400
        assert (await server.request("POST", "/v1/completions", body | {"prompt": "fail"}, user)).status == 200
        expected = {
            ("user", "ok"): 5, ("user", "InvalidInput"): 1, ("user", "ModelNotFound"): 1, ("user", "ModelFailed"): 1,
            ("user", "NotSupported"): 1,
            ("few", "ok"): 1, ("few", "RateLimited"): 2, ("bound", "Forbidden"): 1,
        }  # fmt: skip
        assert await key_calls(server, keys.keys["user"]) == expected

        waits: dict[str, tuple[str, Any]] = {
            "Stuttering": ("/v1/completions", body | {"prompt": "wait"}), "Gate": ("/v2/models/Gate/infer", BODY),
        }  # fmt: skip
        for model, (path, sent) in waits.items():
            leaving = asyncio.create_task(server.request("POST", path, sent, user))
            async with asyncio.timeout(60):
                await server.model(model).begun.wait()
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        async with asyncio.timeout(60):
            while (await key_calls(server, keys.keys["user"])).get(("user", "Cancelled")) != 2:
                await asyncio.sleep(0.01)


async def test_a_key_that_is_added_later_is_counted_from_then_on(server: RestServer, keys: KeyFile) -> None:
    later = bearer(keys.add("later"))
    async with asyncio.timeout(60):
        while (await server.infer("Doubler", BODY, later)).status != 200:
            await asyncio.sleep(0.05)
    assert await key_calls(server, keys.keys["user"]) == {("later", "ok"): 1}


async def test_without_keys_there_is_no_metric() -> None:
    async with serving(Doubler) as server:
        assert (await server.infer("Doubler", BODY)).status == 200
        assert b"dragoman_key_calls" not in (await server.request("GET", "/metrics")).body


@pytest.mark.parametrize("name", ["one too many", ""])
def test_further_names_are_counted_together(name: str) -> None:
    calls = KeyCalls()
    calls.expect(f"key{number}" for number in range(MAX_NAMES + 10))
    calls.of("key0").add(1)
    calls.of(name).add(2)
    calls.of("another").add(3, ModelFailed("no"))
    (family,) = calls.families()
    counted = {tuple(sample.labels.values()): sample.value for sample in family.samples if sample.value}
    assert counted == {("key0", "ok"): 1, ("other", "ok"): 2, ("other", "ModelFailed"): 3}
    assert len({sample.labels["key"] for sample in family.samples}) == MAX_NAMES + 1


def test_calls_in_one_request_count_each() -> None:
    assert calls_of(ConcurrentCalls((Request(Infer({})), Request(Infer({}))))) == 2
