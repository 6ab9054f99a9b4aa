"""Other model servers: their packages, and how to start each with identity models or a classifier."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.engines import ENGINES
from benchmarks.processes import RESULTS, Process, free_port, run_process
from benchmarks.subjects import Form, Subject
from benchmarks.workloads import Wire

HERE = Path(__file__).resolve().parent
CLASSIFIER = "Classifier"


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """Ports, models and folder of a peer."""

    folder: Path
    models: Sequence[str]
    batching: bool = False
    http: int = field(default_factory=free_port)
    grpc: int = field(default_factory=free_port)


@dataclass(frozen=True, slots=True)
class Peer:
    """A server: its packages, request format, start command and health endpoint.

    `interpreter` creates its environment, if it cannot be ours.
    """

    packages: tuple[str, ...]
    form: Form
    command: Callable[[PeerConfig], list[str]]
    health: str = "/v2/health/ready"
    environment: tuple[tuple[str, str], ...] = ()
    has_grpc: bool = False
    interpreter: str = sys.executable


def python(name: str) -> Path:
    """Return the interpreter of a peer's environment."""
    return RESULTS / "venvs" / name / "bin" / "python"


def _mlserver(defaults: bool, config: PeerConfig) -> list[str]:
    """Write a model folder with settings and return the command: either the default settings or the fastest ones."""
    settings = {"host": "127.0.0.1", "http_port": config.http, "grpc_port": config.grpc, "metrics_port": free_port()}
    if not defaults:
        settings |= {"parallel_workers": 0, "debug": False, "gzip_enabled": False, "metrics_endpoint": None}
    for name in config.models:
        home = config.folder / name
        home.mkdir(parents=True)
        model_settings: dict[str, object] = {"name": name, "implementation": "mlserver_models.Identity"}
        if name == "Slow":
            model_settings["implementation"] = "mlserver_models.Slow"
        if name == CLASSIFIER:
            model_settings["implementation"] = "mlserver_sklearn.SKLearnModel"
            model_settings["parameters"] = {"uri": str(train_classifier("mlserver", config.folder))}
        if config.batching:
            model_settings |= {"max_batch_size": 32, "max_batch_time": 0.002}
        (home / "model-settings.json").write_text(json.dumps(model_settings))
    (config.folder / "settings.json").write_text(json.dumps(settings))
    return [str(python("mlserver").parent / "mlserver"), "start", str(config.folder)]


def train_classifier(peer: str, folder: Path) -> Path:
    """Train the classifier with the scikit-learn of the peer, because other versions cannot load its files."""
    target = folder / "classifier.joblib"
    subprocess.run([str(python(peer)), str(HERE / "train.py"), str(target)], check=True)
    return target


def _script(peer: str, config: PeerConfig) -> list[str]:
    arguments = [str(config.http), str(config.grpc), *config.models]
    return [str(python(peer)), str(HERE / f"{peer}_server.py"), *arguments]


def _bentoml(config: PeerConfig) -> list[str]:
    command = [str(python("bentoml")), "-m", "bentoml", "serve", "bentoml_server:Identity"]
    return [*command, "--host", "127.0.0.1", "--port", str(config.http), "--working-dir", str(HERE)]


# Version bounds that the release needs but does not declare.
_MLSERVER = ("mlserver==1.7.1", "mlserver-sklearn==1.7.1", "uvloop==0.21.0", "pandas<3", "httptools")

PEERS = {
    "mlserver": Peer(_MLSERVER, "oip", lambda s: _mlserver(False, s), has_grpc=True),
    "mlserver-defaults": Peer(_MLSERVER, "oip", lambda s: _mlserver(True, s), has_grpc=True),
    "kserve": Peer(("kserve==0.21.0",), "oip", lambda s: _script("kserve", s), has_grpc=True),
    "litserve": Peer(("litserve", "numpy"), "plain", lambda s: _script("litserve", s), "/health"),
    "fastapi": Peer(("fastapi", "uvicorn[standard]", "numpy"), "plain", lambda s: _script("fastapi", s), "/health"),
    "bentoml": Peer(("bentoml",), "plain", _bentoml, "/readyz", (("BENTOML_DO_NOT_TRACK", "True"),)),
    "ray": Peer(
        ("ray[serve]",), "plain", lambda s: _script("ray", s), "/-/healthz", (("RAY_USAGE_STATS_ENABLED", "0"),)
    ),
    # Its Python backend is linked with the interpreter of a distribution.
    "triton": Peer(
        ("nvidia-pytriton",),
        "oip",
        lambda s: _script("triton", s),
        has_grpc=True,
        interpreter="/usr/bin/python3",
    ),
}


def home_of(name: str) -> str:
    """Return the name of the environment of a peer; variants with other settings share it."""
    return name.partition("-")[0]


def installed_peers() -> list[str]:
    """Return the names of the installed servers."""
    return [name for name in PEERS if _installed_file(name).exists()]


def installed_engines() -> list[str]:
    return [name for name in ENGINES if _installed_file(name).exists()]


def _installed_file(name: str) -> Path:
    return python(home_of(name)).parent.parent / "installed"


def install(name: str) -> None:
    """Install a peer into its own environment, or update it if its packages have changed."""
    packages = _packages(name)
    incompatible = ENGINES[name].incompatible if name in ENGINES else ()
    stamp = _installed_file(name)
    if stamp.exists() and stamp.read_text() == "\n".join(packages):
        return
    if not python(home_of(name)).exists():
        interpreter = PEERS[name].interpreter if name in PEERS else sys.executable
        subprocess.run([interpreter, "-m", "venv", "--without-pip", str(stamp.parent)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python(home_of(name)))]
    subprocess.run([*pip, "install", "-q", *packages], check=True)
    if incompatible:
        subprocess.run([*pip, "uninstall", "-q", "-y", *incompatible], check=True)
    stamp.write_text("\n".join(packages))


def _packages(name: str) -> tuple[str, ...]:
    return ENGINES[name].packages if name in ENGINES else PEERS[name].packages


def version(name: str) -> str:
    """Return the version of an installed server or engine."""
    distribution = _packages(name)[0].partition("==")[0].partition("[")[0]
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    return subprocess.run([str(python(home_of(name))), "-c", code], capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def run_peer(name: str, config: PeerConfig, core: int | None) -> Iterator[Subject]:
    """Run a peer and wait until it is ready. Raises RuntimeError with the end of its log if it does not start."""
    peer = PEERS[name]
    config.folder.mkdir(parents=True, exist_ok=True)
    command = ["env", f"PYTHONPATH={HERE}", *(f"{k}={v}" for k, v in peer.environment), *peer.command(config)]
    with run_process(command, config.folder / "log", core, cwd=config.folder) as process:
        ready_s = process.wait_until(lambda: _is_ready(peer, config), limit_s=120)
        ports: dict[Wire, int] = {"http": config.http}
        if peer.has_grpc:
            ports["grpc"] = config.grpc
        yield Subject(name, process, ports, peer.form, ready_s)
        _end(process)


def _is_ready(peer: Peer, config: PeerConfig) -> bool:
    """Return whether the server is ready and, with the Open Inference Protocol, its last model."""
    paths = [peer.health, *([f"/v2/models/{config.models[-1]}/ready"] if peer.form == "oip" else [])]
    return all(_is_ok(f"http://127.0.0.1:{config.http}{path}") for path in paths)


def _is_ok(url: str) -> bool:
    with urllib.request.urlopen(url, timeout=5) as response:
        return bool(response.status == 200)


def _end(process: Process) -> None:
    """Terminate the server and its workers."""
    for pid in reversed(process.pids()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 15)
