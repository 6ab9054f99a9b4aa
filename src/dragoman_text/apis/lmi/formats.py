"""LMI responses: output formatters (JSON, JSON lines, server-sent events) and errors, in the schema of the model."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from dragoman.core.calls import Response
from dragoman.core.errors import (
    AlreadyLoaded,
    DeadlineExceeded,
    DragomanError,
    Forbidden,
    InvalidInput,
    ModelNameMissing,
    ModelNotFound,
    NotReady,
    NotSupported,
    OutOfMemory,
    Overloaded,
    PathNotFound,
    RateLimited,
    ServerError,
    Unauthorized,
)
from dragoman.core.text import Generation, PromptInfo, Text, Token
from dragoman.protocols.parameters import finite, most_likely_first, split_by_token
from dragoman.protocols.wire import (
    EVENT_STREAM_HEADERS,
    JSON_TYPE,
    PLAIN_TEXT,
    Headers,
    HttpError,
    HttpResponse,
    error_headers,
    find_error_row,
)
from dragoman_text.apis.lmi.model import TEXT_ONLY, LmiModel, format_text_only
from dragoman_text.apis.lmi.request import LmiRequest

_KINDS: Mapping[str, Headers] = {
    "json": (JSON_TYPE,),
    "jsonlines": (("content-type", "application/jsonlines"),),
    "sse": EVENT_STREAM_HEADERS,
}
_encoded = json.JSONEncoder(ensure_ascii=False).encode


class Formatter:
    """Formats one response, complete or in chunks. Counts the tokens that were sent."""

    def __init__(self, request: LmiRequest, model: LmiModel) -> None:
        self._request = request
        self._model = model
        self._compat = model.tgi_compat and request.rolling
        self._prompts: tuple[PromptInfo, ...] = ()
        self._sent = 0
        sampling = request.sampling
        self.ranked = max(sampling.n, sampling.best_of, sampling.num_beams) > 1
        self.streams = request.formatter != "json"
        chosen = request.parameters.options.get("output_formatter", "")
        self._custom = model.custom if not chosen else format_text_only if chosen == TEXT_ONLY else None

    @property
    def headers(self) -> Headers:
        """Return the headers of the response, with the names of ignored parameters."""
        kinds = _KINDS[self._request.formatter]
        if self._custom is not None:
            kinds = (("content-type", getattr(self._custom, "content_type", "") or PLAIN_TEXT),)
        return (*kinds, *self._request.parameters.headers)

    # --- complete ---------------------------------------------------------------------------------------------

    def format_complete(self, response: Response[Generation]) -> HttpResponse:
        """Format the complete response."""
        self._prompts = response.answer.prompts
        results = [self._answer(i, texts) for i, texts in enumerate(self._by_prompt(response.answer))]
        value: Any = results if self._compat or not self._request.rolling else results[0]
        return HttpResponse(200, (self._encode(value),), self.headers)

    def _by_prompt(self, generation: Generation) -> list[list[Text]]:
        """Group the completions by prompt, the best first."""
        count = len(self._request.inputs)
        grouped: list[list[Text]] = [[] for _ in range(count)]
        for text in generation.texts:
            grouped[text.prompt].append(text)
        return [most_likely_first(texts, self._request.sampling) for texts in grouped]

    def _answer(self, at: int, texts: Sequence[Text]) -> dict[str, Any]:
        result: dict[str, Any] = {"generated_text": self._full(at, texts[0])}
        # LMI: other completions are in the details, so details are returned unless disabled.
        details = self._request.parameters.options.get("details", self._compat or self.ranked)
        if details and self._model.rolling:
            result["details"] = self._details(at, texts)
        return result

    def _full(self, at: int, text: Text) -> str:
        # LMI: in the dynamic-batch schema the text includes the prompt.
        full = self._request.parameters.options.get("return_full_text", not self._request.rolling)
        return (self._request.inputs[at] if full else "") + text.whole

    def _details(self, at: int, texts: Sequence[Text]) -> dict[str, Any]:
        best, prompt = texts[0], self._request.inputs[at]
        details: dict[str, Any] = {
            "finish_reason": best.finish,
            "generated_tokens": best.generated,
            "inputs": prompt,
            "tokens": self._tokens(best),
        }
        if self.ranked:
            details = {"inputs": prompt, **details}
        if self._request.parameters.options["prefill"] or self._compat:
            details["prefill"] = self._prefill(at)
        if self._request.sampling.top_logprobs:
            details["top_tokens"] = [[self._token(top, top.text) for top in token.top] for token in best.tokens]
        if self.ranked:
            details["best_of_sequences"] = [self._sequence(at, text) for text in texts[1:]]
        if self._compat:
            details["seed"] = best.seed
        return details

    def _prefill(self, at: int) -> list[dict[str, Any]]:
        tokens = self._prompts[at].prefill if self._prompts else ()
        if not self._request.sampling.prompt_logprobs:
            return [self._token(token, token.text) for token in tokens]
        return [
            {**self._token(token, token.text), "top_tokens": [self._token(top, top.text) for top in token.top]}
            for token in tokens
        ]

    def _sequence(self, at: int, text: Text) -> dict[str, Any]:
        sequence = {
            "finish_reason": text.finish,
            "generated_tokens": text.generated,
            "tokens": self._tokens(text),
            "generated_text": self._full(at, text),
        }
        return {**sequence, "prefill": [], "seed": text.seed} if self._compat else sequence

    def _tokens(self, text: Text) -> list[dict[str, Any]]:
        return [self._token(*pair) for pair in zip(text.tokens, split_by_token(text.text, text.tokens), strict=True)]

    def _token(self, token: Token, text: str) -> dict[str, Any]:
        logprob = finite(token.logprob)
        fields: dict[str, Any] = {"id": token.id, "text": text, "log_prob": logprob}
        if self._compat:  # fields that TGI's clients need
            return {**fields, "logprob": logprob, "special": token.special}
        return {**fields, "special_token": True} if token.special else fields

    # --- in chunks -----------------------------------------------------------------------------------------

    def format_chunk(self, response: Response[Generation]) -> bytes:
        """Format one chunk: one line per token, or per step of all prompts in the dynamic-batch schema."""
        self._prompts = self._prompts or response.answer.prompts
        if not self._request.rolling:
            return b"".join(self._frame({"outputs": row}) for row in self._outputs(response.answer))
        best = self._by_prompt(response.answer)[0]
        return b"".join(map(self._frame, self._lines(best[0]))) if best else b""

    def _outputs(self, generation: Generation) -> Iterator[Sequence[str]]:
        """Yield the new tokens of each prompt, step by step."""
        best = (texts[0] if texts else Text() for texts in self._by_prompt(generation))
        parts = (split_by_token(text.text, text.tokens) or [text.text] for text in best)
        yield from zip_longest(*parts, fillvalue="")

    def _lines(self, text: Text) -> list[dict[str, Any]]:
        parts = split_by_token(text.text, text.tokens)
        lines = [self._line(token, part) for token, part in zip(text.tokens, parts, strict=True)]
        if not lines and (text.finish or text.text):
            lines = [self._line(Token(-1, "", 0.0, special=not text.text), text.text)]
        if text.finish:
            lines[-1]["generated_text"] = self._full(0, text)
            lines[-1]["details"] = self._last(text)
        return lines

    def _line(self, token: Token, text: str) -> dict[str, Any]:
        self._sent += 1
        line: dict[str, Any] = {"index": self._sent} if self._compat else {}
        line["token"] = self._token(token, text)
        if self._request.sampling.top_logprobs:
            line["top_tokens"] = [self._token(top, top.text) for top in token.top]
        return line

    def _last(self, text: Text) -> dict[str, Any]:
        line: dict[str, Any] = {
            "finish_reason": text.finish,
            "generated_tokens": text.generated,
            "inputs": self._request.inputs[0],
        }
        if self._request.parameters.options["prefill"]:
            line["prefill"] = self._prefill(0)
        if self._compat:
            length = self._prompts[0].tokens if self._prompts else 0
            line |= {"seed": text.seed, "input_length": length}
        return line

    # --- errors --------------------------------------------------------------------------------------------

    def error(self, error: DragomanError) -> bytes:
        """Format the end of a stream that failed."""
        if not self._request.rolling:
            return self._frame(dynamic_error_body(error))
        token = {"id": -1, "text": "", "log_prob": -1, "special_token": True}
        details = {"finish_reason": "error", "generated_tokens": None, "inputs": None}
        return self._frame({"token": token, "generated_text": "", "details": details})

    def format_failure(self) -> bytes:
        """Format a failure of the generation before the first chunk was sent."""
        details = {"finish_reason": "error", "generated_tokens": None, "inputs": None, "tokens": None}
        return to_json({"generated_text": "", "details": details})

    # --- bytes ---------------------------------------------------------------------------------------------

    def _frame(self, value: dict[str, Any]) -> bytes:
        written = self._encode(value)
        if self._custom is not None:
            return written
        return b"data: " + written + b"\n\n" if self._request.formatter == "sse" else written + b"\n"

    def _encode(self, value: Any) -> bytes:
        if self._custom is None:
            return to_json(value)
        formatted = self._custom(value)
        if isinstance(formatted, bytes):
            return formatted
        return formatted.encode() if isinstance(formatted, str) else to_json(formatted)


def dynamic_error_body(error: DragomanError) -> dict[str, Any]:
    """Return the body of an error in the dynamic-batch schema."""
    return {"code": 424, "message": "invoke handler failure", "error": error.message}


def to_json(value: Any) -> bytes:
    """Serialize with spaces after commas and colons and without escapes, as LMI does."""
    return _encoded(value).encode(errors="replace")


# The statuses that LMI's operators may choose, by the names of its properties without `_http_code`.
CODES: Mapping[str, int] = {
    "bad_request": 400,
    "wlm_error": 503,
    "throttle_error": 503,
    "timeout": 504,
    "server_error": 500,
}
# Errors in the format of DJL Serving: a status, or the name of a configurable one, and the type.
_TYPES: Sequence[tuple[type[DragomanError], int | str, str]] = (
    (ModelNameMissing, "bad_request", "BadRequestException"),
    (AlreadyLoaded, 409, "ConflictStatusException"),  # SageMaker's multi-model endpoints rely on these two
    (OutOfMemory, 507, "WlmOutOfMemoryException"),
    (NotSupported, "bad_request", "BadRequestException"),
    (PathNotFound, 404, "ResourceNotFoundException"),
    (ModelNotFound, 404, "ModelNotFoundException"),
    (Unauthorized, 401, "UnauthorizedException"),
    (Forbidden, 403, "ForbiddenException"),
    (NotReady, "wlm_error", "ServiceUnavailableException"),
    (Overloaded, "throttle_error", "WlmCapacityException"),
    (RateLimited, 429, "ThrottlingException"),
    (DeadlineExceeded, "timeout", "TimeoutException"),
)
_HTTP_TYPES: Mapping[int, str] = {404: "ResourceNotFoundException", 405: "MethodNotAllowedException"}


def parse_codes(text: str) -> Mapping[str, int]:
    """Parse `name=status,...`; others keep their default. Raises InvalidInput naming what is wrong."""
    codes = dict(CODES)
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, status = (each.strip() for each in part.partition("="))
        if name not in CODES or not status.isdecimal() or not 400 <= int(status[:4]) <= 599:
            raise InvalidInput(
                f"setting 'lmi_http_codes': expected name=status, with a status from 400 to 599 and a name of "
                f"{', '.join(CODES)}; got '{part}'"
            )
        codes[name] = int(status)
    return codes


class LmiErrors:
    """Formats errors with the statuses that the operator has configured."""

    def __init__(self, chosen: Mapping[str, int]) -> None:
        self._codes = chosen

    @property
    def statuses(self) -> list[int]:
        """All statuses of errors, 424 for those of models."""
        return [424, *(self._codes[code] if isinstance(code, str) else code for _, code, _ in _TYPES)]

    def write(self, error: DragomanError | HttpError, _request_id: str = "") -> HttpResponse:
        """Format an error of a request that reached no model."""
        if isinstance(error, HttpError):
            is_client_error = error.status < 500
            kind = _HTTP_TYPES.get(
                error.status, "BadRequestException" if is_client_error else "InternalServerException"
            )
            status = {400: self._codes["bad_request"], 500: self._codes["server_error"]}.get(error.status, error.status)
            return _json({"code": status, "type": kind, "message": error.message}, status, error.headers)
        row = find_error_row(error, _TYPES)
        if row is None:
            return _json({"error": error.message, "code": 424}, 424)
        code, name = row
        status = self._codes[code] if isinstance(code, str) else code
        return _json({"code": status, "type": name, "message": error.message}, status, error_headers(error))

    def format_failure(self, error: DragomanError, request: LmiRequest, formatter: Formatter) -> HttpResponse:
        """Format an error that occurred before the first chunk was sent."""
        error = request.parameters.with_client_names(error)
        headers = (JSON_TYPE, *request.parameters.headers)
        if isinstance(error, ServerError | InvalidInput) and not request.rolling:
            return format_dynamic(error, request.parameters.headers)
        if isinstance(error, ServerError) and not formatter.streams:
            return HttpResponse(424, (formatter.format_failure(),), headers)
        return self.write(error)


def format_dynamic(error: DragomanError, headers: Headers = ()) -> HttpResponse:
    """Format an error in the dynamic-batch schema."""
    return _json(dynamic_error_body(error), 424, headers)


def _json(value: Any, status: int, headers: Headers = ()) -> HttpResponse:
    return HttpResponse(status, (to_json(value),), (JSON_TYPE, *headers))
