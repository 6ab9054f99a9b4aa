"""Prometheus metrics of the server."""

from pathlib import Path

import requests
from prometheus_client.parser import text_string_to_metric_families

from e2e.server_process import ServerProcess, running_server

MODEL = """
import dragoman


@dragoman.model
def half(x: float) -> float:
    if x == 13:
        raise ValueError("unlucky")
    return x / 2
"""


def samples(process: ServerProcess) -> dict[tuple[str, str, str], float]:
    got = requests.get(f"http://{process.url}/metrics", timeout=30)
    assert got.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = [s for f in text_string_to_metric_families(got.text) for s in f.samples]
    return {(s.name, s.labels.get("outcome", ""), s.labels.get("le", "")): s.value for s in found}


def test_calls_are_counted_by_outcome(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with running_server(str(tmp_path / "model.py:half")) as process:
        for value in (1.0, 2.0, 13.0, "no number"):
            body = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [value]}]}
            requests.post(f"http://{process.url}/v2/models/half/infer", json=body, timeout=30)
        found = samples(process)
    assert found["dragoman_calls_total", "ok", ""] == 2
    assert found["dragoman_calls_total", "ModelFailed", ""] == 1
    assert found["dragoman_call_duration_seconds_count", "", ""] == 3  # what cannot be read never becomes a call
    assert found["dragoman_call_duration_seconds_bucket", "", "+Inf"] == 3
    assert found["dragoman_calls_in_flight", "", ""] == 0
    assert found["dragoman_model_ready", "", ""] == 1


def test_the_path_of_metrics_can_be_changed_or_disabled(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with running_server(str(tmp_path / "model.py:half"), "--metrics-path", "/custom/metrics") as process:
        for path in ("/custom/metrics", "/server/metrics"):
            assert "dragoman_calls_total" in requests.get(f"http://{process.url}{path}", timeout=30).text
        asked = requests.get(f"http://{process.url}/server/metrics?name[]=dragoman_model_ready&name[]=no", timeout=30)
        assert [f.name for f in text_string_to_metric_families(asked.text)] == ["dragoman_model_ready"]
        assert requests.get(f"http://{process.url}/metrics", timeout=30).status_code == 404
    with running_server(str(tmp_path / "model.py:half"), "--metrics-path", "") as process:
        for path in ("/metrics", "/server/metrics"):
            assert requests.get(f"http://{process.url}{path}", timeout=30).status_code == 404
