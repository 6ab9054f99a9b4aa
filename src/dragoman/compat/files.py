"""Convert settings.json and model-settings.json, with environment variables, to our settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman.compat.environment import model_variables, server_variables, variables
from dragoman.compat.fields import CONVERTERS, MODEL, PARAMETERS, SERVER, findings, report
from dragoman.compat.implementations import implementation
from dragoman.core.errors import InvalidInput


def server_table(given: Mapping[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Return our settings for a folder's settings.json (None if there is none) and environment. Raises InvalidInput."""
    fields = {**server_variables(variables(folder)), **(given or {})}
    report(findings(fields, SERVER), folder / "settings.json")
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
    report([*findings(fields, MODEL), *findings(parameters, PARAMETERS, "parameters.")], path)
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
