"""Traces: spans of a request under the client's, in each protocol and process; a collector that fails is no harm."""

import asyncio
import json
import logging
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import grpc
import httpx2
import pytest

import dragoman
from dragoman.core.errors import InvalidInput
from dragoman.formats import grpc_messages as m
from dragoman.system.trace_context import Sampler
from e2e.otlp_receiver import SERVER, OtlpReceiver, Span, running_receiver
from e2e.server_process import ServerProcess, free_ports, running_server, wait_until

MODELS = """
import json
import logging
import time

import dragoman


class Inline(dragoman.Model):
    placement = "inline"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)

    def infer(self, call):
        return {"y": call.inputs["x"].data}


class Batched(Inline):
    placement = "process"
    batched = True

    def infer(self, call):
        logging.getLogger("author").warning("headers %s", json.dumps(dragoman.trace_headers()))
        time.sleep(0.05)
        return super().infer(call)


class Thread(Inline):
    placement = "thread"

    def infer(self, call):
        time.sleep(0.02)
        if call.inputs["x"].data[0] == 13:
            raise ValueError("unlucky")
        return super().infer(call)


@dragoman.vector_function(inputs=[1], outputs=[1], placement="thread")
def square(x):
    return x**2
"""
GRAPH = """
edges = ["local -> remote"]
[nodes]
local = {{ served = "square" }}
remote = {{ umbridge = "{url}", model = "square" }}
"""
X = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}]}
SECRET = "hunter2-and-more"
CLIENT_SPAN = "b7ad6b7169203331"
_ids = iter(range(1, 1000))


def new_trace_id() -> str:
    return f"{next(_ids):032x}"


def parent(trace_id: str, flags: str = "01") -> str:
    return f"00-{trace_id}-{CLIENT_SPAN}-{flags}"


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with running_receiver() as found:
        yield found


class Simulator(BaseHTTPRequestHandler):
    """An UM-Bridge server that keeps the headers of evaluations."""

    evaluations: ClassVar[list[dict[str, str]]] = []
    answers: ClassVar[dict[str, Any]] = {
        "/Info": {"protocolVersion": 1.0, "models": ["square"]},
        "/ModelInfo": {"support": {"Evaluate": True}},
        "/InputSizes": {"inputSizes": [1]},
        "/OutputSizes": {"outputSizes": [1]},
    }

    def do_GET(self) -> None:
        call = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
        if self.path == "/Evaluate":
            self.evaluations.append({name.lower(): value for name, value in self.headers.items()})
        body = json.dumps(self.answers.get(self.path) or {"output": [[call["input"][0][0] ** 2]]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - named by the base class

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def simulator() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Simulator)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def server(receiver: OtlpReceiver, simulator: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that traces only what its clients trace."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "authored.py").write_text(MODELS)
    http_port, grpc_port = free_ports(2)
    (folder / "twice.graph.toml").write_text(GRAPH.format(url=simulator))
    options = {
        "--http-port": http_port,
        "--grpc-port": grpc_port,
        "--max-batch-size": 2,
        "--batch-linger": 0,
        "--access-log": folder / "access.log",
        "--access-log-format": "json",
    }
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_EXPORTER_OTLP_HEADERS": f"x-collector-key={SECRET}",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_SERVICE_NAME": "tested",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    names = ("Inline", "Batched", "Thread", "square")
    models = [f"{folder / 'authored.py'}:{name}" for name in names] + [str(folder / "twice.graph.toml")]
    process = ServerProcess(*models, *(f"{k}={v}" for k, v in options.items()), environment=environment, folder=folder)
    process.http_port, process.grpc_port = http_port, grpc_port
    try:
        yield process.wait_until_ready()
    finally:
        process.kill()


def infer(server: ServerProcess, model: str, trace_id: str, body: Any = X, **headers: str) -> tuple[int, Any]:
    headers = {"traceparent": parent(trace_id), **headers}
    status, answer, _ = server.request("POST", f"/v2/models/{model}/infer", body, headers)
    return status, answer


def tree(spans: list[Span], parent_id: str = CLIENT_SPAN) -> list[Any]:
    """Return the names of spans as nested lists, after checking that each lies within its parent."""
    assert len({span.span_id for span in spans}) == len(spans)
    found: list[Any] = []
    for span in spans:
        if span.parent_id == parent_id:
            inner = [each for each in spans if each.parent_id == span.span_id]
            assert all(span.start <= each.start <= each.end <= span.end for each in inner), span.name
            below = tree(spans, span.span_id)
            found += [span.name, below] if below else [span.name]
    return found


def by_name(spans: list[Span]) -> dict[str, Span]:
    return {span.name: span for span in spans}


def test_spans_of_a_request_over_http(server: ServerProcess, receiver: OtlpReceiver) -> None:
    trace_id, before_ns = new_trace_id(), time.time_ns()
    sent = {"x-request-id": "mine", "user-agent": "tests/1.0 " + 300 * "x", "x-forwarded-for": "203.0.113.9"}
    assert infer(server, "Inline", trace_id, tracestate="vendor=a", **sent)[0] == 200
    spans = receiver.trace(trace_id, 4)
    assert tree(spans) == ["POST /v2/models/{model}/infer", ["parse", "compute", "format"]]
    request, *children = spans
    assert (request.kind, {child.kind for child in children}) == (SERVER, {1})
    assert before_ns - 1e6 < request.start < request.end < time.time_ns() + 1e6
    assert {span.state for span in spans} == {"vendor=a"}
    assert not request.is_error
    sizes = {name: request.attributes.pop(f"http.{name}.body.size") for name in ("request", "response")}
    assert sizes["request"] == len(json.dumps(X))
    assert sizes["response"] > 50
    assert request.attributes == {
        "http.request.method": "POST",
        "http.route": "/v2/models/{model}/infer",
        "http.response.status_code": 200,
        "url.path": "/v2/models/Inline/infer",
        "url.scheme": "http",
        "client.address": "127.0.0.1",
        "server.address": "127.0.0.1",
        "server.port": server.http_port,
        "user_agent.original": sent["user-agent"][:256],
        "network.protocol.name": "http",
        "network.protocol.version": "1.1",
        "dragoman.request.id": "mine",
        "dragoman.protocol": "oip_rest",
        "dragoman.model.name": "Inline",
    }
    assert request.resource["service.name"] == "tested"
    assert request.resource["deployment.environment"] == "test"
    assert receiver.headers[-1]["x-collector-key"] == SECRET


def test_spans_over_http2(server: ServerProcess, receiver: OtlpReceiver) -> None:
    trace_id = new_trace_id()
    with httpx2.Client(http1=False, http2=True, base_url=f"http://{server.url}") as client:
        headers = {"traceparent": parent(trace_id)}
        assert client.post("/v2/models/Inline/infer", json=X, headers=headers).status_code == 200
    assert tree(receiver.trace(trace_id, 4)) == ["POST /v2/models/{model}/infer", ["parse", "compute", "format"]]


def test_errors_are_in_the_span(server: ServerProcess, receiver: OtlpReceiver) -> None:
    traces = [new_trace_id() for _ in range(4)]
    unlucky = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [13.0]}]}
    assert infer(server, "Inline", traces[0], b"{")[0] == 400
    assert infer(server, "none", traces[1])[0] == 404
    assert infer(server, "Thread", traces[2], unlucky)[0] == 500
    assert server.request("PUT", "/v2/models/Inline/infer", b"", {"traceparent": parent(traces[3])})[0] == 405
    invalid, unknown, failed, method = (receiver.trace(traces[i], n) for i, n in enumerate((2, 2, 3, 1)))
    assert tree(invalid) == ["POST /v2/models/{model}/infer", ["parse"]]
    assert [span[0].is_error for span in (invalid, unknown, failed, method)] == [False, False, True, False]
    assert [span[0].attributes["http.response.status_code"] for span in (invalid, unknown, failed)] == [400, 404, 500]
    assert failed[0].attributes["error.type"] == "500"
    assert "compute" in by_name(failed)
    assert [(span.name, span.attributes["url.path"]) for span in method] == [("PUT", "/v2/models/Inline/infer")]


def test_spans_of_grpc_calls(server: ServerProcess, receiver: OtlpReceiver) -> None:
    message = m.ModelInferRequest(model_name="Inline")
    message.inputs.add(name="x", datatype="FP64", shape=[1]).contents.fp64_contents.append(1.0)
    data, service = message.SerializeToString(), "inference.GRPCInferenceService/"
    ok, invalid, stream, unknown = (new_trace_id() for _ in range(4))
    with grpc.insecure_channel(server.grpc_url) as channel:

        def metadata(trace_id: str) -> Any:
            return (("traceparent", parent(trace_id)), ("authorization", f"Bearer {SECRET}"))

        channel.unary_unary(f"/{service}ModelInfer")(data, metadata=metadata(ok))
        for path, trace_id in (("ModelInfer", invalid), ("None", unknown)):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(f"/{service}{path}")(b"\xff", metadata=metadata(trace_id))
        call = channel.stream_stream(f"/{service}ModelStreamInfer")
        assert len([*call(iter([data, data]), metadata=metadata(stream))]) == 2
    spans = receiver.trace(ok, 4)
    assert tree(spans) == [f"{service}ModelInfer", ["parse", "compute", "format"]]
    attributes = spans[0].attributes
    assert spans[0].kind == SERVER
    assert (attributes["rpc.system"], attributes["rpc.method"]) == ("grpc", f"{service}ModelInfer")
    assert (attributes["rpc.response.status_code"], attributes["dragoman.model.name"]) == ("OK", "Inline")
    assert attributes["dragoman.request.size"] == len(data)
    assert (attributes["client.address"], attributes["network.protocol.version"]) == ("127.0.0.1", "2")
    assert (attributes["server.address"], attributes["server.port"]) == ("127.0.0.1", server.grpc_port)
    assert attributes["user_agent.original"].startswith("grpc-python/")
    assert receiver.trace(invalid, 2)[0].attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    names = [span.name for span in receiver.trace(stream, 4)]
    assert names == [f"{service}ModelStreamInfer", "parse", "queue", "compute"]
    rejected = receiver.trace(unknown, 1)[0]
    assert (rejected.name, rejected.is_error) == ("_OTHER", True)
    assert rejected.attributes["rpc.method_original"] == f"/{service}None"


def test_batches_in_a_worker_process(server: ServerProcess, receiver: OtlpReceiver) -> None:
    batches: list[dict[str, Any]] = []

    def two_calls_were_merged() -> bool:
        traces = [new_trace_id() for _ in range(5)]
        with ThreadPoolExecutor(5) as threads:
            assert {status for status, _ in threads.map(lambda trace: infer(server, "Batched", trace), traces)} == {200}
        batches.extend(batch for trace_id in traces for batch in batches_of(trace_id))
        return any(batch["dragoman.batch.calls"] == 2 for batch in batches)

    def batches_of(trace_id: str) -> list[dict[str, Any]]:
        names = by_name(spans := receiver.trace(trace_id, 5))
        if "batch" in names:
            names = by_name(spans := receiver.trace(trace_id, 6))
        request, compute = names["POST /v2/models/{model}/infer"], names["compute"]
        assert compute.end - compute.start >= 49e6  # measured by the worker
        if "batch" in names:
            assert tree(spans) == [request.name, ["parse", "queue", "batch", ["compute"], "format"]]
            return [names["batch"].attributes]
        assert tree(spans) == [request.name, ["parse", "queue", "compute", "format"]]
        return []

    wait_until(two_calls_were_merged, "calls that arrive in time")
    assert all(batch["dragoman.batch.reason"] for batch in batches)
    assert all(batch["dragoman.batch.rows"] == batch["dragoman.batch.calls"] for batch in batches)


def test_log_lines_and_the_model_know_the_trace(server: ServerProcess, receiver: OtlpReceiver) -> None:
    trace_id = new_trace_id()
    assert infer(server, "Batched", trace_id, tracestate="vendor=a")[0] == 200
    request = receiver.trace(trace_id, 5)[0]
    line = next(line for line in server.log().splitlines() if f"trace_id={trace_id} " in f"{line} ")
    assert line.endswith(f" trace_id={trace_id} span_id={request.span_id}")
    headers = json.loads(re.findall(r"headers (\{.*?\})", line)[0])
    assert headers == {"traceparent": f"00-{trace_id}-{request.span_id}-01", "tracestate": "vendor=a"}


def test_nodes_of_a_graph_are_spans_and_remote_ones_continue_the_trace(
    server: ServerProcess, receiver: OtlpReceiver
) -> None:
    trace_id = new_trace_id()
    body = {"name": "twice", "input": [[3.0]], "config": {}}
    status, answer, _ = server.request("POST", "/Evaluate", body, {"traceparent": parent(trace_id)})
    assert (status, answer["output"]) == (200, [[81.0]])
    spans = receiver.trace(trace_id, 7)
    (graph,) = [span for span in spans if span.kind == SERVER]
    assert Simulator.evaluations[-1]["traceparent"] == f"00-{trace_id}-{graph.span_id}-01"
    (node,) = [span for span in spans if span.name == "call square"]
    assert node.attributes["dragoman.model.name"] == "square"
    (compute,) = [s for s in spans if s.name == "compute" and s.parent_id == graph.span_id]
    assert node.parent_id == compute.span_id
    assert compute.start <= node.start < node.end <= compute.end
    assert [span.name for span in spans if span.parent_id == node.span_id] == ["queue", "compute"]


def test_a_request_that_its_client_does_not_sample_has_no_span(server: ServerProcess, receiver: OtlpReceiver) -> None:
    unsampled, sampled = new_trace_id(), new_trace_id()
    headers = {"traceparent": parent(unsampled, "02")}
    assert server.request("POST", "/v2/models/Batched/infer", X, headers)[0] == 200
    assert server.request("POST", "/v2/models/Batched/infer", X)[0] == 200
    assert infer(server, "Inline", sampled)[0] == 200
    receiver.trace(sampled, 4)
    assert not [span for span in receiver.spans if span.trace_id == unsampled]
    # But its log lines can be found, and the next service learns of the decision.
    line = next(line for line in server.log().splitlines() if unsampled in line)
    assert f'"traceparent": "00-{unsampled}-{CLIENT_SPAN}-02"' in line


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{'0' * 32}-{CLIENT_SPAN}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"00-{'A' * 32}-{CLIENT_SPAN}-01",
        f"00-{'a' * 32}-{CLIENT_SPAN}-01-more",
        f"ff-{'a' * 32}-{CLIENT_SPAN}-01",
        f"00-{'a' * 32}-{CLIENT_SPAN}-01, 00-{'a' * 32}-{CLIENT_SPAN}-01",
        f"00-{'a' * 31}g-{CLIENT_SPAN}-01",
    ],
)
def test_an_invalid_parent_is_ignored(server: ServerProcess, receiver: OtlpReceiver, header: str) -> None:
    sampled = new_trace_id()
    status, _, _ = server.request("POST", "/v2/models/Inline/infer", X, {"traceparent": header, "tracestate": "a=b"})
    assert status == 200
    assert infer(server, "Inline", sampled)[0] == 200
    receiver.trace(sampled, 4)
    assert "a" * 32 not in {span.trace_id.lower() for span in receiver.spans}


def test_a_later_version_of_the_header_is_understood(server: ServerProcess, receiver: OtlpReceiver) -> None:
    trace_id = new_trace_id()
    headers = {"traceparent": f"cc-{trace_id}-{CLIENT_SPAN}-f9-what-the-future-brings", "tracestate": "invalid"}
    assert server.request("POST", "/v2/models/Inline/infer", X, headers)[0] == 200
    assert {(span.parent_id, span.state) for span in receiver.trace(trace_id, 4)} >= {(CLIENT_SPAN, "")}


@pytest.mark.parametrize("host", ["example:99999", "a.example:81"])
def test_the_name_of_the_server_is_that_which_the_client_used(
    server: ServerProcess, receiver: OtlpReceiver, host: str
) -> None:
    trace_id = new_trace_id()
    infer(server, "Inline", trace_id, host=host)
    found = {name: value for name, value in receiver.trace(trace_id, 1)[0].attributes.items() if "server." in name}
    assert found == ({"server.address": "a.example", "server.port": 81} if host == "a.example:81" else {})


def test_no_secret_is_exported(server: ServerProcess, receiver: OtlpReceiver) -> None:
    trace_id = new_trace_id()
    headers = {"traceparent": parent(trace_id), "authorization": f"Bearer {SECRET}", "cookie": SECRET}
    server.request("POST", f"/v2/models/Inline/infer?token={SECRET}", X, headers)
    rejected = new_trace_id()
    server.request("GET", f"/unknown?token={SECRET}", None, {**headers, "traceparent": parent(rejected)})
    spans = [*receiver.trace(trace_id, 4), *receiver.trace(rejected, 1)]
    assert spans[0].attributes["url.path"] == "/v2/models/Inline/infer"
    assert not [body for body in receiver.bodies if SECRET.encode() in body]


def test_the_access_log_has_the_trace(server: ServerProcess, receiver: OtlpReceiver) -> None:
    trace_id = new_trace_id()
    assert infer(server, "Inline", trace_id)[0] == 200
    server.request("POST", "/v2/models/Inline/infer", X)
    file = next(Path(f"/proc/{server.popen.pid}/cwd").resolve().glob("access.log"))
    wait_until(lambda: trace_id in file.read_text(), "a line with the trace")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    (line,) = [line for line in lines if line.get("trace_id") == trace_id]
    assert (line["path"], line["status"]) == ("/v2/models/Inline/infer", 200)
    assert [*line][:3] == ["time", "request_id", "trace_id"]
    wait_until(lambda: "trace_id" not in json.loads(file.read_text().splitlines()[-1]), "the line without a trace")


def metric(text: str, name: str) -> float:
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1])


def test_exported_traces_are_counted(server: ServerProcess, receiver: OtlpReceiver) -> None:
    trace_id = new_trace_id()
    infer(server, "Inline", trace_id)
    receiver.trace(trace_id, 4)
    text = server.request("GET", "/metrics")[1].decode()
    assert metric(text, "dragoman_traces_dropped_total") == 0


# --- the server in this process -----------------------------------------------------------------------------------


def identity(x: float) -> float:
    return x


def serve(receiver_url: str, **settings: Any) -> dragoman.Server:
    return dragoman.Server(identity, http_port=0, grpc_port=-1, tracing_endpoint=receiver_url, **settings)


async def post(server: dragoman.Server, headers: dict[str, str] | None = None) -> int:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.http_ports[0]}") as client:
        return (await client.post("/v2/models/identity/infer", json=X, headers=headers)).status_code


async def test_requests_are_traced_by_default_once_there_is_a_collector(receiver: OtlpReceiver) -> None:
    before = len(receiver.spans)
    async with serve(f"{receiver.url}/") as server:
        assert await post(server) == 200
        assert await post(server, {"traceparent": parent("f" * 32, "00")}) == 200
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.http_ports[0]}") as client:
            await client.get("/v2/health/ready")
    spans = receiver.spans[before:]  # sent before the server has stopped
    assert {span.resource["service.name"] for span in spans} == {"dragoman"}
    assert tree(spans, "") == ["POST /v2/models/{model}/infer", ["parse", "queue", "compute", "format"]]


@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
def test_the_ratio_of_requests_is_sampled(ratio: float) -> None:
    sampler, count = Sampler(ratio), 20_000
    traces = []
    for _ in range(count):
        sampler.countdown -= 1
        if sampler.countdown <= 0 and (trace := sampler.trace({})) is not None:
            traces.append(trace)
    assert abs(len(traces) - ratio * count) <= 6 * math.sqrt(count * ratio * (1 - ratio))  # six standard deviations
    assert all(int(trace.trace_id[16:], 16) < ratio * 2**64 for trace in traces)


async def test_the_ratio_is_that_of_the_setting(receiver: OtlpReceiver) -> None:
    before = len(receiver.spans)
    async with serve(receiver.url, tracing_ratio=0) as server:
        assert await post(server) == 200
        assert await post(server, {"traceparent": "invalid"}) == 200
    assert receiver.spans[before:] == []


async def test_large_messages_and_asgi(receiver: OtlpReceiver, tmp_path: Path) -> None:
    """Requests that are not answered at once, and those that another server receives."""
    large = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [9000], "data": [1.0] * 9000}]}
    traces = [new_trace_id(), new_trace_id()]
    log = tmp_path / "access.log"
    app = dragoman.asgi(
        dragoman.vector_function(inputs=[1])(identity), tracing_endpoint=receiver.url, access_log=str(log)
    )
    async with serve(receiver.url, access_log=str(log)) as server, app:
        url = f"http://127.0.0.1:{server.http_ports[0]}"
        for trace_id, transport in zip(traces, (None, httpx2.ASGITransport(app)), strict=True):
            async with httpx2.AsyncClient(base_url=url, transport=transport) as client:
                headers = {"traceparent": parent(trace_id), "x-request-id": trace_id}
                response = await client.post("/v2/models/identity/infer", json=large, headers=headers)
                assert response.headers["x-request-id"] == trace_id
    for trace_id in traces:
        spans = receiver.trace(trace_id, 2)
        assert spans[0].attributes["dragoman.request.id"] == trace_id
        assert tree(spans)[0] == "POST /v2/models/{model}/infer"
        assert f'request_id="{trace_id}" trace_id="{trace_id}"' in log.read_text()


async def test_several_processes_record_the_times_of_the_engine(receiver: OtlpReceiver, tmp_path: Path) -> None:
    (tmp_path / "authored.py").write_text(f"{MODELS}\nfrom text_server import ReverseModel\n")
    trace_id, text_id = new_trace_id(), new_trace_id()
    with running_server(
        f"{tmp_path / 'authored.py'}:Thread",
        f"{tmp_path / 'authored.py'}:ReverseModel",
        "--processes=2",
        "--max-batch-size=4",
        f"--tracing-endpoint={receiver.url}",
        "--tracing-ratio=0",
        "--control-open",
        environment={"OTEL_BSP_SCHEDULE_DELAY": "50", "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:
        for path in ("/v2/trace/setting", "/v2/logging"):
            assert "expected processes 1" in process.request("GET", path)[1]["error"]
        body = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}]}
        assert infer(process, "Thread", trace_id, body)[0] == 200
        spans = receiver.trace(trace_id, 5)
        text = {"model": "ReverseModel", "prompt": "one two three", "max_tokens": 9}
        assert process.request("POST", "/v1/completions", text, {"traceparent": parent(text_id)})[0] == 200
        attributes = by_name(receiver.trace(text_id, 4))["text_completion ReverseModel"].attributes
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (3, 4)
    compute = by_name(spans)["compute"]
    assert 19e6 <= compute.end - compute.start < by_name(spans)["parse"].start - spans[0].start + 10e9
    assert tree(spans) == ["POST /v2/models/{model}/infer", ["parse", "queue", "compute", "format"]]


async def test_a_collector_that_is_down_is_counted_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    (port,) = free_ports(1)
    caplog.set_level(logging.WARNING)
    started_s = time.monotonic()
    async with serve(f"http://127.0.0.1:{port}/?token={SECRET}") as server:
        for _ in range(3):
            assert await post(server) == 200
    assert time.monotonic() - started_s < 60  # not until the last attempt to export
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert re.fullmatch(r"traces cannot be exported: .+; dropped=3", warnings[0])
    assert SECRET not in warnings[0]


async def test_errors_of_a_collector_are_logged_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with running_receiver() as receiver:
        receiver.status = 400
        async with serve(receiver.url) as server:
            for count in (1, 2, 3):
                assert await post(server) == 200
                wait_until(lambda count=count: len(receiver.bodies) >= count, "an export")  # type: ignore[misc]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert re.fullmatch(r"traces cannot be exported: .*code: 400.*; dropped=1", warnings[0])


async def test_a_collector_that_hangs_delays_no_request_and_the_stop_only_a_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "3")
    with running_receiver() as receiver:
        receiver.respond.clear()
        async with serve(receiver.url) as server:
            assert await post(server) == 200
            wait_until(lambda: receiver.bodies, "the first export")
            for _ in range(5):  # two more than the queue has room for
                assert await post(server) == 200
            async with (
                httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.http_ports[0]}") as client,
                asyncio.timeout(60),
            ):
                text = ""
                while not text or metric(text, "dragoman_traces_dropped_total") < 2:  # spans end after the response
                    text = (await client.get("/metrics")).text
            stopping_s = time.monotonic()
        assert metric(text, "dragoman_traces_dropped_total") == 2
        assert time.monotonic() - stopping_s < 25


async def test_invalid_settings_are_reported_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in ("collector:4318", "grpc://collector:4317", "http://"):
        with pytest.raises(InvalidInput, match="setting 'tracing_endpoint': expected http://host:port"):
            async with serve(endpoint):
                pass
    with pytest.raises(InvalidInput, match="tracing_ratio"):
        serve("http://127.0.0.1:9", tracing_ratio=1.5)


async def test_without_the_package_the_setting_is_an_error_and_the_variable_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidInput, match=re.escape("pip install 'dragoman[tracing]'")):
        async with serve("http://127.0.0.1:9"):
            pass
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    async with serve("") as server:
        assert await post(server) == 200
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but nothing is exported: a package is missing" in caplog.text


UNTRACED = """
import asyncio, os, sys
import dragoman

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}

def identity(x: float) -> float:
    return x

async def main():
    for variables in (
        {}, {"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
    ):
        os.environ.update(variables and {**ENDPOINT, **variables})
        async with dragoman.Server(identity, http_port=0, grpc_port=-1):
            print(sum(name.startswith("opentelemetry") for name in sys.modules))
        for name in variables:
            del os.environ[name]

asyncio.run(main())
"""


def test_without_tracing_nothing_of_opentelemetry_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", UNTRACED], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["0"] * 4
    assert "OTEL_EXPORTER_OTLP_PROTOCOL: expected http/protobuf or grpc, got 'http/json'" in done.stderr
