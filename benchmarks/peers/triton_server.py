"""Run Triton with its Python backend, both from the wheel of PyTriton, with identity models or a folder of models.

usage: python triton_server.py HTTP_PORT GRPC_PORT {MODEL... | FOLDER}
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

SHAPES = {"Identity": [16], "IdentityImage": [3, 224, 224]}
MODEL = """
import triton_python_backend_utils as triton


class TritonPythonModel:
    def execute(self, requests):
        tensors = [triton.get_input_tensor_by_name(request, "INPUT0") for request in requests]
        return [triton.InferenceResponse([triton.Tensor("OUTPUT0", each.as_numpy())]) for each in tensors]
"""
CONFIG = """
backend: "python"
max_batch_size: 64
input [{{ name: "INPUT0" data_type: TYPE_FP32 dims: {shape} }}]
output [{{ name: "OUTPUT0" data_type: TYPE_FP32 dims: {shape} }}]
instance_group [{{ count: 1 kind: KIND_CPU }}]
"""


def server() -> Path:
    """Return the folder of Triton in the wheel. The package itself is not imported."""
    spec = find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise SystemExit("nvidia-pytriton is not installed")
    return Path(spec.origin).parent / "tritonserver"


def backends(triton: Path) -> Path:
    """Return a folder with the Python backend and its stub for this interpreter."""
    folder = Path("backends", "python").resolve()
    folder.mkdir(parents=True)
    version = ".".join(map(str, sys.version_info[:2]))
    stub = triton / "python_backend_stubs" / version / "triton_python_backend_stub"
    for file in (*(triton / "backends" / "python").iterdir(), stub):
        (folder / file.name).symlink_to(file)
    return folder.parent


def repository(names: list[str]) -> Path:
    folder = Path("repository").resolve()
    for name in names:
        code = folder / name / "1" / "model.py"
        code.parent.mkdir(parents=True)
        code.write_text(MODEL)
        (folder / name / "config.pbtxt").write_text(CONFIG.format(shape=SHAPES[name]))
    return folder


if __name__ == "__main__":
    triton = server()
    settings: dict[str, Path | str] = {"backend-directory": backends(triton)}
    if Path(sys.argv[3]).is_absolute():
        settings |= {"model-repository": sys.argv[3], "model-control-mode": "explicit", "load-model": "*"}
        settings |= {"exit-on-error": "false", "strict-readiness": "false"}
    else:
        settings["model-repository"] = repository(sys.argv[3:])
    settings |= {"http-port": sys.argv[1], "grpc-port": sys.argv[2]}
    settings |= {"http-address": "127.0.0.1", "grpc-address": "127.0.0.1", "allow-metrics": "false"}
    libraries = f"{triton.parents[1] / 'nvidia_pytriton.libs'}:{Path(sys.base_prefix) / 'lib'}"
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries, "PYTHONPATH": str(triton.parents[1])}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [str(triton / "bin" / "tritonserver"), *(f"--{name}={value}" for name, value in settings.items())]
    os.execve(command[0], [*command, "--disable-auto-complete-config"], environment)
