"""Sampling parameters as OpenVINO GenAI's GenerationConfig; unsupported ones are rejected by name."""

from collections.abc import Callable, Mapping
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.text import Sampling
from dragoman.generation.external_engine import ExternalRequest

# Unsupported parameters: the condition, and the message.
_UNSUPPORTED: Mapping[str, tuple[Callable[[Sampling], bool], str]] = {
    "num_beams": (lambda given: given.num_beams > 1, "beam search is not carried to OpenVINO; expected 1"),
    "typical_p": (lambda given: given.do_sample and given.typical_p < 1, "OpenVINO does not have it; expected 1"),
    "logit_bias": (lambda given: bool(given.logit_bias), "OpenVINO does not have it; expected none"),
    "allowed_token_ids": (lambda given: bool(given.allowed_token_ids), "OpenVINO does not have it; expected none"),
    "bad_words": (lambda given: bool(given.bad_words), "OpenVINO does not have it; expected none"),
    "top_logprobs": (lambda given: given.top_logprobs > 0, "OpenVINO reports only the sampled token; expected 0"),
    "prompt_logprobs": (
        lambda given: given.prompt_logprobs is not None,
        "OpenVINO's are wrong if several prompts are prefilled in chunks; expected none",
    ),
    "grammar": (
        lambda given: given.grammar is not None,
        "OpenVINO compiles a grammar in the step of all sequences, which an invalid one would end; expected none",
    ),
    "min_new_tokens": (
        lambda given: bool(given.min_new_tokens and given.ignore_eos and given.stop_token_ids),
        "OpenVINO does not suppress stop tokens while it ignores the end token; expected 0",
    ),
}


def refuse(given: Sampling) -> None:
    """Raise InvalidInput naming an unsupported parameter."""
    for name, (is_unsupported, message) in _UNSUPPORTED.items():
        if is_unsupported(given):
            raise InvalidInput(f"{name}: {message}, got {getattr(given, name)!r}")


def fields(wanted: ExternalRequest) -> dict[str, Any]:
    """Return the fields of a GenerationConfig. Detokenization and stop strings are handled on our side."""
    given, ends = wanted.asked.sampling, wanted.ends
    config: dict[str, Any] = {
        "apply_chat_template": False,
        "max_new_tokens": ends.length,
        "logprobs": 1,
        "do_sample": given.do_sample,
        "repetition_penalty": given.repetition_penalty,
        "presence_penalty": given.presence_penalty,
        "frequency_penalty": given.frequency_penalty,
    }
    # If the end token is ignored, stop tokens are checked on our side.
    if given.ignore_eos or not ends.eos:
        config |= {"ignore_eos": True}
    else:
        config |= {
            "ignore_eos": False,
            "eos_token_id": min(ends.eos),
            "stop_token_ids": set(ends.eos | ends.requested),
            "min_new_tokens": min(given.min_new_tokens, ends.length),
        }
    if given.do_sample:
        config |= {"temperature": given.temperature, "top_p": given.top_p, "min_p": given.min_p}
        config |= {"rng_seed": wanted.seed} | ({"top_k": given.top_k} if given.top_k else {})
    return config
