"""The environment variables of MLServer, and those in a `.env` file beside the models."""

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
    """Every variable of theirs; the environment goes before the file."""
    found = {**dict(_from_file(folder / ".env")), **os.environ}
    return {key: value for key, value in found.items() if key.startswith(PREFIX)}


def server_variables(given: Mapping[str, str]) -> dict[str, Any]:
    """The fields of settings.json among them."""
    return {name: _value(key, given[key]) for name, key in _keys(PREFIX, SERVER, given)}


def model_variables(given: Mapping[str, str]) -> dict[str, Any]:
    """The fields of model-settings.json among them, those of its `parameters` included."""
    found = {name: _value(key, given[key]) for name, key in _keys(MODEL_PREFIX, MODEL, given)}
    own = {name: _value(key, given[key]) for name, key in _keys(MODEL_PREFIX, PARAMETERS, given)}
    parameters = {**own, **(found.get("parameters") or {})}
    return found | ({"parameters": parameters} if parameters else {})


def _keys(prefix: str, table: Mapping[str, Any], given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, prefix + name.upper()) for name in table if prefix + name.upper() in given)


def _value(key: str, text: str) -> Any:
    """Lists and objects are written as JSON; anything else stays text."""
    if not text.strip().startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except ValueError as fault:
        raise InvalidInput(f"environment variable {key}: expected JSON, got {text!r}: {fault}") from fault


def _from_file(path: Path) -> Iterator[tuple[str, str]]:
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        key, separator, value = line.strip().removeprefix("export ").partition("=")
        if separator and not key.startswith("#"):
            yield key.strip(), value.strip().strip("'\"")
