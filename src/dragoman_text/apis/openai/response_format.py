"""Format responses of OpenAI's Responses API, as one object or as a stream of events."""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dragoman.core.calls import Response
from dragoman.core.errors import DragomanError
from dragoman.core.text import Generation, Token
from dragoman.formats.exact_json import dump_json
from dragoman.protocols.parameters import get_object
from dragoman_text.apis.common.chat import ChatRequest
from dragoman_text.apis.common.chat_reader import ChatReader
from dragoman_text.apis.common.openai_format import error_body, format_logprob
from dragoman_text.apis.common.tools import Reasoning, ToolCallDelta
from dragoman_text.apis.openai.responses import ECHOED

_Event = dict[str, Any]
_LOGPROBS = "message.output_text.logprobs"
_FUNCTION: Mapping[str, Any] = {"description": None, "parameters": None, "strict": None}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _describe_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {**tool} if tool.get("type") == "custom" else {**_FUNCTION, **tool}


def frame_event(kind: str, data: bytes) -> bytes:
    """Return an event of a stream over HTTP."""
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def output_text(items: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the messages of a response."""
    messages = [item for item in items if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"] if part["type"] == "output_text")


class OutputItems:
    """The output items of one response. Methods return the events of a stream.

    A completed message has a `phase` (Open Responses 2026-04-24): commentary if a call follows it, else final_answer.
    """

    def __init__(self, *, has_logprobs: bool, shows_reasoning: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._has_logprobs, self._shows_reasoning = has_logprobs, shows_reasoning
        self._tokens: list[Token] = []  # of text that is not sent yet
        self._logprobs: list[Any] = []
        self._text: list[str] = []  # of the open item
        self._open = ""  # its type
        self._call = -1

    def add(self, part: str | Reasoning | ToolCallDelta) -> Iterator[_Event]:
        item: dict[str, Any]
        match part:
            case ToolCallDelta():
                if part.opens:
                    yield from self.close(phase="commentary")
                    self._call = part.index
                    call = {"call_id": f"call_{part.opens.id}", "name": part.opens.name}
                    if part.opens.is_custom:
                        item = {"id": new_id("ctc"), "type": "custom_tool_call", **call, "input": ""}
                    else:
                        item = {"id": new_id("fc"), "type": "function_call", **call, "arguments": ""}
                    yield self._begin(item)
                name = "custom_tool_call_input" if part.is_custom else "function_call_arguments"
                yield from self._delta(f"response.{name}.delta", part.arguments)
            case Reasoning():
                if self._shows_reasoning:
                    if self._open != "reasoning":
                        yield from self.close()
                        yield self._begin({"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []})
                        yield self._part_event("added", {"type": "reasoning_text", "text": ""})
                    yield from self._delta("response.reasoning_text.delta", part.text, content_index=0)
            case str():
                if part:
                    yield from self._open_message()
                    logprobs = self._take_logprobs()
                    yield from self._delta("response.output_text.delta", part, content_index=0, logprobs=logprobs)

    def add_tokens(self, tokens: Sequence[Token]) -> None:
        if self._has_logprobs:
            self._tokens += tokens

    def close(self, status: str = "completed", phase: str = "final_answer") -> Iterator[_Event]:
        """Complete the open item; `phase` is that of a message."""
        if not self._open:
            return
        item, text, kind = self.items[-1], "".join(self._text), self._open
        part: dict[str, Any]
        if kind == "function_call":
            item["arguments"] = text
            yield self._event("response.function_call_arguments.done", name=item["name"], arguments=text)
        elif kind == "custom_tool_call":
            item["input"] = text
            yield self._event("response.custom_tool_call_input.done", input=text)
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": text}
            yield self._event("response.reasoning_text.done", content_index=0, text=text)
            yield self._part_event("done", part)
            item["content"] = [part]
        else:
            self._logprobs += self._take_logprobs()
            logprobs = self._logprobs
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
            yield self._event("response.output_text.done", content_index=0, text=text, logprobs=logprobs)
            yield self._part_event("done", part)
            item["content"] = [part]
            if status == "completed":
                item["phase"] = phase
        item["status"] = status
        self._open, self._text = "", []
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def end(self, status: str) -> Iterator[_Event]:
        """Complete the last item; a response without any gets an empty message."""
        if not self.items:
            yield from self._open_message()
        yield from self.close(status)

    def _open_message(self) -> Iterator[_Event]:
        if self._open != "message":
            yield from self.close()
            self._logprobs = []
            yield self._begin({"id": new_id("msg"), "type": "message", "role": "assistant", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._part_event("added", part)

    def _begin(self, item: dict[str, Any]) -> _Event:
        self._open, self._text = item["type"], []
        self.items.append({**item, "status": "in_progress"})
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": {**self.items[-1]}}

    def _delta(self, kind: str, text: str, **fields: Any) -> Iterator[_Event]:
        if text:
            self._text.append(text)
            self._logprobs += fields.get("logprobs", ())
            yield self._event(kind, delta=text, **fields)

    def _part_event(self, what: str, part: Mapping[str, Any]) -> _Event:
        return self._event(f"response.content_part.{what}", content_index=0, part=part)

    def _event(self, kind: str, **fields: Any) -> _Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _take_logprobs(self) -> list[Any]:
        tokens, self._tokens = self._tokens, []
        return [{**format_logprob(token), "top_logprobs": [format_logprob(t) for t in token.top]} for token in tokens]


class ResponseFormatter:
    """Formats one response, whole or as events. `stored`: it will be kept for later requests.

    `value` has every field that Open Responses 2026-04-24 requires. `frame` returns an event as the transport sends it.
    """

    def __init__(
        self, request: ChatRequest, *, stored: bool, frame: Callable[[str, bytes], bytes] = frame_event
    ) -> None:
        self._parameters, self._frame = request.parameters, frame
        options, sampling = request.parameters.options, request.parameters.fields
        include = options.get("include") or ()
        self._reader = ChatReader(request)
        self._items = OutputItems(
            has_logprobs=_LOGPROBS in include,
            shows_reasoning=options.get("include_reasoning", True),
        )
        self._sequence = 0
        self._has_begun = False
        reasoning = get_object(options, "reasoning")
        text = {name: value for name, value in get_object(options, "text").items() if value is not None}
        self.value: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "frequency_penalty": sampling.get("frequency_penalty", 0.0),
            "incomplete_details": None,
            "instructions": options.get("instructions"),
            "max_output_tokens": sampling.get("max_new_tokens"),
            "model": "",
            "output": [],
            "parallel_tool_calls": options.get("parallel_tool_calls", True),
            "presence_penalty": sampling.get("presence_penalty", 0.0),
            "previous_response_id": options.get("previous_response_id"),
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "service_tier": "default",
            "store": stored,
            "temperature": sampling.get("temperature", 1.0),
            "text": {"format": {"type": "text"}, "verbosity": "medium", **text},
            "tool_choice": options.get("tool_choice", "auto"),
            "tools": [_describe_tool(tool) for tool in options.get("tools") or ()],
            "top_logprobs": sampling.get("top_logprobs", 0),
            "top_p": sampling.get("top_p", 1.0),
            "truncation": options.get("truncation", "disabled"),
            "usage": None,
            **{name: options.get(name) for name in ECHOED},
        }
        self.value["metadata"] = self.value["metadata"] or {}

    def complete(self, response: Response[Generation]) -> dict[str, Any]:
        """Return the whole response."""
        for _ in self._add(response, is_whole=True):
            pass
        for _ in self._end():
            pass
        return self.value

    def format_chunk(self, response: Response[Generation]) -> bytes:
        return b"".join(map(self._format, self._add(response)))

    def format_last_chunk(self) -> bytes:
        return b"".join(map(self._format, self._end()))

    def format_prepared(self, model: str, prompt_tokens: int) -> bytes:
        """Format the events of a response that only prepares a conversation: it has no output."""
        self.value["model"] = model
        created = self._format({"type": "response.created", "response": self.value})
        self._reader.usage.prompt = prompt_tokens
        self.value["status"], self.value["completed_at"] = "completed", int(time.time())
        self.value["usage"] = self._usage()
        return created + self._format({"type": "response.completed", "response": self.value})

    def format_late_error(self, error: DragomanError) -> bytes:
        """Format the failure of a stream: what was generated before remains in the response."""
        closing = b"".join(map(self._format, self._items.close("incomplete")))
        error_fields = error_body(self._parameters.with_client_names(error))["error"]
        self.value["status"] = "failed"
        self.value["error"] = {"code": error_fields["code"] or error_fields["type"], "message": error_fields["message"]}
        self.value["output"] = self._items.items
        self.value["usage"] = self._usage()
        return closing + self._format({"type": "response.failed", "response": self.value})

    def _add(self, response: Response[Generation], *, is_whole: bool = False) -> Iterator[_Event]:
        parts = self._reader.read(response, is_whole=is_whole)
        if not self._has_begun:
            self._has_begun = True
            self.value["model"] = response.model
            self._set_defaults(response.answer)
            yield {"type": "response.created", "response": self.value}
            yield {"type": "response.in_progress", "response": self.value}
        self._items.add_tokens(self._reader.tokens)
        for part in parts:
            yield from self._items.add(part)

    def _set_defaults(self, generation: Generation) -> None:
        """Set the values that the model chose because the request left them out."""
        for name in {"temperature", "top_p"} - self._parameters.fields.keys():
            for info in generation.prompts:
                value = getattr(info, name)
                if value is not None:
                    self.value[name] = value

    def _end(self) -> Iterator[_Event]:
        is_cut = self._reader.finish == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self._items.end(status)
        self.value["status"] = status
        self.value["completed_at"] = None if is_cut else int(time.time())
        self.value["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        self.value["output"] = self._items.items
        self.value["usage"] = self._usage()
        yield {"type": f"response.{status}", "response": self.value}

    def _usage(self) -> dict[str, Any]:
        usage = self._reader.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": sum(usage.reasoning.values())},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _format(self, event: _Event) -> bytes:
        self._sequence += 1
        kind: str = event["type"]
        return self._frame(kind, dump_json({**event, "sequence_number": self._sequence - 1}))
