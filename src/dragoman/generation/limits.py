"""How much an engine does at a time."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """How much at a time: sequences, tokens of one prompt and text, tokens of prompts in a step."""

    max_batch: int = 32
    max_context: int = 2048
    prefill_chunk: int = 256
