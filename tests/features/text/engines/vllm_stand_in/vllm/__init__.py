"""A stand-in for vLLM with the part of its interface that the runtime uses; its engine dies when it is told to.

The engine continues each prompt with its own tokens. It dies when the folder of the model contains the file `die`,
which a new engine removes, or when a prompt contains the token of `!`.
"""

from dataclasses import dataclass
from typing import Any

__version__ = "0.0"


@dataclass(kw_only=True)
class SamplingParams:
    output_kind: Any
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: list[int]
    temperature: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int
    prompt_logprobs: int | None
    bad_words: list[str]
    logit_bias: Any
    allowed_token_ids: Any
    detokenize: bool
    structured_outputs: Any = None
