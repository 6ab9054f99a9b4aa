"""Prometheus metrics of the server."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import requests
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

import dragoman
from e2e.otlp_receiver import OtlpReceiver, running_receiver
from e2e.server_process import ServerProcess, running_server, wait_until

MODEL = """
import dragoman


@dragoman.model
def half(x: float) -> float:
    if x == 13:
        raise ValueError("unlucky")
    return x / 2
"""


def all_samples(process: ServerProcess, accept: str = "") -> dict[str, float]:
    """Return every sample of the server by name and labels."""
    response = requests.get(f"http://{process.url}/metrics", headers={"accept": accept}, timeout=60)
    families = [*text_string_to_metric_families(response.text)]
    found = [s for f in families for s in f.samples]
    keys = [s.name + "".join(f",{k}={v}" for k, v in sorted(s.labels.items())) for s in found]
    assert len({*keys}) == len(keys)
    return dict(zip(keys, (s.value for s in found), strict=True))


def samples(process: ServerProcess) -> dict[tuple[str, str, str], float]:
    response = requests.get(f"http://{process.url}/metrics", timeout=60)
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = [s for f in text_string_to_metric_families(response.text) for s in f.samples]
    return {(s.name, s.labels.get("outcome", ""), s.labels.get("le", "")): s.value for s in found}


def test_calls_are_counted_by_outcome(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with running_server(str(tmp_path / "model.py:half"), "--placement", "thread") as process:
        for value in (1.0, 2.0, 13.0, "no number"):
            body = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [value]}]}
            requests.post(f"http://{process.url}/v2/models/half/infer", json=body, timeout=60)
        found = samples(process)
    assert found["dragoman_calls_total", "ok", ""] == 2
    assert found["dragoman_calls_total", "ModelFailed", ""] == 1
    assert found["dragoman_call_duration_seconds_count", "ok", ""] == 2
    assert found["dragoman_call_duration_seconds_bucket", "ModelFailed", "+Inf"] == 1
    assert found["dragoman_compute_seconds_count", "", ""] == 3  # an invalid request is not a call
    assert found["dragoman_calls_in_flight", "", ""] == 0
    assert found["dragoman_model_ready", "", ""] == 1


def test_the_path_of_metrics_can_be_changed_or_disabled(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with running_server(
        str(tmp_path / "model.py:half"), "--placement", "thread", "--metrics-path", "/custom/metrics"
    ) as process:
        assert "dragoman_calls_total" in requests.get(f"http://{process.url}/custom/metrics", timeout=60).text
        response = requests.get(
            f"http://{process.url}/custom/metrics?name[]=dragoman_model_ready&name[]=no", timeout=60
        )
        assert [f.name for f in text_string_to_metric_families(response.text)] == ["dragoman_model_ready"]
        assert requests.get(f"http://{process.url}/metrics", timeout=60).status_code == 404
    with running_server(str(tmp_path / "model.py:half"), "--placement", "thread", "--metrics-path", "") as process:
        assert requests.get(f"http://{process.url}/metrics", timeout=60).status_code == 404


OIP = "oip_rest"
SERVICE, GRPC = "inference.GRPCInferenceService", "oip_grpc"
X = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}]}


def test_every_response_is_counted_by_protocol_and_status(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with (
        running_server(str(tmp_path / "model.py:half"), "--placement", "thread") as process,
        requests.Session() as session,
    ):
        before = all_samples(process)
        url = f"http://{process.url}"
        for body in (*[json.dumps(X)] * 70, "{", "[1]"):
            session.post(f"{url}/v2/models/half/infer", data=body, timeout=60)
        session.get(f"{url}/nowhere", timeout=60)
        session.delete(f"{url}/v2/models/half/infer", timeout=60)
        session.post(f"{url}/generate", data="{", timeout=60)
        session.get(f"{url}/v2 ", timeout=60)
        with grpc.insecure_channel(process.grpc_url) as channel:
            for path in ("ModelInfer", "ServerLive", "None"):
                with suppress(grpc.RpcError):
                    channel.unary_unary(f"/{SERVICE}/{path}")(b"")
            with suppress(grpc.RpcError):
                channel.unary_unary(f"/{SERVICE}/ModelInfer")(b"\xff")
        after = all_samples(process)

    def counted(protocol: str, status: object, name: str = "dragoman_requests_total") -> float:
        key = f"{name},protocol={protocol},status={status}"
        return after[key] - before[key]  # each exists before its first response

    assert counted(OIP, 200) == 70
    assert counted(OIP, 400) == 2  # cannot be parsed
    assert counted(OIP, 404) + counted("none", 404) >= 1
    assert counted("metrics", 200) == 1
    assert counted(GRPC, "OK", "dragoman_health_requests_total") == 1
    assert counted(GRPC, "INVALID_ARGUMENT") == 2
    assert counted("none", "UNIMPLEMENTED") == 1
    assert counted("none", 405) == 1
    parsed = f"dragoman_parse_seconds_count,protocol={OIP}"
    assert after[parsed] >= before.get(parsed, 0) + 64  # one of so many is measured


def test_connections_bytes_and_rejected_requests_are_counted(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with running_server(
        str(tmp_path / "model.py:half"), "--placement", "thread", "--max-bodies-bytes", "5000"
    ) as process:
        url = f"http://{process.url}/v2/models/half/infer"
        with requests.Session() as session:
            session.post(url, json=X, timeout=60)
            before = all_samples(process)
            body = json.dumps(X).ljust(2000)
            responses = [session.post(url, data=body, timeout=60) for _ in range(3)]
            after = all_samples(process)
            assert requests.post(url, data=body.ljust(6000), timeout=60).status_code == 503
        rejected = all_samples(process)
    change = {name: after[name] - before[name] for name in before}
    assert {response.status_code for response in responses} == {200}
    assert 6000 < change["dragoman_received_bytes_total"] < 9000
    assert change["dragoman_sent_bytes_total"] > sum(len(response.content) for response in responses)
    assert change["dragoman_connections_total"] == 1  # that of the second scrape
    assert after["dragoman_open_connections"] >= 2
    assert rejected["dragoman_rejected_total,reason=bodies_memory"] == 1
    assert rejected["dragoman_rejected_total,reason=connections"] == 0


BATCHED = """
import time

import dragoman


class Slow(dragoman.Model):
    placement = "process"
    batched = True
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)

    def infer(self, call):
        if call.inputs["x"].data[0] == 13:
            import os
            os._exit(1)
        time.sleep(0.3)
        return {"y": call.inputs["x"].data}
"""


def test_batches_restarts_and_process_are_counted(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(BATCHED)
    options = ("--max-batch-size", "4", "--batch-linger", "0", "--explain-batches", "--metrics-as", "triton")
    with running_server(str(tmp_path / "model.py:Slow"), *options) as process:
        with ThreadPoolExecutor(9) as threads:
            assert {*threads.map(lambda _: process.infer("Slow", [1.0])[0], range(9))} == {200}
        found = all_samples(process)
        assert process.infer("Slow", [13.0])[0] == 500
        wait_until(lambda: all_samples(process)["dragoman_worker_restarts_total,model=Slow,version="] == 1, "a restart")
        lines = [line for line in process.log().splitlines() if "batch dispatched: model=Slow" in line]
    model = ",model=Slow"
    assert found[f"dragoman_batch_calls_sum{model},version="] == found[f"dragoman_batch_rows_sum{model},version="] == 9
    assert found[f"dragoman_queue_seconds_count,call=Infer{model},version="] == 9
    assert found[f"dragoman_queue_seconds_sum,call=Infer{model},version="] > 0.3  # those behind the first batch
    assert found[f"dragoman_compute_seconds_sum,call=Infer{model},version="] >= 9 * 0.3  # that of its batch each
    batches = found[f"dragoman_batch_calls_count{model},version="]
    prefix = "dragoman_batches_total,model=Slow,reason="
    reasons = {k.removeprefix(prefix).split(",")[0]: v for k, v in found.items() if k.startswith(prefix)}
    assert sum(reasons.values()) == batches
    assert {name for name, count in reasons.items() if count} <= {"idle_worker", "worker_free", "full"}
    assert {*reasons} == {"idle_worker", "worker_free", "full", "max_wait", "batch_delay"}  # from the start
    assert reasons["idle_worker"] >= 1
    assert len(lines) == batches + 1  # and that of the call that ends the worker
    assert any("reason=idle_worker calls=" in line and "request_ids=" in line for line in lines)
    ids = [re.findall(r"request_ids?=(\S+)", line) for line in lines]
    assert all(of_batch == of_line for of_batch, of_line in ids)  # not the id of the request that ended before
    assert found[f"nv_inference_count{model},version="] == 9
    assert found[f"nv_inference_exec_count{model},version="] == batches
    assert found[f"nv_inference_request_success{model},version="] == 9
    assert found[f"nv_inference_pending_request_count{model},version="] == 0
    assert found[f"nv_inference_queue_duration_us{model},version="] > 300_000
    assert found["process_resident_memory_bytes"] > 10_000_000
    assert found["process_open_fds"] > 3
    assert abs(found["process_start_time_seconds"] - time.time()) < 600
    assert [v for k, v in found.items() if k.startswith("dragoman_build_info") and dragoman.__version__ in k] == [1]


def test_metrics_without_batches_under_the_names_of_triton(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with running_server(str(tmp_path / "model.py:half"), "--placement", "thread", "--metrics-as", "triton") as process:
        for value in (1.0, 13.0, 2.0):
            body = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [value]}]}
            requests.post(f"http://{process.url}/v2/models/half/infer", json=body, timeout=60)
        found = all_samples(process)
    assert found["nv_inference_count,model=half,version="] == 2
    assert found["nv_inference_exec_count,model=half,version="] == 2
    assert found["nv_inference_request_failure,model=half,reason=BACKEND,version="] == 1
    assert found["nv_inference_pending_request_count,model=half,version="] == 0


def test_openmetrics_and_text_export_the_same_values(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with running_server(str(tmp_path / "model.py:half"), "--placement", "thread") as process:
        requests.post(f"http://{process.url}/v2/models/half/infer", json=X, timeout=60)
        path = f"http://{process.url}/metrics?name[]=dragoman_calls_total&name[]=dragoman_call_duration_seconds"
        text = requests.get(path, timeout=60)
        openmetrics = requests.get(path, headers={"accept": "application/openmetrics-text;version=1.0.0"}, timeout=60)
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")
    plain = [s for f in text_string_to_metric_families(text.text) for s in f.samples]
    other = [s for f in openmetrics_parser.text_string_to_metric_families(openmetrics.text) for s in f.samples]
    assert [(s.name, s.labels, s.value) for s in plain] == [(s.name, s.labels, s.value) for s in other]


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with running_receiver() as found:
        yield found


def test_the_documentation_lists_exactly_the_metrics_of_the_server(tmp_path: Path, receiver: OtlpReceiver) -> None:
    (tmp_path / "model.py").write_text(BATCHED)
    (tmp_path / "secret").write_text("a-secret-of-twenty-characters")
    for name, more in {"Slow": "", "Remote": '[model.placement]\nlauncher = "join"\n'}.items():
        (tmp_path / "models" / name).mkdir(parents=True)
        settings = f'[model]\nuri = "{tmp_path}/model.py:Slow"\n{more}'
        (tmp_path / "models" / name / "dragoman.toml").write_text(settings)
    options = ["--max-batch-size", "4", "--access-log", "-", "--control-token", "secret", "--load-on-demand"]
    options += ["--response-cache-bytes", "9999", "--tracing-endpoint", receiver.url, "--tracing-ratio", "0"]
    options += [
        "--worker-port",
        "0",
        "--worker-secret-file",
        str(tmp_path / "secret"),
        "--state",
        str(tmp_path / "state"),
        "--audit-log",
        str(tmp_path / "audit.log"),
    ]
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}
    environment |= {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_LOGS_EXPORTER": "otlp"}
    with running_server(str(tmp_path / "models"), *options, environment=environment) as process:
        for _ in range(64):  # of so many small requests the parsing of one is measured
            assert process.request("GET", "/v2/models/Slow")[0] == 200
        assert process.infer("Slow", [1.0])[0] == 200
        with pytest.raises(requests.Timeout):  # no worker joins
            requests.get(f"http://{process.url}/v2/models/Remote", timeout=0.5)
        text = requests.get(f"http://{process.url}/metrics", timeout=60).text
    exported = {*re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)}
    documentation = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    known = {*re.findall(r"`((?:dragoman|process)_\w+)`", documentation)}
    assert exported <= known
    others = {
        name
        for name in known - exported
        if not name.startswith(("dragoman_text_", "dragoman_server_process_", "dragoman_version_", "dragoman_gpu_"))
    }
    assert others == {"dragoman_key_calls_total"}  # there are no keys
