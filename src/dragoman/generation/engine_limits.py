"""Limits of one engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Maximum number of sequences, of tokens of a prompt with its completion, and of prompt tokens per step."""

    max_batch: int = 32
    max_context: int = 2048
    prefill_chunk: int = 256
