"""Validation of generation parameters."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.text import Sampling

# Maximum number of top tokens returned with each token.
MAX_TOP_LOGPROBS = 100

_LIMITS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda v: v is None or v >= 1, "at least 1"),
    "min_new_tokens": (lambda v: v >= 0, "at least 0"),
    "temperature": (lambda v: v > 0, "more than 0"),
    "top_k": (lambda v: v >= 0, "at least 0"),
    "top_p": (lambda v: 0 < v <= 1, "more than 0 and at most 1"),
    "min_p": (lambda v: 0 <= v <= 1, "from 0 to 1"),
    "typical_p": (lambda v: 0 < v <= 1, "more than 0 and at most 1"),
    "repetition_penalty": (lambda v: v > 0, "more than 0"),
    "presence_penalty": (math.isfinite, "a finite number"),
    "frequency_penalty": (math.isfinite, "a finite number"),
    "length_penalty": (lambda v: abs(v) <= 100, "from -100 to 100"),
    "n": (lambda v: v >= 1, "at least 1"),
    "best_of": (lambda v: v >= 0, "at least 0"),
    "num_beams": (lambda v: v >= 1, "at least 1"),
    "early_stopping": (lambda v: v in (True, False, "never"), "true, false or 'never'"),
    "top_logprobs": (lambda v: 0 <= v <= MAX_TOP_LOGPROBS, f"from 0 to {MAX_TOP_LOGPROBS}"),
    "prompt_logprobs": (lambda v: v is None or 0 <= v <= MAX_TOP_LOGPROBS, f"from 0 to {MAX_TOP_LOGPROBS}"),
    "truncate": (lambda v: v is None or v >= 1, "at least 1"),
    "seed": (lambda v: v is None or 0 <= v < 2**64, "from 0 to 2**64 - 1"),
    "stop": (lambda v: all(v), "texts that are not empty"),
    "bad_words": (lambda v: all(v), "texts that are not empty"),
}


def check(sampling: Sampling, vocabulary: int, max_batch: int, adapters: frozenset[str]) -> None:
    """Raise InvalidInput naming the parameter, the expected range and the value."""
    for name, (holds, expected) in _LIMITS.items():
        value = getattr(sampling, name)
        if (isinstance(value, float) and not math.isfinite(value)) or not holds(value):
            raise InvalidInput(f"{name}: expected {expected}, got {value!r}")
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        strange = [token for token in getattr(sampling, name) if not 0 <= token < vocabulary]
        if strange:
            raise InvalidInput(f"{name}: expected token ids from 0 to {vocabulary - 1}, got {strange[0]}")
    if not all(math.isfinite(bias) for bias in sampling.logit_bias.values()):
        raise InvalidInput("logit_bias: expected finite numbers")
    if sampling.adapter and sampling.adapter not in adapters:
        known = ", ".join(sorted(adapters)) or "none"
        raise InvalidInput(f"adapter: there is no '{sampling.adapter}'; there are: {known}")
    _together(sampling, max_batch)


def _together(sampling: Sampling, max_batch: int) -> None:
    """Check parameters that exclude each other."""
    if sampling.max_new_tokens is not None and sampling.min_new_tokens > sampling.max_new_tokens:
        raise InvalidInput(
            f"min_new_tokens: expected at most max_new_tokens, {sampling.max_new_tokens}, got {sampling.min_new_tokens}"
        )
    if sampling.num_beams > 1:
        if sampling.do_sample:
            raise InvalidInput("num_beams: beam search does not sample; expected do_sample false or num_beams 1")
        if max(sampling.n, sampling.best_of) > sampling.num_beams:
            raise InvalidInput(f"n: expected at most num_beams, {sampling.num_beams}, got {sampling.n}")
    elif sampling.best_of and sampling.best_of < sampling.n:
        raise InvalidInput(f"best_of: expected at least n, {sampling.n}, got {sampling.best_of}")
    width = max(sampling.n, sampling.best_of, sampling.num_beams)
    if width > max_batch:
        raise InvalidInput(f"n, best_of and num_beams: expected at most {max_batch}, got {width}")
