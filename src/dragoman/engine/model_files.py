"""What files beside a model say of it: `model-settings.json`, and `dragoman.toml` with its tables."""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from dragoman.compat import files, serving
from dragoman.core.datatypes import datatype
from dragoman.core.errors import InvalidInput
from dragoman.core.options import Option, options, suggestion
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.settings import SETTINGS


@dataclass(frozen=True, kw_only=True)
class _ModelTable(ModelSpec):
    """Keys of `[model]` and `[models.NAME]`: the options of a version, and those that choose versions."""

    version_policy: Annotated[str, SETTINGS["version_policy"]] = SETTINGS["version_policy"].default
    default_version: Annotated[str, Option("version for requests that name none; default: the newest")] = ""


MODEL_SETTINGS: Mapping[str, Option] = options(_ModelTable)


_TABLES = ("server", "model", "models")


def model_settings(folder: Path) -> dict[str, Any] | None:
    """What the files in a model's own folder say of it; None where there are none."""
    found: dict[str, Any] = {}
    path = folder / "model-settings.json"
    if path.is_file():
        table: dict[str, Any] = files.model_table(_read_json(path), path)
        found |= checked(table, path)
    lmi = serving.model_table(folder)
    if lmi is not None:
        found |= checked(lmi, folder / "serving.properties")
    toml = _read_toml(folder)
    if "model" in toml:
        found |= checked(toml["model"], folder / "dragoman.toml")
    return found or None


def environment_settings(folder: Path) -> dict[str, Any] | None:
    """What the environment alone says of the one model of a folder, as MLServer and LMI let it; None where it does
    not."""
    for environment_table in (files.environment_table, serving.environment_table):
        table = environment_table(folder)
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
    theirs = files.server_table(given, folder)
    lmi = serving.server_table(os.environ)
    ours = _read_toml(folder).get("server", {})
    return [(str(path), theirs), ("environment", lmi), (f"{folder / 'dragoman.toml'}: [server]", ours)]


def checked(table: Any, path: Path) -> dict[str, Any]:
    """A model's table with its keys and kinds checked and its tensors read; InvalidInput names the file and key."""
    if not isinstance(table, dict):
        raise InvalidInput(f"{path}: expected a table for a model, got {table!r}")
    result = {key: _parse(key, value, path) for key, value in table.items()}
    for name, parameters in result.get("protocols", {}).items():
        if not isinstance(parameters, dict):
            raise InvalidInput(f"{path}: setting 'protocols.{name}': expected a table, got {parameters!r}")
    for key in ("inputs", "outputs"):
        if key in result:
            result[key] = tuple(_tensor(t, f"{path}: setting '{key}'") for t in result[key])
    return result


def _parse(key: str, value: Any, path: Path) -> Any:
    """Return the value of a model setting; raise InvalidInput that names the file and the key."""
    option = MODEL_SETTINGS.get(key)
    if option is None:
        raise InvalidInput(f"{path}: unknown model setting '{key}'{suggestion(key, MODEL_SETTINGS)}")
    if option.operator_only:
        raise InvalidInput(
            f"{path}: setting '{key}' cannot be set in a file beside models; use --{key.replace('_', '-')}"
        )
    try:
        return option.parse(value)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error.message}") from error


def _tensor(given: Any, where: str) -> TensorSpec:
    try:
        name, shape = given["name"], tuple(given["shape"])
        kind = datatype(given["datatype"])
        content_type = given.get("content_type", "")
        whole = isinstance(name, str) and all(isinstance(n, int) and n >= -1 for n in shape)
        whole = whole and isinstance(content_type, str)
    except (TypeError, KeyError, InvalidInput) as error:
        raise InvalidInput(f"{where}: expected name, datatype and shape of a tensor, got {given!r}: {error}") from error
    if not whole:
        raise InvalidInput(f"{where}: expected a name and a shape of integers from -1, got {given!r}")
    return TensorSpec(name, kind, shape, content_type=content_type)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{path}: expected a JSON object, got {found!r}")
    return found


def _read_toml(folder: Path) -> dict[str, Any]:
    path = folder / "dragoman.toml"
    if not path.is_file():
        return {}
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    for name in ("server", "models"):
        if not isinstance(found.get(name, {}), dict):
            raise InvalidInput(f"{path}: expected a table [{name}], got {found[name]!r}")
    for name in found:
        if name not in _TABLES:
            raise InvalidInput(
                f"{path}: unknown table '{name}': expected [server], [model] or [models.NAME]"
                f"{suggestion(name, _TABLES)}"
            )
    return found
