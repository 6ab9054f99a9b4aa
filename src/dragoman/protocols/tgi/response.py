"""Format generations as TGI does: as one object or as server-sent events."""

import time
from collections.abc import Sequence
from typing import Any

import orjson

from dragoman.core.calls import Response
from dragoman.core.text import Generation, Text, Token
from dragoman.protocols.text_common.parameters import EVENT_STREAM, most_likely_first, split_by_token
from dragoman.protocols.tgi.request import TgiRequest
from dragoman.protocols.wire import Headers, HttpResponse, json_response


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

    def whole(self, response: Response[Generation]) -> HttpResponse:
        generation = response.answer
        found = [self._one(i, generation) for i in range(len(self._request.inputs))]
        headers = (*self._timing_headers(generation), *self._request.headers)
        return json_response(found if self._listed else found[0], 200, headers)

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
        return (*EVENT_STREAM, ("x-accel-buffering", "no"), *self._compute_headers(), *self._request.headers)

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
    return b"data:" + orjson.dumps(value) + b"\n\n"


def _tokens(text: Text) -> list[dict[str, Any]]:
    return [_format_token(*pair) for pair in zip(text.tokens, split_by_token(text.text, text.tokens), strict=True)]


def _format_token(token: Token, part: str) -> dict[str, Any]:
    # Clients remove special tokens by this flag.
    text = token.text if token.special and not part else part
    return {"id": token.id, "text": text, "logprob": token.logprob, "special": token.special}
