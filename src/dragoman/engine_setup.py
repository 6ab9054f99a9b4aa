"""Engine of paths and Python objects, with the settings in files beside models."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from dragoman import plugins
from dragoman.core import audit
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.model_digests import read_digests
from dragoman.core.options import RENAMED, SECRET_SOURCES, secrets_in_files, split_list
from dragoman.core.spec import ModelSpec, check_name
from dragoman.core.state_store import StateStore
from dragoman.core.usage import HOOK, MakeMeter, UsageMeter
from dragoman.core.vectors import find_vector_function
from dragoman.engine.engine import Engine, ServerIdentity
from dragoman.engine.folder_watch import check_watch
from dragoman.engine.model_files import environment_paths, response_dialect, server_tables
from dragoman.engine.on_demand import load_limits
from dragoman.engine.repository import DiskRepository
from dragoman.engine.saved_weights import SavedWeights
from dragoman.protocols.open_inference.extensions import extensions
from dragoman.runtimes.files import preflight_check
from dragoman.server_transports import check_settings
from dragoman.settings import PREFIX, SETTINGS, Settings, from_environment, parse_settings
from dragoman.settings_arguments import SettingsArguments

log = logging.getLogger("dragoman.server")


def make_engine(paths: Sequence[str], objects: Sequence[ModelSpec], settings: Settings, **defaults: Any) -> Engine:
    """Return an engine for models on disk and for Python objects, without transports; `defaults`: further fields of
    each ModelSpec.
    """
    if settings.watch:
        check_watch(paths)
    if settings.model_digests:
        read_digests(settings.model_digests)  # reports an invalid list at once
    folders = split_list(settings.model_folders)
    repository = DiskRepository(
        paths,
        {**settings.model_defaults(), **defaults},
        settings.version_policy,
        objects,
        folders,
        model_name=settings.model_name,
        may_be_empty=settings.watch or not settings.load_at_start,
    )
    sources = repository.scan()
    for skipped in repository.skipped:
        log.info("not served: file=%s reason=%s", skipped.file, skipped.reason)
    for source in sources.values():
        source.specs()  # reports invalid settings before a model is loaded
    if not sources and not (settings.can_add_models or settings.watch) and (settings.load_at_start or not paths):
        raise InvalidInput("nothing to serve; expected model files, folders, module:object or Python objects")
    is_guarded = settings.needs_keys or settings.control_loopback
    store = StateStore(settings.state)
    return Engine(
        repository,
        ServerIdentity(
            name=settings.server_name,
            extensions=extensions(has_control=settings.allows_control, has_shared_memory=settings.shared_memory),
            # With these settings, the transports admit only callers with the role admin to model control.
            control_token="" if is_guarded else settings.control_token,
            control_open=settings.control_open or is_guarded,
            has_open_reasons=settings.control_open or settings.needs_keys,
            default_model=settings.default_model,
            load_at_start=settings.load_at_start and bool(sources),
            loads_new_models=settings.load_at_start,
            dialect=response_dialect(settings.responses_as),
        ),
        sources,
        watch_quiet_s=settings.watch_quiet_s if settings.watch else None,
        on_demand=load_limits(settings),
        max_records=settings.max_stored_responses,
        saved_weights=SavedWeights(settings.version_weights_file, store),
        store=store,
        meter=_meter(store) if settings.needs_keys else None,
        audit=make_audit_writer(settings),
    )


def make_audit_writer(settings: Settings) -> audit.AuditWriter | None:
    """Return what keeps the audit log, None if it is off. Raises InvalidInput if the file cannot be used."""
    if not settings.audit_log:
        if settings.audit_log_required:
            raise InvalidInput("setting 'audit_log_required' needs 'audit_log', the file")
        return None
    if not plugins.has(*audit.HOOK):
        raise InvalidInput("setting 'audit_log': the feature dragoman_audit is not installed")
    writer: audit.AuditWriter = plugins.find(*audit.HOOK)(settings.audit_log, is_required=settings.audit_log_required)
    return writer


def _meter(store: StateStore) -> UsageMeter | None:
    """Return what counts the usage of keys, with what it has counted before; None if that feature is not installed."""
    if not plugins.has(*HOOK):
        return None
    make: MakeMeter = plugins.find(*HOOK)
    return make(store.table("usage"))


def load_errors(path: str, environment: Mapping[str, Any], names: list[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield the subject and the error of everything in a path that cannot be served, without loading models.

    names: gets the names of the other models.
    """
    settings = Settings()
    try:
        settings = settings_for([path], environment)
        check_settings(settings)
    except DragomanError as error:
        yield "settings", error.message
    yield from model_errors([path], settings, names)


def setting_errors(
    paths: Sequence[str], environment: Mapping[str, str], flags: Mapping[str, Any]
) -> tuple[list[str], Settings]:
    """Return every error in settings of files, environment variables and flags, and the settings without those."""
    errors: list[str] = []
    layers: list[Mapping[str, Any]] = []
    for path in map(Path, paths):
        try:
            tables = _server_tables(path)
        except InvalidInput as error:
            errors.append(error.message)
            continue
        for file, table in tables:
            layers.append(_valid(table, partial(_checked_table, file), errors))
    without_secrets = {name: value for name, value in environment.items() if name not in SECRET_SOURCES}
    layers.append(_valid(without_secrets, from_environment, errors))
    try:
        layers.append(secrets_in_files(environment))
    except InvalidInput as error:
        errors.append(error.message)
    layers.append(_valid(flags, dict, errors))
    return errors, _parse_layers(layers)


def _valid(layer: Mapping[str, Any], read: Callable[[Any], Any], errors: list[str]) -> dict[str, Any]:
    """Return the settings of a layer that are valid, as `read` returns them, and add the errors of the others."""
    valid: dict[str, Any] = {}
    for name, raw in layer.items():
        try:
            found = read({name: raw})
            parse_settings(found)
        except InvalidInput as error:
            errors.append(error.message)
        else:
            valid |= found
    return valid


def model_errors(paths: Sequence[str], settings: Settings, names: list[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield the subject and the error of every model in paths that cannot be served, without loading models.

    names: gets the names of the other models.
    """
    try:
        sources = DiskRepository(paths, settings.model_defaults(), settings.version_policy, run_code=False).scan()
    except DragomanError as error:
        yield "models", error.message
        return
    for name, source in sources.items():
        try:
            for spec in source.specs():
                preflight_check(spec)
            if names is not None:
                names.append(name)
        except DragomanError as error:
            subject = f"model '{name}'"
            yield subject, error.message.removeprefix(f"{subject}: ")


def open_engine(*models: Any, **changes: Unpack[SettingsArguments]) -> Engine:
    """Return an engine without a server.

    `async with open_engine("model.onnx") as engine: await engine.infer("model", {"x": array})`
    """
    paths = [str(m) for m in models if isinstance(m, str | Path)]
    settings = settings_for(paths, changes)
    return make_engine(paths, [spec_of_object(m, settings) for m in models if not isinstance(m, str | Path)], settings)


def settings_for(paths: Sequence[str], *layers: Mapping[str, Any]) -> Settings:
    """Return the settings in files of the served folders, overridden by each further layer."""
    files: dict[str, Any] = {}
    for path in map(Path, paths):
        for file, table in _server_tables(path):
            _check_table(table, file)
            files |= table
    return _parse_layers([files, *layers])


def _parse_layers(layers: Sequence[Mapping[str, Any]]) -> Settings:
    """Return the settings of layers, each of which overrides those before it."""
    settings = parse_settings(*layers)
    return parse_settings(_sagemaker_defaults(os.environ), *layers) if settings.sagemaker else settings


def served_paths(arguments: Sequence[str], environment: Mapping[str, str], settings: Settings) -> Sequence[str]:
    """Return the paths of a server: those of its command line, else of SageMaker's contract or of the environment.

    In SageMaker a multi-model endpoint has none, since it loads on request.
    """
    if arguments or not settings.sagemaker:
        return arguments or environment_paths(environment)
    return [] if _is_multi_model(environment) else ["/opt/ml/model"]


def _server_tables(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the server's settings in the files of a folder. Raises InvalidInput if it cannot be read."""
    try:
        return server_tables(path) if path.is_dir() else []
    except OSError as error:
        raise InvalidInput(f"'{path}' cannot be read: {error.strerror or error}") from error


def _checked_table(file: str, table: dict[str, Any]) -> dict[str, Any]:
    _check_table(table, file)
    return table


def _check_table(table: Mapping[str, Any], file: str) -> None:
    """Raise InvalidInput naming the file if it has an invalid setting, or one that files beside models cannot set."""
    for name in (RENAMED.get(given, given) for given in table):
        if name in SETTINGS and SETTINGS[name].operator_only:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidInput(
                f"{file}: setting '{name}' cannot be set in a file beside models; use {flag} or {PREFIX}{name.upper()}"
            )
    try:
        parse_settings(table)
    except InvalidInput as error:
        raise InvalidInput(f"{file}: {error.message}") from error


def spec_of_object(target: Any, settings: Settings) -> ModelSpec:
    """Return the spec of a model that is a Python object: a Model, its class, or a function."""
    declared = getattr(target, "__dragoman__", None) or getattr(find_vector_function(target), "options", None)
    name = getattr(declared, "name", "") or getattr(target, "name", "") or getattr(target, "__name__", "")
    if not isinstance(name, str) or not name:
        name = type(target).__name__
    return ModelSpec(**settings.model_defaults(), name=check_name(name), runtime="python", target=target)


def _sagemaker_defaults(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the defaults for a SageMaker container, by the variables that SageMaker sets."""
    port = environment.get("SAGEMAKER_BIND_TO_PORT") or "8080"
    defaults = {"host": "0.0.0.0", "http_port": port, "grpc_port": -1}  # noqa: S104 - a container's own network
    # SageMaker sends no token; it forwards clients' requests to the inference paths only.
    return {**defaults, "model_folders": "/opt/ml/models", "control_open": _is_multi_model(environment)}


def _is_multi_model(environment: Mapping[str, str]) -> bool:
    return environment.get("SAGEMAKER_MULTI_MODEL", "").lower() == "true"
