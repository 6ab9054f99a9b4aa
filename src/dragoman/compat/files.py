"""What settings.json and model-settings.json, with the environment, mean as settings of ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman.compat.environment import model_variables, server_variables, variables
from dragoman.compat.fields import CONVERTED, MODEL, PARAMETERS, SERVER, findings, tell
from dragoman.compat.implementations import implementation
from dragoman.core.errors import InvalidInput


def server_table(given: Mapping[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Our settings in a folder's settings.json (None: it has none) and environment; InvalidInput refuses a field."""
    found = {**server_variables(variables(folder)), **(given or {})}
    tell(findings(found, SERVER), folder / "settings.json")
    result: dict[str, Any] = {}
    for name, value in found.items():
        if value is None or name not in SERVER or not SERVER[name].setting:
            continue
        result |= _converted(name, value, folder / "settings.json")
    return result


def model_table(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Our fields of a model in its model-settings.json and environment; InvalidInput refuses a field."""
    whole = with_environment(given, path.parent)
    parameters = whole["parameters"]
    tell([*findings(whole, MODEL), *findings(parameters, PARAMETERS, "parameters.")], path)
    found: dict[str, Any] = {
        "name": whole.get("name") or "",
        "platform": whole.get("platform") or "",
        "version": str(parameters.get("version") or ""),
        "max_batch_size": _number(whole.get("max_batch_size"), int, f"{path}: 'max_batch_size'"),
        "max_batch_wait_s": _number(whole.get("max_batch_time"), float, f"{path}: 'max_batch_time'"),
    }
    if whole.get("parallel_workers") is not None:
        found |= _converted("parallel_workers", whole["parallel_workers"], path)
    found |= implementation(whole, path)
    return {k: v for k, v in found.items() if v}


def environment_table(folder: Path) -> dict[str, Any] | None:
    """The model that the environment alone describes, where no file in the folder describes one."""
    if "implementation" not in model_variables(variables(folder)) or any(folder.rglob("model-settings.json")):
        return None
    return model_table({}, folder / "model-settings.json")


def with_environment(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What a file says, and of what it does not say, what the environment says; `parameters` is always there."""
    environment = model_variables(variables(folder))
    parameters = {**(environment.get("parameters") or {}), **(given.get("parameters") or {})}
    return {**environment, **given, "parameters": parameters}


def _converted(name: str, value: Any, path: Path) -> dict[str, Any]:
    try:
        return CONVERTED[name](value) if name in CONVERTED else {SERVER[name].setting: value}
    except (TypeError, ValueError) as fault:
        raise InvalidInput(f"{path}: '{name}' has the wrong kind of value: {value!r}") from fault


def _number(value: Any, kind: type[int] | type[float], where: str) -> float:
    if value is None or value == "":
        return 0
    try:
        return kind(value)
    except (TypeError, ValueError) as fault:
        raise InvalidInput(f"{where} has the wrong kind of value: {value!r}") from fault
