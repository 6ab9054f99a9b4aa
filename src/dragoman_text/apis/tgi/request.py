"""TGI requests, with parameters within TGI's limits, and their responses."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.calls import DescribeModels, ModelDescription, Request, Response
from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import check_value, flag, format_value, integer, number, text, texts
from dragoman.core.text import Chat, Generation, RawPrompt, Sampling, Text, Token
from dragoman.formats import fast_json
from dragoman.protocols.parameters import (
    GRAMMAR,
    Parameter,
    ParsedParameters,
    get_object,
    ignored,
    most_likely_first,
    option,
    parse_parameters,
    reject_unknown,
    reject_unused,
    sets,
    split_by_token,
)
from dragoman.protocols.wire import (
    EVENT_STREAM_HEADERS,
    EndpointResult,
    Headers,
    HttpRequest,
    HttpResponse,
    Policy,
    PreliminaryCall,
    json_response,
)
from dragoman_text.apis.common.chat import PARAMETERS as PARAMETERS_OF_CHAT
from dragoman_text.apis.common.chat import get_flag, parse_conversation
from dragoman_text.apis.common.openai_format import PLACEHOLDERS, is_url
from dragoman_text.limits import TGI_BEST_OF, TGI_INPUTS, TGI_STOPS, TGI_TOP


def resolve_model(
    body: Mapping[str, Any], http: HttpRequest, then: Callable[[str, tuple[str, ...]], EndpointResult]
) -> EndpointResult:
    """Call `then` with the name of the model and the names of fields that have no effect.

    TGI ignores the field `model` of a body. Here it chooses the model if the path names none and such a model exists.
    """
    name, path = body.get("model"), http.params.get("model", "")
    name = name.rpartition("/")[2] if isinstance(name, str) and not is_url(name) else ""
    if not name or name == path:
        return then(path, ())
    ignored_fields = () if name in PLACEHOLDERS else ("model",)
    if path:
        return then(path, ignored_fields)

    def choose(response: Response[tuple[ModelDescription, ...]]) -> EndpointResult:
        is_known = any(each.name == name for each in response.answer)
        return then(name, ()) if is_known else then("", ignored_fields)

    return PreliminaryCall(Request(DescribeModels()), choose)


PARAMETERS: Mapping[str, Parameter] = {
    "best_of": sets("n", integer(1, TGI_BEST_OF)),
    "temperature": sets("temperature", number(0.0, 1e6, above=True)),
    "repetition_penalty": sets("repetition_penalty"),
    "frequency_penalty": sets("frequency_penalty"),
    "top_k": sets("top_k", integer(1)),
    "top_p": sets("top_p", number(0.0, 1.0, above=True)),
    "typical_p": sets("typical_p"),
    "do_sample": sets("do_sample"),
    "max_new_tokens": sets("max_new_tokens"),
    "return_full_text": option("return_full_text", flag()),
    "stop": sets("stop", texts(TGI_STOPS)),
    "stop_sequences": sets("stop", texts(TGI_STOPS)),
    "truncate": sets("truncate"),
    "watermark": ignored(),
    "details": option("details", flag()),
    "decoder_input_details": option("decoder_input_details", flag()),
    "seed": sets("seed"),
    "top_n_tokens": sets("top_logprobs", integer(0, TGI_TOP)),
    "grammar": sets("grammar", GRAMMAR),
    "adapter_id": sets("adapter"),
}
_FIELDS = ("inputs", "parameters", "stream", "model", "add_special_tokens")
_DRAWS = ("temperature", "top_k", "top_p", "typical_p")
_NEUTRAL: Mapping[str, Any] = {name: getattr(Sampling(), name) for name in _DRAWS}


class TgiRequest(msgspec.Struct, frozen=True):
    """A parsed request. `listed`: the inputs were a list; `full`: the response repeats the prompt."""

    inputs: tuple[str, ...]
    listed: bool
    sampling: Sampling
    details: bool
    prefill: bool
    full: bool
    parameters: ParsedParameters

    @property
    def headers(self) -> Headers:
        return self.parameters.headers


def wants_stream(body: Mapping[str, Any]) -> bool:
    """Return whether a body asks for a stream, at paths where the body decides."""
    return bool(check_value("stream", body.get("stream") or False, flag()))


def parse_request(
    body: Mapping[str, Any], policy: Policy, ignored_fields: Sequence[str] = (), *, stream: bool
) -> TgiRequest:
    """Parse a body in which the fields `passed_over` have no effect. Raises InvalidInput for values outside TGI's
    limits."""
    inputs, listed = inputs_of(body)
    parameters = parse_parameters(get_object(body, "parameters"), PARAMETERS, policy)
    unknown = _ignored_fields(body, _FIELDS, ignored_fields, policy)
    fields, options = parameters.fields, parameters.options
    samples = any(fields.get(name, neutral) != neutral for name, neutral in _NEUTRAL.items())
    fields["do_sample"] = bool(fields.get("do_sample")) or samples
    _check_together(parameters, stream=stream, listed=listed)
    prefill = options.get("decoder_input_details", False)
    if prefill:
        fields["prompt_logprobs"] = 0
    names = {**parameters.names, "prompt": "inputs"}
    sampling = parameters.sampling(policy, include_stop=True)
    details = options.get("details", False) or prefill
    parameters = ParsedParameters(fields, options, names, (*unknown, *parameters.ignored))
    return TgiRequest(inputs, listed, sampling, details, prefill, options.get("return_full_text", False), parameters)


def parse_text_to_tokenize(
    body: Mapping[str, Any], policy: Policy, ignored_fields: Sequence[str]
) -> tuple[str, Sequence[str]]:
    """Return the text to tokenize and the names of fields without effect."""
    inputs, _ = inputs_of(body)
    if len(inputs) > 1:
        raise InvalidInput(f"`inputs` must be one string; got {len(inputs)}")
    return inputs[0], _ignored_fields(body, _FIELDS, ignored_fields, policy)


def parse_chat_to_tokenize(
    body: Mapping[str, Any], policy: Policy, ignored_fields: Sequence[str]
) -> tuple[Chat, Sequence[str]]:
    """Return the conversation to tokenize and the names of fields without effect."""
    chat, _ = parse_conversation(body, policy)
    # As in TGI, not all fields of a chat affect its tokens.
    supported = [name for name, each in PARAMETERS_OF_CHAT.items() if each.effect == "applied"]
    return chat, _ignored_fields(body, supported, ignored_fields, policy)


def _ignored_fields(
    body: Mapping[str, Any], supported: Sequence[str], ignored_fields: Sequence[str], policy: Policy
) -> tuple[str, ...]:
    """Return the fields that are unknown or have no effect. Raises InvalidInput for them in strict mode."""
    check_value("model", body.get("model") or "", text())
    unknown = [name for name in body if name not in supported]
    reject_unknown(unknown, supported, policy)
    reject_unused(ignored_fields, policy)
    return (*unknown, *ignored_fields)


def inputs_of(body: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return the inputs and whether they were a list, which TGI itself does not accept."""
    value = body.get("inputs")
    inputs: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) for each in inputs):
        raise InvalidInput(f"`inputs` must be a string, or a list of strings; got {format_value(value)}")
    if not inputs or not all(inputs):
        raise InvalidInput("`inputs` cannot be empty")
    if len(inputs) > TGI_INPUTS:
        raise InvalidInput(f"`inputs` must have at most {TGI_INPUTS} strings; got {len(inputs)}")
    bare = not get_flag(body, "add_special_tokens", otherwise=True)
    return tuple(map(RawPrompt, inputs) if bare else inputs), isinstance(value, list)


def _check_together(parameters: ParsedParameters, *, stream: bool, listed: bool) -> None:
    fields = parameters.fields
    if fields.get("n", 1) > 1:
        if stream:
            raise InvalidInput("`best_of` != 1 is not supported when streaming tokens")
        if not fields["do_sample"]:
            raise InvalidInput("you must use sampling when `best_of` is > 1")
        if "seed" in fields:
            raise InvalidInput("`seed` must not be set when `best_of` > 1")
    if stream and parameters.options.get("decoder_input_details"):
        raise InvalidInput("`decoder_input_details` == true is not supported when streaming tokens")
    if stream and listed:
        raise InvalidInput("`inputs` must be a string when streaming tokens; got a list")
    if len(fields.get("stop", ())) > TGI_STOPS:
        raise InvalidInput(f"`stop` supports up to {TGI_STOPS} stop sequences. Given: {len(fields['stop'])}")


class TgiFormatter:
    """Formats the response to one request, which arrived at `since_s` on the monotonic clock."""

    def __init__(self, request: TgiRequest, since_s: float, *, always_listed: bool = False) -> None:
        self._request = request
        self._since_s = since_s
        self._parsed_s = time.monotonic()
        self._listed = always_listed or request.listed
        self._length = 0
        self._index = 0

    # --- complete ---------------------------------------------------------------------------------------------

    def format_complete(self, response: Response[Generation]) -> HttpResponse:
        generation = response.answer
        results = [self._one(i, generation) for i in range(len(self._request.inputs))]
        headers = (*self._timing_headers(generation), *self._request.headers)
        return json_response(results if self._listed else results[0], 200, headers)

    def _one(self, at: int, generation: Generation) -> dict[str, Any]:
        texts = most_likely_first([t for t in generation.texts if t.prompt == at], self._request.sampling)
        value: dict[str, Any] = {"generated_text": self._full(at, texts[0])}
        if self._request.details:
            prefill = generation.prompts[at].prefill if generation.prompts and self._request.prefill else ()
            value["details"] = self._details(texts[0], prefill)
            if len(texts) > 1:
                value["details"]["best_of_sequences"] = [
                    {"generated_text": self._full(at, text), **self._details(text, prefill)} for text in texts[1:]
                ]
        return value

    def _full(self, at: int, text: Text) -> str:
        return (self._request.inputs[at] if self._request.full else "") + text.whole

    def _details(self, text: Text, prefill: Sequence[Token]) -> dict[str, Any]:
        value: dict[str, Any] = {
            "finish_reason": text.finish,
            "generated_tokens": text.generated,
            "seed": text.seed,
            "prefill": [{"id": t.id, "text": t.text, "logprob": t.logprob} for t in prefill],
            "tokens": _tokens(text),
        }
        if self._request.sampling.top_logprobs:
            value["top_tokens"] = [[_format_token(top, top.text) for top in token.top] for token in text.tokens]
        return value

    def _timing_headers(self, generation: Generation) -> Headers:
        """Return TGI's timing headers. For several prompts the queue time is the longest."""
        now_s = time.monotonic()
        total, validation = now_s - self._since_s, self._parsed_s - self._since_s
        generated = sum(text.generated for text in generation.texts)
        queue = min(total - validation, max((info.waited_s or 0.0 for info in generation.prompts), default=0.0))
        inference_ms = round((total - validation - queue) * 1000)
        return (
            *self._compute_headers(),
            ("x-compute-time", f"{total:.6f}"),
            ("x-total-time", str(round(total * 1000))),
            ("x-validation-time", str(round(validation * 1000))),
            ("x-queue-time", str(round(queue * 1000))),
            ("x-inference-time", str(inference_ms)),
            ("x-time-per-token", str(round(inference_ms / max(1, generated)))),
            ("x-prompt-tokens", str(sum(info.tokens for info in generation.prompts))),
            ("x-generated-tokens", str(generated)),
        )

    def _compute_headers(self) -> Headers:
        characters = sum(map(len, self._request.inputs))
        return (("x-compute-type", "dragoman"), ("x-compute-characters", str(characters)))

    # --- in chunks -----------------------------------------------------------------------------------------

    @property
    def stream_headers(self) -> Headers:
        return (*EVENT_STREAM_HEADERS, ("x-accel-buffering", "no"), *self._compute_headers(), *self._request.headers)

    def format_chunk(self, response: Response[Generation]) -> bytes:
        """Format one event per token of a chunk."""
        if response.answer.prompts:
            self._length = response.answer.prompts[0].tokens
        return b"".join(event for text in response.answer.texts for event in self._events(text))

    def _events(self, text: Text) -> list[bytes]:
        tokens = list(text.tokens)
        if not tokens and (text.text or text.finish):
            tokens = [Token(0, text.text, 0.0, special=not text.text)]
        parts = split_by_token(text.text, tokens)
        return [self._event(text, token, part, token is tokens[-1]) for token, part in zip(tokens, parts, strict=True)]

    def _event(self, text: Text, token: Token, part: str, last: bool) -> bytes:
        self._index += 1
        value: dict[str, Any] = {"index": self._index, "token": _format_token(token, part)}
        if self._request.sampling.top_logprobs:
            value["top_tokens"] = [_format_token(top, top.text) for top in token.top]
        ends = bool(text.finish) and last
        details = {
            "finish_reason": text.finish,
            "generated_tokens": text.generated,
            "seed": text.seed,
            "input_length": self._length,
        }
        value["generated_text"] = self._full(0, text) if ends else None
        value["details"] = details if ends else None
        return event(value)


def event(value: Any) -> bytes:
    """Format a server-sent event as TGI does, without a space after the colon."""
    return b"data:" + fast_json.dumps(value) + b"\n\n"


def _tokens(text: Text) -> list[dict[str, Any]]:
    return [_format_token(*pair) for pair in zip(text.tokens, split_by_token(text.text, text.tokens), strict=True)]


def _format_token(token: Token, part: str) -> dict[str, Any]:
    # Clients remove special tokens by this flag.
    text = token.text if token.special and not part else part
    return {"id": token.id, "text": text, "logprob": token.logprob, "special": token.special}
