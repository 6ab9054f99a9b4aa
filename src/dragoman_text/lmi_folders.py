"""Convert serving.properties and the environment variables of LMI containers to our settings."""

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dragoman.core.errors import InvalidInput
from dragoman.core.model_files import ModelFiles
from dragoman.core.remarks import Field, Remark, field_remarks, report

log = logging.getLogger("dragoman.compat")

FILE = "serving.properties"
_OPTION = "OPTION_"
_SERVER = "SERVING_"
_VARIABLES: Mapping[str, str] = {
    "HF_MODEL_ID": "option.model_id",
    "HF_REVISION": "option.revision",
    "HF_MODEL_TRUST_REMOTE_CODE": "option.trust_remote_code",
    "TENSOR_PARALLEL_DEGREE": "option.tensor_parallel_degree",
    "MAX_CONCURRENT_REQUESTS": "job_queue_size",
}
_ENGINES = "Dragoman has its own engine; choose another one with `runtime`: see the page on text generation"
_ONE_DEVICE = "a model runs on one device: choose it with parameters.device"
_STATIC = "requests with lists of inputs are not merged into batches"

_LMI_FLAGS = ("bedrock_compat", "enable_streaming", "infer_do_sample", "tgi_compat")
_SAME = ("dtype", "input_formatter", "max_model_len", "max_rolling_batch_size", "output_formatter", "predict_timeout")

# Support of each property. `_CONVERTERS` converts those that are supported.
PROPERTIES: Mapping[str, Field] = {
    **{f"option.{name}": Field("same") for name in (*_LMI_FLAGS, *_SAME)},
    "job_queue_size": Field("same"),
    "option.model_id": Field("different", "a folder on this machine; models are not downloaded", "uri"),
    "option.rolling_batch": Field(
        "different",
        "'disable' selects the dynamic-batch schema, 'vllm' uses vLLM if it is installed, others use Dragoman's engine",
    ),
    "engine": Field("unused", _ENGINES),
    "option.entrypoint": Field("unused", _ENGINES),
    "option.task": Field("missing", "the task is recognized from the files of the model", "", "text-generation"),
    "option.revision": Field("unused", "models are not downloaded"),
    "option.trust_remote_code": Field("missing", "code of the model is not executed", "", "false"),
    "option.tensor_parallel_degree": Field("missing", _ONE_DEVICE, "", "1"),
    "option.pipeline_parallel_degree": Field("missing", _ONE_DEVICE, "", "1"),
    "option.device_map": Field("unused", _ONE_DEVICE),
    "option.quantize": Field(
        "missing",
        "weights quantized by AWQ or GPTQ are recognized by their config.json; others are quantized at load by "
        "parameters.quantization, 'int8' or 'int4'",
    ),
    "option.enable_lora": Field("unused", "adapters are found in the folder of the model"),
    "option.model_loading_timeout": Field("unused", "models may take ten minutes to load"),
    "option.parallel_loading": Field("unused", "models are loaded concurrently"),
    "option.max_rolling_batch_prefill_tokens": Field("unused", "see parameters.prefill_chunk"),
    "load_on_devices": Field("unused", _ONE_DEVICE),
    "batch_size": Field("unused", _STATIC),
    "max_batch_delay": Field("unused", _STATIC),
    "max_idle_time": Field("unused", "models stay loaded until they are unloaded over the API"),
    "minworkers": Field("unused", "one engine serves all requests concurrently"),
    "maxworkers": Field("unused", "one engine serves all requests concurrently"),
}

# Runtime and required package of engines other than our own.
_ENGINE_RUNTIMES = {"vllm": ("vllm", "vllm"), "openvino": ("openvino_genai", "openvino_genai")}
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def _model(value: str, folder: Path) -> dict[str, Any]:
    location = (folder / value).expanduser()
    if "://" in value or not location.exists():
        raise InvalidInput(
            f"{folder / FILE}: option.model_id: folder '{value}' not found; models are not downloaded: copy the model "
            "beside the file and give its folder"
        )
    return {"uri": str(location.resolve())}


def _formatter(name: str) -> Callable[[str, Path], dict[str, Any]]:
    """Return a converter for the name of a formatter; the module of a custom one is beside the properties."""

    def convert(value: str, folder: Path) -> dict[str, Any]:
        custom = {"formatter_folder": str(folder.resolve())} if ":" in value else {}
        return {"protocols": {"lmi": {name: value, **custom}}}

    return convert


def _flag(name: str) -> Callable[[str, Path], dict[str, Any]]:
    words = {"true": True, "false": False, "1": True, "0": False}
    return lambda value, _: {"protocols": {"lmi": {name: words[value.strip().lower()]}}}


def _parameter(name: str, parse: Callable[[str], Any]) -> Callable[[str, Path], dict[str, Any]]:
    return lambda value, _: {"parameters": {name: parse(value)}}


def _rolling_batch(value: str, _: Path) -> dict[str, Any]:
    """Return the runtime of the engine if its package is installed; else Dragoman's engine is used."""
    runtime, package = _ENGINE_RUNTIMES.get(value.strip().lower(), ("", ""))
    chosen = {"runtime": runtime} if runtime and importlib.util.find_spec(package) is not None else {}
    return {"protocols": {"lmi": {"rolling_batch": value}}, **chosen}


_CONVERTERS: Mapping[str, Callable[[str, Path], dict[str, Any]]] = {
    "option.model_id": _model,
    "option.dtype": _parameter("dtype", lambda value: _DTYPES.get(value, value)),
    "option.max_rolling_batch_size": _parameter("max_batch", int),
    "option.max_model_len": _parameter("max_context", int),
    "option.output_formatter": _formatter("output_formatter"),
    "option.input_formatter": _formatter("input_formatter"),
    "option.rolling_batch": _rolling_batch,
    **{f"option.{name}": _flag(name) for name in _LMI_FLAGS},
    "option.predict_timeout": lambda value, _: {"timeout_s": float(value)},
    "job_queue_size": lambda value, _: {"max_queue": int(value)},
}


def model_table(folder: Path) -> dict[str, Any] | None:
    """Return our settings of the model for a folder's serving.properties and environment; None without such a file.

    Raises InvalidInput naming a property with an invalid value.
    """
    path = folder / FILE
    return _table({**_options(os.environ), **_parse(path)}, folder) if path.is_file() else None


def environment_table(folder: Path) -> dict[str, Any] | None:
    """Return our settings of the model that only the environment describes; None if there is none."""
    given = _options(os.environ)
    is_model = "option.model_id" in given or (folder / "config.json").is_file()
    return _table(given, folder) if given and is_model and not (folder / FILE).is_file() else None


def server_table(_folder: Path) -> tuple[str, dict[str, Any]]:
    """Return our settings of the server for the `SERVING_` variables. Raises InvalidInput."""
    table: dict[str, Any] = {}
    for name, value in os.environ.items():
        if name.startswith(_SERVER) and (read := _SERVER_VARIABLES.get(name.removeprefix(_SERVER).lower())):
            try:
                _add(table, read(value))
            except ValueError as error:
                raise InvalidInput(f"invalid value of environment variable {name}: {value!r}") from error
    return "environment", table


def _address(value: str) -> dict[str, Any]:
    parts = urlsplit(value)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(value)
    return {"host": parts.hostname, "http_port": parts.port or 8080}


_CODES = ("bad_request", "wlm_error", "throttle_error", "timeout", "server_error")


def _code(name: str) -> Callable[[str], dict[str, Any]]:
    return lambda value: {"lmi_http_codes": f"{name}={int(value)}"}


_SERVER_VARIABLES: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "inference_address": _address,
    "max_request_size": lambda value: {"max_body_bytes": int(value)},
    "job_queue_size": lambda value: {"max_queue": int(value)},
    "predict_timeout": lambda value: {"timeout_s": float(value)},
    **{f"{name}_http_code": _code(name) for name in _CODES},
}


def _add(table: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add settings; status codes of several variables are joined in one of them."""
    for name, value in more.items():
        table[name] = f"{table[name]},{value}" if name == "lmi_http_codes" and name in table else value


# --- parsing -------------------------------------------------------------------------------------------------


def survey(path: Path) -> list[Remark]:
    """Return the support of each property in the files below a folder."""
    remarks: list[Remark] = []
    for file in sorted(path.rglob(FILE)) if path.is_dir() else ():
        location = str(file.relative_to(path))
        try:
            remarks += field_remarks(_parse(file), PROPERTIES, location)
        except InvalidInput as error:
            remarks.append(Remark(location, "properties", "rejected", error.message))
    return remarks


def _options(environment: Mapping[str, str]) -> dict[str, str]:
    options = {name: environment[key] for key, name in _VARIABLES.items() if environment.get(key)}
    for key, value in environment.items():
        if key.startswith(_OPTION):
            options[f"option.{key.removeprefix(_OPTION).lower()}"] = value
    return options


def _parse(path: Path) -> dict[str, str]:
    """Parse a Java properties file: `name=value` or `name: value`; comments begin with # or !."""
    properties = {}
    for line in path.read_text().splitlines():
        text = line.strip()
        if not text or text[0] in "#!":
            continue
        at = min((i for i in (text.find("="), text.find(":")) if i >= 0), default=-1)
        if at < 0:
            raise InvalidInput(f"{path}: expected lines of name=value, got {text[:80]!r}")
        properties[text[:at].strip().lower()] = text[at + 1 :].strip()
    return properties


def _table(given: Mapping[str, str], folder: Path) -> dict[str, Any]:
    report(log, field_remarks(given, PROPERTIES, folder / FILE))
    result: dict[str, Any] = {}
    for name, value in given.items():
        if value and name in _CONVERTERS:
            try:
                _merge(result, _CONVERTERS[name](value, folder))
            except (ValueError, KeyError) as error:
                raise InvalidInput(f"{folder / FILE}: invalid value of '{name}': {value!r}") from error
    return result


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, Mapping):
            _merge(into.setdefault(name, {}), value)
        else:
            into[name] = value


MODEL_FILES = ModelFiles(
    file=FILE, model_table=model_table, environment_table=environment_table, server_table=server_table
)
