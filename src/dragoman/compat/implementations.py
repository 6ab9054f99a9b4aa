"""Resolve `implementation`: a runtime of MLServer, which becomes ours, or a custom class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dragoman.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class KnownImplementation:
    """Our runtime for an MLServer runtime, the file names that it looks for, and its default parameters."""

    runtime: str
    files: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)


_ANY_NAME = {"content_type": "np"}  # inputs may have any name
_XGBOOST = {**_ANY_NAME, "sklearn_api": True}  # MLServer loads every file with XGBRegressor or XGBClassifier

RUNTIMES: Mapping[str, KnownImplementation] = {
    "mlserver_sklearn.SKLearnModel": KnownImplementation(
        "sklearn", ("model.joblib", "model.pickle", "model.pkl"), _ANY_NAME
    ),
    "mlserver_xgboost.XGBoostModel": KnownImplementation("xgboost", ("model.bst", "model.json", "model.ubj"), _XGBOOST),
    "mlserver_lightgbm.LightGBMModel": KnownImplementation("lightgbm", ("model.bst",), _ANY_NAME),
    "mlserver_catboost.CatboostModel": KnownImplementation("catboost", ("model.cbm", "model.bin"), _ANY_NAME),
    "mlserver_mlflow.MLflowRuntime": KnownImplementation("mlflow"),
    "mlserver_huggingface.HuggingFaceRuntime": KnownImplementation("huggingface"),
}

# Packages whose runtimes are not supported, with the alternative.
UNSUPPORTED: Mapping[str, str] = {
    "mlserver_alibi_explain": "explainers are not supported: wrap the explainer in a subclass of mlserver.MLModel",
    "mlserver_alibi_detect": "drift detectors are not supported: wrap the detector in a subclass of mlserver.MLModel",
    "mlserver_mllib": "Spark MLlib models are not supported: convert the model to ONNX with onnxmltools",
}


def implementation(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return runtime, uri, tensors and parameters of a model. Raises InvalidInput if it is not supported."""
    named = fields.get("implementation") or ""
    if not isinstance(named, str):
        raise InvalidInput(f"{path}: 'implementation': expected text, got {named!r}")
    reason = unsupported(named)
    if reason:
        raise InvalidInput(f"{path}: implementation '{named}': {reason}")
    known = known_implementation(named)
    if named and known is None:
        return _custom_class(named, fields, path)
    given = {**fields["parameters"]}
    uri, _ = given.pop("uri", ""), given.pop("version", "")
    parameters = {**(known.parameters if known else {}), **given, **(given.pop("extra", None) or {})}
    parameters.pop("extra", None)
    found = {
        "uri": _file(uri or "", known, path.parent),
        "parameters": {k: v for k, v in parameters.items() if v is not None},
        "inputs": [_tensor_table(t) for t in fields.get("inputs") or []],
        "outputs": [_tensor_table(t) for t in fields.get("outputs") or []],
    }
    return found | ({"runtime": known.runtime} if known else {})


def known_implementation(named: str) -> KnownImplementation | None:
    """Return our runtime for an implementation of MLServer, also by its full module path; None for any other class."""
    return RUNTIMES.get(f"{named.partition('.')[0]}.{named.rpartition('.')[2]}")


def unsupported(named: str) -> str:
    """Return why an implementation of MLServer is not supported, and the alternative; "" for any other."""
    return UNSUPPORTED.get(named.partition(".")[0], "")


def file_of(named: str, folder: Path) -> Path | None:
    """Return the file in a model's folder that defines a class; None if there is none."""
    module = named.rpartition(".")[0].replace(".", "/")
    places = (folder / f"{module}.py", folder / module / "__init__.py")
    return next((place for place in places if place.is_file()), None)


def _custom_class(named: str, fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    module, _, name = named.rpartition(".")
    if not module:
        raise InvalidInput(f"{path}: 'implementation': expected module.Class, got '{named}'")
    file = file_of(named, path.parent)
    return {
        "runtime": "mlserver",
        "uri": f"{file}:{name}" if file is not None else f"{module}:{name}",
        "parameters": {"model_settings": dict(fields), "source": str(path)},
    }


def _file(uri: str, known: KnownImplementation | None, folder: Path) -> str:
    """Return the uri, or if it is a folder the file in it that the MLServer runtime would load."""
    place = folder / uri
    if known is None or not place.is_dir():
        return uri
    return next((str(Path(uri) / name) for name in known.files if (place / name).is_file()), uri)


def _tensor_table(tensor: Any) -> Any:
    """Return the description of a tensor with the content type of its parameters, without the others."""
    if not isinstance(tensor, dict):
        return tensor
    content_type = (tensor.get("parameters") or {}).get("content_type")
    fields = {k: v for k, v in tensor.items() if k != "parameters"}
    return fields | ({"content_type": content_type} if content_type else {})
