"""Modules that `dragoman serve` has imported when it is ready: each costs time at every start."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[2] / "benchmarks" / "models.py"
# Serves until it is ready, then prints the imported modules and exits.
SCRIPT = """
import os, sys
from dragoman.cli import main, serve

def run(paths, flags):
    from dragoman.cli import serving
    def report(server, _):
        assert server.engine.ready()
        classes = [object]
        for each in classes:
            classes += type.__subclasses__(each)
        print(*{f"{c.__module__}:{c.__qualname__}" for c in classes if "__dataclass_fields__" in vars(c)})
        print(*sys.modules)
        sys.stdout.flush()
        os._exit(0)
    return serve_until_stopped(paths, flags, report)

import dragoman.cli.serving
serve_until_stopped, dragoman.cli.serving.serve = dragoman.cli.serving.serve, run
main(sys.argv[1:])
"""
# Parts of the server and of its dependencies that some request or model needs first.
LATER = (
    *("dragoman.client", "dragoman.codecs.pandas", "dragoman.codecs.image", "dragoman.engine.config_overrides"),
    *("dragoman.processes", "dragoman.runtimes.onnx.model", "dragoman.runtimes.sklearn.model"),
    *("dragoman.transports.access_log", "dragoman.transports.kafka", "opentelemetry"),
    *("dragoman_simulators.derivatives", "dragoman_simulators.simulator_model", "dragoman_text.generation"),
    *("dragoman_cluster", "dragoman_check", "dragoman_kernels"),
    *("email.policy", "google.protobuf", "http.client", "multiprocessing", "numpy.ma", "numpy.random", "sqlite3"),
    *("urllib.request", "xml"),
)
# All modules of a server with the features, with some room; dataclasses and regular expressions cost more than lines.
MOST_MODULES = 800
# Python compiles the methods of a dataclass when its module is imported, 0.5 to 1 ms; a msgspec.Struct takes 0.02 ms.
MOST_DATACLASSES = 40


def free_ports() -> list[str]:
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(str(free.getsockname()[1]))
    return ["--http-port", ports[0], "--grpc-port", ports[1]]


@pytest.mark.parametrize("name", ["Identity", "doubled"])
def test_a_server_that_is_ready_has_imported_no_module_that_is_needed_later(name: str) -> None:
    command = [sys.executable, "-c", SCRIPT, "serve", f"{MODELS}:{name}", *free_ports()]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    dataclasses, modules = (line.split() for line in process.stdout.splitlines()[-2:])
    assert "dragoman.settings:Settings" in dataclasses
    assert len(dataclasses) <= MOST_DATACLASSES, dataclasses
    assert "dragoman.transports.http1.connection" in modules
    assert [m for m in modules if m.startswith(tuple(f"{each}." for each in LATER)) or m in LATER] == []
    assert len(modules) < MOST_MODULES


@pytest.mark.skipif(sys.platform != "linux", reason="the libraries of a process are read from /proc")
def test_protobuf_is_imported_once_the_server_is_ready() -> None:
    """Before the first call over gRPC, during which no other call would be answered for 15 ms."""
    command = [sys.executable, "-m", "dragoman", "serve", f"{MODELS}:Identity", *free_ports()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            due_s = time.monotonic() + 60
            while "/google/_upb/" not in Path(f"/proc/{process.pid}/maps").read_text():
                assert time.monotonic() < due_s
                time.sleep(0.05)
        finally:
            process.terminate()
