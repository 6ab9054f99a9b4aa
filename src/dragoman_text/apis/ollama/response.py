"""Format responses of Ollama's chats and completions, as one object or as JSON lines."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from dragoman.core.calls import Response
from dragoman.core.errors import DragomanError
from dragoman.core.text import Generation, Token
from dragoman.formats.exact_json import dump_json
from dragoman.protocols.wire import replace_surrogates
from dragoman_text.apis.common.chat import ChatRequest
from dragoman_text.apis.common.chat_reader import ChatReader, parse_arguments
from dragoman_text.apis.common.openai_format import format_logprob
from dragoman_text.apis.common.tools import Reasoning, ToolCall, ToolCallDelta


class OllamaFormatter:
    """Formats one response; `is_chat`: its text is in a `message`."""

    def __init__(self, request: ChatRequest, *, is_chat: bool) -> None:
        self._parameters = request.parameters
        self._reader = ChatReader(request)
        self._is_chat = is_chat
        self._shows_thinking = request.parameters.options.get("think") is not False
        self._has_logprobs = request.parameters.options.get("logprobs", False)
        self._started_ns = time.monotonic_ns()
        self._first_ns = 0
        self._read_s: float | None = None  # to compute the prompt
        self._waited_s = 0.0
        self._took_s: float | None = None  # in the engine
        self._call: ToolCall | None = None  # not complete yet
        self._arguments: list[str] = []
        self._calls = 0

    @property
    def model(self) -> str:
        """The name of the model, after the first chunk."""
        return self._reader.model

    def complete(self, response: Response[Generation]) -> dict[str, Any]:
        """Return the whole response."""
        return {**self._object(self._read(response, is_whole=True)), **self._end()}

    def format_chunk(self, response: Response[Generation]) -> bytes:
        fields = self._read(response)
        self._first_ns = self._first_ns or time.monotonic_ns()
        return _line({**self._object(fields), "done": False}) if fields else b""

    def format_last_chunk(self) -> bytes:
        fields = {"tool_calls": self._complete_call()} if self._call else {}
        return _line({**self._object(fields), **self._end()})

    def format_late_error(self, error: DragomanError) -> bytes:
        return _line(error_object(self._parameters.with_client_names(error).message))

    def _read(self, response: Response[Generation], *, is_whole: bool = False) -> dict[str, Any]:
        """Return the new fields of a message."""
        parts, calls = self._reader.read(response, is_whole=is_whole), []
        for info in response.answer.prompts:
            self._read_s, self._waited_s = info.read_s, info.waited_s or 0.0
        for text in response.answer.texts:
            self._took_s = text.took_s
        for part in parts:
            if isinstance(part, ToolCallDelta):
                if part.opens:
                    calls += self._complete_call()
                    self._call = part.opens
                self._arguments.append(part.arguments)
        if is_whole:
            calls += self._complete_call()
        thinking = "".join(part.text for part in parts if isinstance(part, Reasoning))
        fields: dict[str, Any] = {
            "thinking": thinking if self._shows_thinking else "",
            "content": "".join(part for part in parts if isinstance(part, str)),
            "tool_calls": calls,
            "logprobs": [*map(_logprob, self._reader.tokens)] if self._has_logprobs else [],
        }
        return {name: value for name, value in fields.items() if value}

    def _complete_call(self) -> list[dict[str, Any]]:
        if self._call is None:
            return []
        call, text = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        self._calls += 1
        function = {"index": self._calls - 1, "name": call.name, "arguments": parse_arguments(text)}
        return [{"id": f"call_{call.id}", "function": function}]

    def _object(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        value: dict[str, Any] = {"model": self._reader.model, "created_at": now()}
        rest = {name: each for name, each in fields.items() if name not in ("content", "logprobs")}
        content = fields.get("content", "")
        if self._is_chat:
            value["message"] = {"role": "assistant", "content": content, **rest}
        else:
            value |= {"response": content, **rest}
        return {**value, "logprobs": fields["logprobs"]} if "logprobs" in fields else value

    def _end(self) -> dict[str, Any]:
        """Return the fields of the last object; durations are in nanoseconds."""
        usage, now_ns = self._reader.usage, time.monotonic_ns()
        total_ns, load_ns = now_ns - self._started_ns, 0
        if self._read_s is not None and self._took_s is not None:
            read_ns, eval_ns = int(self._read_s * 1e9), int((self._took_s - self._waited_s - self._read_s) * 1e9)
            load_ns = total_ns - read_ns - eval_ns  # loading the model on demand, tokenization, the queue
        else:  # an engine that does not tell: the first chunk, if there are several, comes after the prompt
            eval_ns = now_ns - (self._first_ns or self._started_ns)
            read_ns = total_ns - eval_ns
        durations = {
            "total_duration": total_ns,
            "load_duration": max(0, load_ns),
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": read_ns,
            "eval_count": usage.completion,
            "eval_duration": max(0, eval_ns),
        }
        reason = "length" if self._reader.finish == "length" else "stop"
        return {"done": True, "done_reason": reason, **durations}


def now(later_s: float = 0.0) -> str:
    """Return the time now, or some seconds later."""
    return (datetime.now(UTC) + timedelta(seconds=later_s)).isoformat().replace("+00:00", "Z")


def error_object(message: str) -> dict[str, Any]:
    return {"error": replace_surrogates(message)}


def _line(value: Any) -> bytes:
    return dump_json(value) + b"\n"


def _logprob(token: Token) -> dict[str, Any]:
    return {**format_logprob(token), "top_logprobs": [format_logprob(top) for top in token.top]}
