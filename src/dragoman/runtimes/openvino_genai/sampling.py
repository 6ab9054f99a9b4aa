"""How a text is to be sampled, as OpenVINO GenAI's GenerationConfig says it; what it cannot say is refused by name."""

from collections.abc import Callable, Mapping
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.text import Sampling
from dragoman.generation.external_engine import ExternalRequest

# The parameters that there are not, or not in our sense: when, and what is said of them.
_REFUSED: Mapping[str, tuple[Callable[[Sampling], bool], str]] = {
    "num_beams": (lambda given: given.num_beams > 1, "beam search is not carried to OpenVINO; expected 1"),
    "typical_p": (lambda given: given.do_sample and given.typical_p < 1, "OpenVINO does not have it; expected 1"),
    "logit_bias": (lambda given: bool(given.logit_bias), "OpenVINO does not have it; expected none"),
    "allowed_token_ids": (lambda given: bool(given.allowed_token_ids), "OpenVINO does not have it; expected none"),
    "bad_words": (lambda given: bool(given.bad_words), "OpenVINO does not have it; expected none"),
    "top_logprobs": (lambda given: given.top_logprobs > 0, "OpenVINO tells of the chosen token alone; expected 0"),
    "prompt_logprobs": (
        lambda given: given.prompt_logprobs is not None,
        "OpenVINO's are wrong where several prompts are read in parts; expected none",
    ),
    "grammar": (
        lambda given: given.grammar is not None,
        "OpenVINO reads a grammar amid everybody's texts, where a wrong one would end them all; expected none",
    ),
    "min_new_tokens": (
        lambda given: bool(given.min_new_tokens and given.ignore_eos and given.stop_token_ids),
        "OpenVINO holds back no tokens of the caller's while it ignores the model's own end; expected 0",
    ),
}


def refuse(given: Sampling) -> None:
    """Raises InvalidInput naming the parameter."""
    for name, (unfit, value) in _REFUSED.items():
        if unfit(given):
            raise InvalidInput(f"{name}: {value}, got {getattr(given, name)!r}")


def fields(wanted: ExternalRequest) -> dict[str, Any]:
    """The fields of a GenerationConfig. Texts are written, and stop strings found, on our side."""
    given, ends = wanted.asked.sampling, wanted.ends
    found: dict[str, Any] = {
        "apply_chat_template": False,
        "max_new_tokens": ends.length,
        "logprobs": 1,
        "do_sample": given.do_sample,
        "repetition_penalty": given.repetition_penalty,
        "presence_penalty": given.presence_penalty,
        "frequency_penalty": given.frequency_penalty,
    }
    # Where the model's own end is to be passed over, the caller's tokens are looked for on our side, as all ends are.
    if given.ignore_eos or not ends.eos:
        found |= {"ignore_eos": True}
    else:
        found |= {
            "ignore_eos": False,
            "eos_token_id": min(ends.eos),
            "stop_token_ids": set(ends.eos | ends.requested),
            "min_new_tokens": min(given.min_new_tokens, ends.length),
        }
    if given.do_sample:
        found |= {"temperature": given.temperature, "top_p": given.top_p, "min_p": given.min_p}
        found |= {"rng_seed": wanted.seed} | ({"top_k": given.top_k} if given.top_k else {})
    return found
