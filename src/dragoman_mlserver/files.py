"""Convert the settings, environment variables and implementations of MLServer to our settings and runtimes."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dragoman.core.dialect import Dialect
from dragoman.core.documents import parse_json, read_json
from dragoman.core.errors import InvalidInput
from dragoman.core.model_files import ModelFiles
from dragoman.core.remarks import report
from dragoman_mlserver.fields import CACHE_BYTES, CONVERTERS, MODEL, PARAMETERS, SERVER, is_true, remarks_on

log = logging.getLogger("dragoman.compat")
FILE = "model-settings.json"


def _unknown(model: str, version: str, _existing: Sequence[str]) -> str:
    return f"Model {model} with version {version} not found" if version else f"Model {model} not found"


def _unknown_to_load(model: str) -> str:
    return f"Model {model} not found"


# MLServer passes `timeout` and `priority` to the model.
DIALECT = Dialect(
    timeout="none",
    unknown=_unknown,
    unknown_to_load=_unknown_to_load,
    unloads_unknown=False,
    handlers_first=True,
    bare_streams=True,
    length_shapes=True,
)


class KnownImplementation(msgspec.Struct, frozen=True):
    """Our runtime of the library of an MLServer runtime, and the file names that this looks for.

    `has_class`: the module `mlserver.runtimes` has its class, which answers as MLServer's does.
    """

    runtime: str
    files: Sequence[str] = ()
    has_class: bool = True


RUNTIMES: Mapping[str, KnownImplementation] = {
    "mlserver_sklearn.SKLearnModel": KnownImplementation("sklearn", ("model.joblib", "model.pickle", "model.pkl")),
    "mlserver_xgboost.XGBoostModel": KnownImplementation("xgboost", ("model.bst", "model.json", "model.ubj")),
    "mlserver_lightgbm.LightGBMModel": KnownImplementation("lightgbm", ("model.bst",)),
    "mlserver_catboost.CatboostModel": KnownImplementation("catboost", ("model.cbm", "model.bin")),
    "mlserver_mlflow.MLflowRuntime": KnownImplementation("mlflow"),
    "mlserver_huggingface.HuggingFaceRuntime": KnownImplementation("huggingface", has_class=False),
}
# The modules of MLServer's packages, all of which stand for the module `mlserver.runtimes`.
RUNTIME_PACKAGES: Mapping[str, Sequence[str]] = {
    "mlserver_sklearn": ("sklearn",),
    "mlserver_xgboost": ("xgboost",),
    "mlserver_lightgbm": ("lightgbm",),
    "mlserver_catboost": ("catboost",),
    "mlserver_mlflow": ("runtime", "codecs"),
    "mlserver_huggingface": ("runtime", "codecs"),
}

# Modules of the package `mlserver` that are parts of another one in ours.
MERGED_MODULES: Mapping[str, str] = {
    **{f"codecs.{name}": "codecs.adapted" for name in ("base64", "datetime", "numpy", "pandas", "string")},
    "codecs.lists": "codecs.json",
    **{f"grpc.{name}": "grpc" for name in ("converters", "dataplane_pb2", "dataplane_pb2_grpc")},
    "handlers.custom": "handlers",
    "metrics.context": "metrics",
    "types.dataplane": "types",
    "types.model_repository": "types",
    "version": "",
}

# The tasks of our runtime for transformers, "" if the architecture says it; others are run by HuggingFaceRuntime.
PIPELINE_TASKS = (
    "",
    "text-classification",
    "sentiment-analysis",
    "token-classification",
    "ner",
    "question-answering",
    "image-classification",
    "feature-extraction",
)

# Packages whose runtimes are not supported, with the alternative.
UNSUPPORTED: Mapping[str, str] = {
    "mlserver_alibi_explain": "explainers are not supported: wrap the explainer in a subclass of mlserver.MLModel",
    "mlserver_alibi_detect": "drift detectors are not supported: wrap the detector in a subclass of mlserver.MLModel",
    "tempo": "Tempo is retired: serve its graph as a graph of models, or derive a class from mlserver.MLModel",
    "mlserver_mllib": "Spark MLlib models are not supported: convert the model to ONNX with onnxmltools",
}


def implementation(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return runtime, uri, tensors and parameters of a model. Raises InvalidInput if it is not supported."""
    named = fields.get("implementation") or ""
    if not isinstance(named, str):
        raise InvalidInput(f"{path}: 'implementation': expected text, got {named!r}")
    reason = unsupported_reason(named)
    if reason:
        raise InvalidInput(f"{path}: implementation '{named}': {reason}")
    known = known_implementation(named)
    if named and known is None:
        return _custom_class(named, fields, path)
    given = {**fields["parameters"]}
    uri = given.pop("uri", "") or ""
    task = (given.get("extra") or {}).get("task") or ""
    if known is not None and (known.has_class or task not in PIPELINE_TASKS):
        uri = uri if known.has_class else given["extra"].get("pretrained_model") or uri
        return {
            "runtime": "mlserver",
            "uri": _file(uri, known, path.parent),
            "parameters": {**_own_parameters(fields, path), "library": known.runtime},
        }
    given.pop("version", None)
    parameters = {**given, **(given.pop("extra", None) or {})}
    parameters.pop("extra", None)
    settings = {
        "uri": _file(uri, known, path.parent),
        "parameters": {k: v for k, v in parameters.items() if v is not None},
        "inputs": [_tensor_table(t) for t in fields.get("inputs") or []],
        "outputs": [_tensor_table(t) for t in fields.get("outputs") or []],
    }
    return settings | ({"runtime": known.runtime} if known else {})


def known_implementation(named: str) -> KnownImplementation | None:
    """Return our runtime for an implementation of MLServer, also by its full module path; None for any other class."""
    return RUNTIMES.get(f"{named.partition('.')[0]}.{named.rpartition('.')[2]}")


def unsupported_reason(named: str) -> str:
    """Return why an implementation of MLServer is not supported, and the alternative; "" for any other."""
    return UNSUPPORTED.get(named.partition(".")[0].replace("-", "_"), "")


def file_of(named: str, folder: Path) -> Path | None:
    """Return the file in a model's folder that defines a class; None if there is none."""
    module = named.rpartition(".")[0].replace(".", "/")
    locations = (folder / f"{module}.py", folder / module / "__init__.py")
    return next((location for location in locations if location.is_file()), None)


def _custom_class(named: str, fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    module, _, name = named.rpartition(".")
    if not module:
        raise InvalidInput(f"{path}: 'implementation': expected module.Class, got '{named}'")
    file = file_of(named, path.parent)
    return {
        "runtime": "mlserver",
        "uri": f"{file}:{name}" if file is not None else f"{module}:{name}",
        "parameters": _own_parameters(fields, path),
    }


def _own_parameters(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    server_name = str(_server_field("server_name", path.parent) or "mlserver")
    return {"model_settings": dict(fields), "source": str(path), "server_name": server_name}


def _file(uri: str, known: KnownImplementation | None, folder: Path) -> str:
    """Return the uri, or if it is a folder the file in it that the MLServer runtime would load."""
    location = folder / uri
    if known is None or not location.is_dir():
        return uri
    return next((str(Path(uri) / name) for name in known.files if (location / name).is_file()), uri)


def _tensor_table(tensor: Any) -> Any:
    """Return the description of a tensor with the content type of its parameters, without the others."""
    if not isinstance(tensor, dict):
        return tensor
    content_type = (tensor.get("parameters") or {}).get("content_type")
    fields = {k: v for k, v in tensor.items() if k != "parameters"}
    return fields | ({"content_type": content_type} if content_type else {})


PREFIX = "MLSERVER_"
_MAX_ABOVE = 3  # folders above that of a model in which settings.json is searched
MODEL_PREFIX = "MLSERVER_MODEL_"


def server_table(given: Mapping[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Return our settings for a folder's settings.json (None if there is none) and environment. Raises InvalidInput."""
    fields = {**server_variables(variables(folder)), **(given or {})}
    report(log, remarks_on(fields, SERVER, folder / "settings.json"))
    result = _client_defaults(folder)
    for name, value in fields.items():
        if (value is None and name != "metrics_endpoint") or name not in SERVER or not SERVER[name].setting:
            continue
        result |= _convert(name, value, folder / "settings.json")
    return result


def _client_defaults(folder: Path) -> dict[str, Any]:
    """Return the settings that clients of MLServer rely on; none for a folder of other models.

    Models get all headers, unless one merges requests: those with headers would not be merged.
    """
    models = [_fields(path) for path in folder.rglob("model-settings.json")]
    if not models:
        return {}
    merges = any(str(fields.get("max_batch_size") or 0) not in ("0", "1") for fields in models)
    return {
        "responses_as": "mlserver",
        "grpc_output_contents": "as-request",
        **({} if merges else {"forward_headers": "*"}),
    }


def _fields(path: Path) -> Mapping[str, Any]:
    """Return the fields of a file; none if it is invalid, which is reported when it is used."""
    try:
        fields = read_json(path)
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _server_field(name: str, folder: Path) -> Any:
    """Return a field of the settings.json of a folder or one above it, else of the environment, else None."""
    locations = (folder, *folder.resolve().parents[:_MAX_ABOVE])
    values = (_fields(location / "settings.json").get(name) for location in locations)
    return next((value for value in values if value is not None), server_variables(variables(folder)).get(name))


def _caches(fields: Mapping[str, Any], folder: Path) -> bool:
    """Return whether responses of a model are cached: the server and the model both have `cache_enabled`."""
    return is_true(fields.get("cache_enabled")) and is_true(_server_field("cache_enabled", folder))


def model_table(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return our settings of a model for its model-settings.json and environment. Raises InvalidInput."""
    fields = with_environment(given, path.parent)
    parameters = fields["parameters"]
    report(log, [*remarks_on(fields, MODEL, path), *remarks_on(parameters, PARAMETERS, path, "parameters.")])
    max_batch_size = _number(fields, "max_batch_size", int, path)
    if not max_batch_size and str(fields.get("max_batch_size")) == "0":
        max_batch_size = 1  # 0 means no batching there, and the model's default here
    result: dict[str, Any] = {
        "name": fields.get("name") or "",
        "platform": fields.get("platform") or "",
        "version": str(parameters.get("version") or ""),
        "max_batch_size": max_batch_size,
        "max_batch_wait_s": _number(fields, "max_batch_time", float, path),
        "response_cache_bytes": CACHE_BYTES if _caches(fields, path.parent) else 0,
    }
    if fields.get("parallel_workers") is not None:
        result |= _convert("parallel_workers", fields["parallel_workers"], path)
    result |= implementation(fields, path)
    return {k: v for k, v in result.items() if v}


def environment_paths(environment: Mapping[str, str]) -> list[str]:
    """Return the path of the model, or of the folder of models, in MLServer's variables; none without them.

    `MLSERVER_MODEL_URI` may be a file: its folder is what the variables describe then.
    """
    uri = environment.get(f"{MODEL_PREFIX}URI", "")
    if uri and f"{MODEL_PREFIX}IMPLEMENTATION" in environment and Path(uri).is_file():
        return [str(Path(uri).parent)]
    path = uri or environment.get(f"{PREFIX}MODELS_DIR", "")
    return [path] if path else []


def environment_table(folder: Path) -> dict[str, Any] | None:
    """Return our settings of the model in the environment variables; None if there is none, or a file describes one."""
    if "implementation" not in model_variables(variables(folder)) or any(folder.rglob("model-settings.json")):
        return None
    return model_table({}, folder / "model-settings.json")


_TYPES: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(("inputs", "outputs", "versions"), (list, "a list")),
    **dict.fromkeys(("parameters", "extra"), (dict, "an object")),
    "uri": (str, "text"),
    "version": (str | int | float, "text"),
}


def with_environment(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields of a file with those of the environment that it lacks; `parameters` is always set.

    Raises InvalidInput for a field of the wrong type.
    """
    environment = model_variables(variables(folder))
    _check_types(given, folder)
    parameters = {**(environment.get("parameters") or {}), **(given.get("parameters") or {})}
    _check_types(parameters, folder)
    fields = {**environment, **given, "parameters": parameters}
    _check_types(fields, folder)
    return fields


def _check_types(fields: Mapping[str, Any], folder: Path) -> None:
    for name, value in fields.items():
        kind, text = _TYPES.get(name, (object, ""))
        if value is not None and not isinstance(value, kind):
            raise InvalidInput(f"{folder / 'model-settings.json'}: '{name}': expected {text}, got {value!r:.64}")


def _convert(name: str, value: Any, path: Path) -> dict[str, Any]:
    try:
        return CONVERTERS[name](value) if name in CONVERTERS else {SERVER[name].setting: value}
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{path}: invalid value of '{name}': {value!r}") from error


def _number(fields: Mapping[str, Any], name: str, kind: type[int] | type[float], path: Path) -> float:
    value = fields.get(name)
    if value is None or value == "":
        return 0
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{path}: invalid value of '{name}': {value!r}") from error


# --- environment variables, also those in a `.env` file in the folder of the models ---------------------------


def variables(folder: Path) -> dict[str, str]:
    """Return all `MLSERVER_` variables; the environment takes precedence over the file."""
    values = {**dict(_read_file(folder / ".env")), **os.environ}
    return {key: value for key, value in values.items() if key.startswith(PREFIX)}


def server_variables(values: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of settings.json among the variables."""
    return {name: _value(key, values[key]) for name, key in _keys(PREFIX, SERVER, values)}


def model_variables(values: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of model-settings.json among the variables, with those of its `parameters`."""
    fields = {name: _value(key, values[key]) for name, key in _keys(MODEL_PREFIX, MODEL, values)}
    single = {name: _value(key, values[key]) for name, key in _keys(MODEL_PREFIX, PARAMETERS, values)}
    parameters = {**single, **(fields.get("parameters") or {})}
    return fields | ({"parameters": parameters} if parameters else {})


def _keys(prefix: str, table: Mapping[str, Any], values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, prefix + name.upper()) for name in table if prefix + name.upper() in values)


def _value(key: str, text: str) -> Any:
    """Return the value of a variable: lists and objects are JSON, anything else is text."""
    if not text.strip().startswith(("{", "[")):
        return text
    try:
        return parse_json(text)
    except ValueError as error:
        raise InvalidInput(f"environment variable {key}: expected JSON, got {text!r}: {error}") from error


def _read_file(path: Path) -> Iterator[tuple[str, str]]:
    if not path.is_file():
        return
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    for line in text.splitlines():
        key, separator, value = line.strip().removeprefix("export ").partition("=")
        if separator:
            yield key.strip(), value.strip().strip("'\"")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        settings = read_json(path)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise InvalidInput(f"{path}: expected a JSON object, got {settings!r}")
    return settings


def _folder_model_table(folder: Path) -> dict[str, Any] | None:
    path = folder / FILE
    return model_table(_read_json(path), path) if path.is_file() else None


def _folder_server_table(folder: Path) -> tuple[str, dict[str, Any]]:
    path = folder / "settings.json"
    return str(path), server_table(_read_json(path) if path.is_file() else None, folder)


MODEL_FILES = ModelFiles(
    file=FILE,
    model_table=_folder_model_table,
    environment_table=environment_table,
    server_table=_folder_server_table,
    environment_paths=environment_paths,
    is_nested=True,
    dialect=DIALECT,
)
