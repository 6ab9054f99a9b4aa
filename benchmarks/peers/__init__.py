"""Other model servers: what each needs installed, and how it is started with an identity or a classifier."""

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
from benchmarks.processes import RESULTS, Process, free_port, started
from benchmarks.subjects import Form, Subject
from benchmarks.workloads import Wire

HERE = Path(__file__).resolve().parent
CLASSIFIER = "Classifier"


@dataclass(frozen=True, slots=True)
class Served:
    """Where a peer shall listen, which models it shall serve, and a folder of its own."""

    folder: Path
    models: Sequence[str]
    batching: bool = False
    http: int = field(default_factory=free_port)
    grpc: int = field(default_factory=free_port)


@dataclass(frozen=True, slots=True)
class Peer:
    """A server: its packages, the form of its questions, the command that starts it, and where it says it is ready.

    `interpreter` is for its environment, where it cannot be ours.
    """

    packages: tuple[str, ...]
    form: Form
    command: Callable[[Served], list[str]]
    health: str = "/v2/health/ready"
    environment: tuple[tuple[str, str], ...] = ()
    speaks_grpc: bool = False
    interpreter: str = sys.executable


def python(name: str) -> Path:
    """The interpreter of a peer's own environment."""
    return RESULTS / "venvs" / name / "bin" / "python"


def _mlserver(defaults: bool, served: Served) -> list[str]:
    """A folder of models with its settings; the quickest ones take out what they allow to."""
    settings = {"host": "127.0.0.1", "http_port": served.http, "grpc_port": served.grpc, "metrics_port": free_port()}
    if not defaults:
        settings |= {"parallel_workers": 0, "debug": False, "gzip_enabled": False, "metrics_endpoint": None}
    for name in served.models:
        home = served.folder / name
        home.mkdir(parents=True)
        described: dict[str, object] = {"name": name, "implementation": "mlserver_models.Identity"}
        if name == CLASSIFIER:
            described["implementation"] = "mlserver_sklearn.SKLearnModel"
            described["parameters"] = {"uri": str(trained("mlserver", served.folder))}
        if served.batching:
            described |= {"max_batch_size": 32, "max_batch_time": 0.002}
        (home / "model-settings.json").write_text(json.dumps(described))
    (served.folder / "settings.json").write_text(json.dumps(settings))
    return [str(python("mlserver").parent / "mlserver"), "start", str(served.folder)]


def trained(peer: str, folder: Path) -> Path:
    """The classifier, trained with the peer's own scikit-learn: its files are no good to another version."""
    target = folder / "classifier.joblib"
    subprocess.run([str(python(peer)), str(HERE / "train.py"), str(target)], check=True)
    return target


def _script(peer: str, served: Served) -> list[str]:
    arguments = [str(served.http), str(served.grpc), *served.models]
    return [str(python(peer)), str(HERE / f"{peer}_server.py"), *arguments]


def _bentoml(served: Served) -> list[str]:
    command = [str(python("bentoml")), "-m", "bentoml", "serve", "bentoml_server:Identity"]
    return [*command, "--host", "127.0.0.1", "--port", str(served.http), "--working-dir", str(HERE)]


# Bounds that a release needs and does not state itself.
_MLSERVER = ("mlserver==1.7.1", "mlserver-sklearn==1.7.1", "uvloop==0.21.0", "pandas<3", "httptools")

PEERS = {
    "mlserver": Peer(_MLSERVER, "oip", lambda s: _mlserver(False, s), speaks_grpc=True),
    "mlserver-defaults": Peer(_MLSERVER, "oip", lambda s: _mlserver(True, s), speaks_grpc=True),
    "kserve": Peer(("kserve==0.21.0",), "oip", lambda s: _script("kserve", s), speaks_grpc=True),
    "litserve": Peer(("litserve",), "plain", lambda s: _script("litserve", s), "/health"),
    "bentoml": Peer(("bentoml",), "plain", _bentoml, "/readyz", (("BENTOML_DO_NOT_TRACK", "True"),)),
    "ray": Peer(
        ("ray[serve]",), "plain", lambda s: _script("ray", s), "/-/healthz", (("RAY_USAGE_STATS_ENABLED", "0"),)
    ),
    # Its Python backend is linked with a distribution's interpreter.
    "triton": Peer(
        ("nvidia-pytriton",),
        "oip",
        lambda s: _script("triton", s),
        speaks_grpc=True,
        interpreter="/usr/bin/python3",
    ),
}


def home_of(name: str) -> str:
    """The environment that a peer runs in: one for all settings of a server."""
    return name.partition("-")[0]


def installed() -> list[str]:
    """The servers that are."""
    return [name for name in PEERS if _stamp(name).exists()]


def installed_engines() -> list[str]:
    return [name for name in ENGINES if _stamp(name).exists()]


def _stamp(name: str) -> Path:
    return python(home_of(name)).parent.parent / "installed"


def install(name: str) -> None:
    """An environment of its own, from the package registry; what is there already is brought up to what is needed."""
    packages = _packages(name)
    unfit = ENGINES[name].unfit if name in ENGINES else ()
    stamp = _stamp(name)
    if stamp.exists() and stamp.read_text() == "\n".join(packages):
        return
    if not python(home_of(name)).exists():
        interpreter = PEERS[name].interpreter if name in PEERS else sys.executable
        subprocess.run([interpreter, "-m", "venv", "--without-pip", str(stamp.parent)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python(home_of(name)))]
    subprocess.run([*pip, "install", "-q", *packages], check=True)
    if unfit:
        subprocess.run([*pip, "uninstall", "-q", "-y", *unfit], check=True)
    stamp.write_text("\n".join(packages))


def _packages(name: str) -> tuple[str, ...]:
    return ENGINES[name].packages if name in ENGINES else PEERS[name].packages


def version(name: str) -> str:
    """Of the server or engine that is installed."""
    distribution = _packages(name)[0].partition("==")[0].partition("[")[0]
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    return subprocess.run([str(python(home_of(name))), "-c", code], capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def running(name: str, served: Served, core: int | None) -> Iterator[Subject]:
    """A peer that is ready. RuntimeError with what it said where it never is."""
    peer = PEERS[name]
    served.folder.mkdir(parents=True, exist_ok=True)
    command = ["env", f"PYTHONPATH={HERE}", *(f"{k}={v}" for k, v in peer.environment), *peer.command(served)]
    with started(command, served.folder / "log", core, cwd=served.folder) as process:
        ready_s = process.until(lambda: _answers(peer, served), limit_s=120)
        ports: dict[Wire, int] = {"http": served.http}
        if peer.speaks_grpc:
            ports["grpc"] = served.grpc
        yield Subject(name, process, ports, peer.form, ready_s)
        _end(process)


def _answers(peer: Peer, served: Served) -> bool:
    """Whether the server says that it is ready, and of its last model too where it can."""
    paths = [peer.health, *([f"/v2/models/{served.models[-1]}/ready"] if peer.form == "oip" else [])]
    return all(_fine(f"http://127.0.0.1:{served.http}{path}") for path in paths)


def _fine(url: str) -> bool:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)


def _end(process: Process) -> None:
    """Its workers too, by their ids."""
    for pid in reversed(process.pids()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 15)
