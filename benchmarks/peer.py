"""Other model servers, each installed into an environment of its own and started with its default settings."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.processes import RESULTS, Process, free_port, http_ready
from benchmarks.processes import started as process_started
from benchmarks.workloads import Wire

NAMES = ("mlserver",)

# The bounds that this release needs and does not state itself.
_MLSERVER = ("mlserver==1.7.1", "uvloop==0.21.0", "pandas<3")
_MLSERVER_MODEL = '''"""The identity as its users write it: numbers to an array and back."""
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Identity(MLModel):
    async def predict(self, payload):
        array = self.decode(payload.inputs[0], default_codec=NumpyCodec)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("OUTPUT0", array)])
'''


def started(
    name: str, running: contextlib.ExitStack, core: int | None, folder: Path
) -> dict[Wire, tuple[Process, int]]:
    """Its process and port for each wire, once it is ready."""
    assert name == "mlserver"
    http, grpc, home = free_port(), free_port(), folder / name
    settings = {"host": "127.0.0.1", "http_port": http, "grpc_port": grpc, "metrics_port": free_port()}
    for model in ("Identity", "IdentityImage"):
        (home / model).mkdir(parents=True)
        (home / model / "identity.py").write_text(_MLSERVER_MODEL)
        described = {"name": model, "implementation": "identity.Identity"}
        (home / model / "model-settings.json").write_text(json.dumps(described))
    (home / "settings.json").write_text(json.dumps(settings))
    log = folder / "mlserver.log"
    command = [str(environment(name, _MLSERVER) / "bin" / "mlserver"), "start", str(home)]
    process = running.enter_context(process_started(command, log, core, cwd=home))
    process.until(lambda: http_ready(http))
    return {"http": (process, http), "grpc": (process, grpc)}


def mlserver_python(install: bool) -> Path | None:
    """The interpreter of the environment that has mlserver; None where there is none and none is to be made."""
    if install:
        environment("mlserver", _MLSERVER)
    found = RESULTS / "venvs" / "mlserver"
    return found / "bin" / "python" if (found / "installed").exists() else None


def environment(name: str, packages: tuple[str, ...]) -> Path:
    """An environment with these packages, made where there is none yet."""
    home = RESULTS / "venvs" / name
    if not (home / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([str(home / "bin" / "python"), "-m", "pip", "install", "-q", *packages], check=True)
        (home / "installed").write_text("\n".join(packages))
    return home
