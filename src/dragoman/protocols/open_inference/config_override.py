"""The parameters of a load request that override the configuration or the files of a model."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import Parse, ParseError

from dragoman.core import error_texts
from dragoman.core.calls import MAX_REPLICAS
from dragoman.core.errors import Forbidden, InvalidInput, ServerError
from dragoman.core.sequences import SequenceOptions
from dragoman.formats import oip_messages as m
from dragoman.protocols.wire import Policy

_LONGEST_NAME = 255  # bytes, of a file on Linux


def parse_overrides(model: str, parameters: Mapping[str, Any], policy: Policy) -> Mapping[str, Any]:
    """Return the settings of a model that the parameter `config` overrides, by the names of `ModelSpec`.

    Raises Forbidden unless the operator allows it, and for all files; InvalidInput for fields that cannot be changed.
    """
    for key in parameters:
        if key.startswith("file:"):
            _reject_file(model, key)
    config = parameters.get("config")
    if config is None or config == "":
        return {}
    if not policy.allow_config_override:
        raise Forbidden(
            f"failed to load '{model}', parameter 'config' is not allowed: expected the setting allow_config_override; "
            "a model is loaded as it is in the repository"
        )
    if not isinstance(config, str):
        raise InvalidInput(f"failed to load '{model}', parameter 'config': expected JSON as a text, got {config!r:.80}")
    if not config.lstrip().startswith("{"):
        raise InvalidInput(f"failed to load '{model}', parameter 'config': expected a JSON object, got {config!r:.80}")
    try:
        return _settings(model, Parse(config, m.ModelConfig()))
    except ParseError as error:
        raise InvalidInput(f"{error_texts.not_in_repository(model)}: parameter 'config': {error}") from error


def _reject_file(model: str, key: str) -> None:
    if any(len(part.encode()) > _LONGEST_NAME for part in key.removeprefix("file:").split("/")):
        raise ServerError(f"{error_texts.not_in_repository(model)}: the name of a file is too long: {key[:64]!r}")
    raise Forbidden(
        f"failed to load '{model}', parameter {key[:64]!r}: files of a model cannot be sent; change them in the "
        "repository and load it"
    )


def _settings(model: str, config: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for field, value in config.ListFields():
        match field.name:
            case "name" if value == model:
                pass
            case "max_batch_size" if value >= 0:
                settings["max_batch_size"] = value
            case "dynamic_batching" if _has_only(value, "preferred_batch_size", "max_queue_delay_microseconds"):
                settings["max_batch_wait_s"] = value.max_queue_delay_microseconds / 1e6
            case "instance_group" if all(_has_only(group, "name", "count", "kind") for group in value):
                settings["replicas"] = _replicas(model, value)
            case "sequence_batching" if _has_only(value, "max_sequence_idle_microseconds", "direct", "oldest"):
                settings["sequences"] = _sequences(model, value)
            case name:
                expected = "name, max_batch_size, dynamic_batching, instance_group or sequence_batching"
                raise InvalidInput(
                    f"failed to load '{model}', parameter 'config': expected only {expected}, got {name}: {value!s:.80}"
                )
    return settings


def _has_only(message: Any, *names: str) -> bool:
    return all(field.name in names for field, _ in message.ListFields())


def _replicas(model: str, groups: Any) -> int:
    """Return the number of instances; 0 is that of a group without a count. Raises InvalidInput."""
    counts = [group.count for group in groups]
    total = sum(count or 1 for count in counts)
    if min(counts) < 0 or total > MAX_REPLICAS:
        raise InvalidInput(
            f"failed to load '{model}', parameter 'config': instance_group: expected from 1 to {MAX_REPLICAS} "
            f"instances in all, got the counts {', '.join(map(str, counts)):.80}"
        )
    return total


def _sequences(model: str, batching: Any) -> SequenceOptions:
    """Return the options of sequences. Raises InvalidInput."""
    idle_s = (batching.max_sequence_idle_microseconds or 1_000_000) / 1e6
    if batching.HasField("oldest"):
        candidates = batching.oldest.max_candidate_sequences
        if candidates < 0:
            raise InvalidInput(
                f"failed to load '{model}', parameter 'config': max_candidate_sequences: expected at least 0, got "
                f"{candidates}"
            )
        return SequenceOptions(max_candidates=max(1, candidates), idle_s=idle_s)
    return SequenceOptions(strategy="direct", idle_s=idle_s)
