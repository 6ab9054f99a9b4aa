"""OpenAI and Bedrock schemas at the LMI paths, whose streams may be JSON lines, and embeddings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import structs

from dragoman.core.calls import Embed, Embedded, Generate, ModelDescription, Response
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.sampling import check_value, flag, format_value, text
from dragoman.core.text import Generation, Text, Token
from dragoman.formats import fast_json
from dragoman.protocols.parameters import (
    Parameter,
    build_request,
    ignored_header,
    json_body,
    option,
    parse_parameters,
    reject_unknown,
    sets,
    split_by_token,
)
from dragoman.protocols.wire import (
    JSON_TYPE,
    EndpointResult,
    EngineCall,
    Headers,
    HttpRequest,
    HttpResponse,
    HttpStream,
    Policy,
    PreliminaryCall,
)
from dragoman_text.apis.common.chat import parse_chat_request
from dragoman_text.apis.common.completions import parse_completion_request
from dragoman_text.apis.lmi.formats import LmiErrors, to_json
from dragoman_text.apis.lmi.model import LmiModel
from dragoman_text.apis.lmi.request import media_type, other_model
from dragoman_text.limits import MAX_TEXTS

_KINDS = ("", "application/json", "application/x-www-form-urlencoded")  # curl calls JSON the last of these


def parse_embeddings_request(
    http: HttpRequest, model: ModelDescription, policy: Policy, errors: LmiErrors
) -> EndpointResult | None:
    """Parse an embeddings request; None if `inputs` is not text."""
    try:
        body = _embeddings_body(http, policy)
        inputs = body.get("inputs") if body is not None else None
        texts: list[Any] = inputs if isinstance(inputs, list) else [inputs]
        if body is None or not texts or not all(isinstance(text, str) for text in texts):
            return None
        _check(body, texts, policy)
        unknown = _unknown(body) + other_model(body, model.name, policy)
    except InvalidInput as error:
        return _invalid_input(error)

    def reply(response: Response[Embedded]) -> HttpResponse:
        vectors = np.ascontiguousarray(response.answer.vectors.data, np.float32)
        value = fast_json.dumps(vectors if isinstance(inputs, list) else vectors[0])
        return HttpResponse(200, (value,), (JSON_TYPE, *ignored_header(unknown)))

    def format_error(error: DragomanError) -> HttpResponse:
        return _invalid_input(error) if isinstance(error, InvalidInput) else errors.write(error)

    return EngineCall(build_request(Embed(tuple(texts)), http, policy, model.name), reply, format_error)


def _embeddings_body(http: HttpRequest, policy: Policy) -> dict[str, Any] | None:
    if media_type(http) not in _KINDS:
        return None
    value = json_body(http.body, policy)
    return value if isinstance(value, dict) else None


def _check(body: Mapping[str, Any], texts: Sequence[str], policy: Policy) -> None:
    if not all(texts) or len(texts) > MAX_TEXTS:
        raise InvalidInput(
            f"`inputs` must be a string, or at most {MAX_TEXTS} strings, none empty; got {format_value(body['inputs'])}"
        )
    reject_unknown(_unknown(body), ("inputs",), policy)


def _unknown(body: Mapping[str, Any]) -> list[str]:
    return [name for name, value in body.items() if name not in ("inputs", "model_name") and value not in (None, {})]


def _invalid_input(error: DragomanError) -> HttpResponse:
    """Format an invalid input as DJL Serving does."""
    value = {"code": 400, "type": "TranslateException", "message": error.message}
    return HttpResponse(400, (to_json(value),), (JSON_TYPE,))


_LINES: Headers = (("content-type", "application/jsonlines"),)
_EVENT_HEADERS = ("content-type", "cache-control")


def parse_openai_request(
    body: Mapping[str, Any], http: HttpRequest, policy: Policy, errors: LmiErrors, model: LmiModel
) -> EndpointResult:
    """Parse a body with `messages` or with a `prompt`. Raises InvalidInput naming the field."""
    parse = parse_chat_request if "messages" in body else parse_completion_request
    result = parse(body, http, policy, errors.write, model.name)
    return _in_lines(result) if model.formatter == "jsonlines" else result


def _in_lines(result: EndpointResult) -> EndpointResult:
    """Return the same result with JSON lines instead of server-sent events, and without [DONE]."""
    if isinstance(result, PreliminaryCall):
        then: Callable[[Response[Any]], EndpointResult] = result.then
        return structs.replace(result, then=lambda response: _in_lines(then(response)))
    if not isinstance(result, HttpStream):
        return result
    chunk, late_error, last_chunk = result.format_chunk, result.format_late_error, result.format_last_chunk
    return structs.replace(
        result,
        format_chunk=lambda response: _lines(chunk(response)),
        format_late_error=lambda error: _lines(late_error(error)),
        format_last_chunk=lambda: _lines(last_chunk()),
        end=b"",
        headers=(*_LINES, *(pair for pair in result.headers if pair[0] not in _EVENT_HEADERS)),
    )


def _lines(events: bytes) -> bytes:
    return b"".join(event.removeprefix(b"data: ") + b"\n" for event in events.split(b"\n\n") if event)


_PARAMETERS: Mapping[str, Parameter] = {
    "prompt": option("prompt", text()),
    "model": option("model", text()),  # used to choose the model
    "max_gen_len": sets("max_new_tokens"),
    "temperature": sets("temperature"),
    "top_p": sets("top_p"),
    "stream": option("stream", flag()),
}
# Bedrock's defaults.
_DEFAULTS: Mapping[str, Any] = {"max_new_tokens": 512, "temperature": 0.5, "top_p": 0.9, "do_sample": True}
_FORWARDED = "x-amzn-sagemaker-forwarded-api"
_STREAMED = "InvokeEndpointWithResponseStream"


def parse_bedrock_request(body: Mapping[str, Any], http: HttpRequest, policy: Policy, model: str) -> EndpointResult:
    """Parse a request. Raises InvalidInput naming the field."""
    parameters = parse_parameters(body, _PARAMETERS, policy)
    prompt = check_value("prompt", parameters.options.get("prompt"), text())
    if not prompt:
        raise InvalidInput(f"`prompt` must be a non-empty string; got {format_value(prompt)}")
    stream = parameters.options.get("stream", http.headers.get(_FORWARDED, "") == _STREAMED)
    sampling = parameters.sampling(policy, **_DEFAULTS, shorten=True)
    request = build_request(Generate(prompts=(prompt,), sampling=sampling, stream=stream), http, policy, model)
    if not stream:
        return EngineCall(request, lambda response: _format_complete(response.answer, parameters.headers))
    lines = _Lines()
    return HttpStream(request, lines.format_chunk, lines.error, b"", (*_LINES, *parameters.headers))


def _format_complete(generation: Generation, headers: Headers) -> HttpResponse:
    best, count = generation.texts[0], _count(generation)
    result = _body(best.whole, count, best.generated, best.finish)
    metering = {"inputTokenCount": count, "outputTokenCount": best.generated}
    value = {"body": result, "metering": metering, "content_type": "application/json"}
    return HttpResponse(200, (to_json(value),), (JSON_TYPE, *headers))


def _count(generation: Generation) -> int:
    return sum(info.tokens for info in generation.prompts)


def _body(text: str | None, prompt: int | None, generated: int, reason: str | None) -> dict[str, Any]:
    return {
        "generation": text,
        "prompt_token_count": prompt,
        "generation_token_count": generated,
        "stop_reason": reason or None,
    }


class _Lines:
    """Formats a stream with one line per token; the first line has the number of prompt tokens."""

    def __init__(self) -> None:
        self._sent = 0
        self._prompt: int | None = None

    def format_chunk(self, response: Response[Generation]) -> bytes:
        if response.answer.prompts:
            self._prompt = _count(response.answer)
        return b"".join(line for text in response.answer.texts for line in self._lines(text))

    def _lines(self, text: Text) -> Sequence[bytes]:
        tokens = text.tokens or ((Token(-1, text.text, 0.0),) if text.text or text.finish else ())
        parts = split_by_token(text.text, tokens)
        last = len(tokens) - 1
        return [self._line(part, text.finish if i == last else "") for i, part in enumerate(parts)]

    def _line(self, part: str, reason: str) -> bytes:
        prompt, self._prompt = self._prompt, None
        self._sent += 1
        metering = {"outputTokenCount": self._sent} | ({} if prompt is None else {"inputTokenCount": prompt})
        body = _body(part, prompt, self._sent, reason)
        return to_json({"body": body, "metering": metering, "content_type": "application/jsonlines"}) + b"\n"

    def error(self, error: DragomanError) -> bytes:
        """Format the last line of a stream that failed."""
        result = {"error_code": 424, "error_msg": error.message}
        value = {"body": _body(None, None, self._sent, "error"), "metering": {"outputTokenCount": self._sent}}
        return to_json({**value, "content_type": "application/jsonlines", "error": result}) + b"\n"
