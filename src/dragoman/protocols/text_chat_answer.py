"""OpenAI's chat: an answer as one object, or as chunks."""

from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.core.calls import Response
from dragoman.core.text import Generation, Text, Token
from dragoman.protocols.text import EVENT_STREAM, event
from dragoman.protocols.text_openai import REASONS, Envelope, Usage, counted
from dragoman.protocols.text_tools import ToolCall, Tools, ToolStream
from dragoman.protocols.wire import Headers, HttpResponse, json_response


class ChatAnswer:
    """How the answer of one chat with `n` choices is written; between pieces it remembers what has been told."""

    def __init__(self, n: int, options: Mapping[str, Any], tools: Tools) -> None:
        self._n = n
        self._tools = tools
        self._logprobs = bool(options.get("logprobs"))
        told = options.get("stream_options", {})
        self._ends_with_usage = told.get("include_usage", False)
        self._always_usage = told.get("continuous_usage_stats", False)
        self._usage = Usage()
        self._envelope = Envelope.new("chatcmpl", "chat.completion")
        self._chunks = Envelope("chatcmpl", "chat.completion.chunk", self._envelope.id, self._envelope.created)
        self._streams: dict[int, ToolStream] = {}
        self._finished = 0

    # --- whole ---------------------------------------------------------------------------------------------

    def whole(self, response: Response[Generation], headers: Headers) -> HttpResponse:
        self._usage.add(response.answer)
        choices = [self._choice(text) for text in response.answer.texts]
        told = self._envelope.around(response.model, choices, usage=self._usage.told())
        return json_response(told, 200, headers)

    def _choice(self, text: Text) -> dict[str, Any]:
        content, calls = self._parsed(text.whole)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if calls:
            message["tool_calls"] = [call.told() for call in calls]
        return {
            "index": text.choice,
            "message": message,
            "logprobs": self._logprobs_of(text.tokens),
            "finish_reason": self._reason(text, calls),
        }

    def _parsed(self, text: str) -> tuple[str, list[ToolCall]]:
        return self._tools.parsed(text) if self._tools.offered else (text, [])

    def _reason(self, text: Text, calls: Sequence[ToolCall]) -> str | None:
        return "tool_calls" if calls and not self._tools.only else REASONS[text.finish]

    def _logprobs_of(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {"content": [{**counted(token), "top_logprobs": [counted(t) for t in token.top]} for token in tokens]}

    # --- in pieces -----------------------------------------------------------------------------------------

    def stream_headers(self, headers: Headers) -> Headers:
        return (*EVENT_STREAM, *headers)

    def piece(self, response: Response[Generation]) -> bytes:
        """The chunks of one piece; the last one of all is followed by the usage where that was asked for."""
        self._usage.add(response.answer)
        chunks = b"".join(self._chunks_of(text, response.model) for text in response.answer.texts)
        if self._finished == self._n and self._ends_with_usage:
            chunks += event(self._chunks.around(response.model, [], usage=self._usage.told()))
        return chunks

    def _chunks_of(self, text: Text, model: str) -> bytes:
        first = text.choice not in self._streams
        if first:
            all_held = bool(self._tools.only or self._tools.required)
            self._streams[text.choice] = ToolStream(self._parsed, all_held=all_held)
        content, calls = self._fed(text)
        self._finished += bool(text.finish)
        chunks = self._chunk(text.choice, model, "") if first else b""
        logprobs = self._logprobs_of(text.tokens) if text.tokens else None
        if content or logprobs or (text.finish and not calls):
            reason = None if calls else REASONS[text.finish]
            chunks += self._chunk(text.choice, model, content, logprobs=logprobs, reason=reason)
        if calls:
            told = [{"index": i, **call.told()} for i, call in enumerate(calls)]
            chunks += self._chunk(text.choice, model, None, calls=told, reason=self._reason(text, calls))
        return chunks

    def _fed(self, text: Text) -> tuple[str, Sequence[ToolCall]]:
        if not self._tools.offered:
            return text.text, ()
        return self._streams[text.choice].feed(text.text, last=bool(text.finish))

    def _chunk(
        self,
        at: int,
        model: str,
        content: str | None,
        *,
        logprobs: Any = None,
        calls: Any = None,
        reason: str | None = None,
    ) -> bytes:
        # TGI's client wants each delta to have all three.
        delta = {"role": "assistant", "content": content, "tool_calls": calls}
        choice = {"index": at, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        more: dict[str, Any] = {}
        if self._always_usage:
            more = {"usage": self._usage.told()}
        elif self._ends_with_usage:
            more = {"usage": None}
        return event(self._chunks.around(model, [choice], **more))
