"""Queue and compute of a call are the same in access log, console, metrics and traces, wherever its model runs."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.forked_process import TEXT
from e2e.otlp_receiver import OtlpReceiver, Span, running_receiver
from e2e.server_process import ServerProcess, free_ports, wait_until
from text_models import make_model

SLEEP_S = 0.06
COMPUTE_MS = 59  # timers of event loops may end a little early
MODELS = f"""
import asyncio
import time

import dragoman


class Inline(dragoman.Model):
    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)

    def infer(self, call):
        time.sleep({SLEEP_S})
        if call.inputs["x"].data[0] == 13:
            raise ValueError("unlucky")
        return {{"y": call.inputs["x"].data}}


class Thread(Inline):
    placement = "thread"


class Process(Inline):
    placement = "process"


class Batched(Process):
    batched = True


class BatchedThread(Thread):
    batched = True


class Joined(Process):
    pass


class Async(Inline):
    async def infer(self, call):
        await asyncio.sleep({SLEEP_S})
        return {{"y": call.inputs["x"].data}}


@dragoman.vector_function(inputs=[1], outputs=[1], placement="thread")
def square(x):
    time.sleep({SLEEP_S})
    return x**2
"""
SETTINGS = {
    "Joined": '[model.placement]\nlauncher = "join"\n',
    "Batched": "max_batch_size = 2\n",
    "BatchedThread": "max_batch_size = 2\n",
}
GRAPH = """
edges = ["first -> second"]
[nodes]
first = { served = "square" }
second = { served = "square" }
"""
CALLS = 3
# Models with one worker, in whose queue calls wait for each other.
QUEUED = ("Thread", "Process", "Joined")
MERGED = ("Batched", "BatchedThread")
INFER = "/v2/models/{}/infer"


def tensor(value: float) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [value]}]}


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with running_receiver() as found:
        yield found


@pytest.fixture(scope="module")
def server(receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a model in each placement, whose requests are all traced and logged."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "authored.py").write_text(MODELS)
    for name in ("Inline", "Async", *QUEUED, *MERGED, "square"):
        (folder / "served" / name).mkdir(parents=True)
        settings = f'[model]\nuri = "{folder}/authored.py:{name}"\n{SETTINGS.get(name, "")}'
        (folder / "served" / name / "dragoman.toml").write_text(settings)
    (folder / "served" / "twice.graph.toml").write_text(GRAPH)
    make_model(folder / "served" / "text")
    (folder / "served" / "text" / "dragoman.toml").write_text(
        '[model]\nruntime = "llm"\n[model.parameters]\nmax_batch = 1\n'
    )
    (folder / "secret").write_text("the secret of this test\n")
    http_port, grpc_port, worker_port = free_ports(3)
    options = {
        "--http-port": http_port,
        "--grpc-port": grpc_port,
        "--worker-port": worker_port,
        "--worker-secret-file": folder / "secret",
        "--batch-linger": 0,
        "--access-log": folder / "access.log",
        "--access-log-format": "json",
        "--recent-requests": 1000,
        "--tracing-endpoint": receiver.url,
    }
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
    arguments = [str(folder / "served"), *(f"{name}={value}" for name, value in options.items())]
    process = ServerProcess(*arguments, environment=environment, folder=folder, imports=TEXT)
    process.http_port = http_port
    join = ["-m", "dragoman", "worker", "--join", f"127.0.0.1:{worker_port}", "--secret-file", str(folder / "secret")]
    process.wait_for_status("/v2/health/live", 200)
    with subprocess.Popen([sys.executable, *join], cwd=folder, stderr=subprocess.DEVNULL) as worker:
        try:
            process.log_file = folder / "access.log"  # type: ignore[attr-defined]
            yield process.wait_until_ready()
        finally:
            process.kill()
            worker.kill()


_ids = itertools.count(1)


class Times(NamedTuple):
    """Queue and compute of a request in milliseconds, and when it was computed, in nanoseconds."""

    queue: float
    compute: float
    started: int
    ended: int
    request_id: str


def send(server: ServerProcess, path: str, bodies: list[Any]) -> dict[str, int]:
    """Send requests concurrently; return their statuses by their ids."""

    def one(body: Any) -> tuple[str, int]:
        headers = {"x-request-id": f"id-{next(_ids)}", "content-type": "application/json"}
        return headers["x-request-id"], server.request("POST", path, body, headers)[0]

    with ThreadPoolExecutor(len(bodies)) as threads:
        return dict(threads.map(one, bodies))


def line_of(server: Any, request_id: str) -> dict[str, Any]:
    def found() -> list[dict[str, Any]]:
        lines = map(json.loads, server.log_file.read_text().splitlines())
        return [line for line in lines if line["request_id"] == request_id]

    (line,) = wait_until(found, f"a line of {request_id}")
    return line


def samples(server: ServerProcess, model: str) -> dict[tuple[str, str], float]:
    """Return the sums and counts of a model by name and type of the call."""
    text = server.request("GET", "/metrics")[1].decode()
    found = [s for f in text_string_to_metric_families(text) for s in f.samples if s.labels.get("model") == model]
    return {(s.name, s.labels.get("call", "")): s.value for s in found if s.name.endswith(("_sum", "_count"))}


def spans_of(receiver: OtlpReceiver, trace_id: str) -> list[Span]:
    """Wait for the spans of a trace."""
    wait_until(lambda: any((s.trace_id, s.name) == (trace_id, "compute") for s in receiver.spans), "the span compute")
    return receiver.trace(trace_id, 3)


def check_channels(
    server: ServerProcess,
    receiver: OtlpReceiver,
    model: str,
    call: str,
    path: str,
    bodies: list[Any],
    status: int = 200,
) -> list[Times]:
    """Send requests; check that all channels agree; return their times in the order in which they were computed."""
    before = samples(server, model)
    statuses = send(server, path, bodies)
    assert {*statuses.values()} == {status}
    found = []
    for request_id in statuses:
        line = line_of(server, request_id)
        (console,) = server.request("GET", f"/console/requests/{request_id}")[1]["requests"]
        assert (console["queue_ms"], console["compute_ms"]) == pytest.approx(
            (line["queue_ms"], line["compute_ms"]), abs=0.0011
        )
        assert line["queue_ms"] + line["compute_ms"] <= line["total_ms"]
        spans = spans_of(receiver, line["trace_id"])
        (root,) = [span.span_id for span in spans if not span.parent_id]
        root = next((span.span_id for span in spans if span.name.startswith("text_completion ")), root)
        parents = [root, *(span.span_id for span in spans if (span.name, span.parent_id) == ("batch", root))]
        (compute,) = [span for span in spans if span.name == "compute" and span.parent_id == parents[-1]]
        queue_ns = sum(span.end - span.start for span in spans if (span.name, span.parent_id) == ("queue", root))
        assert queue_ns / 1e6 == pytest.approx(line["queue_ms"], abs=0.01)
        assert (compute.end - compute.start) / 1e6 == pytest.approx(line["compute_ms"], abs=0.01)
        found.append(Times(line["queue_ms"], line["compute_ms"], compute.start, compute.end, request_id))
    after = samples(server, model)

    def change(name: str) -> float:
        return after[name, call] - before.get((name, call), 0.0)

    assert change("dragoman_queue_seconds_count") == change("dragoman_compute_seconds_count") == len(bodies)
    queue_s, compute_s = (sum(each) / 1000 for each in zip(*((t.queue, t.compute) for t in found), strict=True))
    assert change("dragoman_queue_seconds_sum") == pytest.approx(queue_s, abs=1e-5 * len(bodies))
    assert change("dragoman_compute_seconds_sum") == pytest.approx(compute_s, abs=1e-5 * len(bodies))
    return sorted(found, key=lambda times: times.started)


def are_disjoint(found: list[Times]) -> bool:
    """Return whether no request was computed, by what it reports, while another one was: no queue is in compute."""
    return all(first.ended <= second.started for first, second in itertools.pairwise(found))


@pytest.mark.parametrize("model", ["Inline", "Async", *QUEUED, *MERGED])
def test_all_channels_agree(server: ServerProcess, receiver: OtlpReceiver, model: str) -> None:
    found = check_channels(server, receiver, model, "Infer", INFER.format(model), [tensor(1.0)] * CALLS)
    assert all(times.compute >= COMPUTE_MS for times in found)
    assert model != "Inline" or {times.queue for times in found} == {0}
    if model in MERGED:  # those of one batch were computed at the same time
        found = [*{times.started: times for times in found}.values()]
    assert model == "Async" or are_disjoint(found)


@pytest.mark.parametrize("model", ["Thread", "Process", "Joined"])
def test_failed_calls_have_the_same_times(server: ServerProcess, receiver: OtlpReceiver, model: str) -> None:
    (found,) = check_channels(server, receiver, model, "Infer", INFER.format(model), [tensor(13.0)], status=500)
    assert found.compute >= COMPUTE_MS


def test_graphs_and_their_nodes(server: ServerProcess, receiver: OtlpReceiver) -> None:
    name = server.request("GET", "/v2/models/twice")[1]["inputs"][0]["name"]
    body = {"inputs": [{"name": name, "datatype": "FP64", "shape": [1], "data": [3.0]}]}
    key = "dragoman_compute_seconds_count", "Infer"
    before = samples(server, "square").get(key, 0)
    found = check_channels(server, receiver, "twice", "Infer", INFER.format("twice"), [body] * 2)
    assert all(times.compute >= 2 * COMPUTE_MS for times in found)
    assert samples(server, "square")[key] - before == 4
    for times in found:
        (console,) = server.request("GET", f"/console/requests/{times.request_id}")[1]["requests"]
        assert [call["model"] for call in console["calls"]] == ["square", "square"]
        assert all(call["compute_ms"] >= COMPUTE_MS for call in console["calls"])


def test_um_bridge(server: ServerProcess, receiver: OtlpReceiver) -> None:
    body = {"name": "square", "input": [[3.0]], "config": {}}
    found = check_channels(server, receiver, "square", "Infer", "/Evaluate", [body] * CALLS)
    assert all(times.compute >= COMPUTE_MS for times in found)
    assert are_disjoint(found)


def test_texts_wait_in_the_queue_of_the_text_engine(server: ServerProcess, receiver: OtlpReceiver) -> None:
    body = {"model": "text", "prompt": "a b", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    found = check_channels(server, receiver, "text", "Generate", "/v1/completions", [body] * CALLS)
    queue_s = samples(server, "text")["dragoman_text_queue_seconds_sum", ""]
    assert queue_s == pytest.approx(sum(times.queue for times in found) / 1000, rel=0.2, abs=0.01)
