"""Counters exist as 0 before their first event: an alert on their increase sees the first failures too."""

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from e2e.server_process import ServerProcess, running_server, started_server, wait_until

ROOT = Path(__file__).parents[2]
MODELS = """
import os
import time

import dragoman
from dragoman.core import errors


class Failing(dragoman.Model):
    placement = "process"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)

    def infer(self, call):
        value = int(call.inputs["x"].data[0])
        if value == 1:
            raise ValueError("unlucky")
        if value == 2:
            os._exit(1)
        if value == 3:
            time.sleep(0.5)
        if value == 4:
            return {"y": 1, "z": object()}
        if value == 5:
            raise errors.NotSupported("no")
        if value == 6:
            raise errors.SequenceLost("a kind of InvalidInput")
        if value == 7:
            raise errors.OutOfMemory("a kind of ModelFailed")
        if value == 8:
            raise errors.RateLimited("a kind of error without a name of its own")
        return {"y": call.inputs["x"].data}


class Cached(dragoman.Model):
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)

    def infer(self, call):
        return {"y": call.inputs["x"].data}
"""
VALUES = {1: 500, 2: 500, 4: 500, 5: 400, 6: 400, 7: 500, 8: 429, 9: 200}
Series = dict[tuple[str, str], float]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "authored.py").write_text(MODELS)
    return tmp_path


def body(value: float, name: str = "x") -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": "FP64", "shape": [1], "data": [value]}]}


def scrape(server: ServerProcess) -> Series:
    """Return the counters by name and labels."""
    found: Series = {}
    for family in text_string_to_metric_families(server.request("GET", "/metrics")[1].decode()):
        if family.type == "counter":
            found |= {(s.name, json.dumps(s.labels, sort_keys=True)): s.value for s in family.samples}
    return found


def increase(before: Series, after: Series, name: str, **labels: str) -> float:
    """Return the increase of a counter between two scrapes as Prometheus does: only of series that both have."""
    changed = 0.0
    for key, value in after.items():
        if key[0] == name and labels.items() <= json.loads(key[1]).items() and key in before:
            changed += value - before[key]
    return changed


def test_no_counter_appears_with_its_first_event(folder: Path) -> None:
    options = ["--max-queue", "2", "--recent-requests", "10", "--batch-linger", "0", "--max-batch-size", "4"]
    options += ["--response-cache-bytes", "100000"]
    models = [f"{folder / 'authored.py'}:{name}" for name in ("Failing", "Cached")]
    with running_server(*models, *options, "--metrics-as", "triton") as server:
        before = scrape(server)
        path = "/v2/models/Failing/infer"
        for value, status in VALUES.items():
            wait_until(lambda: server.status("/v2/models/Failing/ready") == 200, "the worker")
            assert server.request("POST", path, body(value))[0] == status, value
        with ThreadPoolExecutor(8) as threads:
            statuses = [*threads.map(lambda n: server.request("POST", path, body(3 + n / 100))[0], range(8))]
        assert 503 in statuses
        assert server.request("POST", path, {**body(3.5), "parameters": {"timeout": 100_000}})[0] in (504, 200)
        for _ in range(2):
            assert server.request("POST", "/v2/models/Cached/infer", body(1))[0] == 200
        assert server.request("POST", path, body(9, "y"))[0] == 400
        assert server.request("POST", path, b"{")[0] == 400
        assert server.request("POST", "/v2/models/none/infer", body(9))[0] == 404
        assert server.request("GET", "/nowhere")[0] == 404
        assert server.request("DELETE", path)[0] == 405
        assert server.request("POST", "/v2/repository/index", {})[0] == 403
        with grpc.insecure_channel(server.grpc_url) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"\xff")
        after = scrape(server)
    assert [key for key in after if key not in before] == []
    expected = {
        "ModelFailed": 2, "WorkerLost": 1, "InvalidOutput": 1, "NotSupported": 1, "InvalidInput": 3, "ok": 1,
    }  # fmt: skip
    for outcome, count in expected.items():
        found = increase(before, after, "dragoman_calls_total", model="Failing", outcome=outcome)
        assert found >= count, outcome
    assert increase(before, after, "dragoman_calls_total", model="Failing", outcome="Overloaded") > 0
    assert increase(before, after, "dragoman_response_cache_hits_total") == 1
    assert increase(before, after, "dragoman_requests_total", protocol="oip_rest", status="503") > 0


def test_failures_before_a_model_is_loaded_are_counted(folder: Path) -> None:
    (folder / "models" / "broken").mkdir(parents=True)
    (folder / "models" / "broken" / "dragoman.toml").write_text('[model]\nuri = "nowhere.py:Nothing"\n')
    with started_server(str(folder / "models"), "--load-on-demand") as server:
        server.wait_for_status("/v2/health/live", 200)
        before = scrape(server)
        assert server.request("POST", "/v2/models/broken/infer", body(1))[0] >= 500
        after = scrape(server)
    failed = increase(before, after, "dragoman_calls_total", model="broken") - increase(
        before, after, "dragoman_calls_total", model="broken", outcome="ok"
    )
    assert failed == 1


def rules() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "monitoring" / "rules.yaml").read_text())
    return found


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    return found


def test_the_documented_alerts_fire_for_failures_that_come_all_at_once(folder: Path, promtool: str) -> None:
    """The series that promtool gets are those of a server: before its first call, and after failures and rejections."""
    with running_server(f"{folder / 'authored.py'}:Failing", "--max-queue", "1") as server:
        before = scrape(server)
        for _ in range(4):
            assert server.request("POST", "/v2/models/Failing/infer", body(1))[0] == 500
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(lambda n: server.request("POST", "/v2/models/Failing/infer", body(3 + n / 100)), range(6)))
        after = scrape(server)
    series = []
    for (name, labels), value in after.items():
        selector = ",".join(f'{k}="{v}"' for k, v in json.loads(labels).items())
        first = before.get((name, labels))
        values = f"{'_' if first is None else first}x20 {value}x60"  # missing before, if it was born late
        series.append({"series": f"{name}{{{selector}}}", "values": values})
    cases = [
        {"eval_time": "13m", "alertname": alert, "exp_alerts": [{"exp_labels": {"model": "Failing"}}]}
        for alert in ("DragomanErrorBudgetBurnsFast", "DragomanQueueFull")
    ]
    for group in (loaded := rules())["groups"]:
        for rule in group["rules"]:
            for field in ("for", "labels", "annotations"):  # failures of a moment do not last
                rule.pop(field, None)
    (folder / "rules.yaml").write_text(yaml.safe_dump(loaded))
    test = {
        "rule_files": ["rules.yaml"],
        "tests": [{"interval": "30s", "input_series": series, "alert_rule_test": cases}],
    }
    (folder / "test.yaml").write_text(yaml.safe_dump(test))
    found = subprocess.run([promtool, "test", "rules", "test.yaml"], cwd=folder, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
