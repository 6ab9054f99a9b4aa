"""What serving.properties, and the environment of an LMI container, mean as settings of ours."""

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dragoman.compat.fields import Field, Finding, findings, tell
from dragoman.core.errors import InvalidInput

FILE = "serving.properties"
_OPTION = "OPTION_"
_SERVER = "SERVING_"
_NAMED: Mapping[str, str] = {
    "HF_MODEL_ID": "option.model_id",
    "HF_REVISION": "option.revision",
    "HF_MODEL_TRUST_REMOTE_CODE": "option.trust_remote_code",
    "TENSOR_PARALLEL_DEGREE": "option.tensor_parallel_degree",
    "MAX_CONCURRENT_REQUESTS": "job_queue_size",
}
_ENGINES = "the text engine is our own; another one is chosen by `runtime`: see the page on text generation"
_ONE_DEVICE = "a model runs on one device; choose it by parameters.device"
_STATIC = "lists of inputs are answered as lists; there is no batch to size"

# What becomes of each property. Those that are the same are converted by the table below.
PROPERTIES: Mapping[str, Field] = {
    "option.model_id": Field("different", "a folder on this machine; nothing is downloaded", "uri"),
    "option.dtype": Field("same"),
    "option.max_rolling_batch_size": Field("same"),
    "option.max_model_len": Field("same"),
    "option.output_formatter": Field("same"),
    "option.input_formatter": Field("same"),
    "option.tgi_compat": Field("same"),
    "option.enable_streaming": Field("same"),
    "option.infer_do_sample": Field("same"),
    "option.rolling_batch": Field(
        "different",
        "'disable' chooses the dynamic-batch schema, 'vllm' takes vLLM where it is installed; others are our engine",
    ),
    "option.predict_timeout": Field("same"),
    "job_queue_size": Field("same"),
    "engine": Field("unused", _ENGINES),
    "option.entrypoint": Field("unused", _ENGINES),
    "option.task": Field("missing", "what a folder is for follows from its files", "", "text-generation"),
    "option.revision": Field("unused", "nothing is downloaded"),
    "option.trust_remote_code": Field("missing", "no code of a model is run", "", "false"),
    "option.tensor_parallel_degree": Field("missing", _ONE_DEVICE, "", "1"),
    "option.pipeline_parallel_degree": Field("missing", _ONE_DEVICE, "", "1"),
    "option.device_map": Field("unused", _ONE_DEVICE),
    "option.quantize": Field("missing", "weights are run as they lie there"),
    "option.bedrock_compat": Field("same"),
    "option.enable_lora": Field("unused", "adapters are there when the model's folder has some"),
    "option.model_loading_timeout": Field("unused", "a model has ten minutes to load"),
    "option.parallel_loading": Field("unused", "models load side by side"),
    "option.max_rolling_batch_prefill_tokens": Field("unused", "see parameters.prefill_chunk"),
    "load_on_devices": Field("unused", _ONE_DEVICE),
    "batch_size": Field("unused", _STATIC),
    "max_batch_delay": Field("unused", _STATIC),
    "max_idle_time": Field("unused", "models stay until they are unloaded"),
    "minworkers": Field("unused", "one engine works on all requests at the same time"),
    "maxworkers": Field("unused", "one engine works on all requests at the same time"),
}

# Engines other than ours: the runtime, and the package that it needs.
_ROLLING = {"vllm": ("vllm", "vllm"), "openvino": ("openvino_genai", "openvino_genai")}
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def _model(value: str, folder: Path) -> dict[str, Any]:
    place = (folder / value).expanduser()
    if "://" in value or not place.exists():
        raise InvalidInput(
            f"{folder / FILE}: option.model_id: there is no folder '{value}'; nothing is downloaded, so put the model "
            "beside the file and name its folder"
        )
    return {"uri": str(place.resolve())}


def _formatter(name: str) -> Callable[[str, Path], dict[str, Any]]:
    """A formatter; one of the operator's own lies beside the properties, wherever the model is."""

    def read(value: str, folder: Path) -> dict[str, Any]:
        own = {"formatter_folder": str(folder.resolve())} if ":" in value else {}
        return {"protocols": {"lmi": {name: value, **own}}}

    return read


def _flag(value: str, _: Path) -> bool:
    words = {"true": True, "false": False, "1": True, "0": False}
    return words[value.strip().lower()]


def _protocol(name: str, read: Callable[[str, Path], Any]) -> Callable[[str, Path], dict[str, Any]]:
    return lambda value, folder: {"protocols": {"lmi": {name: read(value, folder)}}}


def _parameter(name: str, read: Callable[[str], Any]) -> Callable[[str, Path], dict[str, Any]]:
    return lambda value, _: {"parameters": {name: read(value)}}


def _text(value: str, _: Path) -> str:
    return value


def _rolling(value: str, _: Path) -> dict[str, Any]:
    """Whoever had vLLM chosen, and has it here, goes on with it; the others lose nothing by our own engine."""
    runtime, package = _ROLLING.get(value.strip().lower(), ("", ""))
    chosen = {"runtime": runtime} if runtime and importlib.util.find_spec(package) is not None else {}
    return {"protocols": {"lmi": {"rolling_batch": value}}, **chosen}


_CONVERTED: Mapping[str, Callable[[str, Path], dict[str, Any]]] = {
    "option.model_id": _model,
    "option.dtype": _parameter("dtype", lambda value: _DTYPES.get(value, value)),
    "option.max_rolling_batch_size": _parameter("max_batch", int),
    "option.max_model_len": _parameter("max_context", int),
    "option.output_formatter": _formatter("output_formatter"),
    "option.input_formatter": _formatter("input_formatter"),
    "option.rolling_batch": _rolling,
    "option.tgi_compat": _protocol("tgi_compat", _flag),
    "option.enable_streaming": _protocol("enable_streaming", _flag),
    "option.infer_do_sample": _protocol("infer_do_sample", _flag),
    "option.bedrock_compat": _protocol("bedrock_compat", _flag),
    "option.predict_timeout": lambda value, _: {"timeout_s": float(value)},
    "job_queue_size": lambda value, _: {"max_queue": int(value)},
}


def model_table(folder: Path) -> dict[str, Any] | None:
    """Our fields of the model that a folder's serving.properties describes, the environment behind it; None where it
    has none. Raises InvalidInput naming a property whose value makes no sense."""
    path = folder / FILE
    return _table({**_options(os.environ), **_read(path)}, folder) if path.is_file() else None


def environment_table(folder: Path) -> dict[str, Any] | None:
    """The model that the environment alone describes, where the folder is one model's or it names one; else None."""
    given = _options(os.environ)
    alone = "option.model_id" in given or (folder / "config.json").is_file()
    return _table(given, folder) if given and alone and not (folder / FILE).is_file() else None


def server_table(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings of the server among the environment's SERVING_ variables."""
    found: dict[str, Any] = {}
    for name, value in environment.items():
        if name.startswith(_SERVER) and (read := _SERVER_VARIABLES.get(name.removeprefix(_SERVER).lower())):
            try:
                _add(found, read(value))
            except ValueError as fault:
                raise InvalidInput(f"environment variable {name} has the wrong kind of value: {value!r}") from fault
    return found


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


def _add(found: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Further settings; several statuses make up one of them."""
    for name, value in more.items():
        found[name] = f"{found[name]},{value}" if name == "lmi_http_codes" and name in found else value


# -----------------------------------------------------------------------------------------------------------


def told(path: Path) -> list[Finding]:
    """What becomes of each property in a serving.properties."""
    return list(findings(_read(path), PROPERTIES))


def _options(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: environment[key] for key, name in _NAMED.items() if environment.get(key)}
    for key, value in environment.items():
        if key.startswith(_OPTION):
            found[f"option.{key.removeprefix(_OPTION).lower()}"] = value
    return found


def _read(path: Path) -> dict[str, str]:
    """A Java properties file: `name=value` or `name: value`; a comment begins with # or !."""
    found = {}
    for line in path.read_text().splitlines():
        text = line.strip()
        if not text or text[0] in "#!":
            continue
        at = min((i for i in (text.find("="), text.find(":")) if i >= 0), default=-1)
        if at < 0:
            raise InvalidInput(f"{path}: expected lines of name=value, got {text[:80]!r}")
        found[text[:at].strip().lower()] = text[at + 1 :].strip()
    return found


def _table(given: Mapping[str, str], folder: Path) -> dict[str, Any]:
    tell(findings(given, PROPERTIES), folder / FILE)
    result: dict[str, Any] = {}
    for name, value in given.items():
        if value and name in _CONVERTED:
            try:
                _merge(result, _CONVERTED[name](value, folder))
            except (ValueError, KeyError) as fault:
                raise InvalidInput(f"{folder / FILE}: '{name}' has the wrong kind of value: {value!r}") from fault
    return result


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, Mapping):
            _merge(into.setdefault(name, {}), value)
        else:
            into[name] = value
