"""What files beside a model say of it: `model-settings.json`, and `dragoman.toml` with its tables."""

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from dragoman import plugins
from dragoman.core.datatypes import datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import PLACEMENTS, WorkingDirectory

# What `[model]` and `[models.NAME]` may say, and the kind of each value.
_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "name": str,
    "version": str,
    "runtime": str,
    "uri": str,
    "platform": str,
    "placement": str,
    "replicas": int,
    "max_batch_size": int,
    "max_batch_wait_s": (int, float),
    "batch_linger": (int, float),
    "max_queue": int,
    "timeout_s": (int, float),
    "cancel_grace_s": (int, float),
    "heartbeat_s": (int, float),
    "working_directory": str,
    "version_policy": str,
    "default_version": str,
    "inputs": list,
    "outputs": list,
    "parameters": dict,
    "protocols": dict,
}

_LEAST: Mapping[str, int] = {
    "replicas": 1,
    "max_batch_size": 0,
    "max_batch_wait_s": 0,
    "batch_linger": 0,
    "max_queue": 0,
    "timeout_s": 0,
    "cancel_grace_s": 0,
    "heartbeat_s": 0,
}

# Settings that are one of some words.
_WORDS: Mapping[str, tuple[str, ...]] = {"placement": PLACEMENTS, "working_directory": get_args(WorkingDirectory)}


def model_settings(folder: Path) -> dict[str, Any] | None:
    """What the files in a model's own folder say of it; None where there are none."""
    found: dict[str, Any] = {}
    path = folder / "model-settings.json"
    if path.is_file():
        table: dict[str, Any] = plugins.resolve("dragoman.compat.files:model_table")(_read_json(path), path)
        found |= checked(table, path)
    serving = plugins.resolve("dragoman.compat.serving:model_table")(folder)
    if serving is not None:
        found |= checked(serving, folder / "serving.properties")
    toml = _read_toml(folder)
    if "model" in toml:
        found |= checked(toml["model"], folder / "dragoman.toml")
    return found or None


def environment_settings(folder: Path) -> dict[str, Any] | None:
    """What the environment alone says of the one model of a folder, as MLServer and LMI let it; None where it does
    not."""
    for compat in ("files", "serving"):
        table = plugins.resolve(f"dragoman.compat.{compat}:environment_table")(folder)
        if table is not None:
            return checked(table, folder)
    return None


def repository_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """What `[models.NAME]` in a repository's `dragoman.toml` says of the models below it, by name."""
    return {n: checked(t, folder / "dragoman.toml") for n, t in _read_toml(folder).get("models", {}).items()}


def server_tables(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The server's settings: in `settings.json`, in LMI's environment variables and in `dragoman.toml`'s `[server]`.

    Each table has where it stands, and a later one goes before an earlier.
    """
    path = folder / "settings.json"
    given = _read_json(path) if path.is_file() else None
    theirs: dict[str, Any] = plugins.resolve("dragoman.compat.files:server_table")(given, folder)
    serving: dict[str, Any] = plugins.resolve("dragoman.compat.serving:server_table")(os.environ)
    ours = _read_toml(folder).get("server", {})
    return [(str(path), theirs), ("environment", serving), (f"{folder / 'dragoman.toml'}: [server]", ours)]


def checked(table: Any, path: Path) -> dict[str, Any]:
    """A model's table with its keys and kinds checked and its tensors read; InvalidInput names the file and key."""
    if not isinstance(table, dict):
        raise InvalidInput(f"{path}: expected a table for a model, got {table!r}")
    result = dict(table)
    if "allow_pickle" in table:
        raise InvalidInput(
            f"{path}: 'allow_pickle' is for whoever starts the server to say (--allow-pickle), not for a file beside "
            "the model"
        )
    for key, value in table.items():
        _check(key, value, path)
    for name, told in result.get("protocols", {}).items():
        if not isinstance(told, dict):
            raise InvalidInput(f"{path}: 'protocols.{name}' expects a table, got {told!r}")
    for key, words in _WORDS.items():
        if key in result and result[key] not in words:
            raise InvalidInput(f"{path}: '{key}' expects one of {', '.join(words)}, got {result[key]!r}")
    for key in ("inputs", "outputs"):
        if key in result:
            result[key] = tuple(_tensor(t, f"{path}: '{key}'") for t in result[key])
    return result


def _check(key: str, value: Any, path: Path) -> None:
    wanted, number = _KEYS.get(key), value
    if wanted is None:
        raise InvalidInput(f"{path}: there is no model setting '{key}'; there are {', '.join(_KEYS)}")
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise InvalidInput(f"{path}: '{key}' has the wrong kind of value: {value!r}")
    if key in _LEAST and not number >= _LEAST[key]:
        raise InvalidInput(f"{path}: '{key}' expects at least {_LEAST[key]}, got {value!r}")


def _tensor(given: Any, where: str) -> TensorSpec:
    try:
        name, shape = given["name"], tuple(given["shape"])
        kind = datatype(given["datatype"])
        content_type = given.get("content_type", "")
        whole = isinstance(name, str) and all(isinstance(n, int) and n >= -1 for n in shape)
        whole = whole and isinstance(content_type, str)
    except (TypeError, KeyError, InvalidInput) as fault:
        raise InvalidInput(f"{where}: expected name, datatype and shape of a tensor, got {given!r}: {fault}") from fault
    if not whole:
        raise InvalidInput(f"{where}: expected a name and a shape of integers from -1, got {given!r}")
    return TensorSpec(name, kind, shape, content_type=content_type)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as fault:
        raise InvalidInput(f"{path} cannot be read: {fault}") from fault
    if not isinstance(found, dict):
        raise InvalidInput(f"{path}: expected a JSON object, got {found!r}")
    return found


def _read_toml(folder: Path) -> dict[str, Any]:
    path = folder / "dragoman.toml"
    if not path.is_file():
        return {}
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as fault:
        raise InvalidInput(f"{path} cannot be read: {fault}") from fault
    for name in ("server", "models"):
        if not isinstance(found.get(name, {}), dict):
            raise InvalidInput(f"{path}: expected a table [{name}], got {found[name]!r}")
    strange = set(found) - {"server", "model", "models"}
    if strange:
        raise InvalidInput(
            f"{path}: there is no table {sorted(strange)}; there are [server], [model] and [models.NAME]"
        )
    return found
