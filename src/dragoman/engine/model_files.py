"""Settings in files next to models: `dragoman.toml`, and those of other servers that features read."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from dragoman import hooks
from dragoman.core.datatypes import datatype
from dragoman.core.dialect import OWN, Dialect
from dragoman.core.documents import parse_toml
from dragoman.core.errors import InvalidInput
from dragoman.core.model_files import ModelFiles
from dragoman.core.options import Option, current_name, options, suggestion
from dragoman.core.schedule import QueueLimits, ScheduleOptions
from dragoman.core.sequences import SequenceOptions
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import LaunchOptions, ModelSpec
from dragoman.engine.version_routing import parse_weights
from dragoman.settings import SETTINGS

log = logging.getLogger("dragoman.server")


@dataclass(frozen=True, kw_only=True)
class _ModelTable(ModelSpec):
    """Keys of `[model]` and `[models.NAME]`: the options of a version, and those that select versions."""

    version_policy: Annotated[str, SETTINGS["version_policy"]] = SETTINGS["version_policy"].default
    default_version: Annotated[str, Option("version for requests that name none; default: the newest")] = ""
    version_weights: Annotated[
        Mapping[str, float],
        Option('shares of the requests that name no version, by version (canary), e.g. { "1" = 90, "2" = 10 }'),
    ] = field(default_factory=dict)


MODEL_SETTINGS: Mapping[str, Option] = options(_ModelTable)
_REPLICAS = options(LaunchOptions)["replicas"]
_TABLES = ("server", "model", "models")


def _kinds() -> Mapping[str, ModelFiles]:
    return hooks.all_of("model_files")


def response_dialect(name: str) -> Dialect:
    """Return the dialect of the setting `responses_as`: ours for "", else that of the model files of that name."""
    if not name:
        return OWN
    dialects = {kind_name: kind.dialect for kind_name, kind in _kinds().items() if kind.dialect is not None}
    if name not in dialects:
        raise InvalidInput(f"setting 'responses_as': expected one of {', '.join(dialects) or 'none'}, got '{name}'")
    return dialects[name]


def model_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings in the files of a model's folder, None if there are none. Raises InvalidInput."""
    settings: dict[str, Any] = {}
    for kind in _kinds().values():
        table = kind.model_table(folder)
        if table is not None:
            own = {} if kind.dialect is None else {"dialect": kind.dialect}
            settings |= {**_parse_table(table, folder / kind.file), **own}
    toml = _read_toml(folder)
    if "model" in toml:
        settings |= _parse_table(toml["model"], folder / "dragoman.toml")
    return settings or None


def has_models_below(folder: Path) -> bool:
    """Return whether folders below that of a model may hold further models, because of its settings file."""
    return any(kind.is_nested and (folder / kind.file).is_file() for kind in _kinds().values())


def environment_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the one model of a folder in environment variables of another server, None if none."""
    for kind in _kinds().values():
        table = kind.environment_table(folder)
        if table is not None:
            return {**_parse_table(table, folder), "dialect": kind.dialect}
    return None


def environment_paths(environment: Mapping[str, str]) -> list[str]:
    """Return the paths to serve that environment variables of another server name, none without them."""
    return next((paths for kind in _kinds().values() if (paths := kind.environment_paths(environment))), [])


def repository_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the settings in the tables `[models.NAME]` of a repository's `dragoman.toml`, by model name."""
    return {n: _parse_table(t, folder / "dragoman.toml") for n, t in _read_toml(folder).get("models", {}).items()}


def server_tables(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the server's settings with their origin; later tables take precedence, `dragoman.toml` is the last."""
    own = _read_toml(folder).get("server", {})
    return [*(kind.server_table(folder) for kind in _kinds().values()), (f"{folder / 'dragoman.toml'}: [server]", own)]


def _parse_table(table: Any, path: Path) -> dict[str, Any]:
    """Return the settings of a model. Raises InvalidInput that names the file and the key."""
    if not isinstance(table, dict):
        raise InvalidInput(f"{path}: expected a table for a model, got {table!r}")
    settings: dict[str, Any] = {}
    for key, value in table.items():
        name = current_name(key, table, lambda text: log.warning("%s: %s", path, text))
        settings |= _parse_setting(name, value, path)
    for name, parameters in settings.get("protocols", {}).items():
        if not isinstance(parameters, dict):
            raise InvalidInput(f"{path}: setting 'protocols.{name}': expected a table, got {parameters!r}")
    if "version_weights" in settings:
        parse_weights(settings["version_weights"], f"{path}: setting 'version_weights'")
    folder = path if path.is_dir() else path.parent
    if settings.get("warmup"):
        settings["warmup"] = str(folder / settings["warmup"])
    for output, file in settings.get("labels", {}).items():
        if not isinstance(file, str):
            raise InvalidInput(f"{path}: setting 'labels.{output}': expected the name of a file, got {file!r}")
        settings["labels"] = {**settings["labels"], output: str(folder / file)}
    for key in ("inputs", "outputs"):
        if key in settings:
            settings[key] = tuple(_parse_tensor(t, f"{path}: setting '{key}'") for t in settings[key])
    return settings


def _parse_setting(key: str, value: Any, path: Path) -> dict[str, Any]:
    """Return the setting of a key, or those that the table `[model.placement]` stands for. Raises InvalidInput."""
    if key == "placement" and isinstance(value, dict):
        return _parse_launch(value, path)
    if key == "sequences":
        return {key: SequenceOptions(**_parse_options(SequenceOptions, key, value, path))}
    if key == "schedule":
        return {key: _parse_schedule(value, path)}
    return {key: _parse(key, value, path)}


def _parse_schedule(table: Any, path: Path) -> ScheduleOptions:
    schedule = ScheduleOptions(**_parse_options(ScheduleOptions, "schedule", table, path))
    for level, limits in schedule.levels.items():
        if not level.isdecimal() or str(int(level)) != level or not 1 <= int(level) <= schedule.priority_levels:
            expected = f"expected a level from 1 to priority_levels = {schedule.priority_levels}"
            raise InvalidInput(f"{path}: setting 'schedule.levels.{level}': {expected}")
        _parse_options(QueueLimits, f"schedule.levels.{level}", limits, path)
    return schedule


def _parse_launch(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings that the table `[model.placement]` stands for. Raises InvalidInput."""
    values: dict[str, Any] = {}
    if "replicas" in table:
        try:
            values["min_replicas"], replicas = _parse_range(table["replicas"])
        except InvalidInput as error:
            raise InvalidInput(f"{path}: [placement] {error.message}") from error
        table = {**table, "replicas": replicas}
    values |= _parse_options(LaunchOptions, "placement", table, path)
    fewest = values.get("min_replicas", 1)
    if values.get("script"):
        values["script"] = str((path if path.is_dir() else path.parent) / values["script"])
    launch = LaunchOptions(**{"min_ready": min(1, fewest), **values, "devices": _device_names(values, path)})
    if launch.sends_files and launch.launcher == "local":
        raise InvalidInput(
            f"{path}: setting 'placement.files': expected shared with launcher 'local', whose workers run on this "
            "machine, got 'send'"
        )
    if launch.min_ready > fewest:
        raise InvalidInput(
            f"{path}: setting 'placement.min_ready': expected at most the fewest replicas, {fewest}, "
            f"got {launch.min_ready}"
        )
    return {"placement": "process", "replicas": launch.replicas, "launch": launch}


def _parse_range(value: Any) -> tuple[int, Any]:
    """Return the fewest and the most replicas of a number or a range such as `0..16`. Raises InvalidInput."""
    fewest, separator, most = str(value).partition("..")
    if not separator:
        return _REPLICAS.parse(value), value
    try:
        lower, upper = int(fewest), int(most)
    except ValueError:
        lower, upper = 1, 0
    if not 0 <= lower <= upper or not upper:
        raise InvalidInput(f"setting 'replicas': expected a number or a range such as 0..16, got {value!r}")
    return lower, upper


def _device_names(values: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Return the GPUs of `placement.devices`. Raises InvalidInput unless each local worker has one."""
    devices = tuple(map(str, values.get("devices", ())))
    launcher, replicas = values.get("launcher", "local"), values.get("replicas", 1)
    if devices and launcher != "local":
        raise InvalidInput(f"{path}: setting 'placement.devices': expected launcher 'local', got '{launcher}'")
    if devices and len(devices) < replicas:
        raise InvalidInput(
            f"{path}: setting 'placement.devices': expected a device for each of {replicas} replicas, got "
            f"{len(devices)}: repeat one that several share"
        )
    return devices


def _parse_options(kind: type, name: str, table: Any, path: Path) -> dict[str, Any]:
    """Return the options of a table within that of a model, by name. Raises InvalidInput."""
    if not isinstance(table, dict):
        raise InvalidInput(f"{path}: setting '{name}': expected a table, got {table!r}")
    known = options(kind)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise InvalidInput(f"{path}: unknown setting '{name}.{key}'{suggestion(key, known)}")
        try:
            values[key] = known[key].parse(value)
        except InvalidInput as error:
            raise InvalidInput(f"{path}: [{name}] {error.message}") from error
    return values


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


def _parse_tensor(value: Any, origin: str) -> TensorSpec:
    try:
        name, shape = value["name"], tuple(value["shape"])
        tensor_datatype = datatype(value["datatype"])
        content_type = value.get("content_type", "")
        is_valid = isinstance(name, str) and all(isinstance(n, int) and n >= -1 for n in shape)
    except (TypeError, KeyError, InvalidInput) as error:
        raise InvalidInput(
            f"{origin}: expected name, datatype and shape of a tensor, got {value!r}: {error}"
        ) from error
    if not is_valid or not isinstance(content_type, str):
        raise InvalidInput(f"{origin}: expected a name and a shape of integers from -1, got {value!r}")
    return TensorSpec(name, tensor_datatype, shape, content_type=content_type)


def _read_toml(folder: Path) -> dict[str, Any]:
    path = folder / "dragoman.toml"
    if not path.is_file():
        return {}
    try:
        tables = parse_toml(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    for name in ("server", "models"):
        if not isinstance(tables.get(name, {}), dict):
            raise InvalidInput(f"{path}: expected a table [{name}], got {tables[name]!r}")
    for name in tables:
        if name not in _TABLES:
            raise InvalidInput(
                f"{path}: unknown table '{name}': expected [server], [model] or [models.NAME]"
                f"{suggestion(name, _TABLES)}"
            )
    return tables
