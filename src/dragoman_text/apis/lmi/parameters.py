"""Names, limits and defaults of LMI's generation parameters."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from dragoman.core.sampling import InvalidValueError, ValueKind, flag, text, texts
from dragoman.core.text import Sampling
from dragoman.core.text_limits import MAX_STOPS
from dragoman.protocols.parameters import (
    GRAMMAR,
    GUIDED,
    RESPONSE_FORMAT,
    Parameter,
    ParsedParameters,
    option,
    parse_parameters,
    reject_unused,
    sets,
)
from dragoman.protocols.wire import Policy

# Parameters with the name of their field.
_SAME = (
    "do_sample",
    "seed",
    "temperature",
    "repetition_penalty",
    "top_k",
    "top_p",
    "max_new_tokens",
    "typical_p",
    "truncate",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "best_of",
    "num_beams",
    "length_penalty",
    "early_stopping",
    "stop_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "prompt_logprobs",
)


def _stop() -> ValueKind:
    """Return the kind of TensorRT-LLM's `stop`: a boolean in LMI's documentation, a list of strings in its code."""
    kind = texts(MAX_STOPS)

    def read(value: Any) -> Any:
        return () if isinstance(value, bool) else kind.convert(value)

    return ValueKind(kind.description, read)


def _adapters() -> ValueKind:
    def read(value: Any) -> tuple[str, ...]:
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) for name in names):
            raise InvalidValueError
        return tuple(names)

    return ValueKind("the name of an adapter, or a list of one for each input", read)


ADAPTERS = _adapters()
PARAMETERS: Mapping[str, Parameter] = {
    **{name: sets(name) for name in _SAME},
    "stop_sequences": sets("stop"),
    "stop": sets("stop", _stop()),
    "ignore_eos_token": sets("ignore_eos"),
    "include_stop_str_in_output": sets("include_stop"),
    "logprobs": sets("top_logprobs"),
    "top_n_tokens": sets("top_logprobs"),
    "min_length": sets("min_new_tokens"),
    "bad_sequences": sets("bad_words"),
    "adapters": sets("adapters", ADAPTERS),
    "grammar": sets("grammar", GRAMMAR),
    "response_format": sets("grammar", RESPONSE_FORMAT),
    **GUIDED,
    "details": option("details", flag()),
    "return_full_text": option("return_full_text", flag()),
    "decoder_input_details": option("decoder_input_details", flag()),
    "output_formatter": option("output_formatter", text()),
}
_DRAWS = ("temperature", "top_k", "top_p", "min_p", "typical_p")


# Parameters that the dynamic-batch schema cannot return, with the value that requests nothing.
_BEYOND_TEXT: Mapping[str, Any] = {
    "n": 1,
    "details": False,
    "decoder_input_details": False,
    "logprobs": 0,
    "top_n_tokens": 0,
    "prompt_logprobs": None,
}


def parse_generation_parameters(
    values: Mapping[str, Any], policy: Policy, *, infer_do_sample: bool, rolling: bool = True, trtllm: bool = False
) -> tuple[ParsedParameters, Sampling]:
    """Parse the parameters of a request into a Sampling.

    Without `rolling` (the dynamic-batch schema) a response is only text. Without `do_sample` the parameters that shape
    the distribution have no effect, as in LMI up to 0.31; with `infer_do_sample` they imply it, as from 0.32. `trtllm`:
    sampling has the defaults of TensorRT-LLM.
    """
    parameters = parse_parameters(values, PARAMETERS, policy)
    unused = [name for name in ("stop",) if isinstance(values.get(name), bool)]
    reject_unused([name for name in unused if values[name]], policy)
    if not rolling:
        unused += _remove_unsupported(parameters, values, policy)
    parameters = replace(parameters, ignored=(*parameters.ignored, *unused))
    fields = parameters.fields
    if len(fields.get("adapters", ())) == 1:
        fields["adapter"] = fields.pop("adapters")[0]
        parameters.names["adapter"] = "adapters"
    if infer_do_sample and "do_sample" not in fields:
        fields["do_sample"] = any(fields.get(name, neutral) != neutral for name, neutral in _NEUTRAL.items())
    if trtllm and fields.get("do_sample"):
        fields.update({name: value for name, value in _TENSORRT_LLM.items() if name not in fields})
    # LMI: with `best_of` or `num_beams` above 1 all completions are returned, the best first, also if `n` is 1.
    option = next((name for name in ("best_of", "num_beams") if fields.get(name, 1) > 1), None)
    if option and rolling and fields.get("n", 1) == 1:
        fields["n"] = fields[option]
        parameters.names["n"] = option
    if parameters.options.get("decoder_input_details"):
        fields.setdefault("prompt_logprobs", 0)
    parameters.options.setdefault("prefill", "prompt_logprobs" in fields)
    return parameters, parameters.sampling(policy, max_new_tokens=30, shorten=True)


def _remove_unsupported(parameters: ParsedParameters, values: Mapping[str, Any], policy: Policy) -> list[str]:
    """Remove parameters that ask for more than text and return their names. Raises InvalidInput in strict mode."""
    unused = [name for name, nothing in _BEYOND_TEXT.items() if values.get(name) not in (None, nothing)]
    reject_unused(unused, policy)
    for name in _BEYOND_TEXT:
        parameter = PARAMETERS[name]
        (parameters.options if parameter.own else parameters.fields).pop(parameter.to, None)
    return unused


# With do_sample, unless the request names them (djl-serving's rolling batch of TensorRT-LLM).
_TENSORRT_LLM: Mapping[str, Any] = {"top_k": 5, "top_p": 0.85, "temperature": 0.8}
_NEUTRAL: Mapping[str, Any] = {name: getattr(Sampling(), name) for name in _DRAWS}
