"""Format messages of Anthropic's API, as one object or as a stream of events."""

import secrets
import uuid
from collections.abc import Iterator
from typing import Any

from dragoman.core.calls import Response
from dragoman.core.errors import DragomanError
from dragoman.core.text import Generation
from dragoman.formats.exact_json import dump_json
from dragoman.protocols.parameters import get_object
from dragoman_text.apis.anthropic.messages import format_error_body
from dragoman_text.apis.common.chat import ChatRequest
from dragoman_text.apis.common.chat_reader import ChatReader, parse_arguments
from dragoman_text.apis.common.tools import Reasoning, ToolCallDelta

_Event = dict[str, Any]


class MessageFormatter:
    """Formats one message, whole or as events; `request_id` is that of the HTTP request."""

    def __init__(self, request: ChatRequest, request_id: str) -> None:
        self._request_id = request_id
        self._parameters = request.parameters
        self._omits_thinking = get_object(request.parameters.options, "thinking").get("display") == "omitted"
        self._reader = ChatReader(request)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks: list[dict[str, Any]] = []
        self._text: list[str] = []  # of the open block
        self._is_open = self._has_begun = False

    def complete(self, response: Response[Generation]) -> dict[str, Any]:
        """Return the whole message."""
        for _ in (*self._add(response, is_whole=True), *self._close()):
            pass
        return self.message

    @property
    def message(self) -> dict[str, Any]:
        """The whole message, once it is complete."""
        return {**self._message(), "content": self._blocks, **self._stop(), "usage": self._usage()}

    def format_chunk(self, response: Response[Generation]) -> bytes:
        return b"".join(map(_format, self._add(response)))

    def format_last_chunk(self) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return b"".join(map(_format, (*self._close(), delta, {"type": "message_stop"})))

    def format_late_error(self, error: DragomanError) -> bytes:
        return _format(format_error_body(self._parameters.with_client_names(error), self._request_id))

    def _add(self, response: Response[Generation], *, is_whole: bool = False) -> Iterator[_Event]:
        parts = self._reader.read(response, is_whole=is_whole)
        if not self._has_begun:
            self._has_begun = True
            start = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": {**start, "usage": {**self._usage(), "output_tokens": 0}}}
            yield {"type": "ping"}
        for part in parts:
            match part:
                case ToolCallDelta():
                    if part.opens:
                        id_ = f"toolu_{part.opens.id}"
                        yield from self._open({"type": "tool_use", "id": id_, "name": part.opens.name, "input": {}})
                    yield from self._delta("input_json_delta", "partial_json", part.arguments)
                case Reasoning():
                    if not self._is_in("thinking"):
                        yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
                    if not self._omits_thinking:
                        yield from self._delta("thinking_delta", "thinking", part.text)
                case str():
                    if part and not self._is_in("text"):
                        yield from self._open({"type": "text", "text": ""})
                    yield from self._delta("text_delta", "text", part)

    def _is_in(self, kind: str) -> bool:
        return self._is_open and self._blocks[-1]["type"] == kind

    def _open(self, block: dict[str, Any]) -> Iterator[_Event]:
        yield from self._close()
        self._is_open = True
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {**block}}

    def _delta(self, kind: str, field: str, text: str) -> Iterator[_Event]:
        if text:
            self._text.append(text)
            delta = {"type": kind, field: text}
            yield {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[_Event]:
        if not self._is_open:
            return
        block, text, at = self._blocks[-1], "".join(self._text), len(self._blocks) - 1
        self._is_open, self._text = False, []
        match block["type"]:
            case "tool_use":
                block["input"] = parse_arguments(text)
            case "thinking":
                block |= {"thinking": text, "signature": secrets.token_hex(16)}
                delta = {"type": "signature_delta", "signature": block["signature"]}
                yield {"type": "content_block_delta", "index": at, "delta": delta}
            case _:
                block["text"] = text
        yield {"type": "content_block_stop", "index": at}

    def _message(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._reader.model}

    def _stop(self) -> dict[str, Any]:
        reader, stop = self._reader, self._reader.stop
        if reader.finish == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if reader.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        usage = self._reader.usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        }


def _format(event: _Event) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + dump_json(event) + b"\n\n"
