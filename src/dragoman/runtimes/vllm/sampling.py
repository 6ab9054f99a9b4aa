"""Sampling parameters as vLLM's SamplingParams; unsupported ones are rejected by name."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.text import Grammar, Sampling
from dragoman.generation.external_engine import ExternalRequest

# https://docs.vllm.ai, SamplingParams: a lower temperature is raised to this one.
_LEAST_TEMPERATURE = 0.01

# Unsupported parameters: the condition, and the message.
_UNSUPPORTED: Mapping[str, tuple[Callable[[Sampling], bool], str]] = {
    "num_beams": (lambda given: given.num_beams > 1, "vLLM's engine has no beam search; expected 1"),
    "typical_p": (lambda given: given.do_sample and given.typical_p < 1, "vLLM does not have it; expected 1"),
    "temperature": (
        lambda given: given.do_sample and not _LEAST_TEMPERATURE <= given.temperature <= 2,
        f"vLLM takes {_LEAST_TEMPERATURE} to 2",
    ),
    "presence_penalty": (lambda given: abs(given.presence_penalty) > 2, "vLLM takes -2 to 2"),
    "frequency_penalty": (lambda given: abs(given.frequency_penalty) > 2, "vLLM takes -2 to 2"),
    "min_new_tokens": (
        lambda given: bool(given.min_new_tokens and given.ignore_eos and given.stop_token_ids),
        "with ignore_eos and stop_token_ids vLLM would also hold back the model's own end of text; expected 0",
    ),
}


def refuse(given: Sampling, tokenize: Callable[[str], list[int]]) -> None:
    """Raise InvalidInput naming an unsupported parameter."""
    for name, (is_unsupported, message) in _UNSUPPORTED.items():
        if is_unsupported(given):
            raise InvalidInput(f"{name}: {message}, got {getattr(given, name)!r}")
    for word in given.bad_words:
        if not _forbids(word, tokenize):
            raise InvalidInput(
                f"bad_words: vLLM would forbid {word!r} at the start of a text or after a space, not both; expected "
                "words of as many tokens in either place"
            )


def _forbids(word: str, tokenize: Callable[[str], list[int]]) -> bool:
    """Return whether vLLM forbids a word everywhere, also after a space: both forms must have equally many tokens."""
    alone, spaced = tokenize(word), tokenize(" " + word.lstrip())
    same = len(alone) == len(spaced) and alone[0] != spaced[0]
    return bool(alone) and word == word.lstrip() and (same or alone == spaced)


def parameters(wanted: ExternalRequest) -> dict[str, Any]:
    """Return the arguments of SamplingParams except `output_kind` and `structured_outputs`.

    Detokenization and stop strings are handled on our side; end tokens are passed explicitly, so that the folder's
    generation_config changes nothing.
    """
    given, ends = wanted.asked.sampling, wanted.ends
    tokens = sorted(ends.eos | ends.requested)
    arguments: dict[str, Any] = {
        "max_tokens": ends.length,
        "min_tokens": min(given.min_new_tokens, ends.length) if tokens else 0,
        "ignore_eos": True,
        "stop_token_ids": tokens,
        "temperature": given.temperature if given.do_sample else 0.0,
        "repetition_penalty": given.repetition_penalty,
        "presence_penalty": given.presence_penalty,
        "frequency_penalty": given.frequency_penalty,
        "logprobs": given.top_logprobs,
        "prompt_logprobs": given.prompt_logprobs,
        "bad_words": list(given.bad_words),
        "logit_bias": dict(given.logit_bias) or None,
        "allowed_token_ids": list(given.allowed_token_ids) or None,
        "detokenize": False,
    }
    if given.do_sample:
        arguments |= {"top_k": given.top_k, "top_p": given.top_p, "min_p": given.min_p, "seed": wanted.seed}
    return arguments


def structure(grammar: Grammar) -> dict[str, Any]:
    """Return the arguments of StructuredOutputsParams."""
    formats: Mapping[str, Callable[[str], dict[str, Any]]] = {
        "json_schema": lambda text: {"json": text},
        "json_object": lambda _: {"json_object": True},
        "regex": lambda text: {"regex": text},
        "lark": lambda text: {"grammar": text},
        "choice": lambda text: {"choice": json.loads(text)},
    }
    return formats[grammar.kind](grammar.text)
