"""Format OpenAI chat responses, as one object or in chunks, with the tool calls in a completion."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dragoman.core.calls import Response
from dragoman.core.text import Generation, Text, Token
from dragoman.protocols.wire import EVENT_STREAM_HEADERS, Headers, HttpResponse, json_response
from dragoman_text.apis.common.completion_parser import CompletionParser
from dragoman_text.apis.common.openai_format import (
    REASONS,
    Envelope,
    TokenUsage,
    format_logprob,
    format_prompt_logprobs,
    format_prompt_token_ids,
    format_token_ids,
    stop_reason,
)
from dragoman_text.apis.common.tools import ChatChunk, Reasoning, Tools, collect_calls, merge_deltas


class ChatFormatter:
    """Formats the response of one chat. Between chunks it remembers what has been sent."""

    def __init__(self, options: Mapping[str, Any], tools: Tools) -> None:
        self._tools = tools
        self._logprobs = bool(options.get("logprobs"))
        self._read = options.get("read", False)
        value = options.get("stream_options", {})
        self._ends_with_usage = value.get("include_usage", False)
        self._always_usage = self._ends_with_usage and value.get("continuous_usage_stats", False)
        self._usage = TokenUsage()
        self._envelope = Envelope.new("chatcmpl", "chat.completion")
        self._chunks = Envelope("chatcmpl", "chat.completion.chunk", self._envelope.id, self._envelope.created)
        # TGI's client requires all fields in each delta; OpenAI's client concatenates what comes, roles too.
        self._full_deltas = options.get("model") == "tgi"
        self._parsers: dict[int, CompletionParser] = {}
        self._prompt_text = ""
        self._splits_reasoning = bool(options.get("splits_reasoning", True))
        self._shows_reasoning = options.get("include_reasoning", True)
        self._returns_token_ids = options.get("token_ids", False)
        self._format_logprob = partial(format_logprob, as_ids=options.get("tokens_as_ids", False))
        self._called: set[int] = set()
        self._pending: dict[str, Any] = {}  # fields of the prompt for the next chunk
        self._model = ""

    # --- complete ---------------------------------------------------------------------------------------------

    def format_complete(self, response: Response[Generation], headers: Headers) -> HttpResponse:
        self._begin(response.answer)
        choices = [self._choice(text) for text in response.answer.texts]
        value = self._envelope.around(
            response.model,
            choices,
            usage=self._usage.to_json(),
            **{"prompt_logprobs": None, **self._prompt(response.answer)},
        )
        return json_response(value, 200, headers)

    def _begin(self, generation: Generation) -> None:
        self._usage.add(generation)
        if generation.prompts:
            self._prompt_text = generation.prompts[0].text

    def _parse(self, text: Text, *, is_whole: bool = False) -> ChatChunk:
        parser = self._parsers.get(text.choice)
        if parser is None:
            parser = CompletionParser(self._tools, self._prompt_text, splits_reasoning=self._splits_reasoning)
            self._parsers[text.choice] = parser
        chunk = parser.feed(text, is_whole=is_whole)
        self._usage.reasoning[text.choice] = parser.reasoning_tokens
        return chunk

    def _prompt(self, generation: Generation) -> dict[str, Any]:
        """Return vLLM's fields about the prompt, if they were requested."""
        if not generation.prompts:
            return {}
        info = generation.prompts[0]
        logprobs = {"prompt_logprobs": format_prompt_logprobs(info.prefill)} if self._read else {}
        return {**logprobs, **(format_prompt_token_ids(info) if self._returns_token_ids else {})}

    def _token_ids(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return vLLM's `token_ids`, if they were requested; not those of reasoning that is hidden, as in vLLM."""
        return format_token_ids(tokens) if self._returns_token_ids and self._shows_reasoning else {}

    def _choice(self, text: Text) -> dict[str, Any]:
        part = self._parse(text, is_whole=True)
        calls = collect_calls(part)
        message: dict[str, Any] = {"role": "assistant", "content": part.content if part.content or not calls else None}
        if part.reasoning and self._shows_reasoning:
            message |= _reasoning(part.reasoning)
        if calls:
            message["tool_calls"] = [call.to_json() for call in calls]
        return {
            "index": text.choice,
            "message": message,
            "logprobs": self._logprobs_of(text.tokens),
            "finish_reason": self._reason(text, called=bool(calls)),
            "stop_reason": stop_reason(text),
            **self._token_ids(text.tokens),
        }

    def _reason(self, text: Text, *, called: bool) -> str | None:
        # OpenAI: truncation takes precedence; a call of the named function has the reason `stop`.
        reason = REASONS[text.finish]
        return "tool_calls" if called and reason == "stop" and not self._tools.only else reason

    def _logprobs_of(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        write = self._format_logprob
        return {"content": [{**write(token), "top_logprobs": [*map(write, token.top)]} for token in tokens]}

    # --- in chunks -----------------------------------------------------------------------------------------

    def stream_headers(self, headers: Headers) -> Headers:
        return (*EVENT_STREAM_HEADERS, *headers)

    def format_chunk(self, response: Response[Generation]) -> bytes:
        self._begin(response.answer)
        self._pending |= self._prompt(response.answer)
        self._model = response.model
        return b"".join(self._chunks_of(text, response.model) for text in response.answer.texts)

    def format_last_chunk(self) -> bytes:
        """Format the chunk after the last step: the usage, if it was requested."""
        return self._chunks.ending(self._model, self._usage) if self._ends_with_usage else b""

    def _chunks_of(self, text: Text, model: str) -> bytes:
        at, chunks = text.choice, b""
        if at not in self._parsers:  # the role comes before any token
            usage, self._usage = self._usage, self._usage.without(text)
            chunks = self._chunk(at, model, {"role": "assistant", "content": ""})
            self._usage = usage
        part = self._parse(text)
        logprobs = self._logprobs_of(text.tokens) if text.tokens else None
        deltas, has_calls = _deltas(part, shows_reasoning=self._shows_reasoning)
        if has_calls:
            self._called.add(at)
        ids = self._token_ids(text.tokens)
        if deltas or logprobs or text.finish or ids:
            *before, last = deltas or [{"content": ""}]
            for delta in before:  # the first of them has the tokens
                chunks, logprobs = chunks + self._chunk(at, model, delta, logprobs=logprobs, **ids), None
                ids = {}
            if text.finish:
                ids["stop_reason"] = stop_reason(text)
            reason = self._reason(text, called=at in self._called)
            chunks += self._chunk(at, model, last, logprobs=logprobs, finish_reason=reason, **ids)
        return chunks

    def _chunk(self, at: int, model: str, delta: Mapping[str, Any], **more: Any) -> bytes:
        if self._full_deltas:
            delta = {"role": "assistant", "content": None, "tool_calls": None, **delta}
        choice = {"index": at, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        about, self._pending = self._pending, {}
        if self._always_usage:
            about["usage"] = self._usage.to_json()
        elif self._ends_with_usage:
            about["usage"] = None
        return self._chunks.event(model, choice, about)


def _reasoning(text: str) -> dict[str, Any]:
    """Return the reasoning under the name of DeepSeek's API and that of vLLM and Ollama."""
    return {"reasoning_content": text, "reasoning": text}


def _deltas(chunk: ChatChunk, *, shows_reasoning: bool) -> tuple[list[dict[str, Any]], bool]:
    """Return the deltas of a message, and whether it has calls.

    Reasoning and text come first, then one delta per call, since some clients read only the first.
    """
    reasoning, content, calls = "", "", []
    for part in chunk.parts:
        if isinstance(part, str):
            content += part
        elif isinstance(part, Reasoning):
            reasoning += part.text
        else:
            calls.append(part)
    deltas = [_reasoning(reasoning)] if reasoning and shows_reasoning else []
    if content:
        deltas.append({"content": content})
    if calls:
        deltas += [{"tool_calls": [value]} for delta in merge_deltas(calls) for value in delta.to_json()]
    return deltas, bool(calls)
