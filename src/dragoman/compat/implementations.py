"""What `implementation` names: a well-known runtime, which becomes ours, or a class of the user's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dragoman.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class WellKnown:
    """Our runtime for a well-known class, the files that it looks for by itself, and its default content type."""

    runtime: str
    files: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)


_ANY_NAME = {"content_type": "np"}  # clients of these never had to know how an input is called
_XGBOOST = {**_ANY_NAME, "sklearn_api": True}  # their runtime loads every file by XGBRegressor or XGBClassifier

RUNTIMES: Mapping[str, WellKnown] = {
    "mlserver_sklearn.SKLearnModel": WellKnown("sklearn", ("model.joblib", "model.pickle", "model.pkl"), _ANY_NAME),
    "mlserver_xgboost.XGBoostModel": WellKnown("xgboost", ("model.bst", "model.json", "model.ubj"), _XGBOOST),
    "mlserver_lightgbm.LightGBMModel": WellKnown("lightgbm", ("model.bst",), _ANY_NAME),
    "mlserver_catboost.CatboostModel": WellKnown("catboost", ("model.cbm", "model.bin"), _ANY_NAME),
    "mlserver_mlflow.MLflowRuntime": WellKnown("mlflow"),
    "mlserver_huggingface.HuggingFaceRuntime": WellKnown("huggingface"),
}

# The same classes by the modules that hold them.
_LONG_NAMES = {
    "mlserver_sklearn.sklearn.SKLearnModel": "mlserver_sklearn.SKLearnModel",
    "mlserver_xgboost.xgboost.XGBoostModel": "mlserver_xgboost.XGBoostModel",
    "mlserver_lightgbm.lightgbm.LightGBMModel": "mlserver_lightgbm.LightGBMModel",
    "mlserver_catboost.catboost.CatboostModel": "mlserver_catboost.CatboostModel",
    "mlserver_mlflow.runtime.MLflowRuntime": "mlserver_mlflow.MLflowRuntime",
    "mlserver_huggingface.runtime.HuggingFaceRuntime": "mlserver_huggingface.HuggingFaceRuntime",
}

# By the package's name; there is nothing of ours for these.
UNSUPPORTED: Mapping[str, str] = {
    "mlserver_alibi_explain": (
        "explainers are not served; wrap the explainer in a class of your own derived from mlserver.MLModel"
    ),
    "mlserver_alibi_detect": (
        "drift detectors are not served; wrap the detector in a class of your own derived from mlserver.MLModel"
    ),
    "mlserver_mllib": (
        "Spark MLlib models are not served; convert the model to ONNX (onnxmltools), which Dragoman serves"
    ),
}


def implementation(whole: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The runtime of a model, its uri, tensors and parameters. Raises InvalidInput where nothing can run it."""
    named = whole.get("implementation") or ""
    if not isinstance(named, str):
        raise InvalidInput(f"{path}: 'implementation' has the wrong kind of value: {named!r}")
    refused = unsupported(named)
    if refused:
        raise InvalidInput(f"{path}: implementation '{named}' is not supported: {refused}")
    known = well_known(named)
    if named and known is None:
        return _own_class(named, whole, path)
    own = {**whole["parameters"]}
    uri, _ = own.pop("uri", ""), own.pop("version", "")
    parameters = {**(known.parameters if known else {}), **own, **(own.pop("extra", None) or {})}
    parameters.pop("extra", None)
    found = {
        "uri": _file(uri or "", known, path.parent),
        "parameters": {k: v for k, v in parameters.items() if v is not None},
        "inputs": [_bare(t) for t in whole.get("inputs") or []],
        "outputs": [_bare(t) for t in whole.get("outputs") or []],
    }
    return found | ({"runtime": known.runtime} if known else {})


def well_known(named: str) -> WellKnown | None:
    """Our runtime for an implementation, if it is a well-known one."""
    return RUNTIMES.get(_LONG_NAMES.get(named, named))


def unsupported(named: str) -> str:
    """Why a well-known implementation has nothing here, and what to use instead; "" for any other."""
    return UNSUPPORTED.get(named.partition(".")[0], "")


def file_of(named: str, folder: Path) -> Path | None:
    """The file in a model's folder, or the folder that is served, that holds a class; None where it is elsewhere."""
    module = named.rpartition(".")[0].replace(".", "/")
    places = (folder / f"{module}.py", folder / module / "__init__.py")
    return next((place for place in places if place.is_file()), None)


def _own_class(named: str, whole: Mapping[str, Any], path: Path) -> dict[str, Any]:
    module, _, name = named.rpartition(".")
    if not module:
        raise InvalidInput(f"{path}: 'implementation' expects module.Class, got '{named}'")
    file = file_of(named, path.parent)
    return {
        "runtime": "mlserver",
        "uri": f"{file}:{name}" if file is not None else f"{module}:{name}",
        "parameters": {"model_settings": dict(whole), "source": str(path)},
    }


def _file(uri: str, known: WellKnown | None, folder: Path) -> str:
    """The uri, or in the folder that it names the file that the well-known runtime would look for."""
    place = folder / uri
    if known is None or not place.is_dir():
        return uri
    return next((str(Path(uri) / name) for name in known.files if (place / name).is_file()), uri)


def _bare(tensor: Any) -> Any:
    """A tensor as we read it: of its parameters only the content type means something here."""
    if not isinstance(tensor, dict):
        return tensor
    content_type = (tensor.get("parameters") or {}).get("content_type")
    bare = {k: v for k, v in tensor.items() if k != "parameters"}
    return bare | ({"content_type": content_type} if content_type else {})
