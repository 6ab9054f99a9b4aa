"""`--processes N`: processes that answer requests with copies of the models behave as one server."""

import asyncio
import http.client
import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

import dragoman
from access.access_models import KeyFile, bearer
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.schedule import ScheduleOptions
from dragoman.core.spec import ModelSpec
from dragoman.engine.engine import Engine
from dragoman.engine.on_demand import LoadLimits
from dragoman.engine.repository import Repository, Source
from dragoman.engine.version_routing import VersionRouting
from dragoman.processes.model_copies import CopiedModels
from dragoman.system.cpus import cores
from dragoman.system.process import has_open_device
from e2e.server_process import MODELS, TIMEOUT_S, ServerProcess, started_server, wait_until
from features.triton.repository import ADD_SUB, write_add_sub

pytestmark = pytest.mark.skipif(cores() < 2, reason="one process per core")

MIRRORS = MODELS / "mirrors.py"
STATEFUL = Path(__file__).parent.parent / "stateful_models.py"
COPIED = ("constant", "Mirror", "Flat", "Pair", "Together", "Gate")


def metrics(process: ServerProcess, name: str, label: str = "model") -> dict[str, float]:
    """Return the sums of a metric by a label. No sample is there twice."""
    text = process.request("GET", "/metrics")[1].decode()
    keys = [line.rpartition(" ")[0] for line in text.splitlines()]
    assert len(set(keys)) == len(keys)
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    sums: Counter[str] = Counter()
    for sample in samples:
        sums[sample.labels.get(label, "")] += sample.value
    return dict(sums)


def wait_for_copies(process: ServerProcess, *counts: int) -> None:
    """Wait until the processes compute these numbers of models, in ascending order; by default both all of COPIED."""

    def has_copies() -> bool:
        time.sleep(0.2)  # a scrape takes CPU time
        with suppress(OSError, http.client.HTTPException):  # a connection to a process that exits
            found = metrics(process, "dragoman_server_process_models", "process")
            return sorted(found.values()) == [*(counts or 2 * (len(COPIED),))]
        return False

    process.wait_until_ready()
    wait_until(has_copies, "copies")


def repeated(
    process: ServerProcess, model: str, count: int, value: float = 1.0, **options: Any
) -> list[tuple[int, Any]]:
    """Send concurrent requests, each on a new connection."""
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda _: process.infer(model, [value], **options), range(count)))


def pids(process: ServerProcess, model: str) -> set[int]:
    """Return the processes that compute a model."""
    tensor = {"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}
    path = f"/v2/models/{model}/infer"
    with ThreadPoolExecutor(16) as threads:
        found = threads.map(lambda _: process.request("POST", path, {"inputs": [tensor]})[1], range(32))
    return {response["parameters"]["pid"] for response in found}


CONSTANT = """
import os
import numpy as np
import dragoman

class Constant(dragoman.Model):
    placement = "inline"

    def predict(self, x: np.ndarray) -> dict[str, np.ndarray]:
        return {{"y": np.array([{value}, os.getpid()])}}
"""


def write_constant(folder: Path, value: int) -> None:
    model = folder / "constant" / "model.py"
    model.write_text(CONSTANT.format(value=value))
    os.utime(model, ns=(value * 10**9, value * 10**9))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    model = folder / "constant" / "model.py"
    model.parent.mkdir()
    (model.parent / "dragoman.toml").write_text(f'[model]\nruntime = "python"\nuri = "{model}:Constant"\n')
    write_constant(folder, 1)
    return folder


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    keys = KeyFile(tmp_path_factory.mktemp("keys") / "keys.toml")
    keys.add("operator", ["read", "infer", "admin"])
    keys.add("slow", calls_per_s=0.001)  # a burst of one call
    return keys


@pytest.fixture(scope="module")
def process(folder: Path, keys: KeyFile) -> Iterator[ServerProcess]:
    """Two processes, with a model in a file. `Apart`, `Countdown` and `Speaker` are not copied."""
    models = [f"{MIRRORS}:{name}" for name in (*COPIED[1:], "Apart", "Speaker")]
    count = "0" if cores() == 2 else "2"  # 0: one per core
    access = ("--api-keys", str(keys.path), "--recent-requests", "1000")
    settings = ("--processes", count, *access, "--drain-s", "60", "--heartbeat-s", "2")
    with started_server(str(folder), *models, f"{STATEFUL}:Countdown", *settings) as process:
        process.headers = bearer(keys.keys["operator"])
        wait_for_copies(process)
        yield process


def control(process: ServerProcess, verb: str, model: str) -> None:
    assert process.request("POST", f"/v2/repository/models/{model}/{verb}", {})[0] == 200


def test_both_processes_compute_copies(process: ServerProcess) -> None:
    calls = metrics(process, "dragoman_server_process_calls_total", "process")
    mirrors = pids(process, "Mirror")
    assert len(mirrors) == 2
    assert process.popen.pid not in mirrors
    assert mirrors < {*process.workers()}
    after = metrics(process, "dragoman_server_process_calls_total", "process")
    assert sum(after.values()) == sum(calls.values()) + 1  # the scrape
    (apart,) = pids(process, "Apart")
    assert apart not in mirrors


def test_modules_are_not_looked_at_by_the_garbage_collector(process: ServerProcess) -> None:
    tensor = {"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}
    response = process.request("POST", "/v2/models/Mirror/infer", {"inputs": [tensor]})[1]
    assert response["parameters"]["frozen"] is True


def test_models_that_are_not_copied_are_named_with_the_reason(process: ServerProcess) -> None:
    log = process.log()
    assert log.count("model 'Apart' is computed in one process, for all: it runs in worker processes\n") == 1
    assert log.count("model 'Countdown' is computed in one process, for all: it has sequences\n") == 1
    assert "'Speaker' is computed in one process, for all: it generates texts or embeddings, or has handlers\n" in log
    assert log.count(" in one process") == 3


def test_responses_are_those_of_the_models(process: ServerProcess) -> None:
    for _ in range(4):
        status, body = process.infer("Flat", [1.0, -2.5])
        assert (status, body["outputs"][0]["data"]) == (200, [2.0, -5.0])
        assert process.infer("Pair", [1.0])[0] == 400
        assert process.infer("Flat", [1], "INT32")[0] == 400
        assert process.infer("Nobody", [1.0])[0] == 404
        status, body, _ = process.request("GET", "/v2/models/Pair")
        assert (status, body["inputs"][0]["shape"]) == (200, [2])
        body = process.request("POST", "/Evaluate", {"name": "Pair", "input": [[1.0, 2.0]], "config": {}})[1]
        assert body == {"output": [[2.0, 4.0]]}
        text = {"model": "Speaker", "prompt": "a b"}
        assert process.request("POST", "/v1/completions", text)[1]["choices"][0]["text"] == "a b"


def test_a_sequence_stays_in_one_process(process: ServerProcess) -> None:
    """`Countdown` has as many responses as its sequence had requests."""
    for n in range(1, 13):
        parameters = {"sequence_id": 7, "sequence_start": n == 1, "sequence_end": n == 12}
        tensor = {"name": "x", "datatype": "INT64", "shape": [1], "data": [0]}
        body = {"inputs": [tensor], "parameters": parameters}
        status, events, _ = process.request("POST", "/v2/models/Countdown/infer_stream", body)
        assert (status, events.count(b"data:")) == (200, n), events


def test_metrics_and_statistics_are_those_of_all_processes(process: ServerProcess) -> None:
    def statistics(model: str) -> Any:
        (found,) = process.request("GET", f"/v2/models/{model}/stats")[1]["model_stats"]
        return found

    name = "dragoman_calls_total"
    before, earlier = metrics(process, name).get("Flat", 0), statistics("Flat")["inference_count"]
    assert [status for status, _ in repeated(process, "Flat", 32)] == [200] * 32
    for _ in range(4):  # over both processes
        assert statistics("Flat")["inference_count"] == earlier + 32
        assert metrics(process, name)["Flat"] == before + 32
    name = "dragoman_batch_rows_sum"
    before = metrics(process, name).get("Together", 0)
    tensor = {"name": "x", "datatype": "FP64", "shape": [3, 1], "data": [1.0, 1.0, 1.0]}
    for _ in range(8):
        assert process.request("POST", "/v2/models/Together/infer", {"inputs": [tensor]})[0] == 200
    assert metrics(process, name)["Together"] == before + 24
    assert (
        sum(each["batch_size"] * each["compute_infer"]["count"] for each in statistics("Together")["batch_stats"]) == 24
    )


def test_requests_of_all_processes_are_found_by_their_ids(process: ServerProcess) -> None:
    tensor = {"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}
    for _ in range(12):  # over both processes
        headers = {**process.headers, "x-request-id": "seen-by-both"}
        assert process.request("POST", "/v2/models/Mirror/infer", {"inputs": [tensor]}, headers)[0] == 200
    for path in 4 * ["/console/requests/seen-by-both"]:
        status, body, _ = process.request("GET", path)
        assert (status, len(body["requests"])) == (200, 12), body
        assert {found["model"] for found in body["requests"]} == {"Mirror"}
    assert process.request("GET", "/console/requests/unseen")[0] == 404
    times = [found["time"] for found in process.request("GET", "/console/requests")[1]["requests"]]
    assert times == sorted(times, reverse=True)
    assert len(times) >= 18


def test_a_change_through_one_process_is_seen_by_all_before_it_is_answered(process: ServerProcess) -> None:
    for _ in range(3):
        control(process, "unload", "Flat")
        assert {status for status, _ in repeated(process, "Flat", 16)} == {404}
        control(process, "load", "Flat")
        assert {status for status, _ in repeated(process, "Flat", 16)} == {200}
    wait_for_copies(process)


# --- files and keys -----------------------------------------------------------------------------------------


def constants(process: ServerProcess) -> tuple[set[float], set[float]]:
    """Return the values of 24 responses, and the processes that have computed them."""
    found = [body["outputs"][0]["data"] for _, body in (process.infer("constant", [1.0]) for _ in range(24))]
    return {value for value, _ in found}, {pid for _, pid in found}


def test_limits_of_keys_hold_for_all_processes(process: ServerProcess, keys: KeyFile) -> None:
    tensor = {"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}

    def status(headers: Mapping[str, str]) -> int:
        return process.request("POST", "/v2/models/constant/infer", {"inputs": [tensor]}, headers)[0]

    slow = bearer(keys.keys["slow"])
    assert Counter(status(slow) for _ in range(12)) == {200: 1, 429: 11}
    assert status({}) == 401


def test_files_are_the_same_in_all_processes(process: ServerProcess, folder: Path) -> None:
    found, workers = constants(process)
    assert (found, len(workers)) == ({1}, 2)
    write_constant(folder, 2)
    assert constants(process)[0] == {1}
    control(process, "load", "constant")
    assert constants(process)[0] == {2}
    wait_for_copies(process)
    found, workers = constants(process)
    assert (found, len(workers)) == ({2}, 2)


def test_a_process_that_is_stopped_is_killed_and_replaced_while_the_other_answers(
    process: ServerProcess, folder: Path
) -> None:
    """It must not answer with a model that was unloaded, nor the next one with files that were not loaded."""
    session = requests.Session()  # its connection is to the process that is not stopped
    session.headers.update(process.headers)
    tensor = {"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}
    url = f"http://{process.url}/v2/models/Mirror/infer"
    other = session.post(url, json={"inputs": [tensor]}, timeout=60).json()["parameters"]["pid"]
    (stopped,) = pids(process, "Mirror") - {other}
    answered = Counter[int]()
    end: list[bool] = []

    def client() -> None:
        while not end:
            try:  # on a new connection, to either process
                status, body = process.infer("Mirror", [1.0])
            except (OSError, http.client.HTTPException):
                continue
            assert status == 200, body
            answered[body["parameters"]["pid"]] += 1
            time.sleep(0.05)

    before = metrics(process, "dragoman_calls_total")["Mirror"]
    with ThreadPoolExecutor(4) as threads:
        clients = [threads.submit(client) for _ in range(4)]
        try:
            wait_until(lambda: answered[stopped] > 200 and answered[other], "answers of both")
            write_constant(folder, 3)
            os.kill(stopped, signal.SIGSTOP)
            url = f"http://{process.url}/v2/repository/models/Pair"
            assert session.post(f"{url}/unload", json={}, timeout=60).status_code == 200
            assert {status for status, _ in repeated(process, "Pair", 8)} == {404}
            assert f"server process {stopped} does not respond to a change of the models and is killed" in process.log()
            assert not Path(f"/proc/{stopped}").exists()
            count = answered[other]
            wait_until(lambda: answered[other] > count + 20, "answers of the other one")
            assert session.post(f"{url}/load", json={}, timeout=60).status_code == 200
            wait_for_copies(process, len(COPIED) - 1, len(COPIED))
        finally:
            end.append(True)
        for each in clients:
            each.result()
    assert "its file 'model.py' has changed since it was loaded" in process.log()
    found, workers = constants(process)
    assert found == {2}
    assert process.popen.pid in workers
    control(process, "load", "constant")
    assert constants(process)[0] == {3}
    wait_for_copies(process)
    assert len(pids(process, "Mirror") - {stopped, other}) == 1
    # Counts are taken each 2 s, in which four clients get fewer than 160 responses.
    assert metrics(process, "dragoman_calls_total")["Mirror"] >= before + answered[other] + answered[stopped] - 160


def test_sigterm_completes_requests_in_flight(process: ServerProcess, tmp_path: Path) -> None:
    """The last test of this server."""
    folders = [tmp_path / str(i) for i in range(4)]
    for each in folders:
        each.mkdir()

    def wait_at_gate(each: Path) -> int:
        return process.infer("Gate", [str(each)], "BYTES")[0]

    with ThreadPoolExecutor(4) as threads:
        responses = [threads.submit(wait_at_gate, each) for each in folders]
        wait_until(lambda: metrics(process, "dragoman_calls_in_flight")["Gate"] == 4, "all requests")
        for pid in process.workers():
            os.kill(pid, signal.SIGTERM)  # like a service manager that signals every process
        process.terminate()
        process.wait_for_status("/v2/health/ready", 400)
        rejected = 503, {"error": "the server is shutting down"}
        wait_until(lambda: process.infer("constant", [1.0]) == rejected, "the drain")
        assert process.status("/v2/health/live") == 200
        for each in folders:
            (each / "go").touch()
        assert [response.result(TIMEOUT_S) for response in responses] == [200] * 4
        assert process.wait_for_exit() == 0
    assert "Traceback" not in process.log()


# --- which models are copied -------------------------------------------------------------------------------------


class OneModel(Repository):
    """A repository with versions of one model."""

    def __init__(self, *specs: ModelSpec, routing: VersionRouting) -> None:
        super().__init__()
        self.source = Source(lambda: [*specs], routing)

    def scan(self) -> dict[str, Source]:
        return {"m": self.source}


COPY = ModelSpec(name="m", runtime="python", uri=f"{MIRRORS}:Flat", version="1")


@asynccontextmanager
async def engine_of(
    *specs: ModelSpec, on_demand: LoadLimits | None = None, weights: Mapping[str, float] | None = None
) -> AsyncIterator[Engine]:
    repository = OneModel(*specs, routing=VersionRouting(weights=weights or {}))
    async with Engine(repository, on_demand=on_demand) as engine:
        if on_demand is not None:
            await engine.infer("m", {"x": np.ones(1)})
        yield engine


def routes_of(engine: Engine) -> list[tuple[str, str]]:
    """Return the names and versions of the requests that copies answer."""
    return sorted(route for copy in pickle.loads(CopiedModels(engine).table()) for route in copy.routes)


@pytest.mark.parametrize(
    ("spec", "on_demand", "reason"),
    [
        (COPY, None, ""),
        (replace(COPY, response_cache_bytes=1000), None, "it has a response cache"),
        (replace(COPY, schedule=ScheduleOptions(priority_levels=2)), None, "it has a queue with priorities"),
        (COPY, LoadLimits(), "it is loaded on demand"),
        (
            replace(COPY, placement="inline", parameters={"lock": Lock()}),
            None,
            "its settings cannot be sent to other processes",
        ),
    ],
)
async def test_a_model_is_copied_unless_its_settings_forbid_it(
    spec: ModelSpec, on_demand: LoadLimits | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with engine_of(spec, on_demand=on_demand) as engine:
        assert routes_of(engine) == ([] if reason else [("m", ""), ("m", "1")])
    assert [record.getMessage() for record in caplog.records if "in one process" in record.getMessage()] == (
        [f"model 'm 1' is computed in one process, for all: {reason}"] if reason else []
    )


async def test_versions_with_weights_are_chosen_in_one_process() -> None:
    versions = COPY, replace(COPY, version="2")
    async with engine_of(*versions) as engine:
        assert routes_of(engine) == [("m", ""), ("m", "1"), ("m", "2")]
    async with engine_of(*versions, weights={"1": 1.0, "2": 1.0}) as engine:
        assert routes_of(engine) == [("m", "1"), ("m", "2")]


async def test_a_model_that_calls_others_is_not_copied_any_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with engine_of(COPY) as engine:
        copied = CopiedModels(engine)
        assert len(pickle.loads(copied.table())) == 1
        with pytest.raises(DragomanError, match="other"):
            await asyncio.to_thread(engine.siblings("m").describe, "other")
        assert pickle.loads(copied.table()) == ()
    assert "model 'm 1' is computed in one process, for all: it calls other models" in caplog.text


async def test_models_of_triton_folders_are_not_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    write_add_sub(tmp_path / "simple" / "1" / "model.onnx")
    (tmp_path / "simple" / "config.pbtxt").write_text('platform: "onnxruntime_onnx"\nmax_batch_size: 8\n' + ADD_SUB)
    async with dragoman.open_engine(tmp_path, placement="thread") as engine:
        assert routes_of(engine) == []
    assert "for all: it calls other models" in caplog.text


async def test_nothing_is_copied_while_a_gpu_is_in_use(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("dragoman.processes.model_copies.has_open_device", "/dev/nvidia".__eq__)
    async with engine_of(COPY) as engine:
        assert routes_of(engine) == []
    assert "for all: a GPU is in use" in caplog.text


# --- what cannot be ---------------------------------------------------------------------------------------------


def served_here(**settings: Any) -> dragoman.Server:
    @dragoman.model
    def half(x: float) -> float:
        return x / 2

    return dragoman.Server(half, http_port=0, grpc_port=-1, **settings)


async def test_functions_that_cannot_be_imported_are_computed_in_one_process(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    server = served_here(processes=2)
    async with server.engine:
        assert pickle.loads(CopiedModels(server.engine).table()) == ()
    assert "model 'half' is computed in one process, for all: other processes cannot import it" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shared_memory": True}, "setting 'shared_memory': expected processes 1, got 2"),
    ],
)
async def test_settings_that_need_one_process(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        async with served_here(processes=2, **settings):
            raise AssertionError("it has started")


def test_more_processes_than_cores(caplog: pytest.LogCaptureFixture) -> None:
    served_here(processes=200)
    assert f"setting 'processes': {cores()} used, one per core of this machine, instead of 200" in caplog.text


@pytest.mark.parametrize(("name", "value"), [("sys.platform", "darwin"), ("socket.SO_REUSEPORT", 1 << 20)])
def test_one_process_where_connections_cannot_be_shared(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(name, value)
    served_here(processes=2)
    assert "setting 'processes': one process is used, since more need SO_REUSEPORT of Linux" in caplog.text


def test_open_devices_are_found() -> None:
    with open("/dev/full", "wb"):
        assert has_open_device("/dev/full")
    assert not has_open_device("/dev/full")
