"""The configuration that a load request gives to a model without a `config.pbtxt`."""

from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.sequences import SequenceOptions
from dragoman.formats.model_config import parse_config


def overridden_settings(model: str, config: str) -> dict[str, Any]:
    """Return the settings that a configuration in the text format changes, by the names of `ModelSpec`.

    Raises InvalidInput for fields that cannot be changed.
    """
    settings: dict[str, Any] = {}
    for field, value in parse_config(config, "config").message.ListFields():
        match field.name:
            case "name" if value == model:
                pass
            case "max_batch_size" if value >= 0:
                settings["max_batch_size"] = value
            case "dynamic_batching" if _has_only(value, "preferred_batch_size", "max_queue_delay_microseconds"):
                settings["max_batch_wait_s"] = value.max_queue_delay_microseconds / 1e6
            case "instance_group" if all(_has_only(group, "name", "count", "kind") for group in value):
                settings["replicas"] = sum(group.count or 1 for group in value)
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
