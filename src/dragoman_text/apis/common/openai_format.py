"""Shared by OpenAI chats and completions: parameters, finish reasons, usage and framing of chunks."""

import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman.core.calls import DescribeModels, ModelDescription, Request, Response
from dragoman.core.errors import (
    AdapterNotFound,
    DeadlineExceeded,
    DragomanError,
    Forbidden,
    InvalidInput,
    ModelNotFound,
    NotReady,
    NotSupported,
    Overloaded,
    PathNotFound,
    RateLimited,
    TooLong,
    Unauthorized,
)
from dragoman.core.sampling import MODEL_DEFAULTS, InvalidValueError, ValueKind, flag, format_value, integer, number
from dragoman.core.text import FinishReason, Generation, PromptInfo, Text, Token
from dragoman.formats import fast_json
from dragoman.protocols.parameters import (
    GUIDED,
    RESPONSE_FORMAT,
    Parameter,
    anything,
    event,
    ignored,
    label,
    option,
    options,
    sets,
)
from dragoman.protocols.wire import (
    EndpointResult,
    HttpError,
    HttpRequest,
    HttpResponse,
    PreliminaryCall,
    find_error_row,
    replace_surrogates,
)

# Formats an error for the protocol of the path.
FormatError = Callable[[DragomanError | HttpError], HttpResponse]

# Names that clients send for any model. So is a URL: clients of Hugging Face send that of the server.
PLACEHOLDERS = frozenset({"", "tgi", "dummy", "default"})
_URL = ("http://", "https://")
DONE = b"data: [DONE]\n\n"
REASONS: Mapping[FinishReason, str | None] = {
    "": None,
    "length": "length",
    "eos_token": "stop",
    "stop_sequence": "stop",
}
_HALF = "\N{REPLACEMENT CHARACTER}"
_SEED = integer(-(1 << 63), (1 << 63) - 1)
_SAME = (
    "n",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "length_penalty",
    "early_stopping",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "prompt_logprobs",
    "bad_words",
    "truncation_side",
)


def truncation() -> ValueKind:
    """A number of tokens; -1, for as many as fit, becomes 0."""

    tokens = integer(-1)

    def convert(value: Any) -> int:
        count: int = tokens.convert(value)
        if count == 0:
            raise InvalidValueError
        return max(0, count)

    schema = {**tokens.schema, "not": {"const": 0}}
    text = "an integer that is strictly positive, or -1: as many as fit"
    return replace(tokens, description=text, convert=convert, schema=schema)


# Including vLLM's extra parameters.
COMMON: Mapping[str, Parameter] = {
    **{name: sets(name) for name in _SAME},
    "temperature": sets("temperature", number(0.0, 2.0)),
    "top_p": sets("top_p", number(0.0, 1.0, above=True)),
    "max_tokens": sets("max_new_tokens"),
    "min_tokens": sets("min_new_tokens"),
    "seed": sets("seed", replace(_SEED, convert=lambda value: _SEED.convert(value) & ((1 << 64) - 1))),
    "include_stop_str_in_output": sets("include_stop"),
    "truncate_prompt_tokens": sets("truncate", truncation()),
    "return_token_ids": sets("prompt_token_ids"),
    "return_tokens_as_token_ids": option("tokens_as_ids", flag()),
    "adapter": sets("adapter"),
    "cache_salt": sets("cache_salt"),
    "response_format": sets("grammar", RESPONSE_FORMAT),
    **GUIDED,
    "add_special_tokens": option("add_special_tokens", flag()),
    "use_beam_search": option("use_beam_search", flag()),
    "stream": option("stream", flag()),
    "stream_options": options(
        "stream_options",
        {
            "include_usage": option("include_usage", flag()),
            "continuous_usage_stats": option("continuous_usage_stats", flag()),
            "include_obfuscation": label(),
        },
    ),
    "model": option("model", anything()),
    "user": label(),
    "metadata": label(),
    "store": ignored(),
    "service_tier": ignored("auto", "default"),
}


def resolve_options(fields: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Resolve OpenAI's parameters together: sampling is on unless the temperature is 0.

    Parameters that the request does not name are left to the model's defaults. As in vLLM's earlier API, the width of a
    beam
    search is `best_of`, else `n`.
    """
    if options.get("use_beam_search"):
        fields.setdefault("num_beams", max(2, fields.get("n", 1), fields.get("best_of", 0)))
        fields.pop("temperature", None)
    else:
        fields["do_sample"] = True
    fields["model_defaults"] = MODEL_DEFAULTS - fields.keys()
    _, adapter = split_model(str(options.get("model", "")))
    if adapter:
        fields.setdefault("adapter", adapter)
    if "stream_options" in options and not options.get("stream"):
        raise InvalidInput("`stream_options` must only be given with `stream`: true")


def resolve_model(
    body: Mapping[str, Any], http: HttpRequest, then: Callable[[str], EndpointResult], model: str = ""
) -> EndpointResult:
    """Call `then` with the name of the model: `model`, or that of the path, or that of the body.

    A placeholder is not a name, unless a model is called so. Only the name of `organisation/name`, as on the Hugging
    Face Hub, is used.
    """
    named = split_model(_model_name(body.get("model")))[0].rpartition("/")[2]
    name = model or http.params.get("model", "") or named
    if not name or name not in PLACEHOLDERS:
        return then(name)

    def choose(response: Response[tuple[ModelDescription, ...]]) -> EndpointResult:
        return then(name if any(each.name == name for each in response.answer) else "")

    return PreliminaryCall(Request(DescribeModels()), choose)


def split_model(name: str) -> tuple[str, str]:
    """Return model and adapter, which follows a colon, of a name in a request; both are "" for a URL."""
    model, _, adapter = ("" if is_url(name) else name).partition(":")
    return model, adapter


def is_url(name: str) -> bool:
    """Return whether the name of a model is a URL, which stands for any model."""
    return name.startswith(_URL)


def _model_name(name: Any) -> str:
    if name is not None and not isinstance(name, str):
        raise InvalidInput(f"`model` must be the name of a model; got {format_value(name)}")
    return name or ""


def stop_reason(text: Text) -> str | int | None:
    """Return vLLM's stop reason: the stop string or token of the request that ended the completion; None for an end
    token."""
    return text.stop if text.finish == "stop_sequence" else None


# --- answers -----------------------------------------------------------------------------------------------


class TokenUsage(msgspec.Struct):
    """Counts prompt tokens and generated tokens."""

    prompt: int = 0
    cached: int = 0
    generated: dict[tuple[int, int], int] = msgspec.field(default_factory=dict)
    reasoning: dict[int, int] = msgspec.field(default_factory=dict)

    @property
    def completion(self) -> int:
        return sum(self.generated.values())

    def add(self, generation: Generation) -> None:
        if generation.prompts:
            self.read(generation.prompts)
        for text in generation.texts:
            self.generated[text.prompt, text.choice] = text.generated

    def without(self, text: Text) -> "TokenUsage":
        """Return the usage before the first tokens of a completion."""
        return replace(self, generated={**self.generated, (text.prompt, text.choice): 0})

    def read(self, prompts: Sequence[PromptInfo]) -> None:
        self.prompt += sum(info.tokens for info in prompts)
        self.cached += sum(info.cached for info in prompts)

    def to_json(self) -> dict[str, Any]:
        reasoning = sum(self.reasoning.values())
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            **({"completion_tokens_details": {"reasoning_tokens": reasoning}} if reasoning else {}),
        }


_NO_CHOICES = b"]}\n\n"


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that every response and every chunk begins with."""

    prefix: str
    kind: str
    id: str = ""
    created: int = 0
    _starts: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False)  # of chunks, by model

    @classmethod
    def new(cls, prefix: str, kind: str) -> "Envelope":
        return cls(prefix, kind, f"{prefix}-{uuid.uuid4().hex}", int(time.time()))

    def around(self, model: str, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": self.kind, "created": self.created, "model": model}
        return {**head, "system_fingerprint": "fp_dragoman", "choices": choices, **more}

    def event(self, model: str, choice: Any, more: Mapping[str, Any]) -> bytes:
        """Format a chunk of a stream with one choice, as `around`; what all chunks begin with is encoded once."""
        start = self._starts.get(model)
        if start is None:
            start = self._starts[model] = event(self.around(model, ())).removesuffix(_NO_CHOICES)
        end = b"]," + fast_json.dumps(more)[1:] + b"\n\n" if more else b"]}\n\n"
        return b"%b%b%b" % (start, fast_json.dumps(choice), end)

    def ending(self, model: str, usage: TokenUsage) -> bytes:
        """Format the last chunk of a stream, with the usage of all of it."""
        return event(self.around(model, [], usage=usage.to_json()))


def format_token_ids(tokens: Sequence[Token]) -> dict[str, Any]:
    """Format vLLM's `token_ids` of a choice, whole or of one chunk."""
    return {"token_ids": [token.id for token in tokens]}


def format_prompt_token_ids(info: PromptInfo) -> dict[str, Any]:
    """Format vLLM's `prompt_token_ids`, null if the model does not return them."""
    return {"prompt_token_ids": list(info.token_ids) or None}


def token_name(token: Token, *, as_ids: bool) -> str:
    """Return the text of a token, or vLLM's form of its id, which is unique: of parts of a character, several have the
    same text."""
    return f"token_id:{token.id}" if as_ids else token.text


def format_logprob(token: Token, *, as_ids: bool = False) -> dict[str, Any]:
    """Format a token with its log-probability as chats do; `bytes` is null for a part of a character whose bytes are
    unknown. as_ids: with its id instead of its text."""
    data = token.data or (b"" if _HALF in token.text else token.text.encode(errors="replace"))
    name = token_name(token, as_ids=as_ids)
    return {"token": name, "logprob": _clip(token), "bytes": list(data) if data or not token.text else None}


def format_prompt_logprobs(prefill: Sequence[Token]) -> list[dict[str, Any] | None]:
    """Format vLLM's `prompt_logprobs`: each prompt token but the first, with the top tokens at its position, by id."""
    return [None if token.logprob is None else _format_ranks(token) for token in prefill]


def _format_ranks(token: Token) -> dict[str, Any]:
    ranks: dict[str, tuple[Token, int | None]] = {str(top.id): (top, rank) for rank, top in enumerate(token.top, 1)}
    ranks.setdefault(str(token.id), (token, None))
    return {
        id_: {"logprob": _clip(each), "rank": rank, "decoded_token": each.text} for id_, (each, rank) in ranks.items()
    }


def _clip(token: Token) -> float:
    return -9999.0 if token.logprob is None else max(token.logprob, -9999.0)  # OpenAI's value for impossible tokens


# --- faults ------------------------------------------------------------------------------------------------

_INVALID_REQUEST = "invalid_request_error"
_NAMED = re.compile(r"`?([\w\[\].]+)(?:`|: )")
_FAULTS: Sequence[tuple[type[DragomanError], int, str, str | None]] = (
    (TooLong, 400, _INVALID_REQUEST, "context_length_exceeded"),
    (AdapterNotFound, 404, _INVALID_REQUEST, "model_not_found"),
    (InvalidInput, 400, _INVALID_REQUEST, None),
    (NotSupported, 400, _INVALID_REQUEST, "unsupported"),
    (PathNotFound, 404, _INVALID_REQUEST, None),
    (ModelNotFound, 404, _INVALID_REQUEST, "model_not_found"),
    (Unauthorized, 401, _INVALID_REQUEST, "invalid_api_key"),
    (Forbidden, 403, _INVALID_REQUEST, None),
    (NotReady, 503, "service_unavailable", None),
    (Overloaded, 503, "service_unavailable", "overloaded"),
    (RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
    (DeadlineExceeded, 504, "timeout", None),
)

STATUSES = tuple(sorted({status for _, status, _, _ in _FAULTS}))


def status_of(error: DragomanError) -> int:
    return _row(error)[0]


def _row(error: DragomanError) -> tuple[int, str, str | None]:
    status, kind, code = find_error_row(error, _FAULTS) or (500, "server_error", None)
    return status, kind, code


def error_body(error: DragomanError) -> dict[str, Any]:
    """Return the body of an error; `param` is the parameter that the message begins with."""
    _, kind, code = _row(error)
    named = _NAMED.match(error.message)
    param = "model" if code == "model_not_found" else named[1] if named and kind == _INVALID_REQUEST else None
    return {"error": {"message": replace_surrogates(error.message), "type": kind, "param": param, "code": code}}


def error_event(error: DragomanError) -> bytes:
    return event(error_body(error))
