"""Start MLServer with its runtimes."""

import json
from pathlib import Path

from benchmarks.processes import free_port
from benchmarks.side_by_side.exchange import Ports
from benchmarks.side_by_side.mlserver.models import write_models
from benchmarks.side_by_side.mlserver.requests import cases
from benchmarks.side_by_side.peer import Peer

RELEASE = "1.7.1"
_RUNTIMES = ("sklearn", "xgboost", "lightgbm", "catboost", "mlflow")
# Version bounds that the release needs but does not declare.
_PACKAGES = (f"mlserver=={RELEASE}", *(f"mlserver-{name}=={RELEASE}" for name in _RUNTIMES), "uvloop<0.22", "pandas<3")


def _command(python: Path, folder: Path, ports: Ports) -> list[str]:
    settings = {
        "host": "127.0.0.1",
        "http_port": ports.http,
        "grpc_port": ports.grpc,
        "metrics_port": free_port(),
        "parallel_workers": 0,
        "debug": False,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    return [str(python.parent / "mlserver"), "start", str(folder)]


MLSERVER = Peer(
    name="MLServer",
    release=RELEASE,
    packages=_PACKAGES,
    pip_flags=(),
    cases=cases,
    write_models=write_models,
    command=_command,
    flags=("--allow-pickle", "--forward-headers", "x-parity"),
    differences=Path(__file__).with_name("differences.toml"),
    deadline_s=60.0,
)
