"""Convert settings.json, model-settings.json and the environment variables of MLServer to our settings."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dragoman.compat.fields import CONVERTERS, MODEL, PARAMETERS, SERVER, remarks_on, report
from dragoman.compat.implementations import implementation
from dragoman.core.errors import InvalidInput

PREFIX = "MLSERVER_"
MODEL_PREFIX = "MLSERVER_MODEL_"


def server_table(given: Mapping[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Return our settings for a folder's settings.json (None if there is none) and environment. Raises InvalidInput."""
    fields = {**server_variables(variables(folder)), **(given or {})}
    report(remarks_on(fields, SERVER, folder / "settings.json"))
    result: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None or name not in SERVER or not SERVER[name].setting:
            continue
        result |= _convert(name, value, folder / "settings.json")
    return result


def model_table(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return our settings of a model for its model-settings.json and environment. Raises InvalidInput."""
    fields = with_environment(given, path.parent)
    parameters = fields["parameters"]
    report([*remarks_on(fields, MODEL, path), *remarks_on(parameters, PARAMETERS, path, "parameters.")])
    result: dict[str, Any] = {
        "name": fields.get("name") or "",
        "platform": fields.get("platform") or "",
        "version": str(parameters.get("version") or ""),
        "max_batch_size": _number(fields, "max_batch_size", int, path),
        "max_batch_wait_s": _number(fields, "max_batch_time", float, path),
    }
    if fields.get("parallel_workers") is not None:
        result |= _convert("parallel_workers", fields["parallel_workers"], path)
    result |= implementation(fields, path)
    return {k: v for k, v in result.items() if v}


def environment_table(folder: Path) -> dict[str, Any] | None:
    """Return our settings of the model in the environment variables; None if there is none, or a file describes one."""
    if "implementation" not in model_variables(variables(folder)) or any(folder.rglob("model-settings.json")):
        return None
    return model_table({}, folder / "model-settings.json")


def with_environment(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields of a file with those of the environment that it lacks; `parameters` is always set."""
    environment = model_variables(variables(folder))
    parameters = {**(environment.get("parameters") or {}), **(given.get("parameters") or {})}
    return {**environment, **given, "parameters": parameters}


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
        return json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"environment variable {key}: expected JSON, got {text!r}: {error}") from error


def _read_file(path: Path) -> Iterator[tuple[str, str]]:
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        key, separator, value = line.strip().removeprefix("export ").partition("=")
        if separator and not key.startswith("#"):
            yield key.strip(), value.strip().strip("'\"")
