"""`--processes N`: processes that answer requests with copies of the models behave as one server."""

import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

import dragoman
from access.access_models import KeyFile, bearer
from dragoman.core.errors import InvalidInput
from dragoman.front_ends.model_copies import CopiedModels
from dragoman.system.process import has_open_device
from dragoman.system.threads import cores
from e2e.server_process import MODELS, TIMEOUT_S, ServerProcess, running_server, started_server, wait_until

pytestmark = pytest.mark.skipif(cores() < 2, reason="one process per core")

FRONTS = MODELS / "fronts.py"
STATEFUL = Path(__file__).parent.parent / "stateful_models.py"
TOKEN = "open sesame"
CONTROL = {"authorization": f"Bearer {TOKEN}"}
COPIED = ("Mirror", "Flat", "Pair", "Together", "Gate", "Counts")


def metrics(url: str, name: str, label: str = "model", headers: Any = None) -> dict[str, float]:
    """Return the samples of a metric by a label. No sample is there twice."""
    text = requests.get(f"http://{url}/metrics", headers=headers, timeout=TIMEOUT_S).text
    keys = [line.rpartition(" ")[0] for line in text.splitlines()]
    assert len(set(keys)) == len(keys)
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    return {s.labels.get(label, ""): s.value for s in samples}


def wait_for_copies(process: ServerProcess, count: int, headers: Any = None) -> None:
    """Wait until both processes compute this number of models."""

    def has_copies() -> bool:
        time.sleep(0.1)  # a scrape takes CPU time
        try:
            return metrics(process.url, "dragoman_front_end_models", "front_end", headers) == {"0": count, "1": count}
        except requests.ConnectionError:  # to a process that exits
            return False

    process.wait_until_ready()
    wait_until(has_copies, f"{count} copies")


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


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gates") / "gate"


@pytest.fixture(scope="module")
def process(gate: Path) -> Iterator[ServerProcess]:
    """Two processes. `Apart`, `Countdown` and `Speaker` are not copied."""
    models = [f"{FRONTS}:{name}" for name in (*COPIED, "Apart", "Speaker")]
    settings = ("--processes", "2", "--control-token", TOKEN, "--max-batch-size", "64", "--heartbeat-s", "2")
    with running_server(
        *models,
        f"{STATEFUL}:Countdown",
        *settings,
        environment={"TEST_GATE": str(gate)},
    ) as process:
        wait_for_copies(process, len(COPIED))
        yield process


def test_both_processes_compute_copies(process: ServerProcess) -> None:
    calls = metrics(process.url, "dragoman_front_end_calls_total", "front_end")
    mirrors = pids(process, "Mirror")
    assert len(mirrors) == 2
    assert process.popen.pid not in mirrors
    assert mirrors < {*process.workers()}
    after = metrics(process.url, "dragoman_front_end_calls_total", "front_end")
    assert sum(after.values()) == sum(calls.values()) + 1  # the scrape
    (apart,) = pids(process, "Apart")
    assert apart not in mirrors


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
    before, earlier = metrics(process.url, name).get("Flat", 0), statistics("Flat")["inference_count"]
    assert [status for status, _ in repeated(process, "Flat", 32)] == [200] * 32
    for _ in range(4):  # over both processes
        assert statistics("Flat")["inference_count"] == earlier + 32
        assert metrics(process.url, name)["Flat"] == before + 32
    name = "dragoman_batch_rows_sum"
    before = metrics(process.url, name).get("Together", 0)
    tensor = {"name": "x", "datatype": "FP64", "shape": [3, 1], "data": [1.0, 1.0, 1.0]}
    for _ in range(8):
        assert process.request("POST", "/v2/models/Together/infer", {"inputs": [tensor]})[0] == 200
    assert metrics(process.url, name)["Together"] == before + 24
    assert (
        sum(each["batch_size"] * each["compute_infer"]["count"] for each in statistics("Together")["batch_stats"]) == 24
    )


def test_a_change_through_one_process_is_seen_by_all_before_it_is_answered(process: ServerProcess) -> None:
    def control(verb: str) -> int:
        return process.request("POST", f"/v2/repository/models/Flat/{verb}", {}, CONTROL)[0]

    for _ in range(5):
        assert control("unload") == 200
        assert {status for status, _ in repeated(process, "Flat", 16)} == {404}
        assert control("load") == 200
        assert {status for status, _ in repeated(process, "Flat", 16)} == {200}
    wait_for_copies(process, len(COPIED))
    assert control("unload") == 200
    assert control("load") == 200
    wait_for_copies(process, len(COPIED))


def test_a_killed_process_is_restarted_while_the_other_answers(process: ServerProcess) -> None:
    first, second = pids(process, "Mirror")
    answered = Counter[int]()
    end: list[bool] = []

    def client() -> None:
        tensor = {"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}
        url = f"http://{process.url}/v2/models/Mirror/infer"
        while not end:
            try:  # on a new connection, to either process
                response = requests.post(url, json={"inputs": [tensor]}, timeout=60)
            except requests.ConnectionError:
                continue
            assert response.status_code == 200, response.text
            answered[response.json()["parameters"]["pid"]] += 1
            time.sleep(0.01)

    before = metrics(process.url, "dragoman_calls_total")["Mirror"]
    with ThreadPoolExecutor(4) as threads:
        clients = [threads.submit(client) for _ in range(4)]
        try:
            wait_until(lambda: answered[first] and answered[second], "answers of both")
            os.kill(first, signal.SIGKILL)
            count = answered[second]
            wait_until(lambda: answered[second] > count + 20, "answers of the other one")
            wait_for_copies(process, len(COPIED))
        finally:
            end.append(True)
        for each in clients:
            each.result()
    assert len(pids(process, "Mirror") - {second, first}) == 1
    assert metrics(process.url, "dragoman_calls_total")["Mirror"] >= before + answered[second]


def test_a_process_that_is_stopped_does_not_block_changes(process: ServerProcess) -> None:
    """It is killed, so that it cannot answer with a model that was unloaded."""
    session = requests.Session()  # its connection is to the other one
    tensor = {"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}
    url = f"http://{process.url}/v2/models/Mirror/infer"
    other = session.post(url, json={"inputs": [tensor]}, timeout=60).json()["parameters"]["pid"]
    (stopped,) = pids(process, "Mirror") - {other}
    os.kill(stopped, signal.SIGSTOP)
    url = f"http://{process.url}/v2/repository/models/Pair"
    assert session.post(f"{url}/unload", json={}, headers=CONTROL, timeout=60).status_code == 200
    assert {status for status, _ in repeated(process, "Pair", 8)} == {404}
    assert f"front end {stopped} does not respond to a change of the models and is killed" in process.log()
    assert not Path(f"/proc/{stopped}").exists()
    assert session.post(f"{url}/load", json={}, headers=CONTROL, timeout=60).status_code == 200
    wait_for_copies(process, len(COPIED))
    assert other in pids(process, "Mirror")


# --- files and keys -----------------------------------------------------------------------------------------


CONSTANT = """
import os
import numpy as np
import dragoman

class Constant(dragoman.Model):
    placement = "inline"

    def predict(self, x: np.ndarray) -> dict[str, np.ndarray]:
        return {{"y": np.array([{value}, os.getpid()])}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    model = folder / "models" / "constant" / "model.py"
    model.parent.mkdir(parents=True)
    (model.parent / "dragoman.toml").write_text(f'[model]\nruntime = "python"\nuri = "{model}:Constant"\n')
    write_constant(folder, 1)
    return folder


def write_constant(folder: Path, value: int) -> None:
    model = folder / "models" / "constant" / "model.py"
    model.write_text(CONSTANT.format(value=value))
    os.utime(model, ns=(value * 10**9, value * 10**9))


@pytest.fixture(scope="module")
def keys(folder: Path) -> KeyFile:
    keys = KeyFile(folder / "keys.toml")
    keys.add("operator", ["read", "infer", "admin"])
    keys.add("slow", calls_per_s=0.001)  # a burst of one call
    return keys


@pytest.fixture(scope="module")
def operator(keys: KeyFile) -> Mapping[str, str]:
    return bearer(keys.keys["operator"])


@pytest.fixture(scope="module")
def guarded(folder: Path, keys: KeyFile, operator: Mapping[str, str]) -> Iterator[ServerProcess]:
    """A process for each core, with a model in a file, `Gate`, and keys."""
    settings = ("--processes", "0", "--api-keys", str(keys.path), "--drain-s", "60")
    with started_server(str(folder / "models"), f"{FRONTS}:Gate", *settings) as process:
        wait_for_copies(process, 2, operator)
        yield process


def send(process: ServerProcess, model: str, headers: Mapping[str, str], value: Any = 1.0) -> tuple[int, Any]:
    """Return the status, and the data of the first output or the error."""
    datatype = "BYTES" if isinstance(value, str) else "FP64"
    tensor = {"name": "x", "datatype": datatype, "shape": [1], "data": [value]}
    status, body, _ = process.request("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]}, headers)
    return status, body["outputs"][0]["data"] if status == 200 else body["error"]


def constants(process: ServerProcess, headers: Mapping[str, str]) -> tuple[set[float], set[float]]:
    """Return the values of 24 responses, and the processes that have computed them."""
    found = [send(process, "constant", headers)[1] for _ in range(24)]
    return {value for value, _ in found}, {pid for _, pid in found}


def test_limits_of_keys_hold_for_all_processes(guarded: ServerProcess, keys: KeyFile) -> None:
    slow = bearer(keys.keys["slow"])
    assert Counter(send(guarded, "constant", slow)[0] for _ in range(12)) == {200: 1, 429: 11}
    assert send(guarded, "constant", {})[0] == 401


def test_files_are_the_same_in_all_processes(guarded: ServerProcess, folder: Path, operator: Mapping[str, str]) -> None:
    for value in (2, 3):
        found, workers = constants(guarded, operator)
        assert (found, len(workers)) == ({value - 1}, 2)
        write_constant(folder, value)
        assert constants(guarded, operator)[0] == {value - 1}
        assert guarded.request("POST", "/v2/repository/models/constant/load", {}, operator)[0] == 200
        assert constants(guarded, operator)[0] == {value}
        wait_for_copies(guarded, 2, operator)
    write_constant(folder, 4)
    os.kill(int(min(constants(guarded, operator)[1])), signal.SIGKILL)
    guarded.wait_for_log("its file 'model.py' has changed since it was loaded")  # in the process that replaces it
    guarded.wait_until_ready()
    found, workers = constants(guarded, operator)
    assert found == {3}
    assert guarded.popen.pid in workers
    write_constant(folder, 3)
    assert guarded.request("POST", "/v2/repository/models/constant/load", {}, operator)[0] == 200
    wait_for_copies(guarded, 2, operator)


def test_sigterm_completes_requests_in_flight(
    guarded: ServerProcess, operator: Mapping[str, str], tmp_path: Path
) -> None:
    """The last test of this server."""
    folders = [tmp_path / str(i) for i in range(4)]
    for each in folders:
        each.mkdir()
    with ThreadPoolExecutor(4) as threads:
        responses = [threads.submit(send, guarded, "Gate", operator, str(each)) for each in folders]
        name = "dragoman_calls_in_flight"
        wait_until(lambda: metrics(guarded.url, name, headers=operator)["Gate"] == 4, "all requests")
        for pid in guarded.workers():
            os.kill(pid, signal.SIGTERM)  # like a service manager that signals every process
        guarded.terminate()
        guarded.wait_for_status("/v2/health/ready", 400)
        rejected = 503, "the server is shutting down"
        wait_until(lambda: send(guarded, "constant", operator) == rejected, "the drain")
        assert guarded.status("/v2/health/live") == 200
        for each in folders:
            (each / "go").touch()
        assert [response.result(TIMEOUT_S)[0] for response in responses] == [200] * 4
        assert guarded.wait_for_exit() == 0
    assert "Traceback" not in guarded.log()


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
        ({"front_ends": 2}, "setting 'processes': expected front_ends 1, got 2"),
        ({"shared_memory": True}, "setting 'shared_memory': expected processes 1, got 2"),
        ({"recent_requests": 5}, "setting 'recent_requests': expected processes 1, got 2"),
    ],
)
async def test_settings_that_need_one_process(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        async with served_here(processes=2, **settings):
            raise AssertionError("it has started")


def test_more_processes_than_cores(caplog: pytest.LogCaptureFixture) -> None:
    served_here(processes=200)
    assert f"setting 'processes': {cores()} are used, one per core of this machine, instead of 200" in caplog.text


def test_one_process_where_connections_cannot_be_shared(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    served_here(processes=2)
    assert "setting 'processes': one process is used on darwin, since several need Linux" in caplog.text


def test_open_devices_are_found() -> None:
    with open("/dev/full", "wb"):
        assert has_open_device("/dev/full")
    assert not has_open_device("/dev/full")
