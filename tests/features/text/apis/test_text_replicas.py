"""A text model in two worker processes: prompts with equal prefixes go to the same one, others by load.

Texts, streams, cancellation and errors are those of the same model in the server's process.
"""

import asyncio
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
import requests
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("torch")
pytest.importorskip("transformers")

import text_models
from dragoman.core.calls import Generate, Infer, Request
from dragoman.core.chunks import ChunkStream
from dragoman.core.datatypes import BYTES
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.tensor import Tensor, object_array
from dragoman.core.text import Chat, Generation, Prompt, Sampling, merge_chunks
from dragoman.engine.engine import Engine
from dragoman.server import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARAMETERS = '[model.parameters]\nthreads = 1\ndtype = "float32"\n'
CONFIG = f"[model]\nmax_queue = 16\n{PARAMETERS}[model.placement]\nreplicas = 2\nmin_ready = 2\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """A server with the same model twice: `one` is in this process, `two` in two worker processes."""
    root = tmp_path_factory.mktemp("replicas")
    text_models.make_model(root / "one")
    shutil.copytree(root / "one", root / "two")
    (root / "one" / "dragoman.toml").write_text(f"[model]\n{PARAMETERS}")
    (root / "two" / "dragoman.toml").write_text(CONFIG)
    async with Server(str(root), http_port=0, grpc_port=-1, metrics_as="vllm") as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(server: Server) -> Engine:
    return server.engine


def request(model: str, *prompts: Prompt, stream: bool = False, **sampling: Any) -> Request[Generation]:
    options = {"max_new_tokens": 8, "ignore_eos": True, **sampling}
    return Request(Generate(prompts=prompts, sampling=Sampling(**options), stream=stream), model)


async def generate(engine: Engine, *prompts: Prompt, model: str = "two", **sampling: Any) -> Generation:
    return (await engine.call(request(model, *prompts, **sampling))).answer


async def cached(engine: Engine, *prompts: Prompt, **sampling: Any) -> int:
    """Return the number of tokens of a prompt that were in the prefix cache of the worker that computed it."""
    return (await generate(engine, *prompts, **sampling)).prompts[0].cached


def document(name: str) -> str:
    return f"Document {name}. " + "It has the same words as each other document. " * 4


async def test_texts_are_those_of_one_process(engine: Engine) -> None:
    chat = Chat(({"role": "user", "content": "How do I say hello in French?"},))
    calls: list[tuple[tuple[Prompt, ...], dict[str, Any]]] = [
        (("A class definition",), {"max_new_tokens": 40}),
        ((document("same"), "The"), {"n": 2, "do_sample": True, "seed": 5, "top_logprobs": 2, "prompt_logprobs": 1}),
        ((chat,), {"num_beams": 2}),
        (((5, 6, 7),), {"do_sample": True, "seed": 2**40}),
    ]
    for prompts, sampling in calls:
        one, two = [await generate(engine, *prompts, model=model, **sampling) for model in ("one", "two")]
        assert [(t.whole, t.seed, t.finish) for t in two.texts] == [(t.whole, t.seed, t.finish) for t in one.texts]
        assert [[(t.id, t.text, len(t.top)) for t in text.tokens] for text in two.texts] == [
            [(t.id, t.text, len(t.top)) for t in text.tokens] for text in one.texts
        ]
        assert [(info.text, info.tokens) for info in two.prompts] == [(info.text, info.tokens) for info in one.prompts]
        async with aclosing(engine.stream(request("two", *prompts, stream=True, **sampling))) as chunks:
            streamed = [chunk.answer async for chunk in chunks]
        assert [text.text for text in merge_chunks(streamed).texts] == [text.whole for text in one.texts]
    # How many tokens a chunk has depends on the load of the machine, but all of these do not come at once.
    async with aclosing(engine.stream(request("two", "A class", max_new_tokens=200, stream=True))) as chunks:
        assert len([chunk async for chunk in chunks]) > 1
    infer = Infer({"text_input": Tensor(object_array([document("other").encode()], (1,)), BYTES)})
    answers = [(await engine.call(Request(infer, model))).answer.outputs for model in ("one", "two")]
    assert answers[0]["text_output"].data == answers[1]["text_output"].data


async def test_equal_prefixes_go_to_the_same_worker(engine: Engine) -> None:
    names = [f"{letter}{number}" for number in range(4) for letter in "ab"]
    for name in names:
        assert await cached(engine, document(name)) < 32, name
    (deployment,) = [each for each in engine.deployments() if each.spec.name == "two"]
    assert all(worker.mean_s for pool in deployment.pools for worker in pool.workers())  # idle workers take turns
    for turn in "xyz":
        found = [await cached(engine, f"{document(name)} Question {turn}?") for name in names]
        assert min(found) >= 32, found


async def test_the_metrics_of_each_worker_are_exported(server: Server) -> None:
    """Those of the engine in the server's process have no label `replica`. vLLM's names have the label `engine`."""

    async def scrape(name: str, label: str) -> dict[tuple[str, str], float]:
        """Return the sums of a metric by model and replica."""
        text = (await asyncio.to_thread(requests.get, f"{server.http_url}/metrics", timeout=60)).text
        lines = [line.rpartition(" ")[0] for line in text.splitlines()]
        assert len(set(lines)) == len(lines)  # no sample twice
        found: Counter[tuple[str, str]] = Counter()
        for sample in (s for family in text_string_to_metric_families(text) for s in family.samples):
            if sample.name == name:
                model = sample.labels.get("model") or sample.labels["model_name"]
                found[model, sample.labels.get(label, "")] += sample.value
        return dict(found)

    steps = "dragoman_text_steps_total"
    before = await scrape(steps, "replica")
    for letter in "mn":  # idle workers take turns
        await generate(server.engine, document(f"{letter}etrics"))
    end_s = time.monotonic() + 60
    after = before
    while sum(count > before.get(key, 0) for key, count in after.items()) < 2:
        assert time.monotonic() < end_s, after
        await asyncio.sleep(0.1)
        after = await scrape(steps, "replica")
    assert sorted(after) == [("one", ""), ("two", "0"), ("two", "1")]
    assert sum(after.values()) - sum(before.values()) >= 16  # a step for each token
    assert after["one", ""] == before["one", ""]
    usage = await scrape("vllm:kv_cache_usage_perc", "engine")
    assert sorted(usage) == [("one", "0"), ("two", "0"), ("two", "1")]
    assert all(0 <= value <= 1 for value in usage.values())


@pytest.mark.parametrize("model", ["one", "two"])
async def test_times_of_tokens_and_reasons_are_counted_streamed_or_not(server: Server, model: str) -> None:
    names = {
        "first": ("dragoman_text_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count"),
        "gaps": ("dragoman_text_inter_token_seconds_count", "vllm:inter_token_latency_seconds_count"),
        "length": ("dragoman_text_finished_total", "vllm:request_success_total"),
    }

    async def scrape() -> Counter[str]:
        url = f"http://127.0.0.1:{server.http_ports[0]}/metrics"
        text = (await asyncio.to_thread(requests.get, url, timeout=30)).text
        found: Counter[str] = Counter()
        for sample in (s for family in text_string_to_metric_families(text) for s in family.samples):
            labels = sample.labels
            if model in (labels.get("model"), labels.get("model_name")):
                reason = labels.get("reason") or labels.get("finished_reason") or "length"
                found[sample.name] += sample.value * (reason == "length")
        return found

    before: Counter[str] = Counter()
    while before != (before := await scrape()):  # workers report each second: those of earlier calls too
        await asyncio.sleep(1.5)
    await server.engine.call(request(model, "a plain call"))
    chunks = [chunk async for chunk in server.engine.stream(request(model, "a stream", stream=True))]
    assert sum(len(text.tokens) for chunk in chunks for text in chunk.answer.texts) == 8
    end_s, expected = time.monotonic() + 60, {"first": 2, "gaps": 2 * 7, "length": 2}
    while True:  # workers report each second
        after = await scrape()
        found = {key: [after[name] - before[name] for name in both] for key, both in names.items()}
        if found == {key: [count, count] for key, count in expected.items()}:
            break
        assert time.monotonic() < end_s, found
        await asyncio.sleep(0.1)
    name = "dragoman_text_time_to_first_token_seconds_sum"
    assert 0 < after[name] - before[name] < 60


async def test_prompts_of_other_kinds_have_prefixes(engine: Engine) -> None:
    messages = [{"role": "system", "content": document("system")}, {"role": "user", "content": "x"}]
    tokens = tuple(range(20, 120))
    infer = Infer({"text_input": Tensor(object_array([document("tensor").encode()], (1,)), BYTES)})
    for turn in range(3):
        await generate(engine, f"{turn} between, so that the workers take turns")
        chat = Chat((*messages, {"role": "user", "content": str(turn)}))
        assert (await cached(engine, chat) > 32) == (turn > 0)
        assert (await cached(engine, (*tokens, turn)) > 32) == (turn > 0)
        if not turn:
            await engine.call(Request(infer, "two"))
    assert await cached(engine, document("tensor") + " and more") > 32


async def test_prompts_without_a_prefix_do_not_block_others(engine: Engine) -> None:
    """Such as values that are nested too deeply, or integers of more digits than Python converts."""
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    message = {"role": "user", "content": "hello"}
    with pytest.raises(ModelFailed, match="its input cannot be sent to a process"):
        await generate(engine, Chat((message,), options={"deep": deep}))
    for options in ({}, {"large": 10**5000}):
        assert (await generate(engine, Chat((message,), options=options))).texts


async def test_load_spreads(engine: Engine) -> None:
    """Equal prompts that come at once go to one worker, unless it has more calls than the other one by far."""
    (deployment,) = [each for each in engine.deployments() if each.spec.name == "two"]

    def calls() -> list[int]:
        return sorted(worker.calls for pool in deployment.pools for worker in pool.workers())

    async def loads(prompts: list[str]) -> list[int]:
        tasks = [asyncio.create_task(generate(engine, prompt, max_new_tokens=100)) for prompt in prompts]
        while sum(calls()) < len(prompts):
            await asyncio.sleep(0)
        found = calls()
        await asyncio.gather(*tasks)
        return found

    assert await loads([f"{number} prompts" for number in range(6)]) == [3, 3]
    assert await loads([document("many")] * 4) == [0, 4]
    assert await loads([document("many")] * 12) == [6, 6]


async def test_cancelled_streams_and_errors(engine: Engine) -> None:
    """`max_queue` counts in the worker, too: it rejects prompts unless those that were cancelled have ended there."""
    prompt = document("cancelled")
    for _ in range(2):
        streams = [engine.stream(request("two", prompt, stream=True, max_new_tokens=300)) for _ in range(16)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        await asyncio.gather(*(stream.aclose() for stream in streams))
    with pytest.raises(InvalidInput, match="expected less than 512 tokens"):
        await generate(engine, document("long") * 40)
    async with aclosing(engine.stream(request("two", "x", stream=True, adapter="none"))) as chunks:
        with pytest.raises(InvalidInput, match="adapter"):
            await anext(chunks)


async def test_a_lost_worker_fails_its_own_streams_only(engine: Engine) -> None:
    (deployment,) = [each for each in engine.deployments() if each.spec.name == "two"]

    def workers() -> list[Any]:
        return [worker for pool in deployment.pools for worker in pool.workers()]

    streams: list[ChunkStream[Any]] = []
    while not all(worker.calls for worker in workers()):  # on a busy machine one may be expected to be much slower
        assert len(streams) < 16
        streams.append(engine.stream(request("two", f"{len(streams)}", stream=True, max_new_tokens=400)))
        await anext(streams[-1])
    first = workers()[0]
    os.kill(int(first.process.split()[-1]), signal.SIGKILL)
    outcomes = await asyncio.gather(*(_rest(stream) for stream in streams), return_exceptions=True)
    assert sorted(type(each).__name__ for each in outcomes) == [
        *["WorkerLost"] * first.calls,
        *["str"] * (len(streams) - first.calls),
    ]


async def _rest(stream: ChunkStream[Any]) -> str:
    chunks = [chunk.answer async for chunk in stream]
    assert chunks[-1].texts[0].finish == "length"
    return str(chunks[-1].texts[0].whole)
