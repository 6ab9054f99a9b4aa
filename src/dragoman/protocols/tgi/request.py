"""Parse TGI requests: inputs, and parameters within TGI's limits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dragoman.core.calls import DescribeModels, ModelDescription, Request, Response
from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import check_value, flag, format_value, integer, number, text, texts
from dragoman.core.text import Chat, RawPrompt, Sampling
from dragoman.protocols.text_common.chat import PARAMETERS as PARAMETERS_OF_CHAT
from dragoman.protocols.text_common.chat import get_flag, parse_conversation
from dragoman.protocols.text_common.grammar import GRAMMAR
from dragoman.protocols.text_common.openai_format import PLACEHOLDERS
from dragoman.protocols.text_common.parameters import (
    Parameter,
    ParsedParameters,
    get_object,
    option,
    parse_parameters,
    reject_unknown,
    reject_unused,
    sets,
)
from dragoman.protocols.wire import EndpointResult, Headers, HttpRequest, Policy, PreliminaryCall


def resolve_model(
    body: Mapping[str, Any], http: HttpRequest, then: Callable[[str, tuple[str, ...]], EndpointResult]
) -> EndpointResult:
    """Call `then` with the name of the model and the names of fields that have no effect.

    TGI ignores the field `model` of a body. Here it chooses the model if the path names none and such a model exists.
    """
    named, path = body.get("model"), http.params.get("model", "")
    named = named.rpartition("/")[2] if isinstance(named, str) else ""
    if not named or named == path:
        return then(path, ())
    ignored_fields = () if named in PLACEHOLDERS else ("model",)
    if path:
        return then(path, ignored_fields)

    def choose(response: Response[tuple[ModelDescription, ...]]) -> EndpointResult:
        known = any(found.name == named for found in response.answer)
        return then(named, ()) if known else then("", ignored_fields)

    return PreliminaryCall(Request(DescribeModels()), choose)


# Defaults of TGI's launcher.
MOST_BEST_OF = 2
MOST_STOP_SEQUENCES = 4
MOST_TOP_TOKENS = 5
MOST_INPUTS = 4

PARAMETERS: Mapping[str, Parameter] = {
    "best_of": sets("n", integer(1, MOST_BEST_OF)),
    "temperature": sets("temperature", number(0.0, 1e6, above=True)),
    "repetition_penalty": sets("repetition_penalty"),
    "frequency_penalty": sets("frequency_penalty"),
    "top_k": sets("top_k", integer(1)),
    "top_p": sets("top_p", number(0.0, 1.0, above=True)),
    "typical_p": sets("typical_p"),
    "do_sample": sets("do_sample"),
    "max_new_tokens": sets("max_new_tokens"),
    "return_full_text": option("return_full_text", flag()),
    "stop": sets("stop", texts(MOST_STOP_SEQUENCES)),
    "stop_sequences": sets("stop", texts(MOST_STOP_SEQUENCES)),
    "truncate": sets("truncate"),
    "watermark": option("watermark", flag()),
    "details": option("details", flag()),
    "decoder_input_details": option("decoder_input_details", flag()),
    "seed": sets("seed"),
    "top_n_tokens": sets("top_logprobs", integer(0, MOST_TOP_TOKENS)),
    "grammar": sets("grammar", GRAMMAR),
    "adapter_id": sets("adapter"),
}
_FIELDS = ("inputs", "parameters", "stream", "model", "add_special_tokens")
_DRAWS = ("temperature", "top_k", "top_p", "typical_p")
_NEUTRAL: Mapping[str, Any] = {name: getattr(Sampling(), name) for name in _DRAWS}


@dataclass(frozen=True, slots=True)
class TgiRequest:
    """A parsed request. `listed`: the inputs were a list; `full`: the response repeats the prompt."""

    inputs: tuple[str, ...]
    listed: bool
    sampling: Sampling
    details: bool
    prefill: bool
    full: bool
    given: ParsedParameters

    @property
    def headers(self) -> Headers:
        return self.given.headers


def wants_stream(body: Mapping[str, Any]) -> bool:
    """Return whether a body asks for a stream, at paths where the body decides."""
    return bool(check_value("stream", body.get("stream") or False, flag()))


def parse_request(
    body: Mapping[str, Any], policy: Policy, ignored_fields: Sequence[str] = (), *, stream: bool
) -> TgiRequest:
    """Parse a body in which the fields `passed_over` have no effect. Raises InvalidInput for values outside TGI's
    limits."""
    inputs, listed = inputs_of(body)
    found = parse_parameters(get_object(body, "parameters"), PARAMETERS, policy)
    unknown = _ignored_fields(body, _FIELDS, ignored_fields, policy)
    fields, options = found.fields, found.options
    drawn = any(fields.get(name, neutral) != neutral for name, neutral in _NEUTRAL.items())
    fields["do_sample"] = bool(fields.get("do_sample")) or drawn
    _check_together(found, stream=stream, listed=listed)
    prefill = options.get("decoder_input_details", False)
    if prefill:
        fields["prompt_logprobs"] = 0
    unused = ["watermark"] if options.get("watermark") else []
    reject_unused(unused, policy)
    names = {**found.names, "prompt": "inputs"}
    sampling = found.sampling(policy, include_stop=True)
    details = options.get("details", False) or prefill
    found = ParsedParameters(fields, options, names, (*unknown, *found.ignored, *unused))
    return TgiRequest(inputs, listed, sampling, details, prefill, options.get("return_full_text", False), found)


def parse_text_to_tokenize(
    body: Mapping[str, Any], policy: Policy, ignored_fields: Sequence[str]
) -> tuple[str, Sequence[str]]:
    """Return the text to tokenize and the names of fields without effect."""
    inputs, _ = inputs_of(body)
    if len(inputs) > 1:
        raise InvalidInput(f"`inputs` must be one text; got {len(inputs)}")
    return inputs[0], _ignored_fields(body, _FIELDS, ignored_fields, policy)


def parse_chat_to_tokenize(
    body: Mapping[str, Any], policy: Policy, ignored_fields: Sequence[str]
) -> tuple[Chat, Sequence[str]]:
    """Return the conversation to tokenize and the names of fields without effect."""
    chat, _ = parse_conversation(body, policy)
    # As in TGI, not all fields of a chat affect its tokens.
    return chat, _ignored_fields(body, tuple(PARAMETERS_OF_CHAT), ignored_fields, policy)


def _ignored_fields(
    body: Mapping[str, Any], known: Sequence[str], ignored_fields: Sequence[str], policy: Policy
) -> tuple[str, ...]:
    """Return the fields that are unknown or have no effect. Raises InvalidInput for them in strict mode."""
    check_value("model", body.get("model") or "", text())
    unknown = [name for name in body if name not in known]
    reject_unknown(unknown, known, policy)
    reject_unused(ignored_fields, policy)
    return (*unknown, *ignored_fields)


def inputs_of(body: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return the inputs and whether they were a list, which TGI itself does not accept."""
    value = body.get("inputs")
    found: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) for each in found):
        raise InvalidInput(f"`inputs` must be a text, or a list of texts; got {format_value(value)}")
    if not found or not all(found):
        raise InvalidInput("`inputs` cannot be empty")
    if len(found) > MOST_INPUTS:
        raise InvalidInput(f"`inputs` must have at most {MOST_INPUTS} texts; got {len(found)}")
    bare = not get_flag(body, "add_special_tokens", otherwise=True)
    return tuple(map(RawPrompt, found) if bare else found), isinstance(value, list)


def _check_together(found: ParsedParameters, *, stream: bool, listed: bool) -> None:
    fields = found.fields
    if fields.get("n", 1) > 1:
        if stream:
            raise InvalidInput("`best_of` != 1 is not supported when streaming tokens")
        if not fields["do_sample"]:
            raise InvalidInput("you must use sampling when `best_of` is > 1")
        if "seed" in fields:
            raise InvalidInput("`seed` must not be set when `best_of` > 1")
    if stream and found.options.get("decoder_input_details"):
        raise InvalidInput("`decoder_input_details` == true is not supported when streaming tokens")
    if stream and listed:
        raise InvalidInput("`inputs` must be a text when streaming tokens; got a list")
    if len(fields.get("stop", ())) > MOST_STOP_SEQUENCES:
        raise InvalidInput(f"`stop` supports up to {MOST_STOP_SEQUENCES} stop sequences. Given: {len(fields['stop'])}")
