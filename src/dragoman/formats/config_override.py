"""The parameters of a load request that override the configuration or the files of a model."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.core import error_texts
from dragoman.core.calls import MAX_REPLICAS
from dragoman.core.errors import Forbidden, InvalidInput, ServerError
from dragoman.core.options import suggestion
from dragoman.formats import grpc_messages as m
from dragoman.formats.policy import Policy

_FILE = "file:"
_CONFIG_FILE = "config.pbtxt"
_MAX_NAME_BYTES = 255  # bytes, of a file on Linux
_MAX_PATH_BYTES = 1024
_MAX_FILES = 100
# Files that no runtime runs as code, and the backends that read nothing else.
_DATA_SUFFIXES = (".onnx", ".data", ".xml", ".bin", ".txt")
_DATA_BACKENDS = ("onnxruntime", "openvino")
_DATA_PLATFORMS = ("onnxruntime_onnx", "openvino_ir")
# Settings of models in the formats of other servers and our own; they may start programs.
_SETTINGS_NAMES = frozenset(
    ("dragoman.toml", "model-settings.json", "serving.properties", "settings.json", _CONFIG_FILE)
)


def parse_overrides(
    model: str, parameters: Mapping[str, Any], policy: Policy, others: Sequence[str] = ()
) -> tuple[str, Mapping[str, bytes]]:
    """Return the configuration that replaces that of a model, as the text of a `config.pbtxt`, and its new files.

    Both are empty without such parameters; the files have the configuration among them. `others` are the names of other
    parameters of a load request. Raises Forbidden for what the operator does not allow, and InvalidInput.
    """
    files = {name: value for name, value in parameters.items() if name.startswith(_FILE)}
    known = ("config", *others)
    for name, value in parameters.items():
        if value is not None and name not in known and name not in files:
            raise InvalidInput(
                f"failed to load '{model}', unrecognized parameter '{name[:64]}': expected "
                f"{', '.join(map(repr, known))} or '{_FILE}VERSION/PATH'{suggestion(name, known)}"
            )
    for name in files:
        _check_allowed(model, name, policy)
    config = parameters.get("config")
    if config is None or config == "":
        if files:
            raise InvalidInput(f"{error_texts.not_in_repository(model)}: files need the parameter 'config'")
        return "", {}
    if not (files or policy.allow_config_override):
        raise Forbidden(
            f"failed to load '{model}', parameter 'config' is not allowed: expected the setting allow_config_override; "
            "a model is loaded as it is in the repository"
        )
    from google.protobuf import text_format

    message = _parse_config(model, config)
    text = text_format.MessageToString(message)
    if not files:
        return text, {}
    if len(files) > _MAX_FILES:
        raise InvalidInput(f"failed to load '{model}', expected at most {_MAX_FILES} files, got {len(files)}")
    if policy.allow_file_override != "code":
        _check_data_backend(model, message)
    contents = {_parse_path(model, name, policy): _parse_content(model, name, files[name]) for name in files}
    for path in contents:
        if any(other.startswith(f"{path}/") for other in contents):
            raise InvalidInput(f"failed to load '{model}', '{path}' is both a file and a folder")
    return text, {**contents, _CONFIG_FILE: text.encode()}


def _parse_config(model: str, config: Any) -> Any:
    if not isinstance(config, str):
        raise InvalidInput(f"failed to load '{model}', parameter 'config': expected a JSON string, got {config!r:.80}")
    if not config.lstrip().startswith("{"):
        raise InvalidInput(f"failed to load '{model}', parameter 'config': expected a JSON object, got {config!r:.80}")
    from google.protobuf.json_format import Parse, ParseError

    try:
        message = Parse(config, m.ModelConfig())
    except ParseError as error:
        raise InvalidInput(f"{error_texts.not_in_repository(model)}: parameter 'config': {error}") from error
    counts = [group.count for group in message.instance_group]
    if min(counts, default=0) < 0 or sum(count or 1 for count in counts) > MAX_REPLICAS:
        raise InvalidInput(
            f"failed to load '{model}', parameter 'config': instance_group: expected from 1 to {MAX_REPLICAS} "
            f"instances in all, got the counts {', '.join(map(str, counts)):.80}"
        )
    return message


def _check_allowed(model: str, name: str, policy: Policy) -> None:
    if any(len(part.encode()) > _MAX_NAME_BYTES for part in name.removeprefix(_FILE).split("/")):
        raise ServerError(f"{error_texts.not_in_repository(model)}: the name of a file is too long: {name[:64]!r}")
    if policy.allow_file_override == "no":
        raise Forbidden(
            f"failed to load '{model}', parameter {name[:64]!r} is not allowed: expected the setting "
            "allow_file_override; a model is loaded as it is in the repository"
        )


def _check_data_backend(model: str, config: Any) -> None:
    """Raise Forbidden unless the configuration names a backend that runs no code of its files."""
    if config.backend in _DATA_BACKENDS or (not config.backend and config.platform in _DATA_PLATFORMS):
        return
    raise Forbidden(
        f"failed to load '{model}', parameter 'config': expected the backend {' or '.join(_DATA_BACKENDS)}, got "
        f'{config.backend or config.platform or "none"!r:.64}; the setting allow_file_override = "code" allows others'
    )


def _parse_path(model: str, name: str, policy: Policy) -> str:
    """Return the path of a file below the folder of its model. Raises InvalidInput, Forbidden."""
    path = name.removeprefix(_FILE)
    parts = path.split("/")
    is_plain = path.isprintable() and len(path.encode()) <= _MAX_PATH_BYTES and "\\" not in path
    if not is_plain or len(parts) < 2 or not _is_version(parts[0]) or not {"", ".", ".."}.isdisjoint(parts):
        raise InvalidInput(
            f"failed to load '{model}', parameter {name[:64]!r}: expected file:VERSION/PATH, such as file:1/model.onnx"
        )
    if not _SETTINGS_NAMES.isdisjoint(parts):
        raise Forbidden(f"failed to load '{model}', parameter {name[:64]!r}: files of settings cannot be sent")
    if policy.allow_file_override != "code" and not path.endswith(_DATA_SUFFIXES):
        raise Forbidden(
            f"failed to load '{model}', parameter {name[:64]!r} is not allowed: expected {', '.join(_DATA_SUFFIXES)}; "
            'the setting allow_file_override = "code" allows others'
        )
    return path


def _is_version(part: str) -> bool:
    return part.isascii() and part.isdecimal() and not part.startswith("0")


def _parse_content(model: str, name: str, value: Any) -> bytes:
    """Return the bytes of a file, which are base64 over REST. Raises InvalidInput."""
    if isinstance(value, bytes):
        return value
    try:
        if isinstance(value, str):
            return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):  # ValueError: not ASCII
        pass
    raise InvalidInput(f"failed to load '{model}', parameter {name[:64]!r}: expected the content of a file in base64")
