"""Format OpenAI chat responses, as one object or in chunks, with the tool calls in a completion."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dragoman.core.calls import Response
from dragoman.core.text import Generation, Text, Token
from dragoman.protocols.text_common.openai_format import (
    REASONS,
    Envelope,
    Usage,
    format_logprob,
    format_prompt_logprobs,
    stop_reason,
)
from dragoman.protocols.text_common.parameters import EVENT_STREAM, event
from dragoman.protocols.text_common.tool_parser import JsonEndFinder, ToolCallParser
from dragoman.protocols.text_common.tools import (
    ToolCall,
    ToolCallDelta,
    ToolChunk,
    Tools,
    collect_calls,
    merge_deltas,
    new_call,
)
from dragoman.protocols.wire import Headers, HttpResponse, json_response

# The output if a call is required: `[{"name": ..., "arguments": {...}}, ...]`, in this order.
_CALL_START = re.compile(r'\{\s*"name"\s*:\s*"([A-Za-z0-9_.\-]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_SEPARATORS = " \t\r\n[]},"
_MAX_CALL_START = 4096


class PlainText:
    """No tools: all text is for the user."""

    def feed(self, text: str, *, last: bool, cut: bool) -> ToolChunk:
        return ToolChunk(text)


class NamedCall:
    """One function must be called: the text is its arguments."""

    def __init__(self, name: str) -> None:
        self._call: ToolCall | None = new_call(name)
        self._held = ""

    def feed(self, text: str, *, last: bool, cut: bool) -> ToolChunk:
        text = self._held + text
        out = text.strip() if self._call else text.rstrip()  # white space after the arguments is removed
        self._held = text[len(text.rstrip()) :]
        if not out and not (last and self._call):
            return ToolChunk()
        opens, self._call = self._call, None
        return ToolChunk("", [ToolCallDelta(0, out, opens)])


class RequiredCalls:
    """A call is required: the text is a list of calls, which may be truncated."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._chunks: list[str] = []
        self._text = ""
        self._count = 0
        self._end_finder: JsonEndFinder | None = None
        self._is_other = False

    def feed(self, text: str, *, last: bool, cut: bool) -> ToolChunk:
        self._chunks.append(text)
        if not self._is_other:
            self._text += text
        deltas = list(self._deltas())
        if self._count or not last:
            return ToolChunk("", deltas)
        return self._parse_other("".join(self._chunks), cut=cut)

    def _parse_other(self, text: str, *, cut: bool) -> ToolChunk:
        """Handle text that does not begin a call as required: a truncated list is not sent to the user."""
        chunk = ToolCallParser(self._tools).feed(text, last=True, cut=cut)
        if not chunk.deltas and cut and text.lstrip()[:1] in ("", "[", "{"):
            return ToolChunk()
        return chunk

    def _deltas(self) -> Iterator[ToolCallDelta]:
        while self._text:
            if self._end_finder:
                stop = self._end_finder.feed(self._text)
                yield ToolCallDelta(self._count - 1, self._text[:stop])
                self._end_finder = self._end_finder if stop is None else None
                self._text = "" if stop is None else self._text[stop:]
                continue
            self._text = self._text.lstrip(_SEPARATORS)
            start = _CALL_START.match(self._text)
            if start is None or start[1] not in self._tools.names or (self._count and self._tools.single):
                self._is_other = start is not None or len(self._text) > _MAX_CALL_START
                self._text = "" if self._is_other else self._text
                return
            self._text, self._end_finder = self._text[start.end() :], JsonEndFinder()
            yield ToolCallDelta(self._count, "", new_call(start[1]))
            self._count += 1


TextParser = PlainText | ToolCallParser | NamedCall | RequiredCalls


def parser_for(tools: Tools) -> TextParser:
    """Return the parser for a completion, by the tools of the chat and by whether a call is required."""
    if not tools.offered:
        return PlainText()
    if tools.only:
        return NamedCall(tools.only)
    return RequiredCalls(tools) if tools.required else ToolCallParser(tools)


class ChatFormatter:
    """Formats the response of one chat. Between chunks it remembers what has been sent."""

    def __init__(self, options: Mapping[str, Any], tools: Tools) -> None:
        self._tools = tools
        self._logprobs = bool(options.get("logprobs"))
        self._read = options.get("read", False)
        value = options.get("stream_options", {})
        self._ends_with_usage = value.get("include_usage", False)
        self._always_usage = value.get("continuous_usage_stats", False)
        self._usage = Usage()
        self._envelope = Envelope.new("chatcmpl", "chat.completion")
        self._chunks = Envelope("chatcmpl", "chat.completion.chunk", self._envelope.id, self._envelope.created)
        # TGI's client requires all fields in each delta; OpenAI's client concatenates what comes, roles too.
        self._full_deltas = options.get("model") == "tgi"
        self._readers: dict[int, TextParser] = {}
        self._called: set[int] = set()
        self._pending: dict[str, Any] = {}  # fields of the prompt for the next chunk
        self._model = ""

    # --- complete ---------------------------------------------------------------------------------------------

    def format_complete(self, response: Response[Generation], headers: Headers) -> HttpResponse:
        self._usage.add(response.answer)
        choices = [self._choice(text) for text in response.answer.texts]
        value = self._envelope.around(
            response.model, choices, usage=self._usage.to_json(), **self._prompt(response.answer)
        )
        return json_response(value, 200, headers)

    def _prompt(self, generation: Generation) -> dict[str, Any]:
        """Return vLLM's fields about the prompt, if they were requested."""
        if not self._read or not generation.prompts:
            return {}
        return {"prompt_logprobs": format_prompt_logprobs(generation.prompts[0].prefill)}

    def _choice(self, text: Text) -> dict[str, Any]:
        part = parser_for(self._tools).feed(text.whole, last=True, cut=text.finish == "length")
        calls = collect_calls(part)
        message: dict[str, Any] = {"role": "assistant", "content": part.content if part.content or not calls else None}
        if calls:
            message["tool_calls"] = [call.to_json() for call in calls]
        return {
            "index": text.choice,
            "message": message,
            "logprobs": self._logprobs_of(text.tokens),
            "finish_reason": self._reason(text, called=bool(calls)),
            "stop_reason": stop_reason(text),
        }

    def _reason(self, text: Text, *, called: bool) -> str | None:
        # OpenAI: truncation takes precedence; a call of the named function has the reason `stop`.
        reason = REASONS[text.finish]
        return "tool_calls" if called and reason == "stop" and not self._tools.only else reason

    def _logprobs_of(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {
            "content": [
                {**format_logprob(token), "top_logprobs": [format_logprob(t) for t in token.top]} for token in tokens
            ]
        }

    # --- in chunks -----------------------------------------------------------------------------------------

    def stream_headers(self, headers: Headers) -> Headers:
        return (*EVENT_STREAM, *headers)

    def format_chunk(self, response: Response[Generation]) -> bytes:
        self._usage.add(response.answer)
        self._pending |= self._prompt(response.answer)
        self._model = response.model
        return b"".join(self._chunks_of(text, response.model) for text in response.answer.texts)

    def format_last_chunk(self) -> bytes:
        """Format the chunk after the last step: the usage, if it was requested."""
        return self._chunks.ending(self._model, self._usage) if self._ends_with_usage else b""

    def _chunks_of(self, text: Text, model: str) -> bytes:
        at, first = text.choice, text.choice not in self._readers
        chunks = self._chunk(at, model, {"role": "assistant", "content": ""}) if first else b""
        read = self._readers.setdefault(at, parser_for(self._tools))
        part = read.feed(text.text, last=bool(text.finish), cut=text.finish == "length")
        if part.deltas:
            self._called.add(at)
        logprobs = self._logprobs_of(text.tokens) if text.tokens else None
        if part.content or part.deltas or logprobs or text.finish:
            *before, last = _deltas(part)
            for delta in before:
                chunks, logprobs = chunks + self._chunk(at, model, delta, logprobs=logprobs), None
            ends = {"stop_reason": stop_reason(text)} if text.finish else {}
            reason = self._reason(text, called=at in self._called)
            chunks += self._chunk(at, model, last, logprobs=logprobs, finish_reason=reason, **ends)
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
        return event(self._chunks.around(model, [choice], **about))


def _deltas(part: ToolChunk) -> list[dict[str, Any]]:
    """Return the deltas of a message: text first, then one delta per call, since some clients read only the first."""
    content: list[dict[str, Any]] = [{"content": part.content}] if part.content or not part.deltas else []
    return content + [{"tool_calls": [value]} for delta in merge_deltas(part.deltas) for value in delta.to_json()]
