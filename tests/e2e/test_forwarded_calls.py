"""`--processes N`: calls of models that are not copied, and of those that are, behave as with one process."""

import asyncio
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import openai
import pytest
import requests
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import umbridge
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

import dragoman
from dragoman.core.errors import InvalidInput
from dragoman.processes.server_processes import bind_all
from dragoman.system.cpus import cores
from e2e.server_process import MODELS, TIMEOUT_S, ServerProcess, free_ports, running_server, started_server, wait_until

pytestmark = pytest.mark.skipif(cores() < 2, reason="one process per core")

MIRRORS = MODELS / "mirrors.py"
NAMES = ("Mirror", "Apart", "Flat", "Pair", "GateApart", "Counts", "Speaker")


def started(gate: Path, count: int, *flags: str) -> Any:
    models = (f"{MIRRORS}:{name}" for name in NAMES)
    settings = ("--processes", str(count), "--control-token", "open sesame", "--heartbeat-s", "2")
    return running_server(*models, *settings, *flags, environment={"TEST_GATE": str(gate)})


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gates") / "gate"


@pytest.fixture(scope="module")
def process(gate: Path) -> Iterator[ServerProcess]:
    """Two processes."""
    with started(gate, 2) as process:
        yield process


@pytest.fixture(scope="module")
def single(gate: Path) -> Iterator[ServerProcess]:
    """The same models behind one process."""
    with started(gate, 1) as process:
        yield process


def metric_values(process: ServerProcess, name: str) -> dict[str, float]:
    """Return the sums of a metric by process or model."""
    text = requests.get(f"http://{process.url}/metrics", timeout=TIMEOUT_S).text
    found = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    sums: Counter[str] = Counter()
    for sample in found:
        sums[sample.labels.get("process") or sample.labels.get("model", "")] += sample.value
    return dict(sums)


def repeated(process: ServerProcess, model: str, count: int, value: float = 1.0) -> list[tuple[int, Any]]:
    """Send concurrent requests, each on a new connection."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda _: process.infer(model, [value]), range(count)))


# --- the same responses as with one process ----------------------------------------------------------------


LARGE = np.random.default_rng(1).normal(size=(300, 100))
TWO = {"name": "n", "datatype": "INT64", "shape": [1], "data": [2]}
BODIES: dict[str, Any] = {
    "a few numbers": [{"name": "x", "datatype": "FP64", "shape": [3], "data": [1.0, -2.5, 3e300]}],
    "many numbers": [{"name": "x", "datatype": "FP64", "shape": [300, 100], "data": LARGE.tolist()}],
    "text": [{"name": "t", "datatype": "BYTES", "shape": [2, 1], "data": ["ein Gruß", ""]}],
    "much text": [{"name": "t", "datatype": "BYTES", "shape": [5000], "data": [f"no {i}" for i in range(5000)]}],
    "small types": [
        {"name": "b", "datatype": "BOOL", "shape": [2], "data": [True, False], "parameters": {"p": 1}},
        {"name": "h", "datatype": "FP16", "shape": [1, 2], "data": [0.5, 2]},
        {"name": "n", "datatype": "INT64", "shape": [0], "data": []},
    ],
    "wrong": [{"name": "x", "datatype": "FP64", "shape": [3], "data": [1.0]}],
}


@pytest.mark.parametrize("model", ["Mirror", "Apart"])
@pytest.mark.parametrize("body", BODIES)
def test_json_responses_equal_those_of_one_process(
    process: ServerProcess, single: ServerProcess, model: str, body: str
) -> None:
    request = {"id": "7", "inputs": BODIES[body], "parameters": {"text": "x", "flag": True}}
    one, two = (s.request("POST", f"/v2/models/{model}/infer", request)[:2] for s in (single, process))
    if one[0] == 200:
        assert (one[1]["parameters"].pop("pid"), two[1]["parameters"].pop("pid")) > (0, 0)
    assert one == two
    assert one[0] == (400 if body == "wrong" else 200)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v2", None),
        ("GET", "/v2/models", None),
        ("GET", "/v2/models/Flat", None),
        ("GET", "/v2/models/Nobody", None),
        ("GET", "/v2/health/live", None),
        ("GET", "/v2/health/ready", None),
        ("GET", "/v2/models/Flat/ready", None),
        ("POST", "/v2/models/Flat/infer", {"inputs": []}),
        ("POST", "/v2/models/Flat/infer", {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}),
        ("POST", "/v2/models/Counts/infer_stream", {"inputs": [BODIES["a few numbers"][0] | {"name": "y"}]}),
        ("POST", "/v2/repository/index", {}),
        (
            "POST",
            "/v2/models/Counts/infer",
            {"inputs": [{"name": "n", "datatype": "INT64", "shape": [1], "data": [2]}]},
        ),
        ("GET", "/nowhere", None),
        ("POST", "/v1/chat/completions", {"messages": []}),
        ("GET", "/v1/models/Speaker", None),
    ],
)
def test_metadata_and_errors_equal_those_of_one_process(
    process: ServerProcess, single: ServerProcess, method: str, path: str, body: Any
) -> None:
    one, two = (s.request(method, path, body) for s in (single, process))
    varying = ("date", "content-length", "x-request-id")
    remaining = [{k: v for k, v in each[2].items() if k not in varying} for each in (one, two)]
    assert (one[0], remaining[0]) == (two[0], remaining[1])
    for each in (one, two):
        if isinstance(each[1], dict):
            each[1].pop("created", None)
    assert one[1] == two[1]


def test_raw_bytes_are_bound_where_the_model_is(process: ServerProcess) -> None:
    vector = np.arange(20_000.0)
    status, body, headers = process.request(
        "POST", "/v2/models/Flat/infer", vector.tobytes(), {"inference-header-content-length": "0"}
    )
    assert status == 200
    head = headers.get("inference-header-content-length")
    values = body["outputs"][0]["data"] if head is None else np.frombuffer(body[int(head) :])
    assert np.array_equal(values, 2 * vector)


def test_tritonclient_over_http_and_grpc(process: ServerProcess) -> None:
    for kind, url in ((triton_http, process.url), (triton_grpc, process.grpc_url), (triton_grpc, process.url)):
        with kind.InferenceServerClient(url) as client:
            for array in (np.arange(4.0), LARGE.astype(np.float32), np.array([b"a", b"\xff"], object)):
                datatype = {"d": "FP64", "f": "FP32", "O": "BYTES"}[array.dtype.char]
                tensor = kind.InferInput("x", list(array.shape), datatype)
                tensor.set_data_from_numpy(array)
                assert np.array_equal(client.infer("Mirror", [tensor]).as_numpy("x"), array)
            assert client.is_server_ready()
            assert client.is_model_ready("Flat")


def test_a_grpc_stream_runs_further_than_its_window(process: ServerProcess) -> None:
    received: list[int] = []
    with triton_grpc.InferenceServerClient(process.grpc_url) as client:
        client.start_stream(lambda result, error: received.append(-1 if error else int(result.as_numpy("i")[0])))
        tensor = triton_grpc.InferInput("n", [1], "INT64")
        tensor.set_data_from_numpy(np.array([100]))
        client.async_stream_infer("Counts", [tensor])
        wait_until(lambda: len(received) >= 100, "the stream")
        client.stop_stream()
    assert received == list(range(100))


def test_umbridge_client(process: ServerProcess) -> None:
    assert umbridge.supported_models(f"http://{process.url}") == ["Pair"]
    model = umbridge.HTTPModel(f"http://{process.url}", "Pair")
    assert model([[1.0, 2.5]]) == [[2.0, 5.0]]


def test_openai_client_reads_a_stream(process: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"http://{process.url}/v1", api_key="none", max_retries=0) as client:
        text = " ".join(map(str, range(50)))
        stream = client.completions.create(model="Speaker", prompt=text, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == text
        assert client.completions.create(model="Speaker", prompt="a b").choices[0].text == "a b"


def test_each_process_has_its_metrics(process: ServerProcess) -> None:
    for name, least in (("cpu_seconds_total", 0.1), ("resident_memory_bytes", 1e7), ("open_fds", 5)):
        found = metric_values(process, f"dragoman_server_process_{name}")
        assert sorted(found) == ["0", "1"]
        assert min(found.values()) >= least
    started = metric_values(process, "dragoman_server_process_start_time_seconds").values()
    assert all(time.time() - 3600 < each < time.time() + 2 for each in started)


def test_async_results_can_be_fetched_over_any_process(process: ServerProcess) -> None:
    before = metric_values(process, "dragoman_server_process_calls_total")
    body = {"inputs": " ".join(map(str, range(60))), "stream": True, "parameters": {"max_new_tokens": 60}}
    status, nothing, headers = process.request("POST", "/predictions/Speaker", body, {"x-synchronous": "false"})
    assert (status, nothing) == (200, b"")
    token, text = headers["x-next-token"], b""
    while token:
        headers_sent = {"x-starting-token": token, "x-max-items": "2"}
        status, part, headers = process.request("POST", "/predictions/Speaker", b"", headers_sent)
        assert status in (200, 202)
        text += part if status == 200 else b""
        token = headers.get("x-next-token", "")
    lines = [json.loads(line) for line in text.splitlines()]
    assert "".join(line["token"]["text"] for line in lines) == body["inputs"]
    assert lines[-1]["generated_text"] == body["inputs"]
    after = metric_values(process, "dragoman_server_process_calls_total")
    assert all(after[number] > before[number] for number in ("0", "1"))


def test_errors_of_async_results_equal_those_of_one_process(process: ServerProcess, single: ServerProcess) -> None:
    for body, headers in (
        (b"", {"x-starting-token": "no such"}),
        (b"", {"x-starting-token": "no such", "x-max-items": "many"}),
    ):
        one, two = (s.request("POST", "/invocations?model_name=Speaker", body, headers)[:2] for s in (single, process))
        assert one == two
        assert one[0] >= 400
    for each in (single, process):
        request = "/invocations?model_name=Nobody", {"inputs": "a"}, {"x-synchronous": "false"}
        status, _, headers = each.request("POST", *request)
        assert status == 200
        found = wait_until(partial(_stored_result, each, headers["x-next-token"]), "the answer")
        assert (found[0], found[1]["type"]) == (404, "ModelNotFoundException")


def _stored_result(process: ServerProcess, token: str) -> Any:
    response = process.request("POST", "/invocations", b"", {"x-starting-token": token})
    return response if response[0] != 202 else None


def test_a_disconnect_from_a_stream_reaches_the_model(process: ServerProcess, gate: Path) -> None:
    url = f"http://{process.url}/v1/completions"
    body = {"model": "Speaker", "prompt": "a !wait", "stream": True}
    with requests.post(url, json=body, stream=True, timeout=TIMEOUT_S) as response:
        assert b"a" in next(response.iter_lines())
    wait_until(Path(f"{gate}.left").exists, "the cancelled call")


# --- one server ----------------------------------------------------------------------------------------------


TRANSPORT_COUNTERS = tuple(
    f"dragoman_{name}"
    for name in ("requests", "parse_seconds", "received_bytes", "sent_bytes", "connections", "access_denied")
)


def transport_counters(process: ServerProcess, timeout_s: float = TIMEOUT_S) -> dict[str, float]:
    """Return the counters of requests and connections, without gauges, by name and labels."""
    text = requests.get(f"http://{process.url}/metrics", timeout=timeout_s).text
    families = [f for f in text_string_to_metric_families(text) if f.type in ("counter", "histogram")]
    found = [s for f in families for s in f.samples if s.name.startswith(TRANSPORT_COUNTERS)]
    keys = [f"{s.name}{sorted(s.labels.items())}" for s in found]
    assert len({*keys}) == len(keys)
    return dict(zip(keys, (s.value for s in found), strict=True))


def test_each_scrape_has_the_requests_of_all_processes(process: ServerProcess) -> None:
    before = transport_counters(process)
    assert [status for status, _ in repeated(process, "Flat", 24)] == [200] * 24
    assert process.request("POST", "/v2/repository/index", {})[0] == 401
    found = [transport_counters(process) for _ in range(4)]  # of both processes

    def change(number: int, name: str, **labels: str) -> float:
        key = f"{name}{sorted(labels.items())}"
        return found[number][key] - before.get(key, 0)

    for number in range(4):
        ok = {"protocol": "oip_rest", "status": "200"}
        assert change(number, "dragoman_requests_total", **ok) == 24
        assert change(number, "dragoman_connections_total") == 26 + number  # and those of scrapes
        assert change(number, "dragoman_access_denied_total", reason="missing") == 1
        assert change(number, "dragoman_received_bytes_total") > 24 * 100


def test_a_deadline_is_kept(process: ServerProcess, tmp_path: Path) -> None:
    began_s = time.monotonic()
    status, body = process.infer("GateApart", [str(tmp_path)], "BYTES", timeout=200_000)
    (tmp_path / "go").touch()
    text = "Request timeout expired; the parameter 'timeout' of the request is 200000 microseconds"
    assert (status, body) == (504, {"error": text})
    assert time.monotonic() - began_s < TIMEOUT_S


# --- processes that crash or stop ----------------------------------------------------------------------------


def server_processes(process: ServerProcess) -> list[int]:
    """Return the processes that answer requests, without workers."""
    return [
        pid for pid in process.workers() if b"dragoman.processes.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def repeat_request_until(process: ServerProcess, end: list[bool]) -> tuple[int, int]:
    """Count responses and lost connections until stopped."""
    well = lost = 0
    session = requests.Session()
    request = {"inputs": BODIES["a few numbers"]}
    while not end:
        try:
            response = session.post(f"http://{process.url}/v2/models/Apart/infer", json=request, timeout=TIMEOUT_S)
            assert response.status_code == 200, response.text
            well += 1
        except requests.ConnectionError:
            lost += 1
            session = requests.Session()
    return well, lost


def test_a_killed_process_loses_its_connections_and_is_restarted(process: ServerProcess) -> None:
    workers, servers = process.workers(), server_processes(process)
    assert len(servers) == 2
    end: list[bool] = []
    with grpc.insecure_channel(process.grpc_url) as channel, ThreadPoolExecutor(8) as threads:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        callers = [threads.submit(repeat_request_until, process, end) for _ in range(8)]
        calls = metric_values(process, "dragoman_server_process_calls_total")
        for _ in range(8):
            assert requests.get(f"http://{process.url}/nowhere", timeout=TIMEOUT_S).status_code == 404
        counters = transport_counters(process)
        wait_until(
            lambda: (
                sum(metric_values(process, "dragoman_server_process_calls_total").values()) > sum(calls.values()) + 100
            ),
            "load",
        )
        os.kill(servers[0], signal.SIGKILL)
        wait_until(
            lambda: max(status_or(process, "dragoman_server_process_restarts_total").values(), default=0) == 1,
            "its death",
        )
        process.wait_until_ready()
        end.append(True)
        outcomes = [caller.result() for caller in callers]
    after = transport_counters(process)
    not_found = [name for name in counters if name.startswith("dragoman_requests_total") and "'404'" in name]
    assert sum(after[name] for name in not_found) == sum(counters[name] for name in not_found) >= 8
    assert all(after[name] >= value for name, value in counters.items())
    assert all(well > 0 for well, _ in outcomes)
    assert all(lost <= 2 for _, lost in outcomes)  # its connection; one that it had not accepted yet
    assert servers[1] in process.workers()
    assert len(process.workers()) == len(workers)
    assert {status for status, _ in repeated(process, "Flat", 16)} == {200}
    assert "a server process died (signal SIGKILL)" in process.log()


def status_or(process: ServerProcess, name: str) -> dict[str, float]:
    """Return `metric_values`, or nothing if the connection was to the process that exits."""
    try:
        return metric_values(process, name)
    except requests.ConnectionError:
        return {}


def counters_or_none(process: ServerProcess) -> Any:
    with suppress(requests.RequestException):
        return transport_counters(process, 3.0)
    return None


def readiness(process: ServerProcess) -> int:
    """Return the status of readiness; 0 if the process of this connection did not answer."""
    with suppress(requests.RequestException):
        return requests.get(f"http://{process.url}/v2/health/ready", timeout=1).status_code
    return 0


def test_not_ready_while_a_process_is_stopped(process: ServerProcess) -> None:
    stopped = server_processes(process)[0]
    before = transport_counters(process)
    os.kill(stopped, signal.SIGSTOP)
    try:
        wait_until(lambda: readiness(process) == 400, "readiness of the other")
        assert f"server process {stopped} is stopped" in process.log()
        after = wait_until(lambda: counters_or_none(process), "a scrape of the other")
        assert all(after[name] >= value for name, value in before.items())
    finally:
        os.kill(stopped, signal.SIGCONT)
    process.wait_until_ready()


def test_processes_end_with_the_engine() -> None:
    with started_server(f"{MIRRORS}:Flat", "--processes", "2") as process:
        process.wait_until_ready()
        processes = process.workers()
        process.popen.kill()
        assert process.wait_for_exit() == -signal.SIGKILL
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), "the end of the others")


# --- ports ---------------------------------------------------------------------------------------------------


async def test_port_0_is_one_port_for_all() -> None:
    settings: Any = {"http_port": 0, "grpc_port": 0, "processes": 2, "umbridge_port": 0}
    async with served_here(settings) as server:
        assert len({*server.http_ports, server.grpc_port} - {0, -1}) == 3
        for url in server.http_urls:
            response = await asyncio.to_thread(requests.get, f"{url}/v2/health/ready", timeout=TIMEOUT_S)
            assert response.status_code == 200
        with pytest.raises(OSError, match="in use"):
            async with served_here(settings | {"http_port": server.http_ports[0]}):
                raise AssertionError("two servers share a port")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", server.grpc_port))
    with pytest.raises(requests.ConnectionError):
        requests.get(server.http_url, timeout=TIMEOUT_S)


def served_here(settings: dict[str, Any]) -> Any:
    @dragoman.model
    def half(x: float) -> float:
        return x / 2

    return dragoman.Server(half, **settings)


async def test_a_cancelled_start_leaves_no_process() -> None:
    (port,) = free_ports(1)
    server = served_here({"http_port": port, "grpc_port": -1, "processes": 2})
    listening = asyncio.create_task(server.listen())
    async with asyncio.timeout(TIMEOUT_S):
        while True:  # until the first of them answers
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            await asyncio.sleep(0.005)
    listening.cancel()
    await asyncio.wait({listening}, timeout=TIMEOUT_S)
    if not listening.cancelled():  # the start has ended
        await server.stop(0.0)
    async with asyncio.timeout(TIMEOUT_S):
        with suppress(ConnectionRefusedError):
            while True:  # a process that was ended may accept connections for a moment
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()
    await server.stop(0.0)


def test_ports_are_bound_all_or_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = bind_all([("127.0.0.1", 0)])
        port = first[0].getsockname()[1]
        first[0].close()
        with pytest.raises(OSError, match="in use"):
            bind_all([("127.0.0.1", port), ("127.0.0.1", taken.getsockname()[1])])
        with socket.create_server(("127.0.0.1", port)):
            pass
    with pytest.raises(OSError, match="in use"):
        bind_all([("127.0.0.1", port), ("127.0.0.1", port)])


async def test_invalid_settings_are_errors_at_start(tmp_path: Path) -> None:
    (tmp_path / "cert").write_text(json.dumps("no certificate"))
    settings = {"http_port": 0, "grpc_port": 0, "processes": 2, "tls_cert": str(tmp_path / "cert")}
    with pytest.raises(InvalidInput, match="cannot use certificate"):
        async with served_here(settings):
            raise AssertionError("it has started")
