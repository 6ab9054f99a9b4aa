"""A server whose model runs in workers that join it: readiness, index, metrics, and the end of either side."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.cli import main
from e2e.server_process import ServerProcess, free_ports, started_server, wait_until

MODEL = """
import time
import numpy as np
import dragoman

class Double(dragoman.Model):
    def predict(self, x: np.ndarray) -> np.ndarray:
        if x[0] < 0:
            open("computing", "w").close()
            time.sleep(600)
        return 2 * x
"""
CONFIG = """
[model]
runtime = "python"
uri = "models/m/model.py:Double"
[model.placement]
launcher = "join"
replicas = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "models" / "m"
    model.mkdir(parents=True)
    (model / "model.py").write_text(MODEL)
    (model / "dragoman.toml").write_text(CONFIG)
    (tmp_path / "secret").write_text("the secret of this test\n")
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[ServerProcess]:
    (port,) = free_ports(1)
    flags = ("--worker-port", str(port), "--worker-secret-file", str(folder / "secret"))
    with started_server("models", "--control-token", "t", *flags, folder=folder) as process:
        process.worker_port = port  # type: ignore[attr-defined]
        yield process


def start_worker(server: Any, folder: Path) -> "subprocess.Popen[str]":
    command = ["-m", "dragoman", "worker", "--join", f"127.0.0.1:{server.worker_port}"]
    secret = ["--secret-file", str(folder / "secret"), "--rejoin-s", "0"]
    (folder / "elsewhere").mkdir(exist_ok=True)

    return subprocess.Popen(
        [sys.executable, *command, *secret], cwd=folder / "elsewhere", stderr=subprocess.PIPE, text=True
    )


def state_of_model(server: ServerProcess) -> tuple[str, str]:
    _, (entry,), _ = server.request("POST", "/v2/repository/index", {}, {"authorization": "Bearer t"})
    return entry["state"], entry["reason"]


def test_a_model_waits_for_its_worker_and_ends_it(
    server: ServerProcess, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.wait_for_status("/v2/health/live", 200)
    waiting = f"waiting for workers that join 127.0.0.1:{server.worker_port}: 0 of 1 are loaded"  # type: ignore[attr-defined]
    wait_until(lambda: state_of_model(server) == ("LOADING", waiting), "the reason in the index")
    assert server.status("/v2/health/ready") != 200
    status, body = server.infer("m", [1.0])
    assert status == 503
    assert body == {"error": "model 'm' is not ready: waiting for workers"}
    assert main(["status", server.url]) == 1
    assert waiting not in capsys.readouterr().out
    monkeypatch.setenv("DRAGOMAN_API_KEY", "t")
    assert main(["status", server.url]) == 1
    assert f"m      -        LOADING  0          1 waiting  {waiting}" in capsys.readouterr().out
    assert b'dragoman_workers{model="m",version="",state="waiting"} 1' in server.request("GET", "/metrics")[1]
    worker = start_worker(server, folder)
    try:
        server.wait_until_ready()
        assert server.infer("m", [1.0, 2.5])[1]["outputs"][0]["data"] == [2.0, 5.0]
        assert b'dragoman_workers{model="m",version="",state="idle"} 1' in server.request("GET", "/metrics")[1]
        assert main(["status", server.url, "--json"]) == 0
        (entry,) = json.loads(capsys.readouterr().out)["models"]
        (status,) = entry["workers"]
        assert (entry["name"], entry["state"], entry["calls"]) == ("m", "READY", 0)
        assert (status["host"], status["state"], status["calls"]) == (socket.gethostname(), "idle", 0)
        assert str(worker.pid) in status["process"]
        assert main(["status", server.url]) == 0
        assert f"  worker process {worker.pid} on '{socket.gethostname()}'  m      idle " in capsys.readouterr().out
        worker.kill()
        wait_until(lambda: state_of_model(server) == ("UNAVAILABLE", waiting), "the reason after the loss")
        worker.communicate()
        worker = start_worker(server, folder)
        assert server.infer("m", [3.0])[1]["outputs"][0]["data"] == [6.0]  # it was queued until then
        server.popen.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.communicate()


@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_when_their_server_is_killed(server: ServerProcess, folder: Path, busy: bool) -> None:
    worker = start_worker(server, folder)
    try:
        server.wait_until_ready()
        if busy:
            request = subprocess.Popen(
                [sys.executable, "-c", REQUEST, str(server.http_port)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            wait_until((folder / "elsewhere" / "computing").exists, "the call")
        os.kill(server.popen.pid, signal.SIGKILL)
        assert worker.wait(60) == 0
        if busy:
            assert request.wait(60) != 0  # the connection was closed without a response
            print("\nserver killed: 1 calls, 1 connection closed")
    finally:
        worker.kill()
        worker.communicate()


REQUEST = """
import json, sys, urllib.request
body = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [-1.0]}]}
url = f"http://127.0.0.1:{sys.argv[1]}/v2/models/m/infer"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()))
"""


def test_the_secret_is_required(folder: Path) -> None:
    with started_server("models", "--worker-port", "0", folder=folder) as process:
        assert process.popen.wait(60) == 2
        log = process.log()
    assert "the secret of workers is missing: expected a file, or the variable DRAGOMAN_WORKER_SECRET" in log


def test_the_secret_is_no_flag() -> None:
    command = [sys.executable, "-m", "dragoman", "serve", "--help=all"]
    flags = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--worker-secret-file" in flags
    assert "--worker-secret " not in flags
