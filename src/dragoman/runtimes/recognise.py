"""Which runtime loads a file or folder: by its suffix, and by its first bytes where suffixes are shared."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dragoman.core.errors import ModelFailed
from dragoman.runtimes.files import is_torchscript

_HEAD_BYTES = 4096


def recognise(path: Path) -> str | None:
    """The name of the runtime that loads this file or folder; None where it is no model that we know."""
    if path.is_dir():
        found = next((runtime for file, runtime in _BY_MEMBER.items() if (path / file).is_file()), None)
        return found or _pretrained(path)
    if not path.is_file():
        return None
    if graph_file(path) is not None:
        return "graph"
    by_suffix = _BY_SUFFIX.get(path.suffix.lower())
    return by_suffix(path) if callable(by_suffix) else by_suffix


def why_not(path: Path) -> str:
    """What is amiss with a file whose suffix alone would make it a model; "" for any other."""
    if not path.is_file() or path.suffix.lower() not in _EXPECTED or recognise(path) is not None:
        return ""
    return f"'{path.name}' is no model: {_EXPECTED[path.suffix.lower()]}"


def why_skipped(path: Path) -> str:
    """Why a file in a folder of models is not served; "" where nobody would expect it to be, as of a README."""
    suffix = path.suffix.lower()
    if suffix == ".py":
        return "" if path.name.startswith("__") else _SCRIPT
    if suffix in _UNSUPPORTED:
        return _UNSUPPORTED[suffix]
    return why_not(path) if suffix in _MODELS_ONLY or path.stem == "model" else ""


def model_file(folder: Path) -> Path | None:
    """The one model directly in a folder: a file, or a folder that is a model itself, as a SavedModel is.

    A `model.py` wins over the data beside it, and a graph over both; other Python files are its neighbours, not models.
    Raises ModelFailed naming them where there are several.
    """
    if recognise(folder) not in ("mlflow", "graph") and (folder / "model.py").is_file():
        return folder / "model.py"
    if recognise(folder) is not None:
        return folder
    found = sorted(entry for entry in folder.iterdir() if _is_candidate(entry))
    if len(found) > 1:
        raise ModelFailed(
            f"folder '{folder.name}' holds several models: {', '.join(entry.name for entry in found)}; name one of "
            "them in its model-settings.json as parameters.uri"
        )
    return found[0] if found else None


def graph_file(path: Path) -> Path | None:
    """The file of a graph: `graph.toml`, `any.graph.toml`, or the one that makes a folder a graph."""
    if path.is_dir():
        return next((path / name for name in GRAPH_FILES if (path / name).is_file()), None)
    return path if path.name.endswith(GRAPH_FILES) and path.name.partition("graph")[0][-1:] in ("", ".") else None


def _is_candidate(entry: Path) -> bool:
    if entry.name.startswith(".") or entry.suffix == ".py":
        return False
    found = recognise(entry)
    # A folder with a model.py is a neighbour's package, not data.
    return found is not None and not (entry.is_dir() and found == "python")


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def _boosted(path: Path) -> str | None:
    """XGBoost's JSON or UBJSON, or LightGBM's text: what .json, .txt, .model and .bst may hold."""
    head = _head(path)
    if head.startswith((b"tree\n", b"tree\r\n")):
        return "lightgbm"
    return "xgboost" if head.startswith(b"{") and b"learner" in head else None


def _pretrained(folder: Path) -> str | None:
    """The runtime of a folder that transformers' save_pretrained wrote: a configuration of a known form, with its
    weights. A decoder is there to continue texts, and its runtime tells what is missing, be it the weights."""
    config = folder / "config.json"
    if not config.is_file():
        return None
    weights = any((folder / name).is_file() for name in _PRETRAINED_WEIGHTS)
    try:
        found = json.loads(config.read_bytes())
    except (ValueError, RecursionError):
        return "llm" if weights and _has_tokenizer(folder) else None
    if not isinstance(found, dict) or not ("architectures" in found or "model_type" in found):
        return None
    if not weights:
        if _continues(found) and (folder / "openvino_model.xml").is_file():
            return "openvino_genai"
        return "llm" if _continues(found) and not _holds_others(folder) else None
    return "llm" if _continues(found) else "huggingface"


def _continues(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures") or []
    return isinstance(names, list) and any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZERS)


def _holds_others(folder: Path) -> bool:
    """Whether there is a model in another form in the folder, or in one below it, as exporters put it."""
    below = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return any(_is_candidate(entry) for place in (folder, *below) for entry in place.iterdir())


def _torch(path: Path) -> str | None:
    return "torch" if is_torchscript(path) else None


# The files that hold graphs; before these names may stand another and a dot.
GRAPH_FILES = ("graph.toml", "graph.json", "graph.yaml", "graph.yml")
# The file that makes a folder a model. An MLflow model may hold any other file, a model.py among them.
_BY_MEMBER: Mapping[str, str] = {
    "MLmodel": "mlflow",
    "saved_model.pb": "tensorflow",
    **dict.fromkeys(GRAPH_FILES, "graph"),
    "model.py": "python",
}
# The weights of a model that save_pretrained wrote, or the list of their files.
_PRETRAINED_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# The files that a tokenizer is read from.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_BY_SUFFIX: Mapping[str, str | Callable[[Path], str | None]] = {
    ".py": "python",
    ".joblib": "sklearn",
    ".pkl": "sklearn",
    ".pickle": "sklearn",
    ".ubj": "xgboost",
    ".xgb": "xgboost",
    ".bst": _boosted,
    ".json": _boosted,
    ".model": _boosted,
    ".txt": _boosted,
    ".lgb": "lightgbm",
    ".cbm": "catboost",
    ".catboost": "catboost",
    ".onnx": "onnx",
    ".pt": _torch,
    ".pth": _torch,
    ".ts": _torch,
    ".pt2": "torch",
}
# What a file has to hold whose suffix does not tell its form.
_PROGRAM = (
    "expected a program of TorchScript or torch.export, not weights or a module that torch.save has pickled; "
    "write one by torch.jit.script(module).save(file) or torch.export.save(program, 'model.pt2')"
)
_BOOSTER = "expected what save_model of an XGBoost or a LightGBM booster writes"
_EXPECTED = {
    **dict.fromkeys((".pt", ".pth", ".ts"), _PROGRAM),
    **dict.fromkeys((".bst", ".json", ".model", ".txt"), _BOOSTER),
}
# Suffixes that no file has but models.
_MODELS_ONLY = frozenset({".pt", ".pth", ".ts", ".bst", ".model"})
_SCRIPT = (
    "a Python file in a folder is not a model by itself; name it in the command (dragoman serve FILE), or call it "
    "model.py in a sub-folder of its own"
)
# Why files of other formats are not served.
_UNSUPPORTED: Mapping[str, str] = {
    ".gguf": "GGUF is not supported; expected the folder that save_pretrained writes, with config.json and safetensors",
    ".ggml": "GGML is not supported; expected the folder that save_pretrained writes, with config.json and safetensors",
    ".safetensors": "weights alone are not a model; expected them beside the config.json that save_pretrained writes",
    ".ckpt": "a checkpoint is not a model; export it as ONNX, torch.export or TorchScript",
    ".h5": "Keras files are not supported; write a SavedModel folder by model.export(folder)",
    ".keras": "Keras files are not supported; write a SavedModel folder by model.export(folder)",
    ".tflite": "TensorFlow Lite is not supported; write a SavedModel folder or ONNX",
    ".pmml": "PMML is not supported; save the model by joblib or as ONNX",
    ".engine": "TensorRT engines are not supported; serve the ONNX file that it was built from",
    ".plan": "TensorRT engines are not supported; serve the ONNX file that it was built from",
}
