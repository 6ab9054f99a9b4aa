"""Other model servers, each installed into its own environment and started with its default settings."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.processes import RESULTS, Process, free_port, http_ready, run_process
from benchmarks.workloads import Wire

NAMES = ("mlserver",)

# Version bounds that this release needs but does not declare.
_MLSERVER = ("mlserver==1.7.1", "uvloop==0.21.0", "pandas<3")
_MLSERVER_MODEL = '''"""An identity model as its users would write it: decode an array, encode it again."""
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Identity(MLModel):
    async def predict(self, payload):
        array = self.decode(payload.inputs[0], default_codec=NumpyCodec)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("OUTPUT0", array)])
'''


def start_peer(
    name: str, running: contextlib.ExitStack, core: int | None, folder: Path
) -> dict[Wire, tuple[Process, int]]:
    """Start the server. Return its process and port for each protocol when it is ready."""
    assert name == "mlserver"
    http, grpc, home = free_port(), free_port(), folder / name
    settings = {"host": "127.0.0.1", "http_port": http, "grpc_port": grpc, "metrics_port": free_port()}
    for model in ("Identity", "IdentityImage"):
        (home / model).mkdir(parents=True)
        (home / model / "identity.py").write_text(_MLSERVER_MODEL)
        model_settings = {"name": model, "implementation": "identity.Identity"}
        (home / model / "model-settings.json").write_text(json.dumps(model_settings))
    (home / "settings.json").write_text(json.dumps(settings))
    log = folder / "mlserver.log"
    command = [str(environment(name, _MLSERVER) / "bin" / "mlserver"), "start", str(home)]
    process = running.enter_context(run_process(command, log, core, cwd=home))
    process.wait_until(lambda: http_ready(http))
    return {"http": (process, http), "grpc": (process, grpc)}


def mlserver_python(install: bool) -> Path | None:
    """Return the interpreter of the environment of mlserver; None if it is not installed and `install` is false."""
    if install:
        environment("mlserver", _MLSERVER)
    home = RESULTS / "venvs" / "mlserver"
    return home / "bin" / "python" if (home / "installed").exists() else None


def environment(name: str, packages: tuple[str, ...]) -> Path:
    """Return the folder of an environment with these packages; create it if there is none."""
    home = RESULTS / "venvs" / name
    if not (home / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([str(home / "bin" / "python"), "-m", "pip", "install", "-q", *packages], check=True)
        (home / "installed").write_text("\n".join(packages))
    return home
