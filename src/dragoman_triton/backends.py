"""The backends and platforms of Triton: our runtime for each, and why others are not supported."""

from collections.abc import Mapping
from pathlib import Path

import msgspec


class Backend(msgspec.Struct, frozen=True):
    """A backend by its name in Triton: our runtime, the default name of the model file, and Triton's platform."""

    name: str
    runtime: str
    file: str
    platform: str = ""


CONFIG_FILE = "config.pbtxt"
PYTHON, ENSEMBLE = "python", "ensemble"
_BACKENDS = (
    Backend("onnxruntime", "onnx", "model.onnx", "onnxruntime_onnx"),
    Backend("pytorch", "torch", "model.pt", "pytorch_libtorch"),
    Backend("pytorch", "torch", "model.pt", "libtorch"),
    Backend("tensorflow", "tensorflow", "model.savedmodel", "tensorflow_savedmodel"),
    Backend("tensorflow", "tensorflow", "model.graphdef", "tensorflow_graphdef"),
    Backend("openvino", "openvino", "model.xml", "openvino_ir"),
    Backend("tensorrt", "tensorrt", "model.plan", "tensorrt_plan"),
    Backend(PYTHON, PYTHON, "model.py"),
    Backend("", ENSEMBLE, "", "ensemble"),
)
_CONVERT = "convert the model to ONNX"
_RETIRED = f"retired upstream and no longer part of Triton: {_CONVERT}"
_LIBRARY = 'rewrite it as a TritonPythonModel (backend: "python"), or serve the model\'s file by one of our runtimes'
# Backends and platforms that are not supported, with the alternative.
UNSUPPORTED: Mapping[str, str] = {
    "mxnet": f"MXNet is {_RETIRED} with mxnet.onnx.export_model (MXNet 1.9)",
    "mxnet_mxnet": f"MXNet is {_RETIRED} with mxnet.onnx.export_model (MXNet 1.9)",
    "caffe2": f"Caffe2 is {_RETIRED} with caffe2.python.onnx of PyTorch before 2.0",
    "caffe2_netdef": f"Caffe2 is {_RETIRED} with caffe2.python.onnx of PyTorch before 2.0",
    "torch_aoti": "packages of AOTInductor are not supported: write the program with torch.export.save",
    "fil": "the FIL backend is not supported: serve the file of XGBoost, LightGBM or scikit-learn itself",
    "vllm": 'the vLLM backend is not supported: serve the folder of the model with runtime = "vllm" in dragoman.toml',
    "tensorrtllm": "TensorRT-LLM is not supported: serve the folder that save_pretrained writes, by llm or vllm",
    "dali": f"DALI pipelines are not supported: {_LIBRARY}",
}


def is_model_folder(folder: Path) -> bool:
    """Return whether Triton serves a folder: it has a `config.pbtxt`, or versions of the Python backend."""
    try:
        return (folder / CONFIG_FILE).is_file() or any(map(_is_python_backend, folder.iterdir()))
    except OSError:  # its files cannot be listed
        return False


def is_version_folder(path: Path) -> bool:
    """Return whether a folder is a version of a model of Triton."""
    return path.name.isdecimal() and ((path.parent / CONFIG_FILE).is_file() or _is_python_backend(path))


def _is_python_backend(version: Path) -> bool:
    file = version / "model.py"
    try:
        return version.name.isdecimal() and b"class TritonPythonModel" in file.read_bytes()
    except OSError:
        return False


def find_backend(backend: str, platform: str, model: str, files: Path | None) -> Backend | None:
    """Return the backend by its name, the platform, the name of the model (`x.onnxruntime`) or the files of a version.

    None if there is none, or if it is not supported.
    """
    if platform and (not backend or backend == "tensorflow"):
        return next((each for each in _BACKENDS if each.platform == platform), None)
    named = backend or model.rpartition(".")[2]
    by_name = [each for each in _BACKENDS if each.name == named]
    present = [
        each for each in by_name or _BACKENDS if files is not None and each.file and (files / each.file).exists()
    ]
    return next(iter((*present, *by_name)), None) if by_name or not backend else None


def unsupported_reason(backend: str, platform: str) -> str:
    """Return why a backend or platform is not supported, and the alternative."""
    given = backend or platform
    if given in UNSUPPORTED:
        return UNSUPPORTED[given]
    known = ", ".join(dict.fromkeys(each.name for each in _BACKENDS if each.name))
    if not given:
        return f"expected one of {known}, or a version folder with a file such as model.onnx or model.py"
    return f"expected one of {known}; if it is a shared library, {_LIBRARY}"
