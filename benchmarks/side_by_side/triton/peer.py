"""Start the Triton of the wheel nvidia-pytriton."""

import http.client
from pathlib import Path

from benchmarks.peers import HERE
from benchmarks.side_by_side.exchange import Ports
from benchmarks.side_by_side.peer import Peer
from benchmarks.side_by_side.triton.models import NAMES, write_models
from benchmarks.side_by_side.triton.requests import cases


def _command(python: Path, folder: Path, ports: Ports) -> list[str]:
    return [str(python), str(HERE / "triton_server.py"), str(ports.http), str(ports.grpc), str(folder)]


def _ready(port: int) -> bool:
    """Return whether all models are ready but the one that cannot be loaded, for which the server is not ready."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        for name in (*NAMES, "versions/versions/1", "versions/versions/3"):
            connection.request("GET", f"/v2/models/{name}/ready")
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                return False
        return True
    finally:
        connection.close()


TRITON = Peer(
    name="Triton",
    release="2.51.0",
    packages=("nvidia-pytriton==0.7.0", "numpy<2"),
    pip_flags=("--no-deps",),
    cases=cases,
    write_models=write_models,
    command=_command,
    # A trial call would change the state of models and statistics.
    flags=("--control-open", "--allow-config-override", "--shared-memory", "--server-name", "triton", "--trial-s", "0"),
    differences=Path(__file__).with_name("differences.toml"),
    deadline_s=5.0,
    ready=_ready,
)
