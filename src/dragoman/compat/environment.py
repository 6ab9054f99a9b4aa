"""Environment variables of MLServer, also those in a `.env` file in the folder of the models."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dragoman.compat.fields import MODEL, PARAMETERS, SERVER
from dragoman.core.errors import InvalidInput

PREFIX = "MLSERVER_"
MODEL_PREFIX = "MLSERVER_MODEL_"


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
