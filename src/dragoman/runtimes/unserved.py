"""Files and folders that no runtime loads: the reason, and what to serve instead."""

from collections.abc import Mapping
from pathlib import Path

_EXPORT = "export it as ONNX, torch.export or TorchScript"
_KERAS = "Keras files are not supported; write a SavedModel folder by model.export(folder)"
_CORE_ML = "Core ML runs on Apple's systems only; export the original model as ONNX"
_PADDLE = "Paddle is not supported; convert the model to ONNX with paddle2onnx"
_CAFFE = "Caffe is retired; convert the network to ONNX"
_MOBILE = "formats of mobile inference libraries are not supported; export the original model as ONNX"
_ARCHIVE = "an archive is not a model; unpack it"
_COMPRESSED = "a compressed file is not a model, unless it is a pickle such as model.pkl.gz; unpack it"
_HDF5 = "HDF5 files, such as Keras weights, are not supported; write a SavedModel folder by model.export(folder)"
_FASTTEXT = "fastText is not supported; load it in a model.py with the package fasttext"
_ARRAYS = "arrays alone are not a model; load them in a model.py"
_BY_SUFFIX: Mapping[str, str] = {
    ".ggml": "GGML is not supported; expected the folder that save_pretrained writes, with config.json and safetensors",
    ".safetensors": "weights alone are not a model; expected them beside the config.json that save_pretrained writes",
    ".ckpt": f"a checkpoint is not a model; {_EXPORT}",
    ".pth.tar": f"a checkpoint is not a model; {_EXPORT}",
    ".msgpack": "weights alone are not a model; load them in a model.py",
    ".h5": _KERAS,
    ".hdf5": _HDF5,
    ".keras": _KERAS,
    ".tflite": "TensorFlow Lite is not supported; write a SavedModel folder or ONNX",
    ".pmml": "PMML is not supported: complete evaluators need Java, and sklearn-pmml-model 1.0.8 ignores "
    "transformations and targets, which gives wrong values; save the model by joblib or as ONNX",
    ".netdef": "Caffe2 is retired; convert the network to ONNX with caffe2.python.onnx of PyTorch before 2.0",
    ".params": "MXNet is retired; convert the network to ONNX with mxnet.onnx.export_model of MXNet 1.9",
    ".caffemodel": _CAFFE,
    ".prototxt": _CAFFE,
    ".mlmodel": _CORE_ML,
    ".mlmodelc": _CORE_ML,
    ".mlpackage": _CORE_ML,
    ".pdmodel": _PADDLE,
    ".pdiparams": _PADDLE,
    ".mnn": _MOBILE,
    ".ncnn": _MOBILE,
    ".rknn": _MOBILE,
    ".dlc": _MOBILE,
    ".weights": "weights of Darknet are not supported; export the network as ONNX",
    ".skops": "skops files are not supported; save the estimator by joblib or as ONNX",
    ".mar": "an archive of TorchServe is not a model; unpack it and serve its program, see migrate-from-torchserve",
    ".ftz": _FASTTEXT,
    ".rds": "models of R are not supported; export the model as ONNX, or as PMML and from there",
    ".mojo": "H2O MOJO is not supported; load it in a model.py with the package daimojo or h2o",
    ".npy": _ARRAYS,
    ".npz": _ARRAYS,
    ".zip": _ARCHIVE,
    ".tar": _ARCHIVE,
    ".tgz": _ARCHIVE,
    ".tar.gz": _ARCHIVE,
    ".7z": _ARCHIVE,
    ".gz": _COMPRESSED,
    ".bz2": _COMPRESSED,
    ".xz": _COMPRESSED,
    ".z": _COMPRESSED,
}
_TFJS = "TensorFlow.js is not supported; serve the SavedModel from which it was converted"
_SPACY = "spaCy pipelines are not supported; load it in a model.py by spacy.load(folder)"
UNKNOWN = (
    "no runtime is known for files of this kind; name one as `runtime` in a dragoman.toml, or load it in a model.py"
)
# Files beside models that are no models: texts, settings, tables, pictures and sound.
_DOCUMENTS = {
    ".bmp", ".c", ".cfg", ".conf", ".cpp", ".css", ".csv", ".db", ".env", ".flac", ".gif", ".h", ".html", ".ini",
    ".ipynb", ".jpeg", ".jpg", ".js", ".json", ".jsonl", ".jsonnet", ".lock", ".log", ".md", ".md5", ".mp3", ".mp4",
    ".ogg", ".parquet", ".pbtxt", ".pdf", ".png", ".properties", ".proto", ".py", ".pyc", ".pyi", ".rst", ".sh",
    ".sha256", ".so", ".split", ".sql", ".sqlite", ".svg", ".tiff", ".toml", ".ts", ".tsv", ".txt", ".wav", ".webp",
    ".xlsx", ".yaml", ".yml",
}  # fmt: skip
_JSON_START = 1 << 16  # bytes of a JSON file in which its keys are looked for, and as many at its end
_SMALL = 4096  # bytes of a file without a known suffix that is no model


def reason_of(path: Path) -> str:
    """Return why no runtime loads a file or folder of a known format, "" if its format is unknown."""
    name = path.name.lower()
    suffixes = sorted((suffix for suffix in _BY_SUFFIX if name.endswith(suffix)), key=len)
    if suffixes:
        return _BY_SUFFIX[suffixes[-1]]
    if path.is_dir():
        return _SPACY if (path / "config.cfg").is_file() and (path / "meta.json").is_file() else ""
    return _TFJS if path.suffix == ".json" and _is_tensorflow_js(path) else ""


def unknown_reason(path: Path) -> str:
    """Return the reason of a file of unknown format, "" for one that is no model by its suffix or size."""
    if path.suffix.lower() in _DOCUMENTS or _is_companion(path):
        return ""
    return UNKNOWN if path.stat().st_size > _SMALL else ""


def _is_companion(path: Path) -> bool:
    """Return whether a file holds the weights of a model file beside it: of ONNX, or of OpenVINO."""
    name = path.name
    if path.suffix == ".bin" and path.with_suffix(".xml").is_file():
        return True
    return any(name.endswith(end) and path.with_name(name.removesuffix(end)).is_file() for end in (".data", "_data"))


def _is_tensorflow_js(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(_JSON_START)
        file.seek(max(0, path.stat().st_size - _JSON_START))
        return b'"modelTopology"' in start and b'"weightsManifest"' in start + file.read()
